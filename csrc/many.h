// A linear layer for many rows, and the bend behind it: as fast as the machine multiplies.
//
//   output[m][n] = bend(bias[n] + sum_k x[m][k] weight[n][k])
//
// x is (row m, channel k), weight (output n, channel k), output (row m, output n). Outputs lie across the lanes. Two vectors
// of neighbouring outputs are a panel, whose weights are packed channel by channel into memory of the thread; six rows of
// x, read where they are, meet a panel at a time. Both stay near the processor: channels are taken in pieces so long
// that a piece of a panel stays in the first cache, rows in blocks and panels in groups that stay in the second.
// Each sum goes from the first channel to the last, the bias is added at the end: the bits of an output depend on its
// row of x and its row of weights, not on rows, outputs or threads around it.
#pragma once

#include "bend.h"
#include "interface.h"
#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace many {

constexpr int kStrip = 6;                    // rows that are worked out at once
constexpr int64_t kPieceBytes = 24 << 10;    // of a panel
constexpr int64_t kBlockBytes = 192 << 10;   // of rows of x
constexpr int64_t kGroupBytes = 256 << 10;   // of panels
constexpr int64_t kPartRows = 512;           // rows that are worth packing weights for again
constexpr int64_t kItems = 4;                // of a thread: who is late leaves some to others

template <class T>
constexpr int kPanel = 2 * kLanes<T>;

// packed[k][n] = weight[first + n][k]; zero where there is no such output.
template <class T>
void pack_panel(const Many& task, int64_t first, T* packed) {
  constexpr int L = kLanes<T>, P = kPanel<T>;
  const int64_t in = task.in, left = task.out - first;
  const T* weight = static_cast<const T*>(task.weight) + first * task.weight_row;
  for (int half = 0; half < P; half += L) {
    if (left >= half + L) {
      const T* row = weight + half * task.weight_row;
      int64_t k = 0;
      for (; k + L <= in; k += L) {
        Vec<T> square[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) square[n] = load<T>(row + n * task.weight_row + k);
        transpose<T>(square);
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) store<T>(packed + (k + n) * P + half, square[n]);
      }
      for (; k < in; ++k)
        for (int n = 0; n < L; ++n) packed[k * P + half + n] = row[n * task.weight_row + k];
    } else {
      for (int64_t k = 0; k < in; ++k)
        for (int n = half; n < half + L; ++n) packed[k * P + n] = n < left ? weight[n * task.weight_row + k] : T(0);
    }
  }
}

// sum[r] += sum_k x[r][k] panel[k] over `count` channels.
template <class T>
REGARD_INLINE void add_products(const T* const (&x)[kStrip], const T* panel, int64_t count,
                                Vec<T> (&sum)[kStrip][2]) {
  constexpr int L = kLanes<T>;
  auto add = [&](int64_t k) __attribute__((always_inline)) {
    const Vec<T> low = load<T>(panel + k * 2 * L), high = load<T>(panel + k * 2 * L + L);
#pragma GCC unroll 6
    for (int r = 0; r < kStrip; ++r) {
      const Vec<T> one = splat<T>(x[r][k]);
      sum[r][0] += one * low;
      sum[r][1] += one * high;
    }
  };
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) add(k + part);
  }
  for (; k < count; ++k) add(k);
}

