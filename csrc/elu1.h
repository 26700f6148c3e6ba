// The feature map elu(x) + 1 = max(x, 0) + e^min(x, 0), and its derivative.
#pragma once

#include "vector.h"

namespace regard {
namespace REGARD_ISA {
namespace elu1 {

// e^r for |r| <= ln(2) / 2: the polynomials of exp2, their argument scaled.
REGARD_INLINE Vec<float> polynomial(Vec<float> r) {
  Vec<float> p = splat<float>(1.38368461e-3f);
  p = p * r + splat<float>(8.37481580e-3f);
  p = p * r + splat<float>(4.16682256e-2f);
  p = p * r + splat<float>(1.66664202e-1f);
  p = p * r + splat<float>(4.99999921e-1f);
  p = p * r + splat<float>(1.00000004f);
  return p * r + splat<float>(1.0f);
}
REGARD_INLINE Vec<double> polynomial(Vec<double> r) {
  Vec<double> p = splat<double>(2.4994304884817208e-8);
  p = p * r + splat<double>(2.76322932794598742e-7);
  p = p * r + splat<double>(2.75576225308722559e-6);
  p = p * r + splat<double>(2.4801486521427465e-5);
  p = p * r + splat<double>(1.98412694326792375e-4);
  p = p * r + splat<double>(1.3888888951223989e-3);
  p = p * r + splat<double>(8.33333333355927175e-3);
  p = p * r + splat<double>(4.16666666664927686e-2);
  p = p * r + splat<double>(1.66666666666661696e-1);
  p = p * r + splat<double>(5.00000000000001753e-1);
  p = p * r + splat<double>(9.99999999999999967e-1);
  return p * r + splat<double>(1.0);
}

template <class T>
struct Bits;
template <>
struct Bits<float> {
  typedef uint32_t Words __attribute__((vector_size(REGARD_BYTES)));
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest whole number
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;  // ln 2; the high part times n is exact
  static constexpr float kTiny = -86.0f, kLowest = -104.0f;  // e^x is a normal number above, zero below
  static constexpr int kShift = 23;
};
template <>
struct Bits<double> {
  typedef uint64_t Words __attribute__((vector_size(REGARD_BYTES)));
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kHigh = 6.93145751953125e-1, kLow = 1.42860682030941723212e-6;
  static constexpr double kTiny = -707.0, kLowest = -746.0;
  static constexpr int kShift = 52;
};

// n, the whole number nearest to x / ln 2, with the magic number added; and e^(x - n ln 2).
template <class T>
REGARD_INLINE Vec<T> reduced(Vec<T> x, Vec<T>& shifted) {
  typedef Bits<T> B;
  shifted = x * splat<T>(T(1.4426950408889634074)) + splat<T>(B::kMagic);
  const Vec<T> n = shifted - splat<T>(B::kMagic);
  return polynomial((x - n * splat<T>(B::kHigh)) - n * splat<T>(B::kLow));
}

// x 2^n for a whole number n, given with the magic number added, by adding n to the exponent: right for normal numbers.
template <class T>
REGARD_INLINE Vec<T> times_power(Vec<T> x, Vec<T> shifted) {
  typedef typename Bits<T>::Words Words;
  const Words sum = (Words)to_bits<T>(x) + ((Words)to_bits<T>(shifted) << Bits<T>::kShift);
  return from_bits<T>((IntVec<T>)sum);
}

// The map of numbers above kTiny; `tiny` becomes all ones where a number is not, or is no number.
template <class T>
REGARD_INLINE Vec<T> map(Vec<T> x, IntVec<T>& tiny) {
  const Vec<T> zero{};
  tiny |= ~(x >= splat<T>(Bits<T>::kTiny));
  const IntVec<T> above = x > zero;
  Vec<T> shifted;
  const Vec<T> p = reduced<T>(choose<T>(above, zero, x), shifted);
  return choose<T>(above, x, zero) + times_power<T>(p, shifted);
}

// The map of any number, subnormal results included: a tiny feature is not zero, and a mean over tiny features exists.
template <class T>
REGARD_INLINE Vec<T> map_any(Vec<T> x) {
  typedef Bits<T> B;
  const Vec<T> zero{}, magic = splat<T>(B::kMagic);
  const IntVec<T> above = x > zero;
  const Vec<T> below = choose<T>(above, zero, choose<T>(x < splat<T>(B::kLowest), splat<T>(B::kLowest), x));
  Vec<T> shifted;
  const Vec<T> p = reduced<T>(below, shifted);
  // Half the exponent at a time, for 2^n itself may be too small for a normal number.
  const Vec<T> one = splat<T>(1), n = shifted - magic, half = n * splat<T>(T(0.5)) + magic;
  const Vec<T> rest = (n - (half - magic)) + magic;
  return choose<T>(above, x, zero) + p * times_power<T>(one, half) * times_power<T>(one, rest);
}

// The derivative at x, from phi = map(x): one above zero, and e^x = phi below.
template <class T>
REGARD_INLINE Vec<T> derivative(Vec<T> phi) {
  return choose<T>(phi > splat<T>(1), splat<T>(1), phi);
}

}  // namespace elu1
}  // namespace REGARD_ISA
}  // namespace regard
