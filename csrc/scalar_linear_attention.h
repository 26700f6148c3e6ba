// The scalar reference of linear_attention.h: sums over all pairs, in double precision, without chunks or a running state.
#pragma once

#include <cmath>
#include <vector>

#include "interface.h"
#include "scalar_decode.h"

namespace regard {
namespace scalar {

// The features of all tokens of one head, and the derivatives of phi.
struct Features {
  std::vector<double> phi, derivative;

  Features(const LinearAttention& task, const Tensor4& tensor, int64_t batch, int64_t head, double scale) {
    for (int64_t token = 0; token < task.tokens; ++token)
      for (int64_t f = 0; f < task.dim; ++f) {
        const double raw = number_at(tensor, task.dtype, batch, head, token, f);
        const double x = task.map ? scale * raw : raw;
        if (!std::isfinite(raw)) finite = false;
        phi.push_back(task.map == 0 ? x : x > 0 ? x + 1 : std::exp(x));
        derivative.push_back(task.map == 0 ? 1 : scale * (x > 0 ? 1 : std::exp(x)));
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
int32_t linear_attention_as(const LinearAttention& task) {
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
          sum[d] += weight * number_at(task.value, task.dtype, batch, kv_head, j, d);
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
          sum += key.phi[j * dim + f] * number_at(task.value, task.dtype, batch, kv_head, j, d);
        if (task.next_state) finite &= keep<T>(sum, task.next_state, (held * dim + f) * value_dim + d);
      }
    }
  }
  return finite ? kOk : kNotFinite;
}

template <class T>
int32_t linear_attention_backward_as(const LinearAttention& task) {
  const int64_t dim = task.dim, value_dim = task.value_dim, group = task.heads / task.kv_heads, tokens = task.tokens;
  bool finite = true;
  for (int64_t held = 0; held < task.batch * task.kv_heads; ++held) {
    const int64_t batch = held / task.kv_heads, kv_head = held % task.kv_heads;
    const Features key(task, task.key, batch, kv_head, task.key_scale);
    std::vector<double> key_grad(tokens * dim, 0.0), value_grad(tokens * value_dim, 0.0);
    std::vector<double> state_grad(dim * value_dim), norm_grad(dim), value(tokens * value_dim);
    for (int64_t n = 0; n < dim * value_dim; ++n)
      state_grad[n] = entry<T>(task.next_state_grad, held * dim * value_dim + n);
    for (int64_t f = 0; f < dim; ++f) norm_grad[f] = entry<T>(task.next_norm_grad, held * dim + f);
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t d = 0; d < value_dim; ++d)
        value[j * value_dim + d] = number_at(task.value, task.dtype, batch, kv_head, j, d);
    // What the next state sends back.
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t f = 0; f < dim; ++f) {
        key_grad[j * dim + f] += norm_grad[f];
        for (int64_t d = 0; d < value_dim; ++d) {
          key_grad[j * dim + f] += state_grad[f * value_dim + d] * value[j * value_dim + d];
          value_grad[j * value_dim + d] += state_grad[f * value_dim + d] * key.phi[j * dim + f];
        }
      }
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const Features query(task, task.query, batch, head, task.query_scale);
      const int64_t first = (batch * task.heads + head) * tokens;
      for (int64_t i = 0; i < tokens; ++i) {
        const double total = entry<T>(task.total, first + i), divisor = total == 0 ? 1 : total;
        std::vector<double> grad(value_dim), query_grad(dim, 0.0);
        double pull = 0;
        for (int64_t d = 0; d < value_dim; ++d) {
          grad[d] = entry<T>(task.grad_output, (first + i) * value_dim + d) / divisor;
          pull += total == 0 ? 0 : grad[d] * entry<T>(task.output, (first + i) * value_dim + d);
        }
        for (int64_t f = 0; f < dim; ++f) {
          const double phi = query.phi[i * dim + f];
          query_grad[f] -= pull * entry<T>(task.norm, held * dim + f);
          norm_grad[f] -= pull * phi;
          for (int64_t d = 0; d < value_dim; ++d) {
            query_grad[f] += grad[d] * entry<T>(task.state, (held * dim + f) * value_dim + d);
            state_grad[f * value_dim + d] += grad[d] * phi;
          }
        }
        for (int64_t j = 0; j <= i; ++j) {
          const double weight = dot(query.phi.data() + i * dim, key.phi.data() + j * dim, dim);
          const double score_grad = dot(grad.data(), value.data() + j * value_dim, value_dim) - pull;
          for (int64_t d = 0; d < value_dim; ++d) value_grad[j * value_dim + d] += weight * grad[d];
          for (int64_t f = 0; f < dim; ++f) {
            query_grad[f] += score_grad * key.phi[j * dim + f];
            key_grad[j * dim + f] += score_grad * query.phi[i * dim + f];
          }
        }
        for (int64_t f = 0; f < dim; ++f)
          finite &= keep<T>(query_grad[f] * query.derivative[i * dim + f], task.query_grad, (first + i) * dim + f);
      }
    }
    for (int64_t n = 0; n < tokens * dim; ++n)
      finite &= keep<T>(key_grad[n] * key.derivative[n], task.key_grad, held * tokens * dim + n);
    for (int64_t n = 0; n < tokens * value_dim; ++n)
      finite &= keep<T>(value_grad[n], task.value_grad, held * tokens * value_dim + n);
    for (int64_t n = 0; n < dim * value_dim; ++n)
      finite &= keep<T>(state_grad[n], task.state_grad, held * dim * value_dim + n);
    for (int64_t f = 0; f < dim; ++f) finite &= keep<T>(norm_grad[f], task.norm_grad, held * dim + f);
  }
  return finite ? kOk : kNotFinite;
}

inline int32_t linear_attention(const LinearAttention& task) {
  return task.dtype == DType::kFloat64 ? linear_attention_as<double>(task) : linear_attention_as<float>(task);
}
inline int32_t linear_attention_backward(const LinearAttention& task) {
  return task.dtype == DType::kFloat64 ? linear_attention_backward_as<double>(task) : linear_attention_backward_as<float>(task);
}

}  // namespace scalar
}  // namespace regard
