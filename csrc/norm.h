// Layer norm and RMS norm of rows, and their gradients in one pass; see matmul_task.h.
//
// Channels lie across the lanes. Gradients of weight and bias are sums over rows: rows are cut into segments, whose
// number depends on the rows alone, and the sums of segments are added in order, whatever the number of threads.
#pragma once

#include "interface.h"
#include "matmul_task.h"
#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace norms {

constexpr int64_t kRows = 32;  // of a segment, but not more than
constexpr int64_t kSegments = 64;

// Calls each(d, count) for vectors of a row; `count` is less than the lanes only in the last one.
template <class T, class Each>
REGARD_INLINE void each_vector(int64_t dim, Each each) {
  constexpr int L = kLanes<T>;
  int64_t d = 0;
  for (; d + L <= dim; d += L) each(d, static_cast<int64_t>(L));
  if (d < dim) each(d, dim - d);
}

template <class T>
REGARD_INLINE Vec<T> get(const T* from, int64_t count) {
  constexpr int L = kLanes<T>;
  if (count == L) return load<T>(from);
  T some[L] = {};
  for (int64_t n = 0; n < count; ++n) some[n] = from[n];
  return load<T>(some);
}

template <class T>
REGARD_INLINE void put(T* to, int64_t count, Vec<T> x) {
  constexpr int L = kLanes<T>;
  if (count == L) return store<T>(to, x);
  T some[L];
  store<T>(some, x);
  for (int64_t n = 0; n < count; ++n) to[n] = some[n];
}

// The first `count` lanes, the others zero.
template <class T>
REGARD_INLINE Vec<T> first_lanes(Vec<T> x, int64_t count) {
  constexpr int L = kLanes<T>;
  for (int64_t n = count; n < L; ++n) x[n] = T(0);
  return x;
}

template <class T>
void forward_row(const Norm& task, int64_t row) {
  const T* x = static_cast<const T*>(task.x) + row * task.dim;
  const T* weight = static_cast<const T*>(task.weight);
  const T* bias = static_cast<const T*>(task.bias);
  T* output = static_cast<T*>(task.output) + row * task.dim;
  const T count = static_cast<T>(task.dim);
  T mean = T(0);
  if (task.subtracts_mean) {
    Vec<T> sum = {};
    each_vector<T>(task.dim, [&](int64_t d, int64_t n) __attribute__((always_inline)) { sum += get<T>(x + d, n); });
    mean = sum_of<T>(sum) / count;
    static_cast<T*>(task.mean)[row] = mean;
  }
  Vec<T> squares = {};
  each_vector<T>(task.dim, [&](int64_t d, int64_t n) __attribute__((always_inline)) {
    Vec<T> from_mean = get<T>(x + d, n) - splat<T>(mean);
    if (n < kLanes<T>) from_mean = first_lanes<T>(from_mean, n);
    squares += from_mean * from_mean;
  });
  const T scale = T(1) / static_cast<T>(__builtin_sqrt(sum_of<T>(squares) / count + static_cast<T>(task.eps)));
  static_cast<T*>(task.scale)[row] = scale;
  each_vector<T>(task.dim, [&](int64_t d, int64_t n) __attribute__((always_inline)) {
    Vec<T> y = (get<T>(x + d, n) - splat<T>(mean)) * splat<T>(scale);
    if (weight) y *= get<T>(weight + d, n);
    if (bias) y += get<T>(bias + d, n);
    put<T>(output + d, n, y);
  });
}

