// Products with quantised weights: activations in 8 bits, whole numbers multiplied and added, one scale for each group.
//
//   x_k ~ a_g p_k,    a_g = max |x_k| / 127,   p_k = round(x_k / a_g)                         over the 32 channels of g
//   output_n = bias_n + sum_g  (scale_ng a_g) sum_k q_nk p_k  +  minimum_ng a_g sum_k p_k     (see quantized_formats.h)
//
// The sums over k are exact: at most 32 * 255 * 127. The sum over groups goes from the first to the last in float32, so the
// bits of an output depend on its row of x and its row of weights alone, and are the same for few rows and for many.
// Against exact products with the quantised weights w the error is at most
//
//   sum_g a_g / 2 sum_k |w_nk|   +   (groups + 2) eps sum_g sum_k |w_nk a_g p_k|
//
// Few rows: eight rows of weights are read where they lie, and eight vectors of sums become one, an output in each lane.
// Many rows: sixteen rows of weights are interleaved, four channels of each in turn (a panel), and meet each row of x.
//
// A group of x that holds an infinity or a NaN has the scale NaN, which reaches all outputs of that row.
#pragma once

#include "quantized_formats.h"
#include "threads.h"

namespace regard {
namespace REGARD_ISA {
namespace quantized {

constexpr int64_t kFewRows = 6;     // up to which weights are not interleaved
constexpr int kTile = 8;            // rows of weights, few rows of x
constexpr int kPanelRows = 16;      // rows of weights in a panel
constexpr int kPanelGroups = 16;    // groups of a panel
constexpr int kStrip = 4;           // rows of x that meet a panel at once

inline bool has_blocks(const PackedMatrix& matrix) {
  return matrix.format >= kWeightQ8_0 && matrix.format <= kWeightQ6_K;
}

// A row of x: p, then for each group a, a * sum p, and the sums of p of its two halves.
struct Prepared {
  int64_t groups;
  explicit Prepared(int64_t cols) : groups((cols + kGroup - 1) / kGroup) {}
  int64_t bytes() const { return (groups * (kGroup + 16) + 63) / 64 * 64; }
  const int8_t* numbers(const char* row) const { return reinterpret_cast<const int8_t*>(row); }
  const float* scales(const char* row) const { return reinterpret_cast<const float*>(row + groups * kGroup); }
  const float* sums(const char* row) const { return scales(row) + groups; }
  const int32_t* halves(const char* row) const { return reinterpret_cast<const int32_t*>(sums(row) + groups); }
};

inline void prepare_row(const float* x, int64_t cols, char* to) {
  constexpr int L = kLanes<float>;
  const Prepared shape(cols);
  auto* numbers = reinterpret_cast<int8_t*>(to);
  float* scales = const_cast<float*>(shape.scales(to));
  float* sums = scales + shape.groups;
  auto* halves = reinterpret_cast<int32_t*>(sums + shape.groups);
  for (int64_t group = 0; group < shape.groups; ++group) {
    const float* from = x + group * kGroup;
    float some[kGroup] = {};
    if (cols - group * kGroup < kGroup) {
      std::memcpy(some, from, (cols - group * kGroup) * sizeof(float));
      from = some;
    }
    Vec<float> most{}, wrong{};
#pragma GCC unroll 8
    for (int k = 0; k < kGroup; k += L) {
      const Vec<float> one = load<float>(from + k);
      most = larger<float>(most, choose<float>(one < Vec<float>{}, -one, one));
      wrong += one * Vec<float>{};  // NaN for an infinity or a NaN
    }
    const float largest = largest_of<float>(most);
    const bool finite = sum_of<float>(wrong) == 0;
    // Below 2^-100 a scale's inverse would overflow; such numbers are zero here.
    const float inverse = finite && largest > 7.9e-31f ? 127 / largest : 0.0f;
    const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : inverse != 0 ? largest / 127 : 0.0f;
    int32_t half[2] = {0, 0};
#pragma GCC unroll 8
    for (int k = 0; k < kGroup; k += L) {
      const Vec<float> magic = splat<float>(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest whole number
      const Vec<float> one = load<float>(from + k) * splat<float>(inverse);
      const IntVec<float> whole = finite ? to_bits<float>(one + magic) - to_bits<float>(magic) : IntVec<float>{};
      typedef int8_t Narrow __attribute__((vector_size(L)));
      const Narrow narrow = __builtin_convertvector(whole, Narrow);
      std::memcpy(numbers + group * kGroup + k, &narrow, L);
      int32_t lanes[L], total = 0;
      std::memcpy(lanes, &whole, sizeof lanes);
      for (int lane = 0; lane < L; ++lane) total += lanes[lane];
      half[k / 16] += total;
    }
    scales[group] = scale;
    sums[group] = scale * static_cast<float>(half[0] + half[1]);
    halves[2 * group] = half[0];
    halves[2 * group + 1] = half[1];
  }
}

// Row n of a matrix in float32, as a table of embeddings is read.
template <Format kFormat>
void read_blocks(const uint8_t* row, int64_t cols, float* to) {
  typedef Layout<kFormat> F;
  for (int64_t group = 0; group * kGroup < cols; ++group) {
    uint8_t q[kGroup];
    const Bytes bytes = F::bytes(row, group);
    std::memcpy(q, &bytes, kGroup);
    float scale, minimum;
    int step[2];
    scales<kFormat>(row, group, scale, minimum, step);
    const int64_t count = cols - group * kGroup < kGroup ? cols - group * kGroup : kGroup;
    for (int64_t k = 0; k < count; ++k) {
      const int whole = F::kSigned ? static_cast<int8_t>(q[k]) : q[k] - F::kOffset;
      to[group * kGroup + k] = scale * static_cast<float>(whole * step[k / 16]) + minimum;
    }
  }
}

inline void read_row(const PackedMatrix& matrix, int64_t n, float* to) {
  const char* row = static_cast<const char*>(matrix.data) + n * matrix.stride;
  const auto* blocks = reinterpret_cast<const uint8_t*>(row);
  switch (matrix.format) {
    case kWeightQ8_0: return read_blocks<kWeightQ8_0>(blocks, matrix.cols, to);
    case kWeightQ4_0: return read_blocks<kWeightQ4_0>(blocks, matrix.cols, to);
    case kWeightQ4_1: return read_blocks<kWeightQ4_1>(blocks, matrix.cols, to);
    case kWeightQ4_K: return read_blocks<kWeightQ4_K>(blocks, matrix.cols, to);
    case kWeightQ6_K: return read_blocks<kWeightQ6_K>(blocks, matrix.cols, to);
    case kWeightBFloat16: return convert<float>(row, DType::kBFloat16, matrix.cols, to);
    default: std::memcpy(to, row, matrix.cols * sizeof(float));
  }
}

// The sum of the lanes of vector `order[n]`, in lane n.
constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
REGARD_INLINE Sums add_lanes(Sums (&some)[8]) {
#if defined(__AVX2__)
  __m256i first[4], second[2];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n)
    first[n] = _mm256_add_epi32(_mm256_unpacklo_epi32((__m256i)some[n], (__m256i)some[n + 4]),
                                _mm256_unpackhi_epi32((__m256i)some[n], (__m256i)some[n + 4]));
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n)
    second[n] = _mm256_add_epi32(_mm256_unpacklo_epi32(first[n], first[n + 2]), _mm256_unpackhi_epi32(first[n], first[n + 2]));
  return (Sums)_mm256_add_epi32(_mm256_permute2x128_si256(second[0], second[1], 0x20),
                                _mm256_permute2x128_si256(second[0], second[1], 0x31));
#else
  Sums total;
  for (int n = 0; n < 8; ++n) {
    int32_t lanes[8];
    std::memcpy(lanes, &some[kOrder[n]], sizeof lanes);
    total[n] = lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
  }
  return total;
#endif
}

// Scales and minima of one group of eight rows, and the steps of the halves of each, four lanes for each half.
template <Format kFormat>
REGARD_INLINE void gather_scales(const uint8_t* const (&row)[kTile], int64_t group, Reals& scale, Reals& minimum,
                                 Sums (&step)[kTile]) {
#if defined(__AVX2__) && defined(__F16C__)
  typedef Layout<kFormat> F;
  if constexpr (kFormat == kWeightQ4_1) {
    const int64_t at = group * F::kBytes;
    int32_t pairs[kTile];
#pragma GCC unroll 8
    for (int n = 0; n < kTile; ++n) std::memcpy(&pairs[n], row[n] + at, 4);
    const __m256i both = _mm256_set_epi32(pairs[7], pairs[6], pairs[5], pairs[4], pairs[3], pairs[2], pairs[1], pairs[0]);
    const __m256i split = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(both, 16)), 0xd8);
    scale = (Reals)_mm256_cvtph_ps(_mm256_castsi256_si128(split));
    minimum = (Reals)_mm256_cvtph_ps(_mm256_extracti128_si256(split, 1));
    return;
  } else if constexpr (kFormat == kWeightQ8_0 || kFormat == kWeightQ4_0) {
    const int64_t at = group * F::kBytes;
    const __m128i halves = _mm_set_epi16(load_word(row[7] + at), load_word(row[6] + at), load_word(row[5] + at),
                                         load_word(row[4] + at), load_word(row[3] + at), load_word(row[2] + at),
                                         load_word(row[1] + at), load_word(row[0] + at));
    scale = (Reals)_mm256_cvtph_ps(halves);
    return;
  }
#endif
#pragma GCC unroll 8
  for (int n = 0; n < kTile; ++n) {
    float one, least;
    int steps[2];
    quantized::scales<kFormat>(row[n], group, one, least, steps);
    scale[n] = one;
    minimum[n] = least;
    step[n] = Sums{steps[0], steps[0], steps[0], steps[0], steps[1], steps[1], steps[1], steps[1]};
  }
}

