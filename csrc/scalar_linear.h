// The scalar twin of linear.h: sums over all pairs, in double precision, without chunks or a running state.
#pragma once

#include <cmath>
#include <vector>

#include "interface.h"
#include "scalar_decode.h"

namespace regard {
namespace scalar {

// The features of all tokens of one head, and their slopes.
struct Features {
  std::vector<double> phi, slope;

  Features(const Linear& task, const Tensor4& tensor, int64_t batch, int64_t head, double scale) {
    for (int64_t token = 0; token < task.tokens; ++token)
      for (int64_t f = 0; f < task.dim; ++f) {
        const double raw = number_at(tensor, task.kind, batch, head, token, f);
        const double x = task.map ? scale * raw : raw;
        if (!std::isfinite(raw)) finite = false;
        phi.push_back(task.map == 0 ? x : x > 0 ? x + 1 : std::exp(x));
        slope.push_back(task.map == 0 ? 1 : scale * (x > 0 ? 1 : std::exp(x)));
      }
  }
  bool finite = true;
};

template <class T>
double entry(const void* numbers, int64_t place) {
  return numbers ? static_cast<double>(static_cast<const T*>(numbers)[place]) : 0;
}

template <class T>
bool keep(double x, void* numbers, int64_t place) {
  if (numbers) static_cast<T*>(numbers)[place] = static_cast<T>(x);
  return std::isfinite(static_cast<T>(x));
}

inline double dot(const double* x, const double* y, int64_t count) {
  double sum = 0;
  for (int64_t n = 0; n < count; ++n) sum += x[n] * y[n];
  return sum;
}

template <class T>
int32_t linear_as(const Linear& task) {
  const int64_t dim = task.dim, value_dim = task.value_dim, group = task.heads / task.kv_heads;
  bool finite = true;
  for (int64_t all = 0; all < task.batch * task.heads; ++all) {
    const int64_t batch = all / task.heads, head = all % task.heads, kv_head = head / group;
    const int64_t held = batch * task.kv_heads + kv_head;
    const Features query(task, task.query, batch, head, task.query_scale);
    const Features key(task, task.key, batch, kv_head, task.key_scale);
    finite = finite && key.finite && query.finite;
    for (int64_t i = 0; i < task.tokens; ++i) {
      const double* q = query.phi.data() + i * dim;
      std::vector<double> sum(value_dim, 0.0);
      double total = 0;
      for (int64_t f = 0; f < dim; ++f) {
        total += q[f] * entry<T>(task.norm, held * dim + f);
        for (int64_t d = 0; d < value_dim; ++d)
          sum[d] += q[f] * entry<T>(task.state, (held * dim + f) * value_dim + d);
      }
      for (int64_t j = 0; j <= i; ++j) {
        const double weight = dot(q, key.phi.data() + j * dim, dim);
        total += weight;
        for (int64_t d = 0; d < value_dim; ++d)
          sum[d] += weight * number_at(task.value, task.kind, batch, kv_head, j, d);
      }
      keep<T>(total, task.total, all * task.tokens + i);
      for (int64_t d = 0; d < value_dim; ++d)
        finite &= keep<T>(sum[d] / (total == 0 ? 1 : total), task.output, (all * task.tokens + i) * value_dim + d);
    }
    if (head % group) continue;
    for (int64_t f = 0; f < dim; ++f) {
      double norm = entry<T>(task.norm, held * dim + f);
      for (int64_t j = 0; j < task.tokens; ++j) norm += key.phi[j * dim + f];
      keep<T>(norm, task.next_norm, held * dim + f);
      for (int64_t d = 0; d < value_dim; ++d) {
        double sum = entry<T>(task.state, (held * dim + f) * value_dim + d);
        for (int64_t j = 0; j < task.tokens; ++j)
          sum += key.phi[j * dim + f] * number_at(task.value, task.kind, batch, kv_head, j, d);
        if (task.next_state) finite &= keep<T>(sum, task.next_state, (held * dim + f) * value_dim + d);
      }
    }
  }
  return finite ? kFine : kNotFinite;
}

template <class T>
int32_t linear_backward_as(const Linear& task) {
  const int64_t dim = task.dim, value_dim = task.value_dim, group = task.heads / task.kv_heads, tokens = task.tokens;
  bool finite = true;
  for (int64_t held = 0; held < task.batch * task.kv_heads; ++held) {
    const int64_t batch = held / task.kv_heads, kv_head = held % task.kv_heads;
    const Features key(task, task.key, batch, kv_head, task.key_scale);
    std::vector<double> key_slope(tokens * dim, 0.0), value_slope(tokens * value_dim, 0.0);
    std::vector<double> state_slope(dim * value_dim), norm_slope(dim), value(tokens * value_dim);
    for (int64_t n = 0; n < dim * value_dim; ++n)
      state_slope[n] = entry<T>(task.next_state_slope, held * dim * value_dim + n);
    for (int64_t f = 0; f < dim; ++f) norm_slope[f] = entry<T>(task.next_norm_slope, held * dim + f);
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t d = 0; d < value_dim; ++d)
        value[j * value_dim + d] = number_at(task.value, task.kind, batch, kv_head, j, d);
    // What the next state sends back.
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t f = 0; f < dim; ++f) {
        key_slope[j * dim + f] += norm_slope[f];
        for (int64_t d = 0; d < value_dim; ++d) {
          key_slope[j * dim + f] += state_slope[f * value_dim + d] * value[j * value_dim + d];
          value_slope[j * value_dim + d] += state_slope[f * value_dim + d] * key.phi[j * dim + f];
        }
      }
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const Features query(task, task.query, batch, head, task.query_scale);
      const int64_t first = (batch * task.heads + head) * tokens;
      for (int64_t i = 0; i < tokens; ++i) {
        const double total = entry<T>(task.total, first + i), divisor = total == 0 ? 1 : total;
        std::vector<double> above(value_dim), query_slope(dim, 0.0);
        double pull = 0;
        for (int64_t d = 0; d < value_dim; ++d) {
          above[d] = entry<T>(task.upstream, (first + i) * value_dim + d) / divisor;
          pull += total == 0 ? 0 : above[d] * entry<T>(task.output, (first + i) * value_dim + d);
        }
        for (int64_t f = 0; f < dim; ++f) {
          const double phi = query.phi[i * dim + f];
          query_slope[f] -= pull * entry<T>(task.norm, held * dim + f);
          norm_slope[f] -= pull * phi;
          for (int64_t d = 0; d < value_dim; ++d) {
            query_slope[f] += above[d] * entry<T>(task.state, (held * dim + f) * value_dim + d);
            state_slope[f * value_dim + d] += above[d] * phi;
          }
        }
        for (int64_t j = 0; j <= i; ++j) {
          const double weight = dot(query.phi.data() + i * dim, key.phi.data() + j * dim, dim);
          const double slope = dot(above.data(), value.data() + j * value_dim, value_dim) - pull;
          for (int64_t d = 0; d < value_dim; ++d) value_slope[j * value_dim + d] += weight * above[d];
          for (int64_t f = 0; f < dim; ++f) {
            query_slope[f] += slope * key.phi[j * dim + f];
            key_slope[j * dim + f] += slope * query.phi[i * dim + f];
          }
        }
        for (int64_t f = 0; f < dim; ++f)
          finite &= keep<T>(query_slope[f] * query.slope[i * dim + f], task.query_slope, (first + i) * dim + f);
      }
    }
    for (int64_t n = 0; n < tokens * dim; ++n)
      finite &= keep<T>(key_slope[n] * key.slope[n], task.key_slope, held * tokens * dim + n);
    for (int64_t n = 0; n < tokens * value_dim; ++n)
      finite &= keep<T>(value_slope[n], task.value_slope, held * tokens * value_dim + n);
    for (int64_t n = 0; n < dim * value_dim; ++n)
      finite &= keep<T>(state_slope[n], task.state_slope, held * dim * value_dim + n);
    for (int64_t f = 0; f < dim; ++f) finite &= keep<T>(norm_slope[f], task.norm_slope, held * dim + f);
  }
  return finite ? kFine : kNotFinite;
}

inline int32_t linear(const Linear& task) {
  return task.kind == Number::kFloat64 ? linear_as<double>(task) : linear_as<float>(task);
}
inline int32_t linear_backward(const Linear& task) {
  return task.kind == Number::kFloat64 ? linear_backward_as<double>(task) : linear_backward_as<float>(task);
}

}  // namespace scalar
}  // namespace regard
