// The scores of a tile: which keys come next, and what bias and pattern do to their products.
#pragma once

#include "plan.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {

template <class T>
constexpr T kLog2E = T(1.4426950408889634074);
template <class T>
constexpr T kLn2 = T(0.69314718055994530942);

// One head of the task: where its numbers are.
template <class T>
struct Head {
  Rows<T> query, key, value;
  T* output;
  int64_t output_row;  // stride of its tokens
  T* lse;
  const T* table;
  const T* bias;
  int64_t row;  // number of the head among those of all batch rows

  Head(const Attention& task, int64_t b, int64_t h)
      : query(task.query, task.dtype, b, h, task.dim),
        key(task.key, task.dtype, b, h / (task.heads / task.kv_heads), task.dim),
        value(task.value, task.dtype, b, h / (task.heads / task.kv_heads), task.value_dim),
        output(row_at<T>(task.output, b, h)),
        output_row(task.output.token),
        lse(static_cast<T*>(task.lse) + (b * task.heads + h) * task.queries),
        table(task.table ? static_cast<const T*>(task.table) + h * task.table_head : nullptr),
        bias(task.bias ? static_cast<const T*>(task.bias) + b * task.bias_batch + h * task.bias_head : nullptr),
        row(b * task.heads + h) {}
};

// Neighbouring keys of a block that are seen by the same vectors of queries, or by some of their lanes: of a triangle
// only the steps of a staircase are computed.
struct Strip {
  int32_t first, count;  // keys
  int32_t low, high;     // vectors of queries
};

// The next keys of a tile, from as many runs as fit. Keys that all queries see come first, ragged ones after them.
template <class T>
struct Keys {
  const T** key;
  const T** value;
  uint64_t* word;
  int32_t* token;
  T* key_room;    // for rows that had to be converted; null where none have
  T* value_room;
  Strip* strip;
  int64_t most;   // keys that fit
  int64_t count = 0;
  int64_t whole = 0;  // keys without a mask
  int32_t strips = 0;

  static int64_t room(const Attention& task, int64_t most) {
    const bool half = task.dtype == DType::kBFloat16 || task.dtype == DType::kFloat16;
    return 2 * Arena::room<T*>(most) + Arena::room<uint64_t>(most) + Arena::room<int32_t>(most) +
           Arena::room<Strip>(most + 1) +
           (half ? Arena::room<T>(most * task.dim) + Arena::room<T>(most * task.value_dim) : 0);
  }
  Keys(Arena& arena, const Attention& task, int64_t gemm)
      : key(arena.take<const T*>(gemm)),
        value(arena.take<const T*>(gemm)),
        word(arena.take<uint64_t>(gemm)),
        token(arena.take<int32_t>(gemm)),
        key_room(nullptr),
        value_room(nullptr),
        strip(arena.take<Strip>(gemm + 1)),
        most(gemm) {
    if (task.dtype == DType::kBFloat16 || task.dtype == DType::kFloat16) {
      key_room = arena.take<T>(gemm * task.dim);
      value_room = arena.take<T>(gemm * task.value_dim);
    }
  }
};

// Walks over the runs of a tile in blocks of nearly equal size.
class Walk {
 public:
  Walk(const Tile& tile, int64_t most) : tile_(tile) {
    for (int32_t r = 0; r < tile.runs; ++r) left_ += tile.run[r].count;
    blocks_ = (left_ + most - 1) / most;
  }
  bool more() const { return left_ > 0; }

