// Quantised weights as GGUF stores them: a row of weights is a row of blocks, each with its own scale.
//
//   format   numbers  bytes  weight k of the block
//   Q8_0     32       34     d q_k                      d float16, q int8
//   Q4_0     32       18     d (q_k - 8)                d float16, q 4 bits
//   Q4_1     32       20     d q_k + m                  d, m float16, q 4 bits
//   Q4_K     256      144    d s_j q_k - e m_j          d, e float16, s and m 6 bits for each 32 numbers, q 4 bits
//   Q6_K     256      210    d s_j (q_k - 32)           d float16, s int8 for each 16 numbers, q 6 bits
//
// The kernels see one thing only, a group of 32 neighbours: whole numbers `q` in bytes, a scale and a minimum,
//
//   weight_k = scale q_k + minimum,      or scale (step_j q_k) for the two halves j of a group of Q6_K,
//
// where `q` carries an offset (8, 32, or 128 where a machine multiplies unsigned bytes by signed ones). The sum of the
// activations of the group, times the offset, takes it out again, exactly: these sums are whole numbers.
//
// Source: ggml-common.h of llama.cpp (the layout of the blocks).
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"
#include "interface.h"
#include "vector.h"
#include "weights.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace regard {
namespace REGARD_ISA {
namespace quantized {

constexpr int kGroup = 32;  // numbers with a scale of activations

typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef uint8_t HalfBytes __attribute__((vector_size(16)));
typedef int32_t Sums __attribute__((vector_size(32)));
typedef float Reals __attribute__((vector_size(32)));

REGARD_INLINE Bytes load_bytes(const void* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}
REGARD_INLINE HalfBytes load_half(const void* from) {
  HalfBytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return bytes;
}
REGARD_INLINE Bytes join(HalfBytes low, HalfBytes high) {
  Bytes both;
#if defined(__AVX2__)
  both = (Bytes)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)low), (__m128i)high, 1);
#else
  std::memcpy(&both, &low, 16);
  std::memcpy(reinterpret_cast<char*>(&both) + 16, &high, 16);
#endif
  return both;
}
// Four bits of each byte, in 16-bit shifts: no machine has 8-bit ones.
REGARD_INLINE HalfBytes upper(HalfBytes bytes) {
  typedef uint16_t Words __attribute__((vector_size(16)));
  return (HalfBytes)((Words)bytes >> 4) & 15;
}
template <int kBits>
REGARD_INLINE Bytes shift_right(Bytes bytes) {
  typedef uint16_t Words __attribute__((vector_size(32)));
  return (Bytes)((Words)bytes >> kBits);
}
template <int kBits>
REGARD_INLINE Bytes shift_left(Bytes bytes) {
  typedef uint16_t Words __attribute__((vector_size(32)));
  return (Bytes)((Words)bytes << kBits);
}

REGARD_INLINE uint16_t load_word(const uint8_t* from) {
  uint16_t word;
  std::memcpy(&word, from, 2);
  return word;
}
REGARD_INLINE float load_float16(const uint8_t* from) {
#if defined(__F16C__)
  return _cvtsh_ss(load_word(from));
#else
  return from_float16(load_word(from));
#endif
}

// Eight sums of four neighbouring products each, of weights q (unsigned, or signed where kSigned) and activations x.
// Where kSigned and the machine multiplies unsigned bytes by signed ones, the sums are those of q + 128.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr int kSignedOffset = 128;
template <bool kSigned>
REGARD_INLINE Sums multiply(Bytes q, Bytes x) {
  if constexpr (kSigned) q ^= 0x80;
  return (Sums)_mm256_dpbusd_epi32(_mm256_setzero_si256(), (__m256i)q, (__m256i)x);
}
#elif defined(__AVX2__)
constexpr int kSignedOffset = 0;
template <bool kSigned>
REGARD_INLINE Sums multiply(Bytes q, Bytes x) {
  __m256i left = (__m256i)q, right = (__m256i)x;
  if constexpr (kSigned) {  // |q| sign(q) x: products of 128 and 127 still fit into sixteen bits, two at a time
    right = _mm256_sign_epi8(right, left);
    left = _mm256_abs_epi8(left);
  }
  return (Sums)_mm256_madd_epi16(_mm256_maddubs_epi16(left, right), _mm256_set1_epi16(1));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kSignedOffset = 0;
template <bool kSigned>
REGARD_INLINE Sums multiply(Bytes q, Bytes x) {
  int8_t left[32], right[32];
  std::memcpy(left, &q, 32);
  std::memcpy(right, &x, 32);
  const int32x4_t low = vdotq_s32(vdupq_n_s32(0), vld1q_s8(left), vld1q_s8(right));
  const int32x4_t high = vdotq_s32(vdupq_n_s32(0), vld1q_s8(left + 16), vld1q_s8(right + 16));
  Sums sums;
  std::memcpy(&sums, &low, 16);
  std::memcpy(reinterpret_cast<char*>(&sums) + 16, &high, 16);
  return sums;
}
#elif defined(__SSE2__)
constexpr int kSignedOffset = 0;
template <bool kSigned>
REGARD_INLINE Sums multiply(Bytes q, Bytes x) {
  Sums sums;
  const __m128i zero = _mm_setzero_si128();
  for (int half = 0; half < 2; ++half) {
    __m128i left, right;
    std::memcpy(&left, reinterpret_cast<const char*>(&q) + 16 * half, 16);
    std::memcpy(&right, reinterpret_cast<const char*>(&x) + 16 * half, 16);
    const __m128i sign = kSigned ? _mm_cmpgt_epi8(zero, left) : zero, other = _mm_cmpgt_epi8(zero, right);
    const __m128i low = _mm_madd_epi16(_mm_unpacklo_epi8(left, sign), _mm_unpacklo_epi8(right, other));
    const __m128i high = _mm_madd_epi16(_mm_unpackhi_epi8(left, sign), _mm_unpackhi_epi8(right, other));
    const __m128i even = _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), 0x88));
    const __m128i odd = _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), 0xdd));
    const __m128i four = _mm_add_epi32(even, odd);
    std::memcpy(reinterpret_cast<char*>(&sums) + 16 * half, &four, 16);
  }
  return sums;
}
#else
constexpr int kSignedOffset = 0;
template <bool kSigned>
REGARD_INLINE Sums multiply(Bytes q, Bytes x) {
  Sums sums = {};
  for (int n = 0; n < 32; ++n) sums[n / 4] += static_cast<int8_t>(q[n]) * static_cast<int8_t>(x[n]);
  return sums;
}
#endif

