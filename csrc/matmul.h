// Matrix products for training, with bias, activation, its derivative and residual fused; see matmul_task.h.
//
// Outputs n lie across the lanes. Two vectors of them are a panel, whose part of `b` is packed step by step; some rows
// of `a` are multiplied with a panel at a time. Rows of `a` that are contiguous are read in place, columns are packed.
//
//   item    some rows, and a group of panels                                            for one thread
//   chunk   of steps k, for which the panels of the group are packed together           second cache
//   block   of rows, multiplied with one panel after another                            second cache
//   strip   of rows                                                                     registers
//
// Partial sums are kept in the output between chunks, and go from the first step to the last: the bits of an output
// depend on its row of `a` and its column of `b`, not on rows, columns or threads around.
#pragma once

#include "activation_grad.h"
#include "interface.h"
#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace matmul {

// 24 sums of AVX-512's 32 registers, 12 of the 16 of others.
constexpr int kStrip = REGARD_BYTES == 64 ? 12 : 6;
constexpr int kHalf = kStrip / 2;
constexpr int64_t kChunk = 256;             // steps
constexpr int64_t kGroupBytes = 256 << 10;  // of panels of one chunk
constexpr int64_t kBlock = 16 * kStrip;     // rows
constexpr int64_t kPartRows = 192;          // rows that are worth packing panels for again
constexpr int64_t kItems = 4;               // of a thread, for load balancing

template <class T>
constexpr int kPanel = 2 * kLanes<T>;

template <class T>
REGARD_INLINE const T* at(const void* base, int64_t offset) {
  return static_cast<const T*>(base) + offset;
}

// In how many chunks the steps are taken: a quarter more for a single one.
REGARD_INLINE int64_t count_chunks(int64_t steps) {
  return 4 * steps <= 5 * kChunk ? 1 : (steps + kChunk - 1) / kChunk;
}

// packed[k - from][n] = b[k][first + n] for steps from `from` to `to`; zero where there is no such column.
template <class T>
void pack_panel(const Matmul& task, int64_t first, int64_t from, int64_t to, T* packed) {
  constexpr int L = kLanes<T>, P = kPanel<T>;
  const int64_t count = to - from, left = task.out - first < P ? task.out - first : P;
  const T* b = at<T>(task.b, from * task.b_step + first * task.b_column);
  if (task.b_column == 1) {
    for (int64_t k = 0; k < count; ++k, b += task.b_step, packed += P) {
      if (left == P) {
        store<T>(packed, load<T>(b));
        store<T>(packed + L, load<T>(b + L));
      } else {
        for (int64_t n = 0; n < P; ++n) packed[n] = n < left ? b[n] : T(0);
      }
    }
    return;
  }
  for (int half = 0; half < P; half += L) {
    const T* column = b + half * task.b_column;
    int64_t k = 0;
    if (left >= half + L)
      for (; k + L <= count; k += L) {
        Vec<T> square[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) square[n] = load<T>(column + n * task.b_column + k);
        transpose<T>(square);
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) store<T>(packed + (k + n) * P + half, square[n]);
      }
    for (; k < count; ++k)
      for (int n = 0; n < L; ++n) packed[k * P + half + n] = half + n < left ? column[n * task.b_column + k] : T(0);
  }
}

// packed[strip][k - from][r] = a[row + r][k], for a matrix that is contiguous along rows; the last row is repeated.
template <class T>
void pack_columns(const Matmul& task, int64_t row, int64_t last_row, int64_t from, int64_t to, T* packed, T* sums) {
  const int64_t count = to - from;
  for (int64_t m = row; m < last_row; m += kStrip, packed += count * kStrip) {
    const int64_t rows = last_row - m < kStrip ? last_row - m : kStrip;
    const T* a = at<T>(task.a, m + from * task.a_step);
    T total[kStrip] = {};
    for (int64_t k = 0; k < count; ++k, a += task.a_step) {
      T* to_here = packed + k * kStrip;
      if (rows == kStrip) {
#pragma GCC unroll 12
        for (int r = 0; r < kStrip; ++r) {
          to_here[r] = a[r];
          total[r] += a[r];
        }
      } else {
        for (int64_t r = 0; r < kStrip; ++r) to_here[r] = a[r < rows ? r : rows - 1];
        for (int64_t r = 0; r < rows; ++r) total[r] += a[r];
      }
    }
    if (sums)
      for (int64_t r = 0; r < rows; ++r) sums[m + r] = from ? sums[m + r] + total[r] : total[r];
  }
}

