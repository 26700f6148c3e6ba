// Vectors of the machine this file is compiled for, by the compiler's own vector types: GCC and clang turn them into
// AVX-512, AVX2, SSE2 or NEON alike. Everything lives in a namespace named after the instruction set, because the same
// templates are compiled once for each and must not be mixed by the linker.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifndef REGARD_ISA
#define REGARD_ISA plain
#endif
#ifndef REGARD_BYTES
#define REGARD_BYTES 16
#endif

#define REGARD_INLINE inline __attribute__((always_inline))

namespace regard {
namespace REGARD_ISA {

template <class T>
struct Kind;
template <>
struct Kind<float> {
  typedef float Vec __attribute__((vector_size(REGARD_BYTES)));
  typedef int32_t Int __attribute__((vector_size(REGARD_BYTES)));
  typedef float Loose __attribute__((vector_size(REGARD_BYTES), aligned(4), may_alias));
  typedef int32_t Whole;
};
template <>
struct Kind<double> {
  typedef double Vec __attribute__((vector_size(REGARD_BYTES)));
  typedef int64_t Int __attribute__((vector_size(REGARD_BYTES)));
  typedef double Loose __attribute__((vector_size(REGARD_BYTES), aligned(8), may_alias));
  typedef int64_t Whole;
};
template <class T>
using Vec = typename Kind<T>::Vec;
template <class T>
using IntVec = typename Kind<T>::Int;

// Numbers in one vector, vectors in the tallest tile, and the queries such a tile holds.
template <class T>
constexpr int kLanes = REGARD_BYTES / sizeof(T);
constexpr int kMostVectors = 3;
template <class T>
constexpr int kTallest = kMostVectors * kLanes<T>;

template <class T>
REGARD_INLINE Vec<T> load(const T* from) {
  return *reinterpret_cast<const typename Kind<T>::Loose*>(from);
}

template <class T>
REGARD_INLINE void store(T* to, Vec<T> x) {
  *reinterpret_cast<typename Kind<T>::Loose*>(to) = x;
}

template <class T>
REGARD_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

template <class T>
REGARD_INLINE Vec<T> infinity(T sign) {
  return splat<T>(sign * std::numeric_limits<T>::infinity());
}

// `x` where the mask is set (all ones), else `y`.
template <class T>
REGARD_INLINE Vec<T> choose(IntVec<T> mask, Vec<T> x, Vec<T> y) {
  return mask ? x : y;
}

// The smaller; a NaN in `y` is passed over.
template <class T>
REGARD_INLINE Vec<T> smaller(Vec<T> x, Vec<T> y) {
  return choose<T>(y < x, y, x);
}

// The larger; a NaN in `x` is kept, so that it is not lost in a maximum.
template <class T>
REGARD_INLINE Vec<T> larger(Vec<T> x, Vec<T> y) {
  return choose<T>(y > x, y, x);
}

template <class T>
REGARD_INLINE IntVec<T> lane_bits() {
  IntVec<T> bits;
  for (int lane = 0; lane < kLanes<T>; ++lane) bits[lane] = typename Kind<T>::Whole(1) << lane;
  return bits;
}

// All ones in lane `n` where bit `n` of the word is set.
template <class T>
REGARD_INLINE IntVec<T> spread(uint64_t word) {
  const IntVec<T> bits = lane_bits<T>();
  const IntVec<T> all = IntVec<T>{} + static_cast<typename Kind<T>::Whole>(word);
  return (all & bits) == bits;
}

template <class T>
REGARD_INLINE T sum_of(Vec<T> x) {
  T lanes[kLanes<T>];
  store<T>(lanes, x);
  for (int half = kLanes<T> / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <class T>
REGARD_INLINE T largest_of(Vec<T> x) {
  T lanes[kLanes<T>];
  store<T>(lanes, x);
  T best = lanes[0];
  for (int lane = 1; lane < kLanes<T>; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
  return best;
}

template <class T>
REGARD_INLINE Vec<T> from_bits(IntVec<T> bits) {
  Vec<T> x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T>
REGARD_INLINE IntVec<T> to_bits(Vec<T> x) {
  IntVec<T> bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// 2^x for x <= 0 (and up to 126), within 1 ulp for results that are normal numbers; below those it is zero.
//
// x = n + f with n whole and |f| <= 1/2. 2^f is a polynomial that is minimax in relative error (degree 6: 1.9e-9, degree
// 11: 3.1e-18, both far below a rounding); 2^n is put together from its bits. The last fused step and the exact
// scaling leave about one rounding. A NaN stays one.
template <class T>
REGARD_INLINE Vec<T> exp2(Vec<T> x);

template <>
REGARD_INLINE Vec<float> exp2<float>(Vec<float> x) {
  typedef float T;
  const Vec<T> low = splat<T>(-127.0f);  // there the exponent is empty: 2^n is zero
  const Vec<T> kept = larger<T>(x, low);
  // 1.5 * 2^23: adding it rounds to the nearest whole number; and 127, with which an exponent is written
  const Vec<T> magic = splat<T>(12583039.0f);
  const Vec<T> shifted = kept + magic;
  const Vec<T> f = kept - (shifted - magic);
  Vec<T> p = splat<T>(1.53458121587e-4f);
  p = p * f + splat<T>(1.33999312095e-3f);
  p = p * f + splat<T>(9.61848895652e-3f);
  p = p * f + splat<T>(5.550328777e-2f);
  p = p * f + splat<T>(2.40226468906e-1f);
  p = p * f + splat<T>(6.93147205737e-1f);
  p = p * f + splat<T>(1.0f);
  // The whole number stands in the low bits of `shifted`; moved into the exponent it is 2^n. (Adding it to the bits of p
  // would be the same for numbers, but could turn a NaN into one.)
  return p * from_bits<T>(to_bits<T>(shifted) << 23);
}

template <>
REGARD_INLINE Vec<double> exp2<double>(Vec<double> x) {
  typedef double T;
  const Vec<T> low = splat<T>(-1023.0);
  const Vec<T> kept = larger<T>(x, low);
  const Vec<T> magic = splat<T>(6755399441056767.0);  // 1.5 * 2^52 + 1023
  const Vec<T> shifted = kept + magic;
  const Vec<T> f = kept - (shifted - magic);
  Vec<T> p = splat<T>(4.4352809446103361611e-10);
  p = p * f + splat<T>(7.0741056262456593708e-9);
  p = p * f + splat<T>(1.0178198033328527662e-7);
  p = p * f + splat<T>(1.3215433089594629037e-6);
  p = p * f + splat<T>(1.52527334899608046e-5);
  p = p * f + splat<T>(1.5403530462514613026e-4);
  p = p * f + splat<T>(1.3333558146789950323e-3);
  p = p * f + splat<T>(9.6181291075883350833e-3);
  p = p * f + splat<T>(5.5504108664819921483e-2);
  p = p * f + splat<T>(2.4022650695910156205e-1);
  p = p * f + splat<T>(6.9314718055994533046e-1);
  p = p * f + splat<T>(1.0);
  return p * from_bits<T>(to_bits<T>(shifted) << 52);
}

// log2 of a normal positive number, within 2 ulp of the larger of the result and 1.
//
// x = 2^n m with m between sqrt(1/2) and sqrt(2), and with t = (m - 1) / (m + 1)
// log2(m) = 2 / ln(2) (t + t^3/3 + t^5/5 + ...), where t^2 <= 0.0295.
template <class T>
REGARD_INLINE Vec<T> log2(Vec<T> x) {
  constexpr bool wide = sizeof(T) == 8;
  constexpr int bits = wide ? 52 : 23, terms = wide ? 11 : 5;
  typedef typename Kind<T>::Whole Whole;
  const Whole root = wide ? Whole(0x3fe6a09e667f3bcd) : Whole(0x3f3504f3);  // sqrt(1/2)
  const IntVec<T> raw = to_bits<T>(x) - root;
  const IntVec<T> n = raw >> bits;
  const Vec<T> m = from_bits<T>((raw & ((Whole(1) << bits) - 1)) + root);
  const Vec<T> t = (m - T(1)) / (m + T(1));
  const Vec<T> square = t * t;
  Vec<T> series = Vec<T>{};
#pragma GCC unroll 11
  for (int k = terms - 1; k >= 0; --k) series = series * square + splat<T>(T(1) / T(2 * k + 1));
  return __builtin_convertvector(n, Vec<T>) + t * series * splat<T>(T(2.8853900817779268147));
}

// One step of a perfect shuffle: x0 y0 x1 y1 ... of the low, or of the high halves.
#if defined(__clang__) || __GNUC__ >= 12
#define REGARD_SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define REGARD_SHUFFLE(x, y, ...) __builtin_shuffle(x, y, IntVec<T>{__VA_ARGS__})
#endif

#if REGARD_BYTES == 16
#define REGARD_LOW_4(x, y) REGARD_SHUFFLE(x, y, 0, 4, 1, 5)
#define REGARD_HIGH_4(x, y) REGARD_SHUFFLE(x, y, 2, 6, 3, 7)
#define REGARD_LOW_8(x, y) REGARD_SHUFFLE(x, y, 0, 2)
#define REGARD_HIGH_8(x, y) REGARD_SHUFFLE(x, y, 1, 3)
#elif REGARD_BYTES == 32
#define REGARD_LOW_4(x, y) REGARD_SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11)
#define REGARD_HIGH_4(x, y) REGARD_SHUFFLE(x, y, 4, 12, 5, 13, 6, 14, 7, 15)
#define REGARD_LOW_8(x, y) REGARD_SHUFFLE(x, y, 0, 4, 1, 5)
#define REGARD_HIGH_8(x, y) REGARD_SHUFFLE(x, y, 2, 6, 3, 7)
#else
#define REGARD_LOW_4(x, y) REGARD_SHUFFLE(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define REGARD_HIGH_4(x, y) REGARD_SHUFFLE(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define REGARD_LOW_8(x, y) REGARD_SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11)
#define REGARD_HIGH_8(x, y) REGARD_SHUFFLE(x, y, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

REGARD_INLINE void interleave(Vec<float> x, Vec<float> y, Vec<float>& low, Vec<float>& high) {
  typedef float T;
  (void)sizeof(T);
  low = REGARD_LOW_4(x, y);
  high = REGARD_HIGH_4(x, y);
}
REGARD_INLINE void interleave(Vec<double> x, Vec<double> y, Vec<double>& low, Vec<double>& high) {
  typedef double T;
  (void)sizeof(T);
  low = REGARD_LOW_8(x, y);
  high = REGARD_HIGH_8(x, y);
}

// A square of as many vectors as a vector has numbers, turned over: each round interleaves the first half of the rows
// with the second, and after log2 rounds columns have become rows.
template <class T>
REGARD_INLINE void transpose(Vec<T> (&square)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
#pragma GCC unroll 8
  for (int round = 1; round < n; round *= 2) {
    Vec<T> next[n];
#pragma GCC unroll 16
    for (int row = 0; row < n / 2; ++row) interleave(square[row], square[row + n / 2], next[2 * row], next[2 * row + 1]);
#pragma GCC unroll 16
    for (int row = 0; row < n; ++row) square[row] = next[row];
  }
}

// The sum of the lanes of vector n, in lane n: vectors are interleaved and added until one is left.
// Each sum is made in the order of sum_of.
template <class T>
REGARD_INLINE Vec<T> sums_of(Vec<T> (&square)[kLanes<T>]) {
#pragma GCC unroll 8
  for (int left = kLanes<T> / 2; left; left /= 2)
#pragma GCC unroll 16
    for (int n = 0; n < left; ++n) {
      Vec<T> low, high;
      interleave(square[n], square[n + left], low, high);
      square[n] = low + high;
    }
  return square[0];
}

}  // namespace REGARD_ISA
}  // namespace regard