// The whole numbers of one group of eight rows, and their products with a row of x, an output in each lane.
template <Format kFormat>
struct Eight {
  typedef Layout<kFormat> F;
  Bytes q[kTile];

  REGARD_INLINE void load(const uint8_t* const (&row)[kTile], int64_t group) {
#pragma GCC unroll 8
    for (int n = 0; n < kTile; ++n) q[kOrder[n]] = F::bytes(row[n], group);
  }
  REGARD_INLINE Sums multiply_all(const int8_t* x, const Sums (&step)[kTile]) const {
    const Bytes p = load_bytes(x);
    Sums sum[kTile];
#pragma GCC unroll 8
    for (int n = 0; n < kTile; ++n) {
      sum[kOrder[n]] = multiply<F::kSigned>(q[kOrder[n]], p);
      if constexpr (F::kHalves) sum[kOrder[n]] *= step[n];
    }
    return add_lanes(sum);
  }
};

// Four vectors with the sums of rows n and n + 4 in their halves become one with the sums of all.
#if defined(__AVX512VNNI__)
REGARD_INLINE Sums add_quarters(__m512i low, __m512i high) {  // rows 0 2 4 6 and 1 3 5 7, four lanes each
  const __m512i pairs = _mm512_add_epi32(_mm512_unpacklo_epi32(low, high), _mm512_unpackhi_epi32(low, high));
  const __m512i sums = _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_BADC));
  return (Sums)_mm512_castsi512_si256(_mm512_permutexvar_epi64(_mm512_set_epi64(6, 4, 2, 0, 6, 4, 2, 0), sums));
}