// Channels from `from` to `to` of six rows of x and one panel. Where they are not the first, sums stand in the output;
// where they are the last, they are finished.
template <class T>
void strip(const Many& task, const T* panel, int64_t row, int64_t last_row, int64_t first, int64_t from, int64_t to) {
  constexpr int L = kLanes<T>;
  const T* x[kStrip];
  T* output[kStrip];
#pragma GCC unroll 6
  for (int r = 0; r < kStrip; ++r) {
    const int64_t m = row + r < last_row ? row + r : last_row - 1;  // what is too many is worked out again
    x[r] = static_cast<const T*>(task.x) + m * task.x_row + from;
    output[r] = static_cast<T*>(task.output) + m * task.out + first;
  }
  const bool whole = first + 2 * L <= task.out;
  Vec<T> sum[kStrip][2];
#pragma GCC unroll 6
  for (int r = 0; r < kStrip; ++r) {
    sum[r][0] = from ? load<T>(output[r]) : Vec<T>{};
    sum[r][1] = from ? load<T>(output[r] + L) : Vec<T>{};
  }
  add_products<T>(x, panel + from * 2 * L, to - from, sum);
  if (to == task.in) {
    const T* bias = static_cast<const T*>(task.bias);
    if (bias) {
      Vec<T> shift[2];
      if (whole) {
        shift[0] = load<T>(bias + first);
        shift[1] = load<T>(bias + first + L);
      } else {
        T some[2 * L] = {};
        for (int64_t n = first; n < task.out; ++n) some[n - first] = bias[n];
        shift[0] = load<T>(some);
        shift[1] = load<T>(some + L);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kStrip; ++r) {
        sum[r][0] += shift[0];
        sum[r][1] += shift[1];
      }
    }
    if (task.bend != kStraight || !whole) {
      T tile[kStrip * 2 * L];
#pragma GCC unroll 6
      for (int r = 0; r < kStrip; ++r) {
        store<T>(tile + r * 2 * L, sum[r][0]);
        store<T>(tile + r * 2 * L + L, sum[r][1]);
      }
      bend_all<T>(static_cast<Bend>(task.bend), tile, kStrip * 2);
      if (!whole) {
        for (int r = 0; r < kStrip; ++r)
          for (int64_t n = first; n < task.out; ++n) output[r][n - first] = tile[r * 2 * L + n - first];
        return;
      }
#pragma GCC unroll 6
      for (int r = 0; r < kStrip; ++r) {
        store<T>(output[r], load<T>(tile + r * 2 * L));
        store<T>(output[r] + L, load<T>(tile + r * 2 * L + L));
      }
      return;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kStrip; ++r) {
    store<T>(output[r], sum[r][0]);
    store<T>(output[r] + L, sum[r][1]);
  }
}

// Rows from `row` to `last_row`, panels from `panel` to `last_panel`, packed one after the other.
template <class T>
void part(const Many& task, const T* packed, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
  constexpr int64_t P = kPanel<T>, size = sizeof(T);
  const int64_t in = task.in, most = kPieceBytes / (P * size);
  const int64_t pieces = in > most + most / 2 ? (in + most - 1) / most : 1;
  int64_t block = kBlockBytes / ((in ? in : 1) * size) / kStrip * kStrip;
  if (block < 4 * kStrip) block = 4 * kStrip;
  for (int64_t start = row; start < last_row; start += block) {
    const int64_t stop = start + block < last_row ? start + block : last_row;
    for (int64_t n = panel; n < last_panel; ++n) {
      const T* weights = packed + (n - panel) * in * P;
      const int64_t parts = (n + 1) * P <= task.out ? pieces : 1;  // sums of a ragged panel do not fit the output
      for (int64_t piece = 0; piece < parts; ++piece) {
        const int64_t from = in * piece / parts, to = in * (piece + 1) / parts;
        for (int64_t m = start; m < stop; m += kStrip) strip<T>(task, weights, m, stop, n * P, from, to);
      }
    }
  }
}

}  // namespace many

template <class T>
int32_t run_many(const Many& task) {
  if (task.rows <= 0 || task.out <= 0) return kFine;
  constexpr int64_t P = many::kPanel<T>, size = sizeof(T);
  const int64_t panels = (task.out + P - 1) / P, strips = (task.rows + many::kStrip - 1) / many::kStrip;
  const double worth = static_cast<double>(task.rows) * static_cast<double>(task.out) * (task.in + 8) / 1e6;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  const int64_t wanted = threads <= 1 ? 1 : threads * many::kItems;
  int64_t parts = task.rows / many::kPartRows;
  parts = parts < 1 || threads <= 1 ? 1 : parts > wanted ? wanted : parts;
  // Panels of a group: as many as the cache holds, but enough groups for all threads.
  const int64_t room = many::kGroupBytes / ((task.in + 1) * P * size);
  int64_t groups = room < 1 ? panels : (panels + room - 1) / room;
  if (groups * parts < wanted) groups = (wanted + parts - 1) / parts;
  if (groups * parts % threads) groups += threads - groups % threads;
  if (groups > panels) groups = panels;
  int32_t failed = 0;
  auto work = [&](int64_t item) {
    const int64_t group = item % groups, slice = item / groups;
    const int64_t first = panels * group / groups, last = panels * (group + 1) / groups;
    const int64_t row = strips * slice / parts * many::kStrip, end = strips * (slice + 1) / parts * many::kStrip;
    T* packed = static_cast<T*>(scratch((last - first) * (task.in * P * size + 64)));
    if (!packed) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t n = first; n < last; ++n) many::pack_panel<T>(task, n * P, packed + (n - first) * task.in * P);
    many::part<T>(task, packed, row, end < task.rows ? end : task.rows, first, last);
  };
  parallel(threads, groups * parts, work);
  return failed ? kNoMemory : kFine;
}

}  // namespace REGARD_ISA
}  // namespace regard
