// A linear layer for many rows, with the activation and the residual connection fused.
//
//   output[m][n] = residual[m][n] + activation(bias[n] + sum_k x[m][k] weight[n][k])
//
// x is (row m, channel k), weight (output n, channel k), output (row m, output n). Outputs lie across the lanes. Two
// vectors of neighbouring outputs are a panel, whose weights are packed channel by channel: into memory of the thread,
// unless `run_pack` has done it before. Six rows of x, read in place, are multiplied with a panel at a time. All of
// them stay in caches:
//
//   item    some rows, and a group of panels                                           for one thread
//   chunk   of channels, for which the panels of the group are packed together         second cache
//   block   of rows, multiplied with one panel after another                           second cache
//   piece   of the chunk, for which a panel meets the rows of the block                first cache
//   strip   of six rows                                                                registers
//
// Partial sums are kept in the output between pieces, so that the residual is another tensor. Each sum goes from the first
// channel to the last, and the bias is added at the end: the bits of an output depend on its row of x, its row of
// weights and its residual, not on rows, outputs or threads around, nor on when the weights were packed.
#pragma once

#include "activation.h"
#include "interface.h"
#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace gemm {

constexpr int kStrip = 6;                   // rows
constexpr int64_t kPieceBytes = 16 << 10;   // of a panel
constexpr int64_t kChunkBytes = 32 << 10;   // of a panel
constexpr int64_t kGroupBytes = 256 << 10;  // of panels of one chunk
constexpr int64_t kBlockBytes = 192 << 10;  // of rows of x in one chunk
constexpr int64_t kPartRows = 512;          // rows that are worth packing weights for again
constexpr int64_t kItems = 4;               // of a thread, for load balancing

template <class T>
constexpr int kPanel = 2 * kLanes<T>;

// In how many parts `count` is to be taken, each of about `most`, a quarter more for a single one.
REGARD_INLINE int64_t shares(int64_t count, int64_t most) {
  return 4 * count <= 5 * most ? 1 : (count + most - 1) / most;
}

// packed[k - from][n] = weight[first + n][k] for channels from `from` to `to`; zero where there is no such output.
template <class T, class Task>
void pack_panel(const Task& task, int64_t first, int64_t from, int64_t to, T* packed) {
  constexpr int L = kLanes<T>, P = kPanel<T>;
  const int64_t count = to - from, left = task.out - first;
  const T* weight = static_cast<const T*>(task.weight) + first * task.weight_row + from;
  for (int half = 0; half < P; half += L) {
    if (left >= half + L) {
      const T* row = weight + half * task.weight_row;
      int64_t k = 0;
      for (; k + L <= count; k += L) {
        Vec<T> square[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) square[n] = load<T>(row + n * task.weight_row + k);
        transpose<T>(square);
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) store<T>(packed + (k + n) * P + half, square[n]);
      }
      for (; k < count; ++k)
        for (int n = 0; n < L; ++n) packed[k * P + half + n] = row[n * task.weight_row + k];
    } else {
      for (int64_t k = 0; k < count; ++k)
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
  for (int64_t k = 0; k < count; ++k) add(k);
}

// Two vectors of outputs, of which there may be fewer: `count` numbers are read and written, the others are zero.
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

// Channels from `from` to `to` of the rows before `last_row`, at most six, and of a panel that begins with the first of
// these channels and with output `first`. Where they are not the first channels, sums stand in the output; where they
// are the last, sums are finished.
template <class T>
void strip(const Gemm& task, const T* panel, int64_t row, int64_t last_row, int64_t first, int64_t from, int64_t to) {
  constexpr int L = kLanes<T>;
  const T* x[kStrip];
  T* output[kStrip];
#pragma GCC unroll 6
  for (int r = 0; r < kStrip; ++r) {
    const int64_t m = row + r < last_row ? row + r : last_row - 1;  // surplus ones are computed again
    x[r] = static_cast<const T*>(task.x) + m * task.x_row + from;
    output[r] = static_cast<T*>(task.output) + m * task.out + first;
  }
  const bool whole = first + 2 * L <= task.out;
  Vec<T> sum[kStrip][2];
#pragma GCC unroll 6
  for (int r = 0; r < kStrip; ++r) sum[r][0] = sum[r][1] = Vec<T>{};
  if (from && whole) {
#pragma GCC unroll 6
    for (int r = 0; r < kStrip; ++r) {
      sum[r][0] = load<T>(output[r]);
      sum[r][1] = load<T>(output[r] + L);
    }
  } else if (from) {
#pragma GCC unroll 6
    for (int r = 0; r < kStrip; ++r) get<T>(output[r], task.out - first, sum[r]);
  }
  add_products<T>(x, panel, to - from, sum);
  const bool last = to == task.in;
  if (last && task.bias) {
    Vec<T> shift[2];
    get<T>(static_cast<const T*>(task.bias) + first, task.out - first, shift);
#pragma GCC unroll 6
    for (int r = 0; r < kStrip; ++r) {
      sum[r][0] += shift[0];
      sum[r][1] += shift[1];
    }
  }
  const bool plain = !(last && (task.activation != kIdentity || task.residual));
  if (whole && plain) {
#pragma GCC unroll 6
    for (int r = 0; r < kStrip; ++r) {
      store<T>(output[r], sum[r][0]);
      store<T>(output[r] + L, sum[r][1]);
    }
    return;
  }
  T sums[kStrip * 2 * L];
#pragma GCC unroll 6
  for (int r = 0; r < kStrip; ++r) {
    store<T>(sums + r * 2 * L, sum[r][0]);
    store<T>(sums + r * 2 * L + L, sum[r][1]);
  }
  if (last) activate_all<T>(task.activation, sums, kStrip * 2);
  for (int r = 0; r < kStrip; ++r) {
    T* from_here = sums + r * 2 * L;
    if (last && task.residual) {
      const int64_t m = row + r < last_row ? row + r : last_row - 1;
      Vec<T> before[2];
      get<T>(static_cast<const T*>(task.residual) + m * task.residual_row + first, task.out - first, before);
      store<T>(from_here, before[0] + load<T>(from_here));
      store<T>(from_here + L, before[1] + load<T>(from_here + L));
    }
    if (whole) {
      store<T>(output[r], load<T>(from_here));
      store<T>(output[r] + L, load<T>(from_here + L));
    } else {
      for (int64_t n = first; n < task.out; ++n) output[r][n - first] = from_here[n - first];
    }
  }
}

// Rows from `row` to `last_row`, panels from `panel` to `last_panel`. `room` is for a chunk of these, unless the weights
// are packed already.
template <class T>
void part(const Gemm& task, T* room, int64_t row, int64_t last_row, int64_t panel, int64_t last_panel) {
  constexpr int64_t P = kPanel<T>, size = sizeof(T);
  const int64_t in = task.in, chunks = shares(in, kChunkBytes / (P * size));
  const T* packed = static_cast<const T*>(task.packed);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = in * chunk / chunks, end = in * (chunk + 1) / chunks, count = end - begin;
    const int64_t pieces = shares(count, kPieceBytes / (P * size));
    const int64_t block = (kBlockBytes / ((count + 1) * size) / kStrip + 1) * kStrip;
    if (!packed)
      for (int64_t n = panel; n < last_panel; ++n)
        pack_panel<T>(task, n * P, begin, end, room + (n - panel) * count * P);
    for (int64_t start = row; start < last_row; start += block) {
      const int64_t stop = start + block < last_row ? start + block : last_row;
      for (int64_t n = panel; n < last_panel; ++n)
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const int64_t from = count * piece / pieces, to = count * (piece + 1) / pieces;
          const T* weights = packed ? packed + (n * in + begin + from) * P : room + ((n - panel) * count + from) * P;
          for (int64_t m = start; m < stop; m += kStrip)
            strip<T>(task, weights, m, stop, n * P, begin + from, begin + to);
        }
    }
  }
}

}  // namespace gemm

