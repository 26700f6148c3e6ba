// All kernels for one instruction set. CMake compiles this file once for each, with REGARD_ISA and REGARD_BYTES set.
#include "backward.h"
#include "channel_attention.h"
#include "decode.h"
#include "gemv.h"
#include "forward.h"
#include "linear_attention.h"
#include "matmul.h"
#include "norm.h"
#include "gemm.h"
#include "greedy.h"
#include "grid_convolution.h"
#include "model_step.h"
#include "peak.h"
#include "weight_products.h"

namespace regard {
namespace REGARD_ISA {
namespace {

bool is_double(DType dtype) { return dtype == DType::kFloat64; }

int32_t attention(const Attention& task) {
  return is_double(task.dtype) ? run_forward<double>(task) : run_forward<float>(task);
}
int32_t attention_backward(const Attention& task) {
  return is_double(task.dtype) ? run_backward<double>(task) : run_backward<float>(task);
}
int32_t decode(const Decode& task) {
  return is_double(task.dtype) ? run_decode<double>(task) : run_decode<float>(task);
}
int32_t linear_attention(const LinearAttention& task) {
  return is_double(task.dtype) ? run_linear_attention<double>(task) : run_linear_attention<float>(task);
}
int32_t linear_attention_backward(const LinearAttention& task) {
  return is_double(task.dtype) ? run_linear_attention_backward<double>(task) : run_linear_attention_backward<float>(task);
}

int32_t gemv_any(const LinearLayer& task) { return is_double(task.dtype) ? run_gemv<double>(task) : run_gemv<float>(task); }

int32_t matmul_any(const Matmul& task) { return is_double(task.dtype) ? run_matmul<double>(task) : run_matmul<float>(task); }
int32_t norm_any(const Norm& task) { return is_double(task.dtype) ? run_norm<double>(task) : run_norm<float>(task); }
int32_t norm_backward_any(const Norm& task) {
  return is_double(task.dtype) ? run_norm_backward<double>(task) : run_norm_backward<float>(task);
}

int32_t gemm_any(const Gemm& task) { return is_double(task.dtype) ? run_gemm<double>(task) : run_gemm<float>(task); }

int32_t pack_any(const PackWeight& task) { return is_double(task.dtype) ? run_pack<double>(task) : run_pack<float>(task); }

int32_t channel_attention_any(const ChannelAttention& task) {
  return is_double(task.dtype) ? run_channel_attention<double>(task) : run_channel_attention<float>(task);
}
int32_t grid_convolution_any(const GridConvolution& task) {
  return is_double(task.dtype) ? run_grid_convolution<double>(task) : run_grid_convolution<float>(task);
}

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

void exp2_any(DType dtype, const void* from, void* to, int64_t count) {
  if (is_double(dtype))
    exp2_all(static_cast<const double*>(from), static_cast<double*>(to), count);
  else
    exp2_all(static_cast<const float*>(from), static_cast<float*>(to), count);
}

#define REGARD_TEXT_(x) #x
#define REGARD_TEXT(x) REGARD_TEXT_(x)

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    REGARD_TEXT(REGARD_ISA), kLanes<float>, attention, attention_backward, decode, linear_attention, linear_attention_backward,
    gemv_any,                gemm_any,      pack_any, channel_attention_any,
    grid_convolution_any, run_weight_products, run_model_step, matmul_any, norm_any, norm_backward_any,
    run_greedy, exp2_any, measure_peak,
};

}  // namespace REGARD_ISA
}  // namespace regard
