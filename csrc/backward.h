// Softmax attention, backward: the weights are computed again from the log-sum-exp (FlashAttention, Dao et al. 2022,
// algorithm 4). With P the weights, g the gradient of the output and delta = sum_d output[d] g[d]:
//
//   dV[j] += P[j] g        dP[j] = V[j] . g        dS = P (dP - delta)
//   dQ += beta dS K        dK[j] += beta dS[j] Q   dbias = dS
//
// Dropout multiplies a weight by a factor f, which is drawn again: dV[j] += f P[j] g and dP[j] = f V[j] . g.
//
// Tiles of many queries add to the same keys. A segment of tiles adds to memory of its own thread, and segments are
// summed in their order; the segments are those of the program, so no result depends on the number of threads.
#pragma once

#include "dropout.h"

namespace regard {
namespace REGARD_ISA {

constexpr int64_t kBackwardKeys = 64;  // in a block: two squares of scores have to fit the first cache

// What one thread adds up for one segment.
template <class T>
struct Shares {
  T* key;    // (key, dim), rows padded to whole vectors
  T* value;  // (key, value_dim)
  T* table;  // (entry)
  int32_t low, high;
  int64_t dim, value_dim;  // padded
};

template <class T>
struct Backward {
  const Attention& task;
  const Head<T>& head;
  const Tile& tile;
  bool resumes;
  const Shares<T>& shares;
  const T* grad_output;  // of this head
  T* query_grad;     // of this head
  T* bias_grad;      // of this head, or null
  Keys<T>& keys;
  T* packed;         // queries (dim, query)
  T* packed_grad;   // gradient of the output (value_dim, query)
  T* rows;           // queries (query, dim), padded
  T* grad_rows;     // gradient of the output (query, value_dim), padded
  T* weights;        // (key, query)
  T* score_grads;         // (key, query)
  T* output;         // gradient of the queries (dim, query)
  T** key_totals;
  T** value_totals;
  bool finite = true;

  static int64_t room(const Attention& task) {
    constexpr int64_t W = kTallest<T>, L = kLanes<T>;
    return 2 * Arena::room<T>(task.dim * W) + Arena::room<T>(task.value_dim * W) +
           Arena::room<T>(rounded_up(task.dim, L) * W) + Arena::room<T>(rounded_up(task.value_dim, L) * W) +
           2 * Arena::room<T>(kBackwardKeys * W) + 2 * Arena::room<T*>(kBackwardKeys) +
           Keys<T>::room(task, kBackwardKeys);
  }

  template <int V>
  void run() {
    constexpr int L = kLanes<T>, W = V * L;
    const T scale = static_cast<T>(task.scale * 1.4426950408889634074);
    Vec<T> lse[V], delta[V];
    begin<V>(lse, delta);
    TileDropout<T> drawn, *dropout = nullptr;
    if (task.drop_below) {
      drawn.begin(task, head.row, tile, W);
      dropout = &drawn;
    }
    const bool biased = head.table || head.bias;
    if (biased) {
      const TileBias<T> bias(task, head, tile, W);
      blocks<V>(&bias, dropout, scale, lse, delta);
    } else {
      blocks<V>(nullptr, dropout, scale, lse, delta);
    }
    end<V>();
  }