// What is common to the formats: numbers in a block and its bytes; the offset of q; whether there is a minimum, and
// whether each half of a group has a step of its own.
template <Format>
struct Layout;

template <>
struct Layout<kWeightQ8_0> {
  static constexpr int kNumbers = 32, kBytes = 34, kOffset = kSignedOffset;
  static constexpr bool kSigned = true, kMinimum = false, kHalves = false;
  static REGARD_INLINE Bytes bytes(const uint8_t* row, int64_t group) { return load_bytes(row + group * kBytes + 2); }
};

template <>
struct Layout<kWeightQ4_0> {
  static constexpr int kNumbers = 32, kBytes = 18, kOffset = 8;
  static constexpr bool kSigned = false, kMinimum = false, kHalves = false;
  static REGARD_INLINE Bytes bytes(const uint8_t* row, int64_t group) {
    const HalfBytes packed = load_half(row + group * kBytes + 2);
    return join(packed & 15, upper(packed));
  }
};

template <>
struct Layout<kWeightQ4_1> {
  static constexpr int kNumbers = 32, kBytes = 20, kOffset = 0;
  static constexpr bool kSigned = false, kMinimum = true, kHalves = false;
  static REGARD_INLINE Bytes bytes(const uint8_t* row, int64_t group) {
    const HalfBytes packed = load_half(row + group * kBytes + 4);
    return join(packed & 15, upper(packed));
  }
};

// Scales and minima of the eight groups of a block of Q4_K: 6 bits each, in 12 bytes.
REGARD_INLINE void scales_of_q4_k(const uint8_t* packed, int group, int& scale, int& minimum) {
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | ((packed[group - 4] >> 6) << 4);
    minimum = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4);
  }
}

template <>
struct Layout<kWeightQ4_K> {
  static constexpr int kNumbers = 256, kBytes = 144, kOffset = 0;
  static constexpr bool kSigned = false, kMinimum = true, kHalves = false;
  static REGARD_INLINE Bytes bytes(const uint8_t* row, int64_t group) {
    const Bytes packed = load_bytes(row + group / 8 * kBytes + 16 + group % 8 / 2 * 32);
    return (group % 2 ? shift_right<4>(packed) : packed) & 15;
  }
};

template <>
struct Layout<kWeightQ6_K> {
  static constexpr int kNumbers = 256, kBytes = 210, kOffset = 32;
  static constexpr bool kSigned = false, kMinimum = false, kHalves = true;
  static REGARD_INLINE Bytes bytes(const uint8_t* row, int64_t group) {
    const uint8_t* block = row + group / 8 * kBytes;
    const int in = static_cast<int>(group % 8), half = in / 4, quarter = in % 4;
    const Bytes low = load_bytes(block + 64 * half + 32 * (quarter % 2)), high = load_bytes(block + 128 + 32 * half);
    const Bytes four = (quarter < 2 ? low : shift_right<4>(low)) & 15;
    const Bytes two = quarter == 0   ? shift_left<4>(high)
                      : quarter == 1 ? shift_left<2>(high)
                      : quarter == 2 ? high
                                     : shift_right<2>(high);
    return four | (two & 48);
  }
};

// Scale and minimum of a group; both steps of a group of Q6_K.
template <Format kFormat>
REGARD_INLINE void scales(const uint8_t* row, int64_t group, float& scale, float& minimum, int (&step)[2]) {
  typedef Layout<kFormat> F;
  const uint8_t* block = row + group * kGroup / F::kNumbers * F::kBytes;
  step[0] = step[1] = 1;
  minimum = 0;
  if constexpr (kFormat == kWeightQ4_K) {
    int factor, least;
    scales_of_q4_k(block + 4, static_cast<int>(group % 8), factor, least);
    scale = load_float16(block) * static_cast<float>(factor);
    minimum = -(load_float16(block + 2) * static_cast<float>(least));
  } else if constexpr (kFormat == kWeightQ6_K) {
    scale = load_float16(block + 208);
    for (int half = 0; half < 2; ++half) step[half] = static_cast<int8_t>(block[192 + group % 8 * 2 + half]);
  } else {
    scale = load_float16(block);
    if constexpr (F::kMinimum) minimum = load_float16(block + 2);
  }
}

}  // namespace quantized
}  // namespace REGARD_ISA
}  // namespace regard
