// Products of few rows with weights of any format; see weights.h. Bound by the memory bandwidth of the weights.
//
// Channels lie across the lanes. Rows of weights are read one after the other, in one long stream: measured on Zen 4 with huge
// pages, that is all of the bandwidth (65 GB/s on two cores), where four or eight rows side by side reach 30 to 50.
// Each sum has two vectors, of even and of odd ones, from the first channel to the last; their sum's lanes are then
// added in a fixed order.
#pragma once

#include "half.h"
#include "interface.h"
#include "quantized_panel.h"
#include "threads.h"
#include "vector.h"
#include "weights.h"

namespace regard {
namespace REGARD_ISA {
namespace weights {

constexpr int64_t kPieces = 4;  // of a thread's share, for load balancing

// Lanes [in - in % L, in) of a row, with zeros after them.
template <DType kKind>
REGARD_INLINE Vec<float> load_end(const char* row, int64_t in) {
  constexpr int L = kLanes<float>;
  float some[L] = {};
  const int64_t whole = in / L * L;
  convert<float>(row + whole * size_of(kKind), kKind, in - whole, some);
  return load<float>(some);
}

struct Rows {
  const float* x;
  int64_t x_row, rows;
  const float* bias;
  float* output;
  int64_t output_row;
};

// One row of weights times M rows of x from `row` on.
template <DType kKind, int M>
REGARD_INLINE void one_output(const PackedMatrix& matrix, const Rows& task, int64_t row, int64_t n) {
  constexpr int L = kLanes<float>;
  const char* weight = static_cast<const char*>(matrix.data) + n * matrix.stride;
  const float* x = task.x + row * task.x_row;
  const int64_t in = matrix.cols;
  Vec<float> even[M] = {}, odd[M] = {};
  int64_t k = 0;
  for (; k + 2 * L <= in; k += 2 * L) {
    const Vec<float> first = load_as<float, kKind>(weight, k / L), second = load_as<float, kKind>(weight, k / L + 1);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      even[m] += load<float>(x + m * task.x_row + k) * first;
      odd[m] += load<float>(x + m * task.x_row + k + L) * second;
    }
  }
  if (k + L <= in) {
    const Vec<float> first = load_as<float, kKind>(weight, k / L);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) even[m] += load<float>(x + m * task.x_row + k) * first;
    k += L;
  }
  if (k < in) {
    const Vec<float> rest = load_end<kKind>(weight, in);
    for (int m = 0; m < M; ++m)
      odd[m] += load_end<DType::kFloat32>(reinterpret_cast<const char*>(x + m * task.x_row), in) * rest;
  }
  const float bias = task.bias ? task.bias[n] : 0.0f;
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m) task.output[(row + m) * task.output_row + n] = sum_of<float>(even[m] + odd[m]) + bias;
}

template <DType kKind, int M>
void few_rows(const PackedMatrix& matrix, const Rows& task, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; ++n) one_output<kKind, M>(matrix, task, 0, n);
}

// The outputs from `first` to `last`. A row of weights stays in the first cache while further rows of x are read.
template <DType kKind>
void floating_products(const PackedMatrix& matrix, const Rows& task, int64_t first, int64_t last) {
  switch (task.rows) {
    case 1: return few_rows<kKind, 1>(matrix, task, first, last);
    case 2: return few_rows<kKind, 2>(matrix, task, first, last);
    case 3: return few_rows<kKind, 3>(matrix, task, first, last);
    case 4: return few_rows<kKind, 4>(matrix, task, first, last);
    case 5: return few_rows<kKind, 5>(matrix, task, first, last);
    case 6: return few_rows<kKind, 6>(matrix, task, first, last);
  }
  for (int64_t n = first; n < last; ++n) {
    int64_t row = 0;
    for (; row + 4 <= task.rows; row += 4) one_output<kKind, 4>(matrix, task, row, n);
    for (; row < task.rows; ++row) one_output<kKind, 1>(matrix, task, row, n);
  }
}

// The three functions of a format. A new format has a case in each.

inline bool knows(const PackedMatrix& matrix) {
  return matrix.format == kWeightFloat32 || matrix.format == kWeightBFloat16 || quantized::has_blocks(matrix);
}

inline int64_t prepared_bytes(const PackedMatrix& matrix, int64_t rows) {
  return quantized::has_blocks(matrix) ? rows * quantized::Prepared(matrix.cols).bytes() : 0;
}

inline void prepare(const PackedMatrix& matrix, const float* x, int64_t x_row, int64_t rows, void* to) {
  if (!quantized::has_blocks(matrix)) return;
  const int64_t bytes = quantized::Prepared(matrix.cols).bytes();
  for (int64_t m = 0; m < rows; ++m)
    quantized::prepare_row(x + m * x_row, matrix.cols, static_cast<char*>(to) + m * bytes);
}

inline void products(const PackedMatrix& matrix, const float* x, int64_t x_row, const void* prepared, int64_t rows,
                     const float* bias, int64_t first, int64_t last, float* output, int64_t output_row) {
  const Rows task{x, x_row, rows, bias, output, output_row};
  switch (matrix.format) {
    case kWeightFloat32: return floating_products<DType::kFloat32>(matrix, task, first, last);
    case kWeightBFloat16: return floating_products<DType::kBFloat16>(matrix, task, first, last);
    default: {
      const quantized::Task blocks{matrix, static_cast<const char*>(prepared), rows, bias, output, output_row};
      return quantized::products(blocks, first, last);
    }
  }
}

}  // namespace weights

inline int32_t run_weight_products(const WeightProducts& task) {
  using namespace weights;
  const PackedMatrix& matrix = task.weight;
  if (!knows(matrix)) return kNoFormat;
  if (task.rows <= 0 || matrix.rows <= 0) return kOk;
  const int64_t bytes = prepared_bytes(matrix, task.rows);
  void* prepared = nullptr;
  if (bytes) {
    prepared = scratch(bytes);
    if (!prepared) return kNoMemory;
    const int64_t each = bytes / task.rows, parts = task.rows < 32 ? 1 : task.rows / 16;
    auto part = [&](int64_t item) {
      const int64_t first = task.rows * item / parts, last = task.rows * (item + 1) / parts;
      prepare(matrix, task.x + first * task.x_row, task.x_row, last - first, static_cast<char*>(prepared) + first * each);
    };
    parallel(task.threads, parts, part);
  }
  // A thread is used only for work that takes longer than waking it.
  const int64_t units = (matrix.rows + 7) / 8;
  const double worth = static_cast<double>(task.rows) * static_cast<double>(matrix.rows) * (matrix.cols + 8) / 1e5;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  const int64_t pieces = threads <= 1 ? 1 : threads * kPieces < units ? threads * kPieces : units;
  auto work = [&](int64_t item) {
    const int64_t first = units * item / pieces * 8, end = units * (item + 1) / pieces * 8;
    products(matrix, task.x, task.x_row, prepared, task.rows, task.bias, first, end < matrix.rows ? end : matrix.rows,
             task.output, task.output_row);
  };
  parallel(threads, pieces, work);
  return kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
