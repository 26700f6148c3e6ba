// Half precision, converted on load. bfloat16 is the upper half of a float; float16 is put together by hand, so that
// every machine reads it alike.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "interface.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// The fraction and exponent are moved to where float keeps them, and a multiplication by 2^112 mends the exponent; that
// also makes the subnormal numbers right. Infinity and NaN, whose exponent was all ones, get theirs back.
inline float from_float16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits & 0x7fff) << 13;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  x *= 5.192296858534828e33f;  // 2^112
  std::memcpy(&wide, &x, sizeof x);
  if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000u;
  wide |= static_cast<uint32_t>(bits & 0x8000) << 16;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// `count` neighbours as the number the kernel computes with.
template <class T>
inline void convert(const void* from, DType dtype, int64_t count, T* to) {
  if (dtype == DType::kBFloat16) {
    const auto* half = static_cast<const uint16_t*>(from);
    for (int64_t n = 0; n < count; ++n) to[n] = static_cast<T>(from_bfloat16(half[n]));
  } else if (dtype == DType::kFloat16) {
    const auto* half = static_cast<const uint16_t*>(from);
    for (int64_t n = 0; n < count; ++n) to[n] = static_cast<T>(from_float16(half[n]));
  } else {
    std::memcpy(to, from, count * sizeof(T));
  }
}

// Sixteen bits become the lower half of thirty-two. Compilers find the one instruction for it only if it is named.
template <class T>
REGARD_INLINE IntVec<T> widened(const char* halves) {
#if REGARD_BYTES == 64 && defined(__AVX512F__)
  // With a mask that keeps all: GCC warns about the plain form of its own header.
  return (IntVec<T>)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#elif REGARD_BYTES == 32 && defined(__AVX2__)
  return (IntVec<T>)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#else
  typedef uint16_t Halves __attribute__((vector_size(REGARD_BYTES / 2), aligned(2), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(halves), IntVec<T>);
#endif
}

// The n-th vector of a row, in the number that is computed with.
template <class T, DType kKind>
REGARD_INLINE Vec<T> load_as(const char* row, int64_t n) {
  if constexpr (kKind == DType::kFloat32 || kKind == DType::kFloat64) {
    return load<T>(reinterpret_cast<const T*>(row) + n * kLanes<T>);
  } else {
    const IntVec<T> bits = widened<T>(row + n * (REGARD_BYTES / 2));
    if constexpr (kKind == DType::kBFloat16) return from_bits<T>(bits << 16);
    const IntVec<T> size = to_bits<T>(from_bits<T>((bits & 0x7fff) << 13) * splat<T>(T(5.192296858534828e33)));
    const IntVec<T> endless = (bits & 0x7c00) == 0x7c00;
    return from_bits<T>(size | (endless & 0x7f800000) | ((bits & 0x8000) << 16));
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
