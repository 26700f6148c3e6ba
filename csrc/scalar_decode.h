// The scalar reference of decode.h: the definition, in double precision, one key after the other.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "half.h"
#include "interface.h"

namespace regard {
namespace scalar {

inline double number_at(const Tensor4& tensor, DType dtype, int64_t batch, int64_t head, int64_t token, int64_t n) {
  const int64_t place = batch * tensor.batch + head * tensor.head + token * tensor.token + n;
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(tensor.data)[place];
    case DType::kFloat64: return static_cast<const double*>(tensor.data)[place];
    case DType::kBFloat16: return from_bfloat16(static_cast<const uint16_t*>(tensor.data)[place]);
    default: return from_float16(static_cast<const uint16_t*>(tensor.data)[place]);
  }
}

template <class T>
int32_t decode_as(const Decode& task) {
  const int64_t group = task.heads / task.kv_heads;
  bool finite = true;
  for (int64_t row = 0; row < task.batch * task.heads * task.queries; ++row) {
    const int64_t query = row % task.queries, head = row / task.queries % task.heads;
    const int64_t batch = row / task.queries / task.heads, kv_head = head / group;
    const int64_t start = task.start[batch * task.queries + query], stop = task.stop[batch * task.queries + query];
    const double nothing = -std::numeric_limits<double>::infinity();
    std::vector<double> score, output(task.value_dim, 0.0);
    double largest = nothing, total = 0;
    for (int64_t key = start; key < stop; ++key) {
      double sum = 0;
      for (int64_t d = 0; d < task.dim; ++d)
        sum += number_at(task.query, task.dtype, batch, head, query, d) *
               number_at(task.key, task.dtype, batch, kv_head, key, d);
      score.push_back(task.scale * sum);
      if (task.slopes) score.back() -= static_cast<const T*>(task.slopes)[head] * double(task.position + query - key);
      largest = score.back() > largest ? score.back() : largest;
      finite = finite && score.back() != nothing;
    }
    for (int64_t key = start; key < stop; ++key) {
      const double weight = largest == nothing ? 0 : std::exp(score[key - start] - largest);
      total += weight;
      for (int64_t d = 0; d < task.value_dim; ++d)
        output[d] += weight * number_at(task.value, task.dtype, batch, kv_head, key, d);
    }
    for (int64_t d = 0; d < task.value_dim; ++d) {
      const T mean = static_cast<T>(total != 0 ? output[d] / total : 0.0);
      static_cast<T*>(task.output)[row * task.value_dim + d] = mean;
      finite = finite && std::isfinite(mean);
    }
    if (task.lse)
      static_cast<T*>(task.lse)[row] = static_cast<T>(total != 0 ? largest + std::log(total) : nothing);
  }
  return finite ? kOk : kNotFinite;
}

inline int32_t decode(const Decode& task) {
  return task.dtype == DType::kFloat64 ? decode_as<double>(task) : decode_as<float>(task);
}

}  // namespace scalar
}  // namespace regard
