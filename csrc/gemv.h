// A linear layer for a few rows, bound by the memory bandwidth of its weights.
//
//   output[m][n] = bias[n] + sum_k x[m][k] weight[n][k]
//
// x is (row m, channel k), weight (output n, channel k), output (row m, output n). Channels lie across the lanes. Some
// neighbouring outputs are computed at once, for up to three rows of x at a time, so that every weight comes from
// memory once, whatever the number of rows. Each sum is one vector from the first channel to the last, whose lanes are
// then added in a fixed order: its bits depend on its row of x and its row of weights, not on rows, outputs or threads
// around it.
#pragma once

#include "interface.h"
#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace gemv {

constexpr int64_t kPieces = 4;  // of a thread's share, for load balancing

// The last numbers of a row, fewer than a vector, with zeros in the other lanes. Where the row has a whole vector they
// stand at its end, else at its beginning.
template <class T>
REGARD_INLINE Vec<T> end_of(const T* row, int64_t in) {
  constexpr int L = kLanes<T>;
  if (in < L) {
    T some[L] = {};
    for (int64_t k = 0; k < in; ++k) some[k] = row[k];
    return load<T>(some);
  }
  IntVec<T> lane;
  for (int n = 0; n < L; ++n) lane[n] = n;
  const auto known = static_cast<typename Kind<T>::Whole>(L - in % L);
  return choose<T>(lane >= known, load<T>(row + in - L), Vec<T>{});
}

// sums[m * N + n] = x_m . weight_n for M rows of x and N rows of weights, with room for whole vectors.
// The same channels of the next N rows are prefetched, if there are any: N streams at once are too many for the
// hardware prefetcher.
template <class T, int N, int M, bool kFetch>
REGARD_INLINE void products(const T* const (&x)[M], const T* const (&weight)[N], int64_t in, int64_t next, T* sums) {
  constexpr int L = kLanes<T>, kLine = 64 / sizeof(T), kGroups = (M * N + L - 1) / L;
  Vec<T> sum[kGroups * L] = {};
  auto add = [&](int64_t k) __attribute__((always_inline)) {
    Vec<T> one[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) one[m] = load<T>(x[m] + k);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec<T> w = load<T>(weight[n] + k);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) sum[m * N + n] += one[m] * w;
    }
  };
  int64_t k = 0;
  for (; k + kLine <= in; k += kLine) {
    if constexpr (kFetch) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) __builtin_prefetch(weight[n] + next + k, 0, 2);
    }
#pragma GCC unroll 4
    for (int part = 0; part < kLine; part += L) add(k + part);
  }
  for (; k + L <= in; k += L) add(k);
  if (k < in) {
    Vec<T> w[N];
    for (int n = 0; n < N; ++n) w[n] = end_of<T>(weight[n], in);
    for (int m = 0; m < M; ++m) {
      const Vec<T> one = end_of<T>(x[m], in);
      for (int n = 0; n < N; ++n) sum[m * N + n] += one * w[n];
    }
  }
#pragma GCC unroll 8
  for (int group = 0; group < kGroups; ++group) {
    Vec<T> square[L];
#pragma GCC unroll 16
    for (int n = 0; n < L; ++n) square[n] = sum[group * L + n];
    store<T>(sums + group * L, sums_of<T>(square));
  }
}

// M rows of x from `row` on, for the outputs from `first` to `last`, at most N.
template <class T, int N, int M, bool kFetch>
void block(const LinearLayer& task, int64_t row, int64_t first, int64_t last, int64_t next) {
  const T *x[M], *weight[N];
  for (int m = 0; m < M; ++m) x[m] = static_cast<const T*>(task.x) + (row + m) * task.x_row;
  for (int n = 0; n < N; ++n) {
    const int64_t output = first + n < last ? first + n : last - 1;  // surplus ones are computed and dropped
    weight[n] = static_cast<const T*>(task.weight) + output * task.weight_row;
  }
  T sums[M * N + kLanes<T>];
  products<T, N, M, kFetch>(x, weight, task.in, next, sums);
  const T* bias = static_cast<const T*>(task.bias);
  for (int m = 0; m < M; ++m) {
    T* output = static_cast<T*>(task.output) + (row + m) * task.out;
    for (int64_t n = first; n < last; ++n) output[n] = sums[m * N + n - first] + (bias ? bias[n] : T(0));
  }
}

// The outputs from `first` to `last`, for all rows, N at a time.
template <class T, int N>
void piece(const LinearLayer& task, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += N) {
    const int64_t stop = n + N < last ? n + N : last, next = N * task.weight_row;
    int64_t row = 0;
    if constexpr (N == 8) {
      if (stop < last)
        block<T, N, 1, true>(task, 0, n, stop, next);
      else
        block<T, N, 1, false>(task, 0, n, stop, next);
    } else {
      if (task.rows == 2 || task.rows == 4) {
        block<T, N, 2, true>(task, 0, n, stop, stop < last ? next : 0);
        row = 2;
      } else {
        block<T, N, 3, true>(task, 0, n, stop, stop < last ? next : 0);
        row = 3;
      }
      for (; task.rows - row > 4 || task.rows - row == 3; row += 3) block<T, N, 3, false>(task, row, n, stop, 0);
      for (; task.rows - row >= 2; row += 2) block<T, N, 2, false>(task, row, n, stop, 0);
    }
  }
}

}  // namespace few

template <class T>
int32_t run_gemv(const LinearLayer& task) {
  if (task.rows <= 0 || task.out <= 0) return kOk;
  const int64_t unit = task.rows == 1 ? 8 : 4, units = (task.out + unit - 1) / unit;
  // A thread is used only for work that takes longer than waking it.
  const double worth = static_cast<double>(task.rows) * static_cast<double>(task.out) * (task.in + 8) / 1e5;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  const int64_t pieces = threads <= 1 ? 1 : threads * gemv::kPieces < units ? threads * gemv::kPieces : units;
  auto work = [&](int64_t item) {
    const int64_t first = units * item / pieces * unit, end = units * (item + 1) / pieces * unit;
    const int64_t last = end < task.out ? end : task.out;
    if (task.rows == 1)
      gemv::piece<T, 8>(task, first, last);
    else
      gemv::piece<T, 4>(task, first, last);
  };
  parallel(threads, pieces, work);
  return kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
