// Softmax attention, forward: one pass over the keys of each tile, scores that never leave the cache.
//
// The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022, algorithm 1): a running
// maximum m, a running sum l of 2^(s - m), and an output that is rescaled when the maximum moves. Scores are kept in powers
// of two, s = log2(e) (beta q.k + bias), which saves a product in every exponential.
#pragma once

#include "dropout.h"

namespace regard {
namespace REGARD_ISA {

constexpr int64_t kForwardKeys = 208;  // in a block: its scores, queries and output just about fit the first cache

template <class T>
struct Forward {
  const Attention& task;
  const Head<T>& head;
  const Tile& tile;
  bool resumes;
  Keys<T>& keys;
  T* packed;   // (dim, query)
  T* scores;   // (key, query)
  T* output;   // (value_dim, query)
  T* rooms;    // rows of queries that had to be converted
  bool finite = true;

  static int64_t room(const Attention& task) {
    constexpr int64_t W = kTallest<T>;
    return Arena::room<T>(task.dim * W) + Arena::room<T>(kForwardKeys * W) + Arena::room<T>(task.value_dim * W) +
           Arena::room<T>(task.dim * W) + Keys<T>::room(task, kForwardKeys);
  }

  template <int V>
  void run() {
    constexpr int L = kLanes<T>, W = V * L;
    const T* rows[W];
    // Lanes beyond the last query repeat it; their results are not used.
    for (int lane = 0; lane < W; ++lane)
      rows[lane] = lane < tile.queries ? head.query.row(tile.query[lane], rooms + lane * task.dim) : rows[lane - 1];
    pack<T>(rows, W, task.dim, packed);
    Vec<T> top[V], sum[V];
    begin<V>(top, sum);
    const T scale = static_cast<T>(task.scale * 1.4426950408889634074);
    TileDropout<T> drawn, *dropout = nullptr;
    if (task.drop_below) {
      drawn.begin(task, head.row, tile, W);
      dropout = &drawn;
    }
    const bool biased = head.table || head.bias;
    if (biased) {
      const TileBias<T> bias(task, head, tile, W);
      blocks<V>(&bias, dropout, scale, top, sum);
    } else {
      blocks<V>(nullptr, dropout, scale, top, sum);
    }
    end<V>(top, sum);
  }

 private:
  template <int V>
  REGARD_INLINE void begin(Vec<T> (&top)[V], Vec<T> (&sum)[V]) {
    constexpr int L = kLanes<T>, W = V * L;
    for (int v = 0; v < V; ++v) {
      top[v] = infinity<T>(-1);
      sum[v] = Vec<T>{};
    }
    if (!resumes) {
      for (int64_t n = 0; n < task.value_dim * W; n += L) store<T>(output + n, Vec<T>{});
      return;
    }
    // What earlier parts saw counts as one key: its score is their log-sum-exp, its value their output.
    const T* rows[W];
    for (int lane = 0; lane < W; ++lane) {
      const int32_t query = tile.query[lane < tile.queries ? lane : tile.queries - 1];
      rows[lane] = head.output + query * head.output_row;
      const T before = head.lse[query];
      top[lane / L][lane % L] = before * kLog2E<T>;
      sum[lane / L][lane % L] = before == -std::numeric_limits<T>::infinity() ? T(0) : T(1);
    }
    pack<T>(rows, W, task.value_dim, output);
  }

  template <int V>
  struct Scoring {
    const Forward& all;
    const TileBias<T>* bias;
    T scale;
    Vec<T>* top;
    Vec<T>& least;
    template <int N>
    REGARD_INLINE void run(const Strip& strip) {
      score_strip<T, N, V * kLanes<T>>(all.keys, strip, bias, all.task.dim, all.packed, scale, all.scores, top, least);
    }
  };

