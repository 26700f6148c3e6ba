// Derivatives of the activations in activation.h, on vectors.
//
//   relu' = 1 where x > 0,   silu' = s (1 + x (1 - s)) with s = 1 / (1 + exp(-x)),   gelu' = Phi(x) + x phi(x)
//   gelu_tanh' = s + x s (1 - s) 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2) with s = (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//
// phi is the normal density, exp(-x^2 / 2) / sqrt(2 pi).
#pragma once

#include "activation.h"

namespace regard {
namespace REGARD_ISA {

// 1 / (1 + 2^power): the power of a large number is infinite, and the quotient zero.
REGARD_INLINE Vec<float> sigmoid2(Vec<float> power) {
  typedef float T;
  const Vec<T> most = splat<T>(126);
  const Vec<T> raised = exp2<T>(choose<T>(power > most, most, power));
  return splat<T>(1) / (splat<T>(1) + choose<T>(power > most, infinity<T>(1), raised));
}

REGARD_INLINE Vec<double> sigmoid2(Vec<double> power) {
  Vec<double> result;
  for (int lane = 0; lane < kLanes<double>; ++lane) result[lane] = 1 / (1 + __builtin_exp2(power[lane]));
  return result;
}

template <class T>
REGARD_INLINE Vec<T> silu_grad(Vec<T> x) {
  const Vec<T> s = sigmoid2(x * splat<T>(T(-1.44269504088896340736)));
  return s * (splat<T>(1) + x * (splat<T>(1) - s));
}

template <class T>
REGARD_INLINE Vec<T> gelu_tanh_grad(Vec<T> x) {
  const T slope = T(1.59576912160573071176);  // 2 sqrt(2 / pi)
  const T twice = T(-2.302208198144325);    // the same over -ln(2)
  const Vec<T> square = x * x;
  const Vec<T> s = sigmoid2(x * (splat<T>(twice) + splat<T>(twice * T(0.044715)) * square));
  const Vec<T> rise = splat<T>(slope) + splat<T>(slope * T(3 * 0.044715)) * square;
  // s (1 - s) is zero where both of them round, however large the cube beside it.
  const Vec<T> bell = s * (splat<T>(1) - s);
  return s + choose<T>(bell == Vec<T>{}, Vec<T>{}, x * bell * rise);
}

// x phi(x), where the power is rounded to nothing far out.
REGARD_INLINE Vec<float> times_density(Vec<float> x) {
  typedef float T;
  return x * exp2<T>(x * x * splat<T>(-0.72134752f)) * splat<T>(0.39894228f);
}

REGARD_INLINE void gelu_grad(Vec<float> (&x)[kSide]) {
  typedef float T;
  Vec<T> phi[kSide];
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) phi[n] = x[n];
  gelu(phi);  // x Phi(x): Phi itself is the quotient, but for an x near zero
#pragma GCC unroll 6
  for (int n = 0; n < kSide; ++n) {
    const IntVec<T> small = x[n] * x[n] < splat<T>(1e-6f);
    const Vec<T> near = splat<T>(0.5f) + x[n] * splat<T>(0.39894228f);
    const Vec<T> share = choose<T>(small, near, phi[n] / choose<T>(small, splat<T>(1), x[n]));
    x[n] = share + times_density(x[n]);
  }
}

REGARD_INLINE void gelu_grad(Vec<double> (&x)[kSide]) {
  for (int n = 0; n < kSide; ++n)
    for (int lane = 0; lane < kLanes<double>; ++lane) {
      const double at = x[n][lane];
      x[n][lane] = 0.5 * (1 + __builtin_erf(at * 0.70710678118654752440)) +
                   at * __builtin_exp(-0.5 * at * at) * 0.39894228040143267794;
    }
}

// numbers[n] = activation'(numbers[n]), for a multiple of kSide vectors.
template <class T>
void activation_grads(Activation activation, T* numbers, int64_t vectors) {
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
  auto one_by_one = [&](auto function) __attribute__((always_inline)) {
    each([&](Vec<T>(&x)[kSide]) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int n = 0; n < kSide; ++n) x[n] = function(x[n]);
    });
  };
  switch (activation) {
    case kIdentity: return one_by_one([](Vec<T>) __attribute__((always_inline)) { return splat<T>(1); });
    case kRelu:
      return one_by_one(
          [](Vec<T> x) __attribute__((always_inline)) { return choose<T>(x <= Vec<T>{}, Vec<T>{}, splat<T>(1)); });
    case kGelu: return each([](Vec<T>(&x)[kSide]) __attribute__((always_inline)) { gelu_grad(x); });
    case kGeluTanh: return one_by_one([](Vec<T> x) __attribute__((always_inline)) { return gelu_tanh_grad<T>(x); });
    case kSilu: return one_by_one([](Vec<T> x) __attribute__((always_inline)) { return silu_grad<T>(x); });
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
