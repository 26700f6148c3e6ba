// Causal linear attention, both ways.
#pragma once

#include "linear_backward.h"
#include "linear_forward.h"
