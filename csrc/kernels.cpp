// All kernels for one instruction set. CMake compiles this file once for each, with REGARD_ISA and REGARD_BYTES set.
#include "backward.h"
#include "decode.h"
#include "few.h"
#include "forward.h"
#include "linear.h"
#include "many.h"
#include "peak.h"

namespace regard {
namespace REGARD_ISA {
namespace {

bool is_double(Number kind) { return kind == Number::kFloat64; }

int32_t attention(const Attention& task) {
  return is_double(task.kind) ? run_forward<double>(task) : run_forward<float>(task);
}
int32_t attention_backward(const Attention& task) {
  return is_double(task.kind) ? run_backward<double>(task) : run_backward<float>(task);
}
int32_t decode(const Decode& task) {
  return is_double(task.kind) ? run_decode<double>(task) : run_decode<float>(task);
}
int32_t linear(const Linear& task) {
  return is_double(task.kind) ? run_linear<double>(task) : run_linear<float>(task);
}
int32_t linear_backward(const Linear& task) {
  return is_double(task.kind) ? run_linear_backward<double>(task) : run_linear_backward<float>(task);
}

int32_t few_rows(const Few& task) { return is_double(task.kind) ? run_few<double>(task) : run_few<float>(task); }

int32_t many_rows(const Many& task) { return is_double(task.kind) ? run_many<double>(task) : run_many<float>(task); }

template <class T>
void exp2_all(const T* from, T* to, int64_t count) {
  for (int64_t n = 0; n < count; n += kLanes<T>) {
    T some[kLanes<T>] = {};
    const int64_t here = count - n < kLanes<T> ? count - n : kLanes<T>;
    for (int64_t lane = 0; lane < here; ++lane) some[lane] = from[n + lane];
    store<T>(some, exp2<T>(load<T>(some)));
    for (int64_t lane = 0; lane < here; ++lane) to[n + lane] = some[lane];
  }
}

void exp2_any(Number kind, const void* from, void* to, int64_t count) {
  if (is_double(kind))
    exp2_all(static_cast<const double*>(from), static_cast<double*>(to), count);
  else
    exp2_all(static_cast<const float*>(from), static_cast<float*>(to), count);
}

#define REGARD_TEXT_(x) #x
#define REGARD_TEXT(x) REGARD_TEXT_(x)

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    REGARD_TEXT(REGARD_ISA), kLanes<float>, attention, attention_backward, decode, linear, linear_backward,
    few_rows,                many_rows,     exp2_any,  measure_peak,
};

}  // namespace REGARD_ISA
}  // namespace regard