// `count` numbers of two vectors; the others are zero.
template <class T>
REGARD_INLINE void get(const T* from, int64_t count, Vec<T> (&two)[2]) {
  constexpr int L = kLanes<T>;
  T some[2 * L] = {};
  if (count < 2 * L) {
    for (int64_t n = 0; n < count; ++n) some[n] = from[n];
    from = some;
  }
  two[0] = load<T>(from);
  two[1] = load<T>(from + L);
}

template <class T>
REGARD_INLINE void put(T* to, int64_t count, const T* from) {
  constexpr int L = kLanes<T>;
  if (count < 2 * L) {
    for (int64_t n = 0; n < count; ++n) to[n] = from[n];
    return;
  }
  store<T>(to, load<T>(from));
  store<T>(to + L, load<T>(from + L));
}

// What is done to the sums of R rows and one panel, from `row` and `first` on, before they are written.
template <class T, int R>
void finish(const Matmul& task, int64_t row, int64_t rows, int64_t first, T* sums) {
  constexpr int L = kLanes<T>, P = kPanel<T>;
  const int64_t count = task.out - first < P ? task.out - first : P;
  if (task.bias) {
    Vec<T> shift[2];
    get<T>(at<T>(task.bias, first), count, shift);
    for (int r = 0; r < R; ++r) {
      store<T>(sums + r * P, load<T>(sums + r * P) + shift[0]);
      store<T>(sums + r * P + L, load<T>(sums + r * P + L) + shift[1]);
    }
  }
  if (task.saved)
    for (int64_t r = 0; r < rows; ++r)
      put<T>(static_cast<T*>(task.saved) + (row + r) * task.out + first, count, sums + r * P);
  if (task.factor) {
    T grads[R * P];
    for (int64_t r = 0; r < R; ++r) {
      Vec<T> two[2] = {};
      if (r < rows) get<T>(at<T>(task.factor, (row + r) * task.out + first), count, two);
      store<T>(grads + r * P, two[0]);
      store<T>(grads + r * P + L, two[1]);
    }
    activation_grads<T>(task.activation, grads, 2 * R);
    for (int n = 0; n < R * P; n += L) store<T>(sums + n, load<T>(sums + n) * load<T>(grads + n));
  } else {
    activate_all<T>(task.activation, sums, 2 * R);
  }
  if (task.residual)
    for (int64_t r = 0; r < rows; ++r) {
      Vec<T> two[2];
      get<T>(at<T>(task.residual, (row + r) * task.residual_row + first), count, two);
      store<T>(sums + r * P, load<T>(sums + r * P) + two[0]);
      store<T>(sums + r * P + L, load<T>(sums + r * P + L) + two[1]);
    }
}

// Steps of R rows and one panel. Rows of `a` are packed, kStrip numbers for each step, or read in place. Where these are not
// the first steps, sums stand in the output; where they are the last, sums are finished.
template <class T, int R, bool kPacked>
void strip(const Matmul& task, const T* a, const T* panel, int64_t row, int64_t rows, int64_t first, int64_t from,
           int64_t to) {
  constexpr int L = kLanes<T>, P = kPanel<T>;
  const int64_t columns = task.out - first < P ? task.out - first : P, count = to - from;
  const bool whole = columns == P && rows == R;
  T* output = static_cast<T*>(task.output) + row * task.output_row + first;
  const T* x[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) x[r] = a + (r < rows ? r : rows - 1) * task.a_row;  // surplus ones are computed again
  Vec<T> sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = Vec<T>{};
  if (from && whole) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      sum[r][0] = load<T>(output + r * task.output_row);
      sum[r][1] = load<T>(output + r * task.output_row + L);
    }
  } else if (from) {
    for (int64_t r = 0; r < rows; ++r) get<T>(output + r * task.output_row, columns, sum[r]);
  }
  if constexpr (kPacked) {
    for (int64_t k = 0; k < count; ++k) {
      const Vec<T> low = load<T>(panel + k * P), high = load<T>(panel + k * P + L);
      const T* here = a + k * kStrip;
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Vec<T> one = splat<T>(here[r]);
        sum[r][0] += one * low;
        sum[r][1] += one * high;
      }
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      const Vec<T> low = load<T>(panel + k * P), high = load<T>(panel + k * P + L);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Vec<T> one = splat<T>(x[r][k]);
        sum[r][0] += one * low;
        sum[r][1] += one * high;
      }
    }
  }
  const bool plain = to != task.in || !(task.bias || task.saved || task.activation != kIdentity || task.residual);
  if (whole && plain) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      store<T>(output + r * task.output_row, sum[r][0]);
      store<T>(output + r * task.output_row + L, sum[r][1]);
    }
    return;
  }
  alignas(64) T sums[R * P];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store<T>(sums + r * P, sum[r][0]);
    store<T>(sums + r * P + L, sum[r][1]);
  }
  if (!plain) finish<T, R>(task, row, rows, first, sums);
  for (int64_t r = 0; r < rows; ++r) put<T>(output + r * task.output_row, columns, sums + r * P);
}

