// A matrix of weights in the format it is stored in, and its products with few rows.
//
//   output[m][n] = bias[n] + sum_k x[m][k] weight[n][k]          x and output in float32, 1 to about 16 rows m
//
// Decided here, for everything that reads weights while decoding (the decode step, linear layers of few rows):
//
// - A `PackedMatrix` describes one matrix (rows = outputs n, cols = channels k), one row of it after the other, `stride`
//   bytes apart. All fields are eight bytes wide; Python packs them in this order (`PACKED_MATRIX` of library.py).
// - `kFloat32` and `kBFloat16` are the tensors of torch themselves. `kInt8` and `kInt4` have `group` channels for each
//   scale; formats of GGUF have their scales inside their blocks, as the file has them. quantized_formats.h
//   defines their layouts, quantized.h their products.
// - weight_products.h has the three functions that a format consists of, and one switch over formats in each:
//     prepared_bytes(weight, rows)          bytes that x becomes before it is multiplied (0: x is used as it is)
//     prepare(weight, x, x_row, rows, to)   for example x in 8 bits with its scales; a function of each row of x alone
//     products(weight, x, x_row, prepared, rows, bias, first, last, output, output_row)     outputs first <= n < last
//   They run on the calling thread: the caller cuts [0, rows of the matrix) into pieces and shares them between threads.
// - The bits of output[m][n] depend on row m of x and row n of the matrix alone: not on `rows`, `first`, `last`, nor on
//   threads. Weights are read from memory once for all rows of x.
// - scalar_weights.h has the same as plain loops in double.
#pragma once

#include <cstdint>

namespace regard {

enum Format : int64_t {
  kWeightFloat32 = 0,
  kWeightBFloat16 = 1,
  kWeightInt8 = 2,  // per group
  kWeightInt4 = 3,  // per group
  kWeightQ8_0 = 4,  // GGUF's blocks from here on
  kWeightQ4_0 = 5,
  kWeightQ4_1 = 6,
  kWeightQ4_K = 7,
  kWeightQ6_K = 8,
};

struct PackedMatrix {
  Format format;
  int64_t rows, cols;
  const void* data;
  int64_t stride;       // bytes from one row of data to the next
  const void* scales;   // of the groups of a row, or null
  const void* offsets;  // what is subtracted or added for each group, or null
  int64_t group;        // channels that share a scale, or 0
};

// What `regard_weight_products` takes.
struct WeightProducts {
  int64_t threads, rows;
  const float* x;
  int64_t x_row;  // stride of its rows, in numbers
  PackedMatrix weight;
  const float* bias;  // (rows of the weight), or null
  float* output;
  int64_t output_row;
};

}  // namespace regard
