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

// Outputs of a panel of packed weights: two vectors of 16 bytes.
template <class T>
constexpr int64_t kPacked = 32 / sizeof(T);

template <class T>
int32_t pack_weight(const PackWeight& task) {
  for (int64_t n = 0; n < (task.out + kPacked<T> - 1) / kPacked<T> * kPacked<T>; ++n)
    for (int64_t k = 0; k < task.in; ++k)
      static_cast<T*>(task.packed)[(n / kPacked<T> * task.in + k) * kPacked<T> + n % kPacked<T>] =
          n < task.out ? static_cast<const T*>(task.weight)[n * task.weight_row + k] : T(0);
  return kOk;
}
inline int32_t pack_weight(const PackWeight& task) {
  return task.dtype == DType::kFloat64 ? pack_weight<double>(task) : pack_weight<float>(task);
}

template <class T>
int32_t linear_layer(const LinearLayer& task, Activation activation, const T* residual, int64_t residual_row,
                     const T* packed) {
  for (int64_t m = 0; m < task.rows; ++m)
    for (int64_t n = 0; n < task.out; ++n) {
      const T* x = static_cast<const T*>(task.x) + m * task.x_row;
      const T* weight = static_cast<const T*>(task.weight) + n * task.weight_row;
      double sum = task.bias ? static_cast<const T*>(task.bias)[n] : 0.0;
      for (int64_t k = 0; k < task.in; ++k)
        sum += static_cast<double>(x[k]) *
               (packed ? packed[(n / kPacked<T> * task.in + k) * kPacked<T> + n % kPacked<T>] : weight[k]);
      const double made = activate(activation, sum) + (residual ? residual[m * residual_row + n] : 0.0);
      static_cast<T*>(task.output)[m * task.out + n] = static_cast<T>(made);
    }
  return kOk;
}

inline int32_t gemv(const LinearLayer& task) {
  return task.dtype == DType::kFloat64 ? linear_layer<double>(task, kIdentity, nullptr, 0, nullptr)
                                       : linear_layer<float>(task, kIdentity, nullptr, 0, nullptr);
}
template <class T>
int32_t gemm(const Gemm& task) {
  return linear_layer<T>(task, task.activation, static_cast<const T*>(task.residual), task.residual_row,
                         static_cast<const T*>(task.packed));
}
inline int32_t gemm(const Gemm& task) { return task.dtype == DType::kFloat64 ? gemm<double>(task) : gemm<float>(task); }

}  // namespace scalar
}  // namespace regard
