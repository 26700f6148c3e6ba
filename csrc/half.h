// Half precision, converted on load. bfloat16 is the upper half of a float; float16 is put together by hand, so that
// every machine reads it alike.
#pragma once

#include <cstdint>
#include <cstring>

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

}  // namespace REGARD_ISA
}  // namespace regard
