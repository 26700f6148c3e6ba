// What bends the outputs of a linear layer, on vectors:
//
//   relu(x) = max(x, 0),   gelu(x) = x Phi(x),   gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//
// Phi is the share of a normal distribution below x, (1 + erf(x / sqrt(2))) / 2. Errors in float32 are at most
// 2 eps |x|, as those of the formulas written out: both lose the digits of a small Phi. In float64 the library of C is
// asked, number by number.
#pragma once

#include "interface.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {

// For |x| < 5.25, Phi(x) = 1/2 + x p(t) with t = 2 (x / 5.25)^2 - 1: a polynomial of degree 14 for which the largest
// error of x p is least, 1.6e-8 (found by Remez' exchange). Beyond, Phi is 0 or 1 to within 8e-8.
REGARD_INLINE Vec<float> gelu(Vec<float> x) {
  typedef float T;
  const T edge = 5.25f;
  const Vec<T> square = x * x, t = square * splat<T>(2 / (edge * edge)) - splat<T>(1);
  Vec<T> p = splat<T>(2.39987867e-4f);
  p = p * t + splat<T>(-6.56616324e-4f);
  p = p * t + splat<T>(6.64620838e-4f);
  p = p * t + splat<T>(-1.03944105e-3f);
  p = p * t + splat<T>(2.89248763e-3f);
  p = p * t + splat<T>(-5.44862244e-3f);
  p = p * t + splat<T>(8.41780203e-3f);
  p = p * t + splat<T>(-1.27751969e-2f);
  p = p * t + splat<T>(1.85386663e-2f);
  p = p * t + splat<T>(-2.50419462e-2f);
  p = p * t + splat<T>(3.20314382e-2f);
  p = p * t + splat<T>(-3.97634132e-2f);
  p = p * t + splat<T>(4.96457858e-2f);
  p = p * t + splat<T>(-6.71268151e-2f);
  p = p * t + splat<T>(1.34659346e-1f);
  const Vec<T> inside = p * x + splat<T>(0.5f), outside = choose<T>(x > Vec<T>{}, splat<T>(1), Vec<T>{});
  return x * choose<T>(square > splat<T>(edge * edge), outside, inside);
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

template <class Function>
REGARD_INLINE Vec<double> one_by_one(Vec<double> x, Function function) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] *= 0.5 * (1 + function(x[lane]));
  return x;
}
REGARD_INLINE Vec<double> gelu(Vec<double> x) {
  return one_by_one(x, [](double u) { return __builtin_erf(u * 0.70710678118654752440); });
}
REGARD_INLINE Vec<double> gelu_tanh(Vec<double> x) {
  return one_by_one(x, [](double u) { return __builtin_tanh(0.79788456080286535588 * (u + 0.044715 * u * u * u)); });
}

// Some vectors, one behind the other.
template <class T>
void bend_all(Bend bend, T* numbers, int64_t vectors) {
  constexpr int L = kLanes<T>;
  auto each = [&](auto function) __attribute__((always_inline)) {
    for (int64_t n = 0; n < vectors; ++n) store<T>(numbers + n * L, function(load<T>(numbers + n * L)));
  };
  switch (bend) {
    case kStraight: return;
    case kRelu: return each([](Vec<T> x) { return larger<T>(x, Vec<T>{}); });
    case kGelu: return each([](Vec<T> x) { return gelu(x); });
    case kGeluTanh: return each([](Vec<T> x) { return gelu_tanh(x); });
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
