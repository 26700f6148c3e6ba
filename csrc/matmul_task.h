// The arguments of the kernels that train: plain numbers and addresses, eight bytes each, in the order of these fields.
#pragma once

#include <cstdint>

namespace regard {

enum class DType : int64_t;
enum Activation : int64_t;

// A matrix product with what a linear layer, forward or backward, does to its result:
//
//   sum[m][n]    = bias[n] + sum_k a[m][k] b[k][n]
//   output[m][n] = activation(sum[m][n]) * activation'(factor[m][n]) + residual[m][n]        whichever are given
//
// `a` has stride 1 along k or along m, `b` along n or along k. With y = activation(x W^T) the three products of a linear
// layer are a = x, b = W^T; a = grad, b = W for the gradient of x; and a = grad^T, b = x for that of W.
struct Matmul {
  DType dtype;  // kFloat32 or kFloat64, of everything
  int64_t threads;
  int64_t rows, in, out;  // m, k, n
  const void* a;
  int64_t a_row, a_step;  // strides of m and k
  const void* b;
  int64_t b_step, b_column;  // strides of k and n
  const void* bias;          // (n), or null
  void* output;              // (m, n)
  int64_t output_row;
  Activation activation;
  void* saved;         // sum before the activation, (m, n) contiguous; or null
  const void* factor;  // (m, n) contiguous: multiply by the derivative of the activation there instead; or null
  const void* residual;
  int64_t residual_row;
  void* row_sums;  // (m): sum_k a[m][k], or null; a has stride 1 along m
};

// A layer norm or an RMS norm of rows, and its gradient:
//
//   hat = (x - mean) * scale,   output = hat * weight + bias,   scale = 1 / sqrt(mean of (x - mean)^2 + eps)
//   g = grad * weight,   x_grad = scale * (g - mean of g - hat * (mean of g hat)) + residual
//
// The RMS norm takes a mean of zero, and does not subtract the mean of g.
struct Norm {
  DType dtype;
  int64_t threads;
  int64_t rows, dim;
  int64_t subtracts_mean;
  double eps;
  const void *x, *weight, *bias;  // (row, dim), (dim) or null, (dim) or null
  void* output;                   // (row, dim)
  void *mean, *scale;             // (row); no mean in an RMS norm
  // Only for backward.
  const void *grad, *residual;  // (row, dim); residual may be null
  void *x_grad;                 // (row, dim)
  void *weight_grad, *bias_grad;  // (dim), or null
};

}  // namespace regard