  template <class T>
  void next(const Head<T>& head, const uint64_t* masks, Keys<T>& keys) {
    // Multiples of four keys fill the register tiles of the products.
    int64_t size = (left_ + blocks_ - 1) / blocks_;
    size = size + 3 < keys.most ? (size + 3) / 4 * 4 : keys.most;
    if (size > left_) size = left_;
    --blocks_;
    left_ -= size;
    keys.count = size;
    keys.whole = size;
    for (int64_t n = 0; n < size;) {
      const Run& run = tile_.run[run_];
      int64_t here = run.count - at_;
      if (here > size - n) here = size - n;
      int32_t token = run.start + static_cast<int32_t>(at_) * run.step;
      if (head.key.direct) {
        const char* key = head.key.base + token * head.key.stride;
        const char* value = head.value.base + token * head.value.stride;
        const int64_t key_step = run.step * head.key.stride, value_step = run.step * head.value.stride;
        for (int64_t i = 0; i < here; ++i) {
          keys.key[n + i] = reinterpret_cast<const T*>(key + i * key_step);
          keys.value[n + i] = reinterpret_cast<const T*>(value + i * value_step);
        }
      } else {
        for (int64_t i = 0; i < here; ++i) {
          keys.key[n + i] = head.key.row(token + i * run.step, keys.key_room + (n + i) * head.key.dim);
          keys.value[n + i] = head.value.row(token + i * run.step, keys.value_room + (n + i) * head.value.dim);
        }
      }
      for (int64_t i = 0; i < here; ++i) keys.token[n + i] = token + static_cast<int32_t>(i) * run.step;
      if (run.mask >= 0) {
        if (keys.whole > n) keys.whole = n;
        for (int64_t i = 0; i < here; ++i) keys.word[n + i] = masks[run.mask + at_ + i];
      }
      n += here;
      at_ += here;
      if (at_ == run.count) {
        ++run_;
        at_ = 0;
      }
    }
    cut<T>(keys, (tile_.queries + kLanes<T> - 1) / kLanes<T>);
  }

 private:
  // Strips of at least eight keys: shorter ones would cost more than they spare.
  template <class T>
  static void cut(Keys<T>& keys, int32_t vectors) {
    keys.strips = 0;
    if (keys.whole) keys.strip[keys.strips++] = Strip{0, static_cast<int32_t>(keys.whole), 0, vectors};
    if (vectors == 1) {
      const Strip rest{static_cast<int32_t>(keys.whole), static_cast<int32_t>(keys.count - keys.whole), 0, 1};
      if (rest.count) keys.strip[keys.strips++] = rest;
      return;
    }
    for (int64_t j = keys.whole; j < keys.count; ++j) {
      const uint64_t word = keys.word[j];
      const int32_t low = word ? __builtin_ctzll(word) / kLanes<T> : 0;
      const int32_t high = word ? (63 - __builtin_clzll(word)) / kLanes<T> + 1 : 0;
      Strip* last = j > keys.whole ? keys.strip + keys.strips - 1 : nullptr;
      if (last && (last->count < 8 || !word || (last->low == low && last->high == high))) {
        ++last->count;
        if (!word) continue;
        if (low < last->low || last->high == 0) last->low = low;
        if (high > last->high) last->high = high;
      } else {
        keys.strip[keys.strips++] = Strip{static_cast<int32_t>(j), 1, low, high};
      }
    }
  }

  const Tile& tile_;
  int64_t left_ = 0, blocks_ = 0, at_ = 0;
  int32_t run_ = 0;
};

// Where the bias of a tile's queries stands.
template <class T>
struct TileBias {
  const T* table;
  int64_t size;
  const int32_t* key_code;
  bool neighbours = false;  // whether the codes of the queries follow one another
  int32_t code[kTallest<T>] = {};
  const T* tensor;
  int64_t stride;  // of keys
  int64_t place[kTallest<T>] = {};

  TileBias(const Attention& task, const Head<T>& head, const Tile& tile, int64_t width)
      : table(head.table), size(task.table_size), key_code(task.key_code), tensor(head.bias), stride(task.bias_key) {
    for (int64_t lane = 0; lane < width; ++lane) {
      const int32_t query = tile.query[lane < tile.queries ? lane : tile.queries - 1];
      if (table) code[lane] = task.query_code[query];
      if (tensor) place[lane] = query * task.bias_query;
    }
    if (table) {
      neighbours = true;
      for (int64_t lane = 1; lane < width; ++lane) neighbours &= lane >= tile.queries || code[lane] == code[0] + lane;
    }
  }

  // The bias of one key for the queries of one vector.
  REGARD_INLINE Vec<T> of(int32_t token, int first) const {
    constexpr int L = kLanes<T>;
    Vec<T> sum = Vec<T>{};
    if (table) {
      const int64_t key = key_code[token];
      const int64_t at = code[first] - key;
      if (neighbours && at >= 0 && at + L <= size) {
        sum = load<T>(table + at);
      } else {
        T some[L];
        for (int lane = 0; lane < L; ++lane) {
          const int64_t entry = code[first + lane] - key;
          some[lane] = entry >= 0 && entry < size ? table[entry] : T(0);
        }
        sum = load<T>(some);
      }
    }
    if (tensor) {
      T some[L];
      for (int lane = 0; lane < L; ++lane) some[lane] = tensor[place[first + lane] + token * stride];
      sum += load<T>(some);
    }
    return sum;
  }
};

