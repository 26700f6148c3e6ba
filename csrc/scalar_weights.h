// The scalar reference of weight_products.h: the definition, in double precision, one output after the other.
#pragma once

#include "half.h"
#include "interface.h"
#include "scalar_quantized.h"

namespace regard {
namespace scalar {

inline bool knows(const PackedMatrix& matrix) {
  return block_shape(matrix.format).numbers || matrix.format == kWeightFloat32 || matrix.format == kWeightBFloat16;
}

// A row of x as these weights meet it: rounded to 8 bits by formats with blocks.
inline std::vector<double> read_activations(const PackedMatrix& matrix, const float* x) {
  if (block_shape(matrix.format).numbers) return round_activations(x, matrix.cols);
  return std::vector<double>(x, x + matrix.cols);
}

// weight[n][k] as a number. A new format has a case here.
inline double weight_at(const PackedMatrix& matrix, int64_t n, int64_t k) {
  const char* row = static_cast<const char*>(matrix.data) + n * matrix.stride;
  if (const BlockShape shape = block_shape(matrix.format); shape.numbers)
    return number_at(matrix.format, reinterpret_cast<const uint8_t*>(row) + k / shape.numbers * shape.bytes, k % shape.numbers);
  if (matrix.format == kWeightFloat32) return reinterpret_cast<const float*>(row)[k];
  return from_bfloat16(reinterpret_cast<const uint16_t*>(row)[k]);
}

inline int32_t weight_products(const WeightProducts& task) {
  const PackedMatrix& matrix = task.weight;
  if (!knows(matrix)) return kNoFormat;
  for (int64_t m = 0; m < task.rows; ++m) {
    const float* row = task.x + m * task.x_row;
    const std::vector<double> x = read_activations(matrix, row);
    for (int64_t n = 0; n < matrix.rows; ++n) {
      double sum = task.bias ? task.bias[n] : 0.0;
      for (int64_t k = 0; k < matrix.cols; ++k) sum += x[k] * weight_at(matrix, n, k);
      task.output[m * task.output_row + n] = static_cast<float>(sum);
    }
  }
  return kOk;
}

}  // namespace scalar
}  // namespace regard