 private:
  template <int V>
  REGARD_INLINE void begin(Vec<T> (&lse)[V], Vec<T> (&delta)[V]) {
    constexpr int L = kLanes<T>, W = V * L;
    const int64_t dim = shares.dim, value_dim = shares.value_dim;
    const T* row[W];
    const T* score_grad[W];
    for (int lane = 0; lane < W; ++lane) {
      const int32_t q = lane < tile.queries ? lane : tile.queries - 1;
      const int64_t query = tile.query[q];
      if (lane == q) {
        // Copies with padding: products over queries read whole vectors of them.
        T* mine = rows + lane * dim;
        convert<T>(head.query.base + query * head.query.stride, task.dtype, task.dim, mine);
        for (int64_t d = task.dim; d < dim; ++d) mine[d] = T(0);
        T* grad_row = grad_rows + lane * value_dim;
        std::memcpy(grad_row, grad_output + query * task.grad_output.token, task.value_dim * sizeof(T));
        for (int64_t d = task.value_dim; d < value_dim; ++d) grad_row[d] = T(0);
        const T* out = head.output + query * head.output_row;
        Vec<T> some = Vec<T>{};
        int64_t d = 0;
        for (; d + L <= task.value_dim; d += L) some += load<T>(out + d) * load<T>(grad_row + d);
        T dot = sum_of<T>(some);
        for (; d < task.value_dim; ++d) dot += out[d] * grad_row[d];
        delta[lane / L][lane % L] = dot;
        const T before = head.lse[query];
        // A query that saw nothing has weights of zero: 2^(score - inf).
        lse[lane / L][lane % L] = before == -std::numeric_limits<T>::infinity() ? std::numeric_limits<T>::infinity()
                                                                                 : before * kLog2E<T>;
      } else {
        delta[lane / L][lane % L] = T(0);
        lse[lane / L][lane % L] = std::numeric_limits<T>::infinity();
      }
      row[lane] = rows + q * dim;
      score_grad[lane] = grad_rows + q * value_dim;
    }
    // An output that is not finite shows here, even where its gradient is not needed.
    Vec<T> check = Vec<T>{};
    for (int v = 0; v < V; ++v) check += delta[v] - delta[v];
    finite &= sum_of<T>(check) == T(0);
    pack<T>(row, W, task.dim, packed);
    pack<T>(score_grad, W, task.value_dim, packed_grad);
    for (int64_t n = 0; n < task.dim * W; n += L) store<T>(output + n, Vec<T>{});
  }

  // One strip of a block: its weights and their gradients, and what these add to values, keys and queries.
  template <int V>
  struct Strips {
    Backward& all;
    const TileBias<T>* bias;
    TileDropout<T>* dropout;
    T scale;
    const Vec<T>* lse;
    const Vec<T>* delta;
    Vec<T> check = Vec<T>{};

    template <int N>
    REGARD_INLINE void run(const Strip& strip) {
      constexpr int L = kLanes<T>, W = V * L;
      const Attention& task = all.task;
      const int64_t at = strip.first * W + strip.low * L;
      T* weights = all.weights + at;
      T* score_grads = all.score_grads + at;
      Vec<T> unused[V];
      for (int v = 0; v < V; ++v) unused[v] = Vec<T>{};
      Vec<T> least = Vec<T>{};  // the forward pass has checked it
      score_strip<T, N, W>(all.keys, strip, bias, task.dim, all.packed, scale, all.weights, unused, least);
      row_product<T, N, W>(all.keys.value + strip.first, strip.count, task.value_dim, all.packed_grad + strip.low * L,
                           T(1), score_grads, unused);
      if (dropout)
        weigh<N, true>(strip, weights, score_grads);
      else
        weigh<N, false>(strip, weights, score_grads);
      const int64_t queries = all.tile.queries - strip.low * L < N * L ? all.tile.queries - strip.low * L : N * L;
      outer_product<T>(all.value_totals + strip.first, strip.count, all.shares.value_dim, weights, W, queries,
                       all.grad_rows + strip.low * L * all.shares.value_dim, all.shares.value_dim);
      if (bias) {
        all.template learn<W>(*bias, strip, queries);
        for (int64_t j = 0; j < strip.count; ++j)
          for (int n = 0; n < N; ++n) {
            const Vec<T> score_grad = load<T>(score_grads + j * W + n * L);
            check += score_grad - score_grad;
          }
      }
      if (task.scale == 0) return;
      column_product<T, N, W>(all.keys.key + strip.first, strip.count, task.dim, score_grads, all.output + strip.low * L);
      outer_product<T>(all.key_totals + strip.first, strip.count, all.shares.dim, score_grads, W, queries,
                       all.rows + strip.low * L * all.shares.dim, all.shares.dim);
    }