// Nibbles: four rows lie in one vector, their lower halves are multiplied with the first sixteen numbers of x.
template <int kStart, int kBytes>
struct EightNibbles {
  __m512i low[2], high[2];

  REGARD_INLINE void load(const uint8_t* const (&row)[kTile], int64_t group) {
    const int64_t at = group * kBytes + kStart;
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      auto part = [&](int n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[n + odd] + at)); };
      const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(part(0)), part(2), 1);
      const __m256i second = _mm256_inserti128_si256(_mm256_castsi128_si256(part(4)), part(6), 1);
      const __m512i packed = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
      low[odd] = _mm512_and_si512(packed, _mm512_set1_epi8(15));
      high[odd] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), _mm512_set1_epi8(15));
    }
  }
  REGARD_INLINE Sums multiply_all(const int8_t* x, const Sums (&)[kTile]) const {
    const __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    const __m512i second = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 16)));
    __m512i sum[2];
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd)
      sum[odd] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), low[odd], first), high[odd], second);
    return add_quarters(sum[0], sum[1]);
  }
};

// Bytes: rows n and n + 4 lie in one vector.
template <>
struct Eight<kWeightQ8_0> {
  __m512i q[4];

  REGARD_INLINE void load(const uint8_t* const (&row)[kTile], int64_t group) {
    const int64_t at = group * Layout<kWeightQ8_0>::kBytes + 2;
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[n] + at));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row[n + 4] + at));
      q[n] = _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), _mm512_set1_epi8(-128));
    }
  }
  REGARD_INLINE Sums multiply_all(const int8_t* x, const Sums (&)[kTile]) const {
    const __m512i p = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    __m512i sum[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) sum[n] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q[n], p);
    const __m512i first = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]), _mm512_unpackhi_epi32(sum[0], sum[1]));
    const __m512i second = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]), _mm512_unpackhi_epi32(sum[2], sum[3]));
    const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m512i all = _mm512_add_epi32(four, _mm512_shuffle_i64x2(four, four, 0xb1));
    return (Sums)_mm512_castsi512_si256(_mm512_permutexvar_epi64(_mm512_set_epi64(5, 4, 1, 0, 5, 4, 1, 0), all));
  }
};
#elif defined(__AVX2__)
template <int kStart, int kBytes>
struct EightNibbles {
  __m256i low[4], high[4];

