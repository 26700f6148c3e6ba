// Causal linear attention, forward and backward.
#pragma once

#include "linear_attention_backward.h"
#include "linear_attention_forward.h"