  // Scores become weights 2^(score - shift), which are added up and multiplied by the values.
  template <int V>
  struct Weighing {
    const Forward& all;
    const TileBias<T>* bias;
    TileDropout<T>* dropout;
    const Vec<T>* shift;
    Vec<T>* sum;
    Vec<T>& least;
    template <int N>
    REGARD_INLINE void run(const Strip& strip) {
      constexpr int L = kLanes<T>, W = V * L;
      T* first = all.scores + strip.first * W + strip.low * L;
      Vec<T> total[N], less[N], small = Vec<T>{};
#pragma GCC unroll 3
      for (int n = 0; n < N; ++n) {
        total[n] = sum[strip.low + n];
        less[n] = shift[strip.low + n];
      }
      // A visible score of minus infinity has no weight and would pass unseen: it is told by the smallest.
      for (int64_t j = 0; j < strip.count; ++j) {
        Vec<T> lowest = load<T>(first + j * W);
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) {
          const Vec<T> score = load<T>(first + j * W + n * L);
          const Vec<T> weight = exp2<T>(score - less[n]);
          if (n) lowest = smaller<T>(lowest, score);
          total[n] += weight;
          store<T>(first + j * W + n * L, weight);
        }
        small = smaller<T>(small, lowest);
      }
      if (is_plain(all.keys, strip, bias)) least = smaller<T>(least, small);
#pragma GCC unroll 3
      for (int n = 0; n < N; ++n) sum[strip.low + n] = total[n];
      if (dropout) drop_weights<T, N, W>(*dropout, all.keys, strip, first);
      column_product<T, N, W>(all.keys.value + strip.first, strip.count, all.task.value_dim, first,
                              all.output + strip.low * L);
    }
  };

  template <int V>
  REGARD_INLINE void blocks(const TileBias<T>* bias, TileDropout<T>* dropout, T scale, Vec<T> (&top)[V],
                            Vec<T> (&sum)[V]) {
    constexpr int L = kLanes<T>, W = V * L;
    bool fresh = !resumes;
    Vec<T> least = Vec<T>{};
    for (Walk walk(tile, kForwardKeys); walk.more(); fresh = false) {
      walk.next(head, task.masks, keys);
      Vec<T> best[V], shift[V];
      for (int v = 0; v < V; ++v) best[v] = top[v];
      Scoring<V> scoring{*this, bias, scale, best, least};
      each_strip<V>(keys, scoring);
      for (int v = 0; v < V; ++v) shift[v] = choose<T>(best[v] == infinity<T>(-1), Vec<T>{}, best[v]);
      if (!fresh) {
        Vec<T> factor[V];
        for (int v = 0; v < V; ++v) {
          factor[v] = exp2<T>(top[v] - shift[v]);
          sum[v] *= factor[v];
        }
        for (int64_t d = 0; d < task.value_dim; ++d)
#pragma GCC unroll 3
          for (int v = 0; v < V; ++v) {
            T* at = output + d * W + v * L;
            store<T>(at, load<T>(at) * factor[v]);
          }
      }
      for (int v = 0; v < V; ++v) top[v] = best[v];
      Weighing<V> weighing{*this, bias, dropout, shift, sum, least};
      each_strip<V>(keys, weighing);
    }
    for (int lane = 0; lane < L; ++lane) finite &= least[lane] != -std::numeric_limits<T>::infinity();
  }

