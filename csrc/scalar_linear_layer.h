// The scalar reference of gemv.h and gemm.h: the definition, in double precision, one output after the other.
#pragma once

#include <cmath>

#include "interface.h"

namespace regard {
namespace scalar {

inline double activate(Activation activation, double x) {
  switch (activation) {
    case kRelu: return x < 0 ? 0 : x;
    case kGelu: return x * (0.5 * (1 + std::erf(x * 0.70710678118654752440)));
    case kGeluTanh: return x * (0.5 * (1 + std::tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))));
    case kSilu: return x / (1 + std::exp(-x));
    default: return x;
  }
}

template <class T>
int32_t linear_layer(const LinearLayer& task, Activation activation) {
  for (int64_t m = 0; m < task.rows; ++m)
    for (int64_t n = 0; n < task.out; ++n) {
      const T* x = static_cast<const T*>(task.x) + m * task.x_row;
      const T* weight = static_cast<const T*>(task.weight) + n * task.weight_row;
      double sum = task.bias ? static_cast<const T*>(task.bias)[n] : 0.0;
      for (int64_t k = 0; k < task.in; ++k) sum += static_cast<double>(x[k]) * weight[k];
      static_cast<T*>(task.output)[m * task.out + n] = static_cast<T>(activate(activation, sum));
    }
  return kOk;
}

inline int32_t linear_layer(const LinearLayer& task, Activation activation) {
  return task.dtype == DType::kFloat64 ? linear_layer<double>(task, activation) : linear_layer<float>(task, activation);
}
inline int32_t gemv(const LinearLayer& task) { return linear_layer(task, kIdentity); }
inline int32_t gemm(const Gemm& task) { return linear_layer(task, task.activation); }

}  // namespace scalar
}  // namespace regard
