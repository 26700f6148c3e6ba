// Quantised weights with many rows: panels of sixteen rows of weights, interleaved; see quantized.h.
//
//   panel[group][k / 4][row][k % 4]        a vector holds four channels of each of its outputs
#pragma once

#include "quantized.h"

namespace regard {
namespace REGARD_ISA {
namespace quantized {

// sum[n] += sum of the products of four channels, for the outputs of a vector: w has four bytes of each, x four numbers.
template <bool kSigned>
REGARD_INLINE IntVec<float> add_four(IntVec<float> sum, const uint8_t* w, const int8_t* x) {
#if REGARD_BYTES == 64 && defined(__AVX512VNNI__)
  int32_t four;
  std::memcpy(&four, x, 4);
  return (IntVec<float>)_mm512_dpbusd_epi32((__m512i)sum, _mm512_load_si512(w), _mm512_set1_epi32(four));
#elif REGARD_BYTES == 64 && defined(__AVX512BW__)
  int32_t four;
  std::memcpy(&four, x, 4);
  __m512i left = _mm512_load_si512(w), right = _mm512_set1_epi32(four);
  if constexpr (kSigned) {
    right = _mm512_mask_sub_epi8(right, _mm512_movepi8_mask(left), _mm512_setzero_si512(), right);
    left = _mm512_abs_epi8(left);
  }
  return sum + (IntVec<float>)_mm512_madd_epi16(_mm512_maddubs_epi16(left, right), _mm512_set1_epi16(1));
#elif REGARD_BYTES == 32 && defined(__AVX2__)
  int32_t four;
  std::memcpy(&four, x, 4);
  return sum + (IntVec<float>)multiply<kSigned>(load_bytes(w), (Bytes)_mm256_set1_epi32(four));
#elif defined(__ARM_FEATURE_DOTPROD)
  int32_t four;
  std::memcpy(&four, x, 4);
  const int8x16_t left = vld1q_s8(reinterpret_cast<const int8_t*>(w));
  return (IntVec<float>)vdotq_s32((int32x4_t)sum, left, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__SSE2__)
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m128i zero = _mm_setzero_si128(), left = _mm_load_si128(reinterpret_cast<const __m128i*>(w));
  const __m128i right = _mm_set1_epi32(four), other = _mm_cmpgt_epi8(zero, right);
  const __m128i sign = kSigned ? _mm_cmpgt_epi8(zero, left) : zero, wide = _mm_unpacklo_epi8(right, other);
  const __m128 low = _mm_castsi128_ps(_mm_madd_epi16(_mm_unpacklo_epi8(left, sign), wide));
  const __m128 high = _mm_castsi128_ps(_mm_madd_epi16(_mm_unpackhi_epi8(left, sign), wide));
  const __m128i even = _mm_castps_si128(_mm_shuffle_ps(low, high, 0x88));
  const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(low, high, 0xdd));
  return sum + (IntVec<float>)_mm_add_epi32(even, odd);
#else
  for (int n = 0; n < kLanes<float>; ++n)
    for (int k = 0; k < 4; ++k) sum[n] += static_cast<int8_t>(w[4 * n + k]) * x[k];
  return sum;
#endif
}

struct Panel {
  alignas(64) uint8_t bytes[kPanelGroups][kGroup / 4][kPanelRows][4];
  alignas(64) float scale[kPanelGroups][kPanelRows];
  alignas(64) float minimum[kPanelGroups][kPanelRows];
  alignas(64) int32_t step[kPanelGroups][2][kPanelRows];
};

template <Format kFormat>
void pack_panel(const PackedMatrix& matrix, int64_t first, int64_t last, int64_t from, int64_t to, Panel& panel) {
  typedef Layout<kFormat> F;
  for (int n = 0; n < kPanelRows; ++n) {
    const int64_t output = first + n < last ? first + n : last - 1;
    const uint8_t* row = static_cast<const uint8_t*>(matrix.data) + output * matrix.stride;
    for (int64_t group = from; group < to; ++group) {
      Bytes bytes = F::bytes(row, group);
      if constexpr (F::kSigned && kSignedOffset != 0) bytes ^= 0x80;
      uint8_t some[kGroup];
      std::memcpy(some, &bytes, kGroup);
#pragma GCC unroll 8
      for (int k = 0; k < kGroup / 4; ++k) std::memcpy(panel.bytes[group - from][k][n], some + 4 * k, 4);
      float least;
      int step[2];
      scales<kFormat>(row, group, panel.scale[group - from][n], least, step);
      if constexpr (F::kMinimum) panel.minimum[group - from][n] = least;
      if constexpr (F::kHalves)
        for (int half = 0; half < 2; ++half) panel.step[group - from][half][n] = step[half];
    }
  }
}

// R rows of x from `first_row` on, groups from `from` to `to`. Sums stand in the output where `from` is not zero.
template <Format kFormat, int R>
void strip(const Task& task, const Panel& panel, int64_t first_row, int64_t first, int64_t last, int64_t from, int64_t to) {
  typedef Layout<kFormat> F;
  constexpr int L = kLanes<float>;
  const Prepared shape(task.matrix.cols);
  const char* x[R];
  for (int r = 0; r < R; ++r) x[r] = task.prepared + (first_row + r) * shape.bytes();
  float sums[R][kPanelRows] = {};
  if (from)
    for (int r = 0; r < R; ++r)
      for (int64_t n = first; n < last; ++n) sums[r][n - first] = task.output[(first_row + r) * task.output_row + n];
  for (int part = 0; part < kPanelRows; part += L) {
    Vec<float> total[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[r] = load<float>(sums[r] + part);
    for (int64_t group = from; group < to; ++group) {
      const int64_t at = group - from;
      IntVec<float> whole[R] = {};
      auto add = [&](int k) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          whole[r] = add_four<F::kSigned>(whole[r], panel.bytes[at][k][part], shape.numbers(x[r]) + group * kGroup + 4 * k);
      };
      if constexpr (F::kHalves) {
        IntVec<float> low[R];
        const auto* steps = reinterpret_cast<const IntVec<float>*>(panel.step[at][0] + part);
        const auto* others = reinterpret_cast<const IntVec<float>*>(panel.step[at][1] + part);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) add(k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          low[r] = (whole[r] - F::kOffset * shape.halves(x[r])[2 * group]) * *steps;
          whole[r] = IntVec<float>{};
        }
#pragma GCC unroll 4
        for (int k = 4; k < 8; ++k) add(k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          whole[r] = low[r] + (whole[r] - F::kOffset * shape.halves(x[r])[2 * group + 1]) * *others;
      } else {
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) add(k);
        if constexpr (F::kOffset != 0) {
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const int32_t* half = shape.halves(x[r]) + 2 * group;
            whole[r] -= F::kOffset * (half[0] + half[1]);
          }
        }
      }
      const Vec<float> scale = load<float>(panel.scale[at] + part);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[r] += __builtin_convertvector(whole[r], Vec<float>) * (scale * shape.scales(x[r])[group]);
        if constexpr (F::kMinimum) total[r] += load<float>(panel.minimum[at] + part) * shape.sums(x[r])[group];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store<float>(sums[r] + part, total[r]);
  }
  const float* bias = to == shape.groups ? task.bias : nullptr;
  for (int r = 0; r < R; ++r) {
    float* output = task.output + (first_row + r) * task.output_row;
    for (int64_t n = first; n < last; ++n) output[n] = sums[r][n - first] + (bias ? bias[n] : 0.0f);
  }
}

template <Format kFormat>
void many_rows(const Task& task, int64_t first, int64_t last) {
  const Prepared shape(task.matrix.cols);
  Panel panel;
  for (int64_t n = first; n < last; n += kPanelRows) {
    const int64_t stop = n + kPanelRows < last ? n + kPanelRows : last;
    for (int64_t from = 0; from < shape.groups; from += kPanelGroups) {
      const int64_t to = from + kPanelGroups < shape.groups ? from + kPanelGroups : shape.groups;
      pack_panel<kFormat>(task.matrix, n, stop, from, to, panel);
      int64_t row = 0;
      for (; row + kStrip <= task.rows; row += kStrip) strip<kFormat, kStrip>(task, panel, row, n, stop, from, to);
      for (; row < task.rows; ++row) strip<kFormat, 1>(task, panel, row, n, stop, from, to);
    }
  }
}

template <Format kFormat>
void products(const Task& task, int64_t first, int64_t last) {
  if (task.rows <= kFewRows)
    few_rows<kFormat>(task, first, last);
  else
    many_rows<kFormat>(task, first, last);
}

inline void products(const Task& task, int64_t first, int64_t last) {
  switch (task.matrix.format) {
    case kWeightQ8_0: return products<kWeightQ8_0>(task, first, last);
    case kWeightQ4_0: return products<kWeightQ4_0>(task, first, last);
    case kWeightQ4_1: return products<kWeightQ4_1>(task, first, last);
    case kWeightQ4_K: return products<kWeightQ4_K>(task, first, last);
    case kWeightQ6_K: return products<kWeightQ6_K>(task, first, last);
    default: return;  // see `has_blocks`
  }
}

}  // namespace quantized
}  // namespace REGARD_ISA
}  // namespace regard
