// Activations of a linear layer, on vectors:
//
//   relu(x) = max(x, 0),   silu(x) = x / (1 + exp(-x)),   gelu(x) = x Phi(x),   gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//
// Phi is the share of a normal distribution below x, (1 + erf(x / sqrt(2))) / 2. Errors in float32 are at most
// 2 eps |x|, as those of the formulas written out: both lose the digits of a small Phi. In float64 the C library
// is called for each number.
#pragma once

#include "interface.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {

// Vectors that are computed at once: each is a chain of dependent steps, and a processor overlaps a chain or two.
constexpr int kSide = 6;

// For |x| < 5.25, Phi(x) = 1/2 + x p(t) with t = 2 (x / 5.25)^2 - 1: a polynomial of degree 14 for which the largest
// error of x p is least, 1.6e-8 (found by Remez' exchange). Beyond, Phi is 0 or 1 to within 8e-8.
REGARD_INLINE void gelu(Vec<float> (&x)[kSide]) {
  typedef float T;
  constexpr T kEdge = 5.25f;
  constexpr T kTerms[] = {2.39987867e-4f,  -6.56616324e-4f, 6.64620838e-4f,  -1.03944105e-3f, 2.89248763e-3f,
                          -5.44862244e-3f, 8.41780203e-3f,  -1.27751969e-2f, 1.85386663e-2f,  -2.50419462e-2f,
                          3.20314382e-2f,  -3.97634132e-2f, 4.96457858e-2f,  -6.71268151e-2f, 1.34659346e-1f};
  Vec<T> t[kSide], p[kSide];
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) {
    t[n] = x[n] * x[n] * splat<T>(2 / (kEdge * kEdge)) - splat<T>(1);
    p[n] = splat<T>(kTerms[0]);
  }
#pragma GCC unroll 14
  for (int term = 1; term < 15; ++term)
#pragma GCC unroll 6
    for (int n = 0; n < kSide; ++n) p[n] = p[n] * t[n] + splat<T>(kTerms[term]);
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) {
    const Vec<T> beyond = choose<T>(x[n] > Vec<T>{}, splat<T>(1), Vec<T>{});
    x[n] *= choose<T>(t[n] > splat<T>(1), beyond, p[n] * x[n] + splat<T>(0.5f));
  }
}

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
REGARD_INLINE Vec<float> gelu_tanh(Vec<float> x) {
  typedef float T;
  const T twice = -2.3022082f;  // -2 sqrt(2 / pi) / ln(2)
  const Vec<T> power = x * (splat<T>(twice) + splat<T>(twice * 0.044715f) * (x * x));
  const Vec<T> most = splat<T>(126);
  const Vec<T> raised = exp2<T>(choose<T>(power > most, most, power));
  return x * (splat<T>(1) / (splat<T>(1) + choose<T>(power > most, infinity<T>(1), raised)));
}

REGARD_INLINE void gelu_tanh(Vec<float> (&x)[kSide]) {
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) x[n] = gelu_tanh(x[n]);
}

// x / (1 + 2^-(x / ln 2)); the power of a large negative x is infinite, and the quotient zero.
REGARD_INLINE void silu(Vec<float> (&x)[kSide]) {
  typedef float T;
  const Vec<T> most = splat<T>(126);
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) {
    const Vec<T> power = x[n] * splat<T>(-1.44269504f);
    const Vec<T> raised = exp2<T>(choose<T>(power > most, most, power));
    x[n] = x[n] / (splat<T>(1) + choose<T>(power > most, infinity<T>(1), raised));
  }
}

REGARD_INLINE void silu(Vec<double> (&x)[kSide]) {
  for (int n = 0; n < kSide; ++n)
    for (int lane = 0; lane < kLanes<double>; ++lane) x[n][lane] /= 1 + __builtin_exp(-x[n][lane]);
}

REGARD_INLINE void gelu(Vec<double> (&x)[kSide]) {
  for (int n = 0; n < kSide; ++n)
    for (int lane = 0; lane < kLanes<double>; ++lane)
      x[n][lane] *= 0.5 * (1 + __builtin_erf(x[n][lane] * 0.70710678118654752440));
}
REGARD_INLINE void gelu_tanh(Vec<double> (&x)[kSide]) {
  for (int n = 0; n < kSide; ++n)
    for (int lane = 0; lane < kLanes<double>; ++lane) {
      const double u = x[n][lane];
      x[n][lane] *= 0.5 * (1 + __builtin_tanh(0.79788456080286535588 * (u + 0.044715 * u * u * u)));
    }
}

template <class T>
REGARD_INLINE void relu(Vec<T> (&x)[kSide]) {
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) x[n] = larger<T>(x[n], Vec<T>{});
}

// Vectors that lie one behind the other, a multiple of kSide.
template <class T>
void activate_all(Activation activation, T* numbers, int64_t vectors) {
  constexpr int L = kLanes<T>;
  auto each = [&](auto function) __attribute__((always_inline)) {
    for (T* some = numbers; some < numbers + vectors * L; some += kSide * L) {
      Vec<T> x[kSide];
#pragma GCC unroll 6
      for (int n = 0; n < kSide; ++n) x[n] = load<T>(some + n * L);
      function(x);
#pragma GCC unroll 6
      for (int n = 0; n < kSide; ++n) store<T>(some + n * L, x[n]);
    }
  };
  typedef Vec<T>(&Some)[kSide];
  switch (activation) {
    case kIdentity: return;
    case kRelu: return each([](Some x) __attribute__((always_inline)) { relu<T>(x); });
    case kGelu: return each([](Some x) __attribute__((always_inline)) { gelu(x); });
    case kGeluTanh: return each([](Some x) __attribute__((always_inline)) { gelu_tanh(x); });
    case kSilu: return each([](Some x) __attribute__((always_inline)) { silu(x); });
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
