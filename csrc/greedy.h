// The token of the largest logit, and its log-probability, row by row:
//
//   token = argmax_n z_n, the lowest of equals,   score = z_token - log(sum_n exp(z_n)) = -log(sum_n exp(z_n - z_token))
#pragma once

#include "interface.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {

// kNotFinite where a row has a NaN, or no finite largest logit.
inline int32_t run_greedy(const float* logits, int64_t rows, int64_t count, int64_t* tokens, float* scores) {
  constexpr int L = kLanes<float>;
  for (int64_t row = 0; row < rows; ++row) {
    const float* z = logits + row * count;
    Vec<float> most[4], wrong{};
    for (auto& one : most) one = infinity<float>(-1);
    int64_t n = 0;
    for (; n + 4 * L <= count; n += 4 * L)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const Vec<float> one = load<float>(z + n + k * L);
        most[k] = larger<float>(most[k], one);
        wrong += choose<float>(one == one, Vec<float>{}, splat<float>(1));
      }
    float top = largest_of<float>(larger<float>(larger<float>(most[0], most[1]), larger<float>(most[2], most[3])));
    bool finite = sum_of<float>(wrong) == 0;
    for (; n < count; ++n) {
      top = z[n] > top ? z[n] : top;
      finite = finite && z[n] == z[n];
    }
    if (!finite || !(top - top == 0)) return kNotFinite;
    int64_t token = 0;
    while (z[token] != top) ++token;
    Vec<float> sum[4] = {};
    const Vec<float> shift = splat<float>(top), factor = splat<float>(1.44269504f);
    for (n = 0; n + 4 * L <= count; n += 4 * L)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sum[k] += exp2<float>((load<float>(z + n + k * L) - shift) * factor);
    double total = sum_of<float>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; n < count; ++n) total += exp2<float>(splat<float>((z[n] - top) * 1.44269504f))[0];
    tokens[row] = token;
    scores[row] = static_cast<float>(-__builtin_log(total));
  }
  return kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
