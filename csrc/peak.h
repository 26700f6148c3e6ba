// The speed limit of this machine: multiply-adds on registers and nothing else.
#pragma once

#include <chrono>

#include "threads.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {

inline double measure_peak(int64_t threads, double seconds) {
  typedef std::chrono::steady_clock Clock;
  constexpr int kSums = 12;
  constexpr int64_t kSteps = 1 << 16;
  double rates[256] = {};
  if (threads > 256) threads = 256;
  auto work = [&](int64_t item) {
    Vec<float> sum[kSums];
    for (int n = 0; n < kSums; ++n) sum[n] = splat<float>(1e-3f * static_cast<float>(n + 1));
    // Volatile, so that the compiler cannot simplify the loop.
    Vec<float> shrink = splat<float>(0.999f), push = splat<float>(1e-3f);
    __asm__ volatile("" : "+m"(shrink), "+m"(push));
    double steps = 0, spent = 0;
    const auto begin = Clock::now();
    do {
      for (int64_t step = 0; step < kSteps; ++step) {
#pragma GCC unroll 12
        for (int n = 0; n < kSums; ++n) sum[n] = sum[n] * shrink + push;
      }
      steps += kSteps;
      spent = std::chrono::duration<double>(Clock::now() - begin).count();
    } while (spent < seconds);
    float kept = 0;
    for (int n = 0; n < kSums; ++n) kept += sum_of<float>(sum[n]);
    volatile float sink = kept;
    (void)sink;
    rates[item] = steps * kSums * kLanes<float> * 2 / spent;
  };
  parallel(threads, threads, work);
  double total = 0;
  for (int64_t n = 0; n < threads; ++n) total += rates[n];
  return total;
}

}  // namespace REGARD_ISA
}  // namespace regard
