// The scalar reference of quantized.h: the numbers of GGUF's blocks one by one, as the format defines them, and activations
// in 8 bits.
#pragma once

#include <cmath>
#include <vector>

#include "half.h"
#include "interface.h"

namespace regard {
namespace scalar {

struct BlockShape {
  int64_t numbers, bytes;
};

inline BlockShape block_shape(Format format) {
  switch (format) {
    case kWeightQ8_0: return {32, 34};
    case kWeightQ4_0: return {32, 18};
    case kWeightQ4_1: return {32, 20};
    case kWeightQ4_K: return {256, 144};
    case kWeightQ6_K: return {256, 210};
    default: return {0, 0};
  }
}

inline double float16_at(const uint8_t* from) {
  return from_float16(static_cast<uint16_t>(from[0] | (from[1] << 8)));
}

// Number k of a block.
inline double number_at(Format format, const uint8_t* block, int64_t k) {
  const double scale = float16_at(block);
  switch (format) {
    case kWeightQ8_0: return scale * static_cast<int8_t>(block[2 + k]);
    case kWeightQ4_0: return scale * ((k < 16 ? block[2 + k] & 15 : block[2 + k - 16] >> 4) - 8);
    case kWeightQ4_1: return scale * (k < 16 ? block[4 + k] & 15 : block[4 + k - 16] >> 4) + float16_at(block + 2);
    case kWeightQ4_K: {
      const int64_t group = k / 32, byte = 16 + k / 64 * 32 + k % 32;
      const uint8_t* six = block + 4;
      const int factor = group < 4 ? six[group] & 63 : (six[group + 4] & 15) | ((six[group - 4] >> 6) << 4);
      const int least = group < 4 ? six[group + 4] & 63 : (six[group + 4] >> 4) | ((six[group] >> 6) << 4);
      const int q = group % 2 ? block[byte] >> 4 : block[byte] & 15;
      return scale * factor * q - float16_at(block + 2) * least;
    }
    default: {  // Q6_K
      const int64_t half = k / 128, quarter = k % 128 / 32, at = k % 32;
      const int low = block[64 * half + 32 * (quarter % 2) + at] >> (quarter < 2 ? 0 : 4) & 15;
      const int high = block[128 + 32 * half + at] >> (2 * quarter) & 3;
      return float16_at(block + 208) * static_cast<int8_t>(block[192 + k / 16]) * ((low | high << 4) - 32);
    }
  }
}

// One row of x after it was rounded to 8 bits, 32 numbers at a time.
inline std::vector<double> round_activations(const float* x, int64_t cols) {
  std::vector<double> rounded(cols);
  for (int64_t first = 0; first < cols; first += 32) {
    const int64_t last = first + 32 < cols ? first + 32 : cols;
    float largest = 0;
    bool finite = true;
    for (int64_t k = first; k < last; ++k) {
      finite = finite && std::isfinite(x[k]);
      largest = std::fmax(largest, std::fabs(x[k]));
    }
    const float inverse = largest > 7.9e-31f ? 127 / largest : 0.0f;
    for (int64_t k = first; k < last; ++k)
      rounded[k] = finite ? std::nearbyint(x[k] * inverse) * (inverse != 0 ? largest / 127 : 0.0f) : NAN;
  }
  return rounded;
}

}  // namespace scalar
}  // namespace regard