// Adds the bias (in powers of two, as all scores here) and hides what the pattern hides, for N vectors of queries from
// vector `low` on; `top` becomes the largest of each lane. `least` becomes the smallest content score that the pattern
// shows: once the bias is added, minus infinity would no longer tell a hidden pair from a key that is infinite.
template <class T, int N, int W>
REGARD_INLINE void dress(const Keys<T>& keys, const Strip& strip, const TileBias<T>* bias, T* scores, Vec<T>* top,
                         Vec<T>& least) {
  constexpr int L = kLanes<T>;
  const Vec<T> hidden = infinity<T>(-1);
  const bool ragged = strip.first >= keys.whole;
  for (int64_t j = strip.first; j < strip.first + strip.count; ++j) {
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) {
      const int first = (strip.low + n) * L;
      Vec<T> score = load<T>(scores + j * W + first);
      Vec<T> content = score;
      if (bias) {
        // Minus infinity hides a pair, even if its content is infinite: their sum would be NaN.
        const Vec<T> extra = bias->of(keys.token[j], first);
        score = choose<T>(extra == hidden, hidden, score + extra * splat<T>(kLog2E<T>));
      }
      if (ragged) {
        const IntVec<T> shown = spread<T>(keys.word[j] >> first);
        content = choose<T>(shown, content, Vec<T>{});
        score = choose<T>(shown, score, hidden);
      }
      least = smaller<T>(least, content);
      store<T>(scores + j * W + first, score);
      top[n] = larger<T>(top[n], score);
    }
  }
}

// Whether content is all there is to the scores of a strip.
template <class T>
REGARD_INLINE bool is_plain(const Keys<T>& keys, const Strip& strip, const TileBias<T>* bias) {
  return !bias && strip.first < keys.whole;
}

// The scores of one strip, dressed; `top` (of all vectors) rises to the largest, `least` falls to the smallest content
// score of those that are not plain: without bias and pattern it can be read from the scores themselves.
template <class T, int N, int W>
REGARD_INLINE void score_strip(const Keys<T>& keys, const Strip& strip, const TileBias<T>* bias, int64_t dim, const T* packed,
                               T scale, T* scores, Vec<T>* top, Vec<T>& least) {
  constexpr int L = kLanes<T>;
  const bool plain = is_plain(keys, strip, bias);
  Vec<T> best[N], unused[N];
  for (int n = 0; n < N; ++n) best[n] = unused[n] = top[strip.low + n];
  row_product<T, N, W>(keys.key + strip.first, strip.count, dim, packed + strip.low * L, scale,
                       scores + strip.first * W + strip.low * L, plain ? best : unused);
  if (!plain) dress<T, N, W>(keys, strip, bias, scores, best, least);
  for (int n = 0; n < N; ++n) top[strip.low + n] = best[n];
}

// Calls work.template run<N>(strip) for every strip of a block, with N its vectors out of V.
template <int V, class T, class Work>
REGARD_INLINE void each_strip(const Keys<T>& keys, Work& work) {
  for (int32_t n = 0; n < keys.strips; ++n) {
    const Strip& strip = keys.strip[n];
    switch (strip.high - strip.low) {
      case 1: work.template run<1>(strip); break;
      case 2:
        if constexpr (V >= 2) work.template run<2>(strip);
        break;
      case 3:
        if constexpr (V >= 3) work.template run<3>(strip);
        break;
      default: break;  // hidden from all queries
    }
  }
}

// Calls work.template run<V>() for the vectors that so many queries need.
template <class T, class Work>
REGARD_INLINE void with_vectors(int64_t queries, Work& work) {
  const int64_t vectors = (queries + kLanes<T> - 1) / kLanes<T>;
  if (vectors <= 1)
    work.template run<1>();
  else if (vectors == 2)
    work.template run<2>();
  else
    work.template run<3>();
}

}  // namespace REGARD_ISA
}  // namespace regard