template <class T, bool kPacked>
REGARD_INLINE void strips(const Matmul& task, const T* a, const T* panel, int64_t row, int64_t rows, int64_t first,
                          int64_t from, int64_t to) {
  if (rows > kHalf)
    strip<T, kStrip, kPacked>(task, a, panel, row, rows, first, from, to);
  else
    strip<T, kHalf, kPacked>(task, a, panel, row, rows, first, from, to);
}

// Rows from `row` to `last_row`, panels from `panel` to `last_panel`.
template <class T>
void part(const Matmul& task, T* panels, T* columns, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
  constexpr int64_t P = kPanel<T>;
  const int64_t chunks = count_chunks(task.in);
  const bool packs = task.a_step != 1 || task.row_sums;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t from = task.in * chunk / chunks, to = task.in * (chunk + 1) / chunks, count = to - from;
    for (int64_t n = panel; n < last_panel; ++n) pack_panel<T>(task, n * P, from, to, panels + (n - panel) * count * P);
    for (int64_t start = row; start < last_row; start += kBlock) {
      const int64_t stop = start + kBlock < last_row ? start + kBlock : last_row;
      if (packs) pack_columns<T>(task, start, stop, from, to, columns, panel ? nullptr : static_cast<T*>(task.row_sums));
      for (int64_t n = panel; n < last_panel; ++n) {
        const T* b = panels + (n - panel) * count * P;
        for (int64_t m = start; m < stop; m += kStrip) {
          const int64_t rows = stop - m < kStrip ? stop - m : kStrip;
          if (packs)
            strips<T, true>(task, columns + (m - start) * count, b, m, rows, n * P, from, to);
          else
            strips<T, false>(task, at<T>(task.a, m * task.a_row + from), b, m, rows, n * P, from, to);
        }
      }
    }
  }
}

}  // namespace matmul

template <class T>
int32_t run_matmul(const Matmul& task) {
  if (task.rows <= 0 || task.out <= 0) return kOk;
  constexpr int64_t P = matmul::kPanel<T>, size = sizeof(T);
  const int64_t panels = (task.out + P - 1) / P, strips = (task.rows + matmul::kStrip - 1) / matmul::kStrip;
  const double worth = static_cast<double>(task.rows) * static_cast<double>(task.out) * (task.in + 8) / 1e6;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  const int64_t wanted = threads <= 1 ? 1 : threads * matmul::kItems;
  int64_t parts = task.rows / matmul::kPartRows;
  parts = parts < 1 || threads <= 1 ? 1 : parts > wanted ? wanted : parts;
  // Panels of a group: as many as the cache holds, but enough groups for all threads.
  const int64_t chunk = task.in / matmul::count_chunks(task.in) + 1;
  const int64_t room = matmul::kGroupBytes / (chunk * P * size) + 1;
  int64_t groups = (panels + room - 1) / room;
  if (groups * parts < wanted) groups = (wanted + parts - 1) / parts;
  if (groups > panels) groups = panels;
  int32_t failed = 0;
  auto work = [&](int64_t item) {
    const int64_t group = item % groups, slice = item / groups;
    const int64_t first = panels * group / groups, last = panels * (group + 1) / groups;
    const int64_t row = strips * slice / parts * matmul::kStrip, end = strips * (slice + 1) / parts * matmul::kStrip;
    const int64_t packed = ((last - first) * chunk * P + 15) / 16 * 16;
    T* memory = static_cast<T*>(scratch((packed + chunk * (matmul::kBlock + matmul::kStrip)) * size));
    if (!memory) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    matmul::part<T>(task, memory, memory + packed, row, end < task.rows ? end : task.rows, first, last);
  };
  parallel(threads, groups * parts, work);
  return failed ? kNoMemory : kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