template <class T>
void backward_row(const Norm& task, int64_t row, T* weight_grad, T* bias_grad) {
  const int64_t at = row * task.dim;
  const T* x = static_cast<const T*>(task.x) + at;
  const T* grad = static_cast<const T*>(task.grad) + at;
  const T* residual = task.residual ? static_cast<const T*>(task.residual) + at : nullptr;
  const T* weight = static_cast<const T*>(task.weight);
  T* x_grad = static_cast<T*>(task.x_grad) + at;
  const Vec<T> mean = splat<T>(task.subtracts_mean ? static_cast<const T*>(task.mean)[row] : T(0));
  const Vec<T> scale = splat<T>(static_cast<const T*>(task.scale)[row]);
  Vec<T> sum = {}, product = {};
  each_vector<T>(task.dim, [&](int64_t d, int64_t n) __attribute__((always_inline)) {
    const Vec<T> hat = (get<T>(x + d, n) - mean) * scale;
    const Vec<T> g = get<T>(grad + d, n);
    if (weight_grad) put<T>(weight_grad + d, n, get<T>(weight_grad + d, n) + g * hat);
    if (bias_grad) put<T>(bias_grad + d, n, get<T>(bias_grad + d, n) + g);
    const Vec<T> weighted = weight ? g * get<T>(weight + d, n) : g;
    sum += weighted;
    product += n < kLanes<T> ? first_lanes<T>(weighted * hat, n) : weighted * hat;
  });
  const T count = static_cast<T>(task.dim);
  const Vec<T> mean_grad = splat<T>(task.subtracts_mean ? sum_of<T>(sum) / count : T(0));
  const Vec<T> mean_product = splat<T>(sum_of<T>(product) / count);
  each_vector<T>(task.dim, [&](int64_t d, int64_t n) __attribute__((always_inline)) {
    const Vec<T> hat = (get<T>(x + d, n) - mean) * scale;
    const Vec<T> g = weight ? get<T>(grad + d, n) * get<T>(weight + d, n) : get<T>(grad + d, n);
    Vec<T> result = scale * (g - mean_grad - hat * mean_product);
    if (residual) result += get<T>(residual + d, n);
    put<T>(x_grad + d, n, result);
  });
}

// Threads worth waking for so many numbers.
inline int64_t count_threads(const Norm& task) {
  const double worth = static_cast<double>(task.rows) * static_cast<double>(task.dim) / (1 << 14);
  return worth < static_cast<double>(task.threads) ? 1 + static_cast<int64_t>(worth) : task.threads;
}

inline int64_t count_segments(int64_t rows) {
  const int64_t segments = (rows + kRows - 1) / kRows;
  return segments < kSegments ? segments : kSegments;
}

}  // namespace norms

template <class T>
int32_t run_norm(const Norm& task) {
  const int64_t segments = norms::count_segments(task.rows);
  auto work = [&](int64_t item) {
    const int64_t last = task.rows * (item + 1) / segments;
    for (int64_t row = task.rows * item / segments; row < last; ++row) norms::forward_row<T>(task, row);
  };
  parallel(norms::count_threads(task), segments, work);
  return kOk;
}

template <class T>
int32_t run_norm_backward(const Norm& task) {
  const int64_t segments = norms::count_segments(task.rows), dim = task.dim;
  const int64_t wanted = (task.weight_grad ? 1 : 0) + (task.bias_grad ? 1 : 0);
  T* sums = wanted ? static_cast<T*>(scratch(segments * wanted * dim * sizeof(T))) : nullptr;
  if (wanted && !sums) return kNoMemory;
  auto work = [&](int64_t item) {
    T* mine = sums + item * wanted * dim;
    if (wanted) std::memset(mine, 0, wanted * dim * sizeof(T));
    T* weight_grad = task.weight_grad ? mine : nullptr;
    T* bias_grad = task.bias_grad ? mine + (task.weight_grad ? dim : 0) : nullptr;
    const int64_t last = task.rows * (item + 1) / segments;
    for (int64_t row = task.rows * item / segments; row < last; ++row)
      norms::backward_row<T>(task, row, weight_grad, bias_grad);
  };
  parallel(norms::count_threads(task), segments, work);
  for (int64_t which = 0; which < wanted; ++which) {
    T* total = static_cast<T*>(which == 0 && task.weight_grad ? task.weight_grad : task.bias_grad);
    std::memset(total, 0, dim * sizeof(T));
    for (int64_t s = 0; s < segments; ++s)
      for (int64_t d = 0; d < dim; ++d) total[d] += sums[(s * wanted + which) * dim + d];
  }
  return kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