    // Scores become weights, after dropout, and gradients of weights become those of scores.
    template <int N, bool kDrops>
    REGARD_INLINE void weigh(const Strip& strip, T* weights, T* score_grads) {
      constexpr int L = kLanes<T>, W = V * L;
      if constexpr (kDrops) dropout->restrict_to(strip.low, N);
      for (int64_t j = 0; j < strip.count; ++j) {
        if constexpr (kDrops) dropout->prepare(all.keys.token[strip.first + j]);
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) {
          const int64_t here = j * W + n * L;
          // A weight is at most one, however far huge scores are rounded.
          const Vec<T> less = load<T>(weights + here) - lse[strip.low + n];
          const Vec<T> weight = exp2<T>(choose<T>(less > Vec<T>{}, Vec<T>{}, less));
          Vec<T> kept = weight, grad = load<T>(score_grads + here);
          if constexpr (kDrops) {
            const Vec<T> factor = dropout->factor(strip.low + n);
            kept *= factor;
            grad *= factor;
          }
          const Vec<T> score_grad = weight * (grad - delta[strip.low + n]);
          store<T>(weights + here, kept);
          store<T>(score_grads + here, score_grad);
        }
      }
    }
  };

  template <int V>
  REGARD_INLINE void blocks(const TileBias<T>* bias, TileDropout<T>* dropout, T scale, const Vec<T> (&lse)[V],
                            const Vec<T> (&delta)[V]) {
    Strips<V> strips{*this, bias, dropout, scale, lse, delta};
    for (Walk walk(tile, kBackwardKeys); walk.more();) {
      walk.next(head, task.masks, keys);
      for (int64_t j = 0; j < keys.count; ++j) {
        key_totals[j] = shares.key + (keys.token[j] - shares.low) * shares.dim;
        value_totals[j] = shares.value + (keys.token[j] - shares.low) * shares.value_dim;
      }
      each_strip<V>(keys, strips);
    }
    finite &= sum_of<T>(strips.check) == T(0);
  }

  // The gradient of the bias is that of its score.
  template <int W>
  void learn(const TileBias<T>& bias, const Strip& strip, int64_t queries) {
    const int first = strip.low * kLanes<T>;
    for (int64_t j = strip.first; j < strip.first + strip.count; ++j) {
      const T* score_grad = score_grads + j * W + first;
      const int32_t token = keys.token[j];
      if (shares.table)
        for (int64_t q = 0; q < queries; ++q) {
          const int64_t entry = bias.code[first + q] - static_cast<int64_t>(task.key_code[token]);
          if (entry >= 0 && entry < task.table_size) shares.table[entry] += score_grad[q];
        }
      if (bias_grad)
        for (int64_t q = 0; q < queries; ++q) bias_grad[bias.place[first + q] + token * bias.stride] += score_grad[q];
    }
  }