  REGARD_INLINE void load(const uint8_t* const (&row)[kTile], int64_t group) {
    const int64_t at = group * kBytes + kStart;
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[n] + at));
      const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[n + 4] + at));
      const __m256i packed = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
      low[n] = _mm256_and_si256(packed, _mm256_set1_epi8(15));
      high[n] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), _mm256_set1_epi8(15));
    }
  }
  REGARD_INLINE Sums multiply_all(const int8_t* x, const Sums (&)[kTile]) const {
    const __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    const __m256i second = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 16)));
    __m256i sum[4], pair[2];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n)  // four products of 15 and 127 fit into sixteen bits
      sum[n] = _mm256_madd_epi16(
          _mm256_add_epi16(_mm256_maddubs_epi16(low[n], first), _mm256_maddubs_epi16(high[n], second)), _mm256_set1_epi16(1));
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n)
      pair[n] = _mm256_add_epi32(_mm256_unpacklo_epi32(sum[2 * n], sum[2 * n + 1]),
                                 _mm256_unpackhi_epi32(sum[2 * n], sum[2 * n + 1]));
    return (Sums)_mm256_add_epi32(_mm256_unpacklo_epi64(pair[0], pair[1]), _mm256_unpackhi_epi64(pair[0], pair[1]));
  }
};
#endif
#if defined(__AVX2__)
template <>
struct Eight<kWeightQ4_0> : EightNibbles<2, 18> {};
template <>
struct Eight<kWeightQ4_1> : EightNibbles<4, 20> {};
#endif

struct Task {
  const PackedMatrix& matrix;
  const char* prepared;
  int64_t rows;
  const float* bias;
  float* output;
  int64_t output_row;
};

// M rows of x from `row` on, for the outputs from `first` to `last`, at most eight.
template <Format kFormat, int M, bool kFetch>
void tile(const Task& task, int64_t first_row, int64_t first, int64_t last) {
  typedef Layout<kFormat> F;
  const Prepared shape(task.matrix.cols);
  const int64_t next = kTile * task.matrix.stride;
  const uint8_t* row[kTile];
  for (int n = 0; n < kTile; ++n) {
    const int64_t output = first + n < last ? first + n : last - 1;  // surplus ones are computed and dropped
    row[n] = static_cast<const uint8_t*>(task.matrix.data) + output * task.matrix.stride;
  }
  const char* x[M];
  for (int m = 0; m < M; ++m) x[m] = task.prepared + (first_row + m) * shape.bytes();
  Reals total[M] = {};
  for (int64_t group = 0; group < shape.groups; ++group) {
    if constexpr (kFetch) {  // the next tile, line after line: one long stream
      constexpr int64_t kAhead = kTile * F::kBytes * kGroup / F::kNumbers;
#pragma GCC unroll 8
      for (int64_t at = 0; at < kAhead; at += 64) __builtin_prefetch(row[0] + next + group * kAhead + at, 0, 3);
    }
    Eight<kFormat> weights;
    Reals scale, minimum = {};
    Sums step[kTile];
    weights.load(row, group);
    gather_scales<kFormat>(row, group, scale, minimum, step);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const int32_t* half = shape.halves(x[m]) + 2 * group;
      Sums whole = weights.multiply_all(shape.numbers(x[m]) + group * kGroup, step);
      if constexpr (F::kHalves) {
        Sums offset;
#pragma GCC unroll 8
        for (int n = 0; n < kTile; ++n) offset[n] = F::kOffset * (step[n][0] * half[0] + step[n][4] * half[1]);
        whole -= offset;
      } else if constexpr (F::kOffset != 0) {
        whole -= F::kOffset * (half[0] + half[1]);
      }
      const float a = shape.scales(x[m])[group];
      total[m] += __builtin_convertvector(whole, Reals) * (scale * a);
      if constexpr (F::kMinimum) total[m] += minimum * shape.sums(x[m])[group];
    }
  }
  for (int m = 0; m < M; ++m) {
    float* output = task.output + (first_row + m) * task.output_row;
    for (int64_t n = first; n < last; ++n) output[n] = total[m][n - first] + (task.bias ? task.bias[n] : 0.0f);
  }
}

template <Format kFormat>
void few_rows(const Task& task, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += kTile) {
    const int64_t stop = n + kTile < last ? n + kTile : last;
    int64_t row = 0;
    if (task.rows == 1) {
      if (n + 2 * kTile <= last)
        tile<kFormat, 1, true>(task, 0, n, stop);
      else
        tile<kFormat, 1, false>(task, 0, n, stop);
      continue;
    }
    for (; task.rows - row >= 2; row += 2) tile<kFormat, 2, false>(task, row, n, stop);
    if (row < task.rows) tile<kFormat, 1, false>(task, row, n, stop);
  }
}

}  // namespace quantized
}  // namespace REGARD_ISA
}  // namespace regard
