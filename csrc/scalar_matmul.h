// The scalar references of matmul.h and norm.h: the definitions, in double precision, one number after the other.
#pragma once

#include "matmul_task.h"
#include "scalar_linear_layer.h"

namespace regard {
namespace scalar {

inline double activation_grad(Activation activation, double x) {
  const double sigmoid = 1 / (1 + std::exp(-x));
  const double u = 0.79788456080286535588 * (x + 0.044715 * x * x * x), tanh = std::tanh(u);
  switch (activation) {
    case kRelu: return x <= 0 ? 0 : 1;
    case kGelu:
      return 0.5 * (1 + std::erf(x * 0.70710678118654752440)) + x * std::exp(-0.5 * x * x) * 0.39894228040143267794;
    case kGeluTanh:
      return 0.5 * (1 + tanh) +
             0.5 * x * (1 - tanh * tanh) * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x);
    case kSilu: return sigmoid * (1 + x * (1 - sigmoid));
    default: return 1;
  }
}

template <class T>
int32_t matmul(const Matmul& task) {
  auto number = [](const void* from, int64_t at) { return static_cast<double>(static_cast<const T*>(from)[at]); };
  for (int64_t m = 0; m < task.rows; ++m) {
    if (task.row_sums) {
      double sum = 0;
      for (int64_t k = 0; k < task.in; ++k) sum += number(task.a, m * task.a_row + k * task.a_step);
      static_cast<T*>(task.row_sums)[m] = static_cast<T>(sum);
    }
    for (int64_t n = 0; n < task.out; ++n) {
      double sum = task.bias ? number(task.bias, n) : 0.0;
      for (int64_t k = 0; k < task.in; ++k)
        sum += number(task.a, m * task.a_row + k * task.a_step) * number(task.b, k * task.b_step + n * task.b_column);
      if (task.saved) static_cast<T*>(task.saved)[m * task.out + n] = static_cast<T>(sum);
      sum = task.factor ? sum * activation_grad(task.activation, number(task.factor, m * task.out + n))
                        : activate(task.activation, sum);
      if (task.residual) sum += number(task.residual, m * task.residual_row + n);
      static_cast<T*>(task.output)[m * task.output_row + n] = static_cast<T>(sum);
    }
  }
  return kOk;
}

inline int32_t matmul(const Matmul& task) {
  return task.dtype == DType::kFloat64 ? matmul<double>(task) : matmul<float>(task);
}

template <class T>
int32_t norm(const Norm& task) {
  for (int64_t row = 0; row < task.rows; ++row) {
    const T* x = static_cast<const T*>(task.x) + row * task.dim;
    double mean = 0, square = 0;
    if (task.subtracts_mean) {
      for (int64_t d = 0; d < task.dim; ++d) mean += x[d];
      mean /= static_cast<double>(task.dim);
      static_cast<T*>(task.mean)[row] = static_cast<T>(mean);
    }
    for (int64_t d = 0; d < task.dim; ++d) square += (x[d] - mean) * (x[d] - mean);
    const double scale = 1 / std::sqrt(square / static_cast<double>(task.dim) + task.eps);
    static_cast<T*>(task.scale)[row] = static_cast<T>(scale);
    for (int64_t d = 0; d < task.dim; ++d) {
      double y = (x[d] - mean) * scale;
      if (task.weight) y *= static_cast<const T*>(task.weight)[d];
      if (task.bias) y += static_cast<const T*>(task.bias)[d];
      static_cast<T*>(task.output)[row * task.dim + d] = static_cast<T>(y);
    }
  }
  return kOk;
}

template <class T>
int32_t norm_backward(const Norm& task) {
  std::vector<double> weight_grad(task.dim, 0), bias_grad(task.dim, 0), g(task.dim), hat(task.dim);
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t at = row * task.dim;
    const double mean = task.subtracts_mean ? static_cast<const T*>(task.mean)[row] : T(0);
    const double scale = static_cast<const T*>(task.scale)[row];
    double sum = 0, product = 0;
    for (int64_t d = 0; d < task.dim; ++d) {
      const double grad = static_cast<const T*>(task.grad)[at + d];
      hat[d] = (static_cast<const T*>(task.x)[at + d] - mean) * scale;
      g[d] = task.weight ? grad * static_cast<const T*>(task.weight)[d] : grad;
      weight_grad[d] += grad * hat[d];
      bias_grad[d] += grad;
      sum += g[d];
      product += g[d] * hat[d];
    }
    const double count = static_cast<double>(task.dim), mean_grad = task.subtracts_mean ? sum / count : 0;
    for (int64_t d = 0; d < task.dim; ++d) {
      double x_grad = scale * (g[d] - mean_grad - hat[d] * product / count);
      if (task.residual) x_grad += static_cast<const T*>(task.residual)[at + d];
      static_cast<T*>(task.x_grad)[at + d] = static_cast<T>(x_grad);
    }
  }
  for (int64_t d = 0; d < task.dim; ++d) {
    if (task.weight_grad) static_cast<T*>(task.weight_grad)[d] = static_cast<T>(weight_grad[d]);
    if (task.bias_grad) static_cast<T*>(task.bias_grad)[d] = static_cast<T>(bias_grad[d]);
  }
  return kOk;
}

inline int32_t norm(const Norm& task) { return task.dtype == DType::kFloat64 ? norm<double>(task) : norm<float>(task); }
inline int32_t norm_backward(const Norm& task) {
  return task.dtype == DType::kFloat64 ? norm_backward<double>(task) : norm_backward<float>(task);
}

}  // namespace scalar
}  // namespace regard
