// The dropout of the scalar reference: one pair after the other, every round of the generator as it is written.
#pragma once

#include "interface.h"

namespace regard {
namespace scalar {
namespace {

// Philox4x32-10 (Salmon et al. 2011): replaces the counter by four words of 32 random bits.
inline void philox(uint32_t (&x)[4], uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t(0xD2511F53) * x[0], product1 = uint64_t(0xCD9E8D57) * x[2];
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ x[1] ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ x[3] ^ key1;
    x[0] = next0;
    x[1] = static_cast<uint32_t>(product1);
    x[2] = next2;
    x[3] = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

// What the weight of a pair is multiplied with: 1 without dropout, else 0 or 1 / (1 - p).
inline double dropout_factor(const Attention& task, int64_t b, int64_t h, int64_t query, int64_t key) {
  if (task.drop_below == 0) return 1;
  if (task.query_number) query = task.query_number[query];
  if (task.key_number) key = task.key_number[key];
  const uint64_t row = static_cast<uint64_t>(b * task.heads + h);
  uint32_t words[4] = {static_cast<uint32_t>(key / 8), static_cast<uint32_t>(query), static_cast<uint32_t>(row),
                       static_cast<uint32_t>(row >> 32)};
  philox(words, task.seed);
  const uint32_t number = words[key % 8 / 2] >> (key % 2 * 16) & 0xffff;
  return number >= task.drop_below ? task.keep_scale : 0;
}

}  // namespace
}  // namespace scalar
}  // namespace regard
