// A 3 x 3 convolution of each channel of a grid, and the layer norm of its result, in one pass over the grid.
//
//   y[r][c][a] = bias[a] + sum_{u,v} weight[u][v][a] x[r + u - 1][c + v - 1][a]        nothing is added beyond the edge
//   z[r][c][a] = norm_bias[a] + norm_weight[a] (y[r][c][a] - mean) / sqrt(variance + eps)     over the channels a
//
// Channels lie across the lanes. For each vector of channels a row of the grid is passed from left to right: three numbers are
// loaded for a column, and each is added to the sums of the column before, of this one and of the next, so that nine weights
// and three sums stay in sixteen registers. Then the row, which is in the cache, is normalised. One item is one row.
#pragma once

#include "grid_tasks.h"
#include "interface.h"
#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace convolution {

// One row of the grid: those around it (null beyond the edge), and what it becomes.
template <class T>
struct Row {
  const T* x[3];
  T *output, *normed;
};

// N channels from `channel` on; V is a vector of them or one number.
template <class T, class V, class Load, class Store>
REGARD_INLINE void convolve(const GridConvolution& task, const Row<T>& row, int64_t channel, Load get, Store put) {
  const int64_t C = task.channels;
  const T* weight = static_cast<const T*>(task.weight) + channel;
  V taps[3][3];
#pragma GCC unroll 3
  for (int u = 0; u < 3; ++u)
#pragma GCC unroll 3
    for (int v = 0; v < 3; ++v) taps[u][v] = get(weight + (u * 3 + v) * C);
  const V bias = get(static_cast<const T*>(task.bias) + channel);
  V before = bias, here = bias;  // sums of the column before and of this one
  for (int64_t column = 0; column < task.columns; ++column) {
    // The three numbers are multiplied before they are added, so that sums of neighbouring columns do not wait for one another.
    V left{}, middle{}, right{};
#pragma GCC unroll 3
    for (int u = 0; u < 3; ++u) {
      if (!row.x[u]) continue;
      const V x = get(row.x[u] + column * C + channel);
      left += taps[u][2] * x;
      middle += taps[u][1] * x;
      right += taps[u][0] * x;
    }
    before += left;
    here += middle;
    const V next = bias + right;
    if (column) put(row.output + (column - 1) * C + channel, before);
    before = here;
    here = next;
  }
  put(row.output + (task.columns - 1) * C + channel, before);
}

// The channels of one token, summed lane by lane; the last ones, fewer than a vector, in the first lanes.
template <class T, class Function>
REGARD_INLINE Vec<T> add_up(const T* x, int64_t count, Function function) {
  constexpr int L = kLanes<T>;
  Vec<T> sum{};
  int64_t k = 0;
  for (; k + L <= count; k += L) sum += function(load<T>(x + k));
  if (k < count) {
    IntVec<T> lane;
    for (int n = 0; n < L; ++n) lane[n] = n;
    T some[L] = {};
    for (int n = 0; n < count - k; ++n) some[n] = x[k + n];
    sum += choose<T>(lane < static_cast<typename Kind<T>::Whole>(count - k), function(load<T>(some)), Vec<T>{});
  }
  return sum;
}

// N tokens from y on become z: as many as a vector has lanes, so that their sums are made together, or one.
template <class T, int N>
void normalise(const GridConvolution& task, const T* y, T* z) {
  constexpr int L = kLanes<T>;
  const int64_t C = task.channels;
  const auto* weight = static_cast<const T*>(task.norm_weight);
  const auto* bias = static_cast<const T*>(task.norm_bias);
  const Vec<T> share = splat<T>(T(1) / static_cast<T>(C));
  Vec<T> square[L] = {};
  for (int n = 0; n < N; ++n)
    square[n] = add_up<T>(y + n * C, C, [](Vec<T> x) __attribute__((always_inline)) { return x; });
  const Vec<T> means = sums_of<T>(square) * share;
  for (int n = 0; n < L; ++n) square[n] = Vec<T>{};
  for (int n = 0; n < N; ++n) {
    const Vec<T> mean = splat<T>(means[n]);
    square[n] = add_up<T>(y + n * C, C, [mean](Vec<T> x) __attribute__((always_inline)) { return (x - mean) * (x - mean); });
  }
  const Vec<T> variances = sums_of<T>(square) * share + splat<T>(static_cast<T>(task.eps));
  for (int n = 0; n < N; ++n) {
    const T mean = means[n], scale = 1 / (sizeof(T) == 8 ? static_cast<T>(__builtin_sqrt(variances[n])) : static_cast<T>(__builtin_sqrtf(static_cast<float>(variances[n]))));
    const T* from = y + n * C;
    T* to = z + n * C;
    int64_t k = 0;
    for (; k + L <= C; k += L) {
      Vec<T> made = (load<T>(from + k) - splat<T>(mean)) * splat<T>(scale);
      if (weight) made *= load<T>(weight + k);
      if (bias) made += load<T>(bias + k);
      store<T>(to + k, made);
    }
    for (; k < C; ++k) to[k] = (from[k] - mean) * scale * (weight ? weight[k] : T(1)) + (bias ? bias[k] : T(0));
  }
}

}  // namespace convolution

template <class T>
int32_t run_grid_convolution(const GridConvolution& task) {
  if (task.batch <= 0 || task.rows <= 0 || task.columns <= 0 || task.channels <= 0) return kOk;
  const int64_t C = task.channels, width = task.columns * C;
  const double worth = static_cast<double>(task.batch) * task.rows * width / 1e4;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  auto work = [&](int64_t item) {
    const int64_t place = item % task.rows;
    const T* x = static_cast<const T*>(task.x) + item * width;
    const convolution::Row<T> row{{place ? x - width : nullptr, x, place + 1 < task.rows ? x + width : nullptr},
                                  static_cast<T*>(task.output) + item * width,
                                  static_cast<T*>(task.normed) + item * width};
    int64_t channel = 0;
    for (; channel + kLanes<T> <= C; channel += kLanes<T>)
      convolution::convolve<T, Vec<T>>(
          task, row, channel, [](const T* from) __attribute__((always_inline)) { return load<T>(from); },
          [](T* to, Vec<T> sum) __attribute__((always_inline)) { store<T>(to, sum); });
    for (; channel < C; ++channel)
      convolution::convolve<T, T>(
          task, row, channel, [](const T* from) __attribute__((always_inline)) { return *from; },
          [](T* to, T sum) __attribute__((always_inline)) { *to = sum; });
    int64_t column = 0;
    for (; column + kLanes<T> <= task.columns; column += kLanes<T>)
      convolution::normalise<T, kLanes<T>>(task, row.output + column * C, row.normed + column * C);
    for (; column < task.columns; ++column)
      convolution::normalise<T, 1>(task, row.output + column * C, row.normed + column * C);
  };
  parallel(threads, task.batch * task.rows, work);
  return kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
