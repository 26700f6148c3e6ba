// The scalar references of channel_attention.h and grid_convolution.h: the definitions, in double precision.
#pragma once

#include <cmath>
#include <vector>

#include "interface.h"

namespace regard {
namespace scalar {

template <class T>
int32_t channel_attention(const ChannelAttention& task) {
  const int64_t C = task.channels, dim = task.groups * C;
  std::vector<double> weights(C);
  for (int64_t image = 0; image < task.batch; ++image)
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t first = i / C * C;
      const T* qkv = static_cast<const T*>(task.qkv) + image * task.tokens * 3 * dim;
      double top = -INFINITY, sum = 0;
      for (int64_t j = 0; j < C; ++j) {
        double score = 0;
        for (int64_t n = 0; n < task.tokens; ++n)
          score += task.scale * qkv[n * 3 * dim + i] * qkv[(n * 3 + 1) * dim + first + j];
        weights[j] = score;
        top = score > top ? score : top;
      }
      for (double& weight : weights) sum += weight = std::exp(weight - top);
      for (int64_t n = 0; n < task.tokens; ++n) {
        double made = 0;
        for (int64_t j = 0; j < C; ++j) made += weights[j] * qkv[(n * 3 + 2) * dim + first + j];
        static_cast<T*>(task.output)[(image * task.tokens + n) * dim + i] = static_cast<T>(made / sum);
      }
    }
  return kOk;
}
inline int32_t channel_attention(const ChannelAttention& task) {
  return task.dtype == DType::kFloat64 ? channel_attention<double>(task) : channel_attention<float>(task);
}

template <class T>
int32_t grid_convolution(const GridConvolution& task) {
  const int64_t C = task.channels;
  auto at = [](const void* numbers, int64_t n, double absent) { return numbers ? static_cast<const T*>(numbers)[n] : absent; };
  for (int64_t place = 0; place < task.batch * task.rows * task.columns; ++place) {
    const int64_t column = place % task.columns, row = place / task.columns % task.rows;
    std::vector<double> y(C);
    double mean = 0, variance = 0;
    for (int64_t a = 0; a < C; ++a) {
      y[a] = at(task.bias, a, 0);
      for (int64_t u = 0; u < 3; ++u)
        for (int64_t v = 0; v < 3; ++v) {
          if (row + u < 1 || row + u > task.rows || column + v < 1 || column + v > task.columns) continue;
          y[a] += at(task.weight, (u * 3 + v) * C + a, 0) * at(task.x, (place + (u - 1) * task.columns + v - 1) * C + a, 0);
        }
      mean += y[a] / C;
    }
    for (double one : y) variance += (one - mean) * (one - mean) / C;
    for (int64_t a = 0; a < C; ++a) {
      static_cast<T*>(task.output)[place * C + a] = static_cast<T>(y[a]);
      const double made = (y[a] - mean) / std::sqrt(variance + task.eps);
      static_cast<T*>(task.normed)[place * C + a] = static_cast<T>(made * at(task.norm_weight, a, 1) + at(task.norm_bias, a, 0));
    }
  }
  return kOk;
}
inline int32_t grid_convolution(const GridConvolution& task) {
  return task.dtype == DType::kFloat64 ? grid_convolution<double>(task) : grid_convolution<float>(task);
}

}  // namespace scalar
}  // namespace regard