  template <int V>
  REGARD_INLINE void end() {
    constexpr int L = kLanes<T>, W = V * L;
    alignas(64) T factor[W];
    for (int lane = 0; lane < W; ++lane) factor[lane] = static_cast<T>(task.scale);
    Vec<T> check = Vec<T>{};
    for (int64_t n = 0; n < task.dim * W; n += L) {
      const Vec<T> x = load<T>(output + n);
      check += x - x;
    }
    finite &= sum_of<T>(check) == T(0);
    T* to[W];
    for (int q = 0; q < W && q < tile.queries; ++q) to[q] = query_grad + tile.query[q] * task.query_grad.token;
    if (resumes)
      unpack<T, true>(output, tile.queries, W, task.dim, factor, to);
    else
      unpack<T, false>(output, tile.queries, W, task.dim, factor, to);
  }
};

// Hands the rows of a segment over: to[token][d] = or += from[token][d] * factor. The first one also clears the rows that
// it has not touched. Returns whether all numbers are finite.
template <class T>
bool hand_over(const T* from, int64_t padded, int32_t low, int32_t high, T factor, T* to, int64_t row, int64_t dim,
               int64_t tokens, bool first) {
  if (first) {
    for (int64_t token = 0; token < tokens; ++token)
      if (token < low || token >= high) std::memset(to + token * row, 0, dim * sizeof(T));
  }
  constexpr int L = kLanes<T>;
  Vec<T> check = Vec<T>{};
  T rest = T(0);
  for (int64_t token = low; token < high; ++token) {
    const T* source = from + (token - low) * padded;
    T* target = to + token * row;
    int64_t d = 0;
    for (; d + L <= dim; d += L) {
      const Vec<T> x = load<T>(source + d) * splat<T>(factor);
      store<T>(target + d, first ? x : load<T>(target + d) + x);
      check += x - x;
    }
    for (; d < dim; ++d) {
      const T x = source[d] * factor;
      target[d] = first ? x : target[d] + x;
      rest += x - x;
    }
  }
  return sum_of<T>(check) + rest == T(0);
}

template <class T>
class Way {
 public:
  Way(const Attention& task, const Program& program) : task_(task), program_(program) {
    group_ = task.heads / task.kv_heads;
    dim_ = rounded_up(task.dim, kLanes<T>);
    value_dim_ = rounded_up(task.value_dim, kLanes<T>);
    threads_ = program.threads(task, 3 * task.dim + 2 * task.value_dim);
  }

  int32_t run() {
    for (int32_t part = 0; part < program_.parts(); ++part) {
      int64_t most = 0;
      for (int32_t row = 0; row < program_.lists(part); ++row) {
        const int64_t segments = program_.list(part, row).segments;
        most = segments > most ? segments : most;
      }
      Turns turns(task_.batch * task_.kv_heads);
      if (!task_.bias_grad) {
        // The first segments of all heads, then the second ones: neighbours in this order do not wait for each other.
        const int64_t pairs = task_.batch * task_.kv_heads;
        auto work = [&](int64_t item) {
          const int64_t pair = item % pairs;
          segment(part, pair / task_.kv_heads, pair % task_.kv_heads, item / pairs, turns);
        };
        parallel(threads_, pairs * most, work);
        continue;
      }
      // The gradient of a bias that several rows or heads share is summed by one thread, in order.
      const int64_t rows = task_.bias_batch ? task_.batch : 1, heads = task_.bias_head ? task_.kv_heads : 1;
      auto work = [&](int64_t item) {
        for (int64_t b = item / heads; b < task_.batch; b += rows)
          for (int64_t k = item % heads; k < task_.kv_heads; k += heads)
            for (int64_t s = 0; s < most; ++s) segment(part, b, k, s, turns);
      };
      parallel(threads_, rows * heads, work);
    }
    if (task_.table_grad) add_rows();
    return worst(flags_);
  }