template <class T>
int32_t run_gemm(const Gemm& task) {
  if (task.rows <= 0 || task.out <= 0) return kOk;
  constexpr int64_t P = gemm::kPanel<T>, size = sizeof(T);
  const int64_t panels = (task.out + P - 1) / P, strips = (task.rows + gemm::kStrip - 1) / gemm::kStrip;
  const double worth = static_cast<double>(task.rows) * static_cast<double>(task.out) * (task.in + 8) / 1e6;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  const int64_t wanted = threads <= 1 ? 1 : threads * gemm::kItems;
  int64_t parts = task.rows / gemm::kPartRows;
  parts = parts < 1 || threads <= 1 ? 1 : parts > wanted ? wanted : parts;
  // Panels of a group: as many as the cache holds, but enough groups for all threads.
  const int64_t chunk = task.in / gemm::shares(task.in, gemm::kChunkBytes / (P * size)) + 1;
  const int64_t room = gemm::kGroupBytes / (chunk * P * size);
  int64_t groups = (panels + room - 1) / room;
  if (groups * parts < wanted) groups = (wanted + parts - 1) / parts;
  if (groups * parts % threads) groups += threads - groups % threads;
  if (groups > panels) groups = panels;
  int32_t failed = 0;
  auto work = [&](int64_t item) {
    const int64_t group = item % groups, slice = item / groups;
    const int64_t first = panels * group / groups, last = panels * (group + 1) / groups;
    const int64_t row = strips * slice / parts * gemm::kStrip, end = strips * (slice + 1) / parts * gemm::kStrip;
    T* room = task.packed ? nullptr : static_cast<T*>(scratch((last - first) * chunk * P * size));
    if (!room && !task.packed) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    gemm::part<T>(task, room, row, end < task.rows ? end : task.rows, first, last);
  };
  parallel(threads, groups * parts, work);
  return failed ? kNoMemory : kOk;
}

// packed[panel][k][n]: all panels of a weight, one after the other, the last one filled up with zeros.
template <class T>
int32_t run_pack(const PackWeight& task) {
  constexpr int64_t P = gemm::kPanel<T>;
  const int64_t panels = (task.out + P - 1) / P;
  auto work = [&](int64_t n) {
    gemm::pack_panel<T>(task, n * P, 0, task.in, static_cast<T*>(task.packed) + n * task.in * P);
  };
  parallel(task.in * task.out < 1 << 16 ? 1 : task.threads, panels, work);
  return kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
