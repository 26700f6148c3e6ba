// The three products of attention, each a register tile of rows x vectors that is summed over a third axis.
//
// Queries lie across the lanes: a tile of up to three vectors of queries is packed as (dim, query), and keys are read
// where they are, row by row, through pointers. Nothing is packed for a key, so any set of keys costs the same, and
// the softmax works on whole vectors without ever summing across lanes.
//
//   scores   S[j][q]  = sum_d K[j][d] Q[d][q]      row_product
//   outputs  O[d][q] += sum_j V[j][d] P[j][q]      column_product
//   keys     G[j][d] += sum_q P[j][q] R[q][d]      outer_product
//
// Rows in registers for 1, 2 and 3 vectors: enough independent sums to hide the latency of a multiply-add, few enough
// for sixteen registers.
#pragma once

#include "vector.h"

namespace regard {
namespace REGARD_ISA {

template <int V>
constexpr int kRows = V == 1 ? 8 : 4;

template <class T, int V, int R>
REGARD_INLINE void clear(Vec<T> (&sum)[R][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) sum[r][v] = Vec<T>{};
}

// R rows of S = scale * (keys . queries); `top` keeps the largest of each lane.
template <class T, int V, int W, int R>
REGARD_INLINE void row_block(const T* const* keys, int64_t dim, const T* queries, T scale, T* scores, Vec<T>* top) {
  Vec<T> sum[R][V];
  clear<T, V, R>(sum);
  const T* left[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) left[r] = keys[r];
  for (int64_t d = 0; d < dim; ++d) {
    Vec<T> row[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) row[v] = load<T>(queries + d * W + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> one = splat<T>(left[r][d]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[r][v] += one * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const Vec<T> score = sum[r][v] * splat<T>(scale);
      store<T>(scores + r * W + v * kLanes<T>, score);
      top[v] = larger<T>(top[v], score);
    }
}

template <class T, int V, int W, int R>
REGARD_INLINE void row_rest(int64_t rest, const T* const* keys, int64_t dim, const T* queries, T scale, T* scores,
                            Vec<T>* top) {
  if constexpr (R > 0) {
    if (rest == R)
      row_block<T, V, W, R>(keys, dim, queries, scale, scores, top);
    else
      row_rest<T, V, W, R - 1>(rest, keys, dim, queries, scale, scores, top);
  }
}

// scores[j][q] = scale * sum_d keys[j][d] queries[d][q] for `count` keys and V vectors of queries; rows have W numbers.
template <class T, int V, int W = V * kLanes<T>>
void row_product(const T* const* keys, int64_t count, int64_t dim, const T* queries, T scale, T* scores, Vec<T>* top) {
  constexpr int R = kRows<V>;
  int64_t j = 0;
  for (; j + R <= count; j += R) row_block<T, V, W, R>(keys + j, dim, queries, scale, scores + j * W, top);
  row_rest<T, V, W, R - 1>(count - j, keys + j, dim, queries, scale, scores + j * W, top);
}

template <class T, int V, int W, int R>
REGARD_INLINE void column_block(const T* const* values, int64_t count, int64_t first, const T* weights, T* output) {
  Vec<T> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) sum[r][v] = load<T>(output + r * W + v * kLanes<T>);
  for (int64_t j = 0; j < count; ++j) {
    const T* left = values[j] + first;
    Vec<T> row[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) row[v] = load<T>(weights + j * W + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> one = splat<T>(left[r]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[r][v] += one * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) store<T>(output + r * W + v * kLanes<T>, sum[r][v]);
}

template <class T, int V, int W, int R>
REGARD_INLINE void column_rest(int64_t rest, const T* const* values, int64_t count, int64_t first, const T* weights,
                               T* output) {
  if constexpr (R > 0) {
    if (rest == R)
      column_block<T, V, W, R>(values, count, first, weights, output);
    else
      column_rest<T, V, W, R - 1>(rest, values, count, first, weights, output);
  }
}

// output[d][q] += sum_j values[j][d] weights[j][q] for `dim` columns; output and weights have rows of W numbers.
template <class T, int V, int W = V * kLanes<T>>
void column_product(const T* const* values, int64_t count, int64_t dim, const T* weights, T* output) {
  constexpr int R = kRows<V>;
  int64_t d = 0;
  for (; d + R <= dim; d += R) column_block<T, V, W, R>(values, count, d, weights, output + d * W);
  column_rest<T, V, W, R - 1>(dim - d, values, count, d, weights, output + d * W);
}

template <class T, int V, int R>
REGARD_INLINE void outer_block(T* const* totals, int64_t first, const T* weights, int64_t width, int64_t inner,
                               const T* rows, int64_t stride) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) sum[r][v] = load<T>(totals[r] + first + v * L);
  for (int64_t q = 0; q < inner; ++q) {
    Vec<T> row[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) row[v] = load<T>(rows + q * stride + first + v * L);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> one = splat<T>(weights[r * width + q]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[r][v] += one * row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) store<T>(totals[r] + first + v * L, sum[r][v]);
}

template <class T, int V, int R>
REGARD_INLINE void outer_rest(int64_t rest, T* const* totals, int64_t first, const T* weights, int64_t width,
                              int64_t inner, const T* rows, int64_t stride) {
  if constexpr (R > 0) {
    if (rest == R)
      outer_block<T, V, R>(totals, first, weights, width, inner, rows, stride);
    else
      outer_rest<T, V, R - 1>(rest, totals, first, weights, width, inner, rows, stride);
  }
}

template <class T, int V>
REGARD_INLINE void outer_columns(T* const* totals, int64_t count, int64_t first, const T* weights, int64_t width,
                                 int64_t inner, const T* rows, int64_t stride) {
  constexpr int R = V == 2 ? 6 : kRows<V>;
  int64_t j = 0;
  for (; j + R <= count; j += R)
    outer_block<T, V, R>(totals + j, first, weights + j * width, width, inner, rows, stride);
  outer_rest<T, V, R - 1>(count - j, totals + j, first, weights + j * width, width, inner, rows, stride);
}

// totals[j][d] += sum_q weights[j][q] rows[q][d] for `count` totals; `dim` is a multiple of the lanes, weights have rows
// of `width` numbers of which `inner` count.
template <class T>
void outer_product(T* const* totals, int64_t count, int64_t dim, const T* weights, int64_t width, int64_t inner,
                   const T* rows, int64_t stride) {
  constexpr int L = kLanes<T>;
  int64_t d = 0;
  for (; d + 2 * L <= dim; d += 2 * L) outer_columns<T, 2>(totals, count, d, weights, width, inner, rows, stride);
  if (d < dim) outer_columns<T, 1>(totals, count, d, weights, width, inner, rows, stride);
}

}  // namespace REGARD_ISA
}  // namespace regard