  template <int V>
  REGARD_INLINE void end(const Vec<T> (&top)[V], const Vec<T> (&sum)[V]) {
    constexpr int L = kLanes<T>, W = V * L;
    alignas(64) T factor[W];
    alignas(64) T total[W];
    Vec<T> check = Vec<T>{};
    for (int v = 0; v < V; ++v) {
      const IntVec<T> nothing = sum[v] == Vec<T>{};
      const Vec<T> safe = choose<T>(nothing, splat<T>(1), sum[v]);
      store<T>(factor + v * L, choose<T>(nothing, Vec<T>{}, splat<T>(1) / safe));
      const Vec<T> logarithm = (top[v] + log2<T>(safe)) * splat<T>(kLn2<T>);
      store<T>(total + v * L, choose<T>(nothing, infinity<T>(-1), logarithm));
      check += sum[v] - sum[v];
    }
    for (int64_t n = 0; n < task.value_dim * W; n += L) {
      const Vec<T> x = load<T>(output + n);
      check += x - x;  // zero, unless x is infinite or NaN
    }
    finite &= sum_of<T>(check) == T(0);
    T* rows[W];
    for (int q = 0; q < W && q < tile.queries; ++q) {
      rows[q] = head.output + tile.query[q] * head.output_row;
      head.lse[tile.query[q]] = total[q];
    }
    unpack<T, false>(output, tile.queries, W, task.value_dim, factor, rows);
  }
};

// Prefetches the next tile's queries, and for the lines its output will be written to, while this one is computed.
template <class T>
REGARD_INLINE void fetch(const Tile& tile, const Head<T>& head, const Attention& task) {
  for (int32_t q = 0; q < tile.queries; ++q) {
    const char* row = head.query.base + tile.query[q] * head.query.stride;
    for (int64_t byte = 0; byte < task.dim * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
    const T* to = head.output + tile.query[q] * head.output_row;
    for (int64_t d = 0; d < task.value_dim; d += 64 / sizeof(T)) __builtin_prefetch(to + d, 1);
  }
}

template <class T>
int32_t run_forward(const Attention& task) {
  const Program program(task.program);
  if (program.tallest() > kTallest<T>) return kTooTall;
  int32_t answers[3] = {};
  const int64_t threads = program.threads(task, task.dim + task.value_dim);
  if (program.resumes()) {
    // No key has been processed yet.
    const int64_t rows = task.batch * task.heads * task.queries;
    for (int64_t n = 0; n < rows; ++n) {
      T* row = row_at<T>(task.output, n / task.queries / task.heads, n / task.queries % task.heads, n % task.queries);
      std::memset(row, 0, task.value_dim * sizeof(T));
      static_cast<T*>(task.lse)[n] = -std::numeric_limits<T>::infinity();
    }
  }
  for (int32_t part = 0; part < program.parts(); ++part) {
    // Tiles are independent: any division among threads gives the same bits. A piece is worth the trouble of fetching.
    int32_t most = 0;
    for (int32_t row = 0; row < program.lists(part); ++row) {
      const int32_t tiles = program.list(part, row).tiles;
      most = tiles > most ? tiles : most;
    }
    const int64_t heads = task.batch * task.heads;
    int64_t pieces = heads >= 8 * threads ? 1 : (8 * threads + heads - 1) / (heads ? heads : 1);
    if (pieces > most) pieces = most;
    auto work = [&](int64_t item) {
      const int64_t piece = item % pieces, h = item / pieces % task.heads, b = item / pieces / task.heads;
      const List list = program.list(part, b);
      const int64_t first = list.tiles * piece / pieces, last = list.tiles * (piece + 1) / pieces;
      if (first == last) return;
      Arena arena;
      if (!arena.open(Forward<T>::room(task))) {
        raise(answers[kNoMemory - 1]);
        return;
      }
      Keys<T> keys(arena, task, kForwardKeys);
      T* packed = arena.take<T>(task.dim * kTallest<T>);
      T* scores = arena.take<T>(kForwardKeys * kTallest<T>);
      T* output = arena.take<T>(task.value_dim * kTallest<T>);
      T* rooms = arena.take<T>(task.dim * kTallest<T>);
      const Head<T> head(task, b, h);
      for (int64_t number = first; number < last; ++number) {
        const Tile tile = program.tile(list, static_cast<int32_t>(number));
        if (number + 1 < last) fetch(program.tile(list, static_cast<int32_t>(number + 1)), head, task);
        Forward<T> forward{task, head, tile, program.resumes(), keys, packed, scores, output, rooms};
        with_vectors<T>(tile.queries, forward);
        if (!forward.finite) raise(answers[kNotFinite - 1]);
      }
    };
    parallel(threads, heads * pieces, work);
  }
  return worst(answers);
}

}  // namespace REGARD_ISA
}  // namespace regard
