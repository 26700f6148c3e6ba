// The scalar reference of model_step.h: the definition, in double precision, one row after the other.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "interface.h"
#include "scalar_linear_layer.h"
#include "scalar_weights.h"

namespace regard {
namespace scalar {

using Numbers = std::vector<double>;

inline Numbers normalize(const StepNorm& norm, const Numbers& x) {
  double mean = 0, square = 0;
  if (norm.kind == kNoNorm) return x;
  if (norm.kind == kLayerNorm)
    for (double one : x) mean += one / static_cast<double>(x.size());
  for (double one : x) square += (one - mean) * (one - mean) / static_cast<double>(x.size());
  Numbers made;
  for (size_t n = 0; n < x.size(); ++n)
    made.push_back((x[n] - mean) / std::sqrt(square + norm.eps) * (norm.weight ? norm.weight[n] : 1) +
                   (norm.bias ? norm.bias[n] : 0));
  return made;
}

inline Numbers multiply(const PackedMatrix& matrix, const float* bias, const Numbers& x) {
  const std::vector<float> single(x.begin(), x.end());
  const Numbers read = block_shape(matrix.format).numbers ? read_activations(matrix, single.data()) : x;
  Numbers made;
  for (int64_t n = 0; n < matrix.rows; ++n) {
    double sum = bias ? bias[n] : 0.0;
    for (int64_t k = 0; k < matrix.cols; ++k) sum += read[k] * weight_at(matrix, n, k);
    made.push_back(sum);
  }
  return made;
}

// Matrices that stand one below the other.
inline Numbers multiply(const PackedMatrix (&stack)[3], const float* bias, const Numbers& x) {
  Numbers made;
  for (const PackedMatrix& matrix : stack) {
    const Numbers one = multiply(matrix, bias ? bias + made.size() : nullptr, x);
    made.insert(made.end(), one.begin(), one.end());
  }
  return made;
}

inline bool knows(const PackedMatrix (&stack)[3]) {
  for (const PackedMatrix& matrix : stack)
    if (matrix.rows && !knows(matrix)) return false;
  return true;
}

// Channels [from, from + dim) of one head, turned by its position.
inline Numbers rotate(const ModelPart& part, const float* cosine, const float* sine, const Numbers& x, int64_t from) {
  Numbers made(x.begin() + from, x.begin() + from + part.dim);
  const int64_t half = part.rotary / 2;
  for (int64_t n = 0; n < half; ++n) {
    const int64_t a = part.rotary_pairs ? 2 * n : n, b = part.rotary_pairs ? 2 * n + 1 : n + half;
    made[a] = x[from + a] * cosine[n] - x[from + b] * sine[n];
    made[b] = x[from + b] * cosine[n] + x[from + a] * sine[n];
  }
  return made;
}

inline Numbers attend(const ModelPart& part, const StepCache& cache, const Numbers& query, int64_t row, int64_t head,
                      bool& finite) {
  const int64_t kv_head = head / (part.heads / part.kv_heads), start = cache.first(row, part.window), stop = cache.last(row);
  const float* key = cache.key + row * cache.key_row + kv_head * cache.key_head;
  const float* value = cache.value + row * cache.value_row + kv_head * cache.value_head;
  Numbers score, made(part.value_dim, 0.0);
  double largest = -std::numeric_limits<double>::infinity(), total = 0;
  for (int64_t j = start; j < stop; ++j) {
    double sum = 0;
    for (int64_t d = 0; d < part.dim; ++d) sum += query[d] * key[j * cache.key_token + d];
    sum *= part.scale;
    if (part.slopes) sum -= part.slopes[head] * static_cast<double>(stop - 1 - j);
    finite = finite && std::isfinite(sum);
    score.push_back(sum);
    largest = sum > largest ? sum : largest;
  }
  for (double one : score) total += std::exp(one - largest);
  for (int64_t j = start; j < stop; ++j)
    for (int64_t d = 0; d < part.value_dim; ++d)
      made[d] += std::exp(score[j - start] - largest) / total * value[j * cache.value_token + d];
  return made;
}

inline Numbers run_attention(const ModelStep& step, const ModelPart& part, int64_t row, const Numbers& h, bool& finite) {
  const StepCache& cache = step.caches[part.cache];
  const float *cosine = step.cosine + row * step.rotation_row, *sine = step.sine + row * step.rotation_row;
  const Numbers made = multiply(part.first, part.first_bias, h);
  Numbers heads;
  if (part.kind == kSelfAttention)
    for (int64_t g = 0; g < part.kv_heads; ++g) {
      const int64_t keys = part.heads * part.dim, values = keys + part.kv_heads * part.dim;
      const Numbers key = rotate(part, cosine, sine, made, keys + g * part.dim);
      float* to = cache.key + row * cache.key_row + g * cache.key_head + cache.column * cache.key_token;
      for (int64_t d = 0; d < part.dim; ++d) to[d] = static_cast<float>(key[d]);
      to = cache.value + row * cache.value_row + g * cache.value_head + cache.column * cache.value_token;
      for (int64_t d = 0; d < part.value_dim; ++d) to[d] = static_cast<float>(made[values + g * part.value_dim + d]);
    }
  for (int64_t head = 0; head < part.heads; ++head) {
    const Numbers one = attend(part, cache, rotate(part, cosine, sine, made, head * part.dim), row, head, finite);
    heads.insert(heads.end(), one.begin(), one.end());
  }
  return multiply(part.second, part.second_bias, heads);
}

inline Numbers run_feed_forward(const ModelPart& part, const Numbers& h) {
  Numbers made = multiply(part.first, part.first_bias, h);
  const size_t hidden = static_cast<size_t>(part.second.cols);
  for (size_t n = 0; n < hidden; ++n)
    made[n] = activate(static_cast<Activation>(part.activation), made[n]) * (part.gated ? made[hidden + n] : 1);
  made.resize(hidden);
  return multiply(part.second, part.second_bias, made);
}

inline int32_t model_step(const ModelStep& step) {
  for (int64_t n = 0; n < step.part_count; ++n)
    if (!knows(step.parts[n].first) || !knows(step.parts[n].second)) return kNoFormat;
  if (step.output.rows && !knows(step.output)) return kNoFormat;
  if (!step.x && !knows(step.embedding)) return kNoFormat;
  bool finite = true;
  for (int64_t row = 0; row < step.rows; ++row) {
    Numbers x(step.dim);
    for (int64_t n = 0; n < step.dim; ++n) {
      x[n] = step.x ? step.x[row * step.dim + n] : step.embedding_scale * weight_at(step.embedding, step.tokens[row], n);
      if (!step.x && step.position_table) x[n] += step.position_table[step.positions[row] * step.dim + n];
    }
    for (int64_t p = 0; p < step.part_count; ++p) {
      const ModelPart& part = step.parts[p];
      const Numbers h = normalize(part.norm, x);
      const Numbers made =
          part.kind == kFeedForward ? run_feed_forward(part, h) : run_attention(step, part, row, h, finite);
      for (int64_t n = 0; n < step.dim; ++n) x[n] = (part.from_normed ? h[n] : x[n]) + made[n];
    }
    x = normalize(step.final_norm[1], normalize(step.final_norm[0], x));
    for (double one : x) finite = finite && std::isfinite(one);
    if (step.hidden)
      for (int64_t n = 0; n < step.dim; ++n) step.hidden[row * step.dim + n] = static_cast<float>(x[n]);
    if (!step.output.rows) continue;
    const Numbers logits = multiply(step.output, nullptr, x);
    for (int64_t n = 0; n < step.output.rows; ++n)
      step.logits[row * step.output.rows + n] = static_cast<float>(logits[n]);
  }
  return finite ? kOk : kNotFinite;
}

}  // namespace scalar
}  // namespace regard