 private:
  void segment(int32_t part, int64_t b, int64_t k, int64_t number, Turns& turns) {
    const List list = program_.list(part, b);
    const int64_t place = b * task_.kv_heads + k;
    if (number >= list.segments) return;
    const Segment& here = list.segment[number];
    constexpr int64_t W = kTallest<T>;
    const int64_t range = here.high - here.low;
    Arena arena;
    if (!arena.open(Backward<T>::room(task_) + Arena::room<T>(range * dim_) + Arena::room<T>(range * value_dim_) +
                    Arena::room<T>(group_ * task_.table_size))) {
      raise(flags_[kNoMemory - 1]);
      turns.wait(place, number);
      turns.pass(place);
      return;
    }
    Keys<T> keys(arena, task_, kBackwardKeys);
    T* packed = arena.take<T>(task_.dim * W);
    T* packed_grad = arena.take<T>(task_.value_dim * W);
    T* rows = arena.take<T>(dim_ * W);
    T* grad_rows = arena.take<T>(value_dim_ * W);
    T* weights = arena.take<T>(kBackwardKeys * W);
    T* score_grads = arena.take<T>(kBackwardKeys * W);
    T* output = arena.take<T>(task_.dim * W);
    T** key_totals = arena.take<T*>(kBackwardKeys);
    T** value_totals = arena.take<T*>(kBackwardKeys);
    Shares<T> shares{arena.take<T>(range * dim_), arena.take<T>(range * value_dim_), nullptr, here.low, here.high,
                     dim_, value_dim_};
    std::memset(shares.key, 0, range * dim_ * sizeof(T));
    std::memset(shares.value, 0, range * value_dim_ * sizeof(T));
    T* tables = arena.take<T>(group_ * task_.table_size);
    if (task_.table_grad) std::memset(tables, 0, group_ * task_.table_size * sizeof(T));
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t h = k * group_ + g;
      const Head<T> head(task_, b, h);
      if (task_.table_grad) shares.table = tables + g * task_.table_size;
      T* bias_grad =
          task_.bias_grad ? static_cast<T*>(task_.bias_grad) + b * task_.bias_batch + h * task_.bias_head : nullptr;
      for (int32_t n = here.first; n < here.last; ++n) {
        const Tile tile = program_.tile(list, n);
        Backward<T> backward{task_, head, tile, program_.resumes(), shares,
                             row_at<const T>(task_.grad_output, b, h),
                             row_at<T>(task_.query_grad, b, h), bias_grad, keys, packed,
                             packed_grad, rows, grad_rows, weights, score_grads, output, key_totals, value_totals};
        with_vectors<T>(tile.queries, backward);
        if (!backward.finite) raise(flags_[kNotFinite - 1]);
      }
    }
    turns.wait(place, number);
    const bool first = part == 0 && number == 0;
    bool fine = hand_over<T>(shares.key, dim_, here.low, here.high, static_cast<T>(task_.scale),
                             row_at<T>(task_.key_grad, b, k), task_.key_grad.token, task_.dim, task_.keys, first);
    fine &= hand_over<T>(shares.value, value_dim_, here.low, here.high, T(1),
                         row_at<T>(task_.value_grad, b, k), task_.value_grad.token, task_.value_dim, task_.keys,
                         first);
    if (!fine) raise(flags_[kNotFinite - 1]);
    if (task_.table_grad) {
      T* total = static_cast<T*>(task_.table_grad) + place * group_ * task_.table_size;
      for (int64_t n = 0; n < group_ * task_.table_size; ++n) total[n] += tables[n];
    }
    turns.pass(place);
  }

  // table_slope (batch, head, entry): the first row becomes the sum of all.
  void add_rows() {
    T* total = static_cast<T*>(task_.table_grad);
    const int64_t entries = task_.table_size;
    auto work = [&](int64_t h) {
      for (int64_t b = 1; b < task_.batch; ++b)
        for (int64_t n = 0; n < entries; ++n) total[h * entries + n] += total[(b * task_.heads + h) * entries + n];
    };
    parallel(threads_, task_.heads, work);
  }

  const Attention& task_;
  const Program& program_;
  int64_t group_, dim_, value_dim_, threads_;
  int32_t flags_[3] = {};
};

template <class T>
int32_t run_backward(const Attention& task) {
  const Program program(task.program);
  if (program.tallest() > kTallest<T>) return kTooTall;
  if (program.resumes())
    for (int64_t b = 0; b < task.batch; ++b)
      for (int64_t h = 0; h < task.heads; ++h)
        for (int64_t n = 0; n < task.queries; ++n)
          std::memset(row_at<T>(task.query_grad, b, h, n), 0, task.dim * sizeof(T));
  return Way<T>(task, program).run();
}

}  // namespace REGARD_ISA
}  // namespace regard
