// Dropout of attention weights. Which are dropped is a function of a seed and of batch row b, head h, query i and key j:
//
//   kept = u >= drop_below,    u = number j % 8 of the eight 16-bit numbers of Philox4x32-10(counter, seed)
//   counter = (j / 8, i, r mod 2^32, r / 2^32),    r = heads b + h
//
// so that neither tiles nor threads matter and the backward pass draws the same again. src/regard/dropout.py is the
// definition. Philox: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (2011). A round is
//
//   x0 x1 x2 x3  ->  high(M1 x2) ^ x1 ^ k0,  low(M1 x2),  high(M0 x0) ^ x3 ^ k1,  low(M0 x0)
//
// Queries lie across the lanes, as everywhere, in lanes of 64 bits: a product needs as many. Their upper halves may hold
// anything, for a product reads the lower ones.
#pragma once

#include <type_traits>

#include "scores.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace regard {
namespace REGARD_ISA {

constexpr uint32_t kPhilox0 = 0xD2511F53, kPhilox1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9, kPhiloxKey1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

typedef uint64_t Words __attribute__((vector_size(REGARD_BYTES)));

// The products of the lower halves of all lanes.
REGARD_INLINE Words multiply(Words x, Words y) {
#if defined(__AVX512F__) && REGARD_BYTES == 64
  // With a mask of ones: the plain one makes GCC 12 warn of its own header.
  return reinterpret_cast<Words>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
#elif defined(__AVX2__) && REGARD_BYTES == 32
  return reinterpret_cast<Words>(_mm256_mul_epu32(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
#elif defined(__SSE2__) && REGARD_BYTES == 16
  return reinterpret_cast<Words>(_mm_mul_epu32(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(y)));
#else
  return (x & 0xffffffffu) * (y & 0xffffffffu);
#endif
}

// The dropout of one tile: draws for eight neighbouring keys and all queries at once.
template <class T>
class TileDropout {
 public:
  void begin(const Attention& task, int64_t row, const Tile& tile, int64_t width) {
    for (int n = 0; n < kPhiloxRounds; ++n) {
      key0_[n] = static_cast<uint32_t>(task.seed) + n * kPhiloxKey0;
      key1_[n] = static_cast<uint32_t>(task.seed >> 32) + n * kPhiloxKey1;
    }
    key_number_ = task.key_number;
    last_dropped_ = typename Kind<T>::Whole(task.drop_below - 1) - IntVec<T>{};
    scale_ = to_bits<T>(splat<T>(static_cast<T>(task.keep_scale)));
    // Of the first round, all that does not depend on the key; of the second, the product that depends on the query.
    const uint64_t product = uint64_t(kPhilox1) * static_cast<uint32_t>(row);
    low_row_ = static_cast<uint32_t>(product);
    high_row_ = static_cast<uint32_t>(row >> 32) ^ key1_[0];
    const uint32_t other = static_cast<uint32_t>(product >> 32) ^ key0_[0];
    for (int64_t lane = 0; lane < width; ++lane) {
      const int32_t place = tile.query[lane < tile.queries ? lane : tile.queries - 1];
      const int32_t query = task.query_number ? task.query_number[place] : place;
      // Lanes of T that share one of 64 bits stand in two vectors: the even ones, then the odd ones.
      const int64_t vector = lane / L, in = lane % L;
      product_[vector * L + in % kParts * kWide + in / kParts] = uint64_t(kPhilox0) * (static_cast<uint32_t>(query) ^ other);
    }
  }

  // From now on for N vectors of queries from vector `low` on.
  void restrict_to(int low, int vectors) {
    low_ = low;
    vectors_ = vectors;
    block_ = -1;
  }

  // Makes `factor` ready for a key.
  REGARD_INLINE void prepare(int32_t token) {
    key_ = key_number_ ? key_number_[token] : token;
    if (key_ / kKeys != block_) draw(key_ / kKeys);
  }

  // What the weights of the prepared key are multiplied with, for one vector of queries: zero or 1 / (1 - p).
  REGARD_INLINE Vec<T> factor(int vector) const {
    Unsigned word;
    std::memcpy(&word, word_[key_ / 2 % 4] + vector * L, sizeof word);
    const Unsigned number = (word >> (key_ % 2 * 16)) & 0xffff;
    return from_bits<T>((reinterpret_cast<IntVec<T>>(number) > last_dropped_) & scale_);
  }

 private:
  static constexpr int L = kLanes<T>, kKeys = 8;
  static constexpr int kWide = REGARD_BYTES / 8, kParts = L / kWide;
  typedef typename std::conditional<sizeof(T) == 8, uint64_t, uint32_t>::type Number;
  typedef Number Unsigned __attribute__((vector_size(REGARD_BYTES)));

  static uint32_t high(uint64_t product) { return static_cast<uint32_t>(product >> 32); }
  static REGARD_INLINE Words all(uint64_t x) { return x + Words{}; }

  __attribute__((noinline)) void draw(int32_t block) {
    block_ = block;
    // Three rounds, of which only two products depend on the query, and one of those is known already.
    const uint64_t first = uint64_t(kPhilox0) * static_cast<uint32_t>(block);
    const uint64_t second = uint64_t(kPhilox1) * (high(first) ^ high_row_);
    const uint64_t third = uint64_t(kPhilox0) * (high(second) ^ low_row_ ^ key0_[1]);
    const Words multiplier0 = all(kPhilox0), multiplier1 = all(kPhilox1);
    const Words from_block = all(static_cast<uint32_t>(first) ^ key1_[1]);
    const Words from_second = all(static_cast<uint32_t>(second) ^ key0_[2]);
    const Words from_third = all(high(third) ^ key1_[2]), low_third = all(static_cast<uint32_t>(third));
    for (int v = low_; v < low_ + vectors_; ++v) {
      Words x0[kParts], x1[kParts], x2[kParts], x3[kParts];
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        Words product;
        std::memcpy(&product, product_ + v * L + part * kWide, sizeof product);
        x1[part] = multiply((product >> 32) ^ from_block, multiplier1);
        x0[part] = (x1[part] >> 32) ^ from_second;
        x2[part] = product ^ from_third;
        x3[part] = low_third;
      }
#pragma GCC unroll 10
      for (int n = 3; n < kPhiloxRounds; ++n) {
        const Words key0 = all(key0_[n]), key1 = all(key1_[n]);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          const Words product0 = multiply(x0[part], multiplier0), product1 = multiply(x2[part], multiplier1);
          x0[part] = (product1 >> 32) ^ x1[part] ^ key0;
          x2[part] = (product0 >> 32) ^ x3[part] ^ key1;
          x1[part] = product1;
          x3[part] = product0;
        }
      }
      put(0, v, x0);
      put(1, v, x1);
      put(2, v, x2);
      put(3, v, x3);
    }
  }

  REGARD_INLINE void put(int number, int vector, const Words (&x)[kParts]) {
    Words word = x[0];
    if constexpr (kParts == 2) word = (x[0] & 0xffffffffu) | (x[1] << 32);
    std::memcpy(word_[number] + vector * L, &word, sizeof word);
  }

  alignas(64) Number word_[4][kTallest<T>];
  alignas(64) uint64_t product_[kTallest<T>];
  IntVec<T> last_dropped_, scale_;
  uint32_t key0_[kPhiloxRounds], key1_[kPhiloxRounds];
  uint32_t low_row_, high_row_;
  int low_ = 0, vectors_ = 0;
  const int32_t* key_number_ = nullptr;
  int32_t key_ = 0, block_ = -1;
};

// Multiplies the weights of a strip, N vectors of queries for each key, by 0 or 1 / (1 - p).
template <class T, int N, int W>
void drop_weights(TileDropout<T>& dropout, const Keys<T>& keys, const Strip& strip, T* weights) {
  dropout.restrict_to(strip.low, N);
  for (int64_t j = 0; j < strip.count; ++j) {
    dropout.prepare(keys.token[strip.first + j]);
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      T* at = weights + j * W + n * kLanes<T>;
      store<T>(at, load<T>(at) * dropout.factor(strip.low + n));
    }
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
