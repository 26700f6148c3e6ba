// Causal linear attention, forward: one sweep over the tokens for each key head.
#pragma once

#include "linear_attention_sweep.h"

namespace regard {
namespace REGARD_ISA {
namespace sweep {

// Division of many numbers by one. A product with the reciprocal, mended once, is the quotient at a third of the cost;
// where the reciprocal is not a normal number, as for sums of tiny features, it is a division.
template <class T>
struct Quotient {
  Vec<T> divisor, inverse;
  bool safe;

  explicit Quotient(T total) : divisor(splat<T>(total)), inverse(splat<T>(1 / total)) {
    const T size = total < 0 ? -total : total;
    safe = size > std::numeric_limits<T>::min() * 4 && size < 1 / (std::numeric_limits<T>::min() * 4);
  }
  REGARD_INLINE Vec<T> operator()(Vec<T> x) const {
    if (!safe) return x / divisor;
    const Vec<T> y = x * inverse;
    return y + (x - y * divisor) * inverse;
  }
};

// total[i] = a_i . norm + sum_j scores[i][j], the normalisers of a chunk, as many rows at once as a vector has lanes.
template <class T>
void sum_totals(const T* scores, const Panel<T>& a, const T* norm, int64_t count, T* total) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < count; first += L) {
    Vec<T> square[L];
    for (int r = 0; r < L; ++r) {
      const T* row = a.at + (first + r) * a.step;
      Vec<T> sum{};
#pragma GCC unroll 8
      for (int n = 0; n < kChunk<T>; n += L) sum += load<T>(scores + (first + r) * kChunk<T> + n);
      for (int64_t n = 0; n < a.step; n += L) sum += load<T>(row + n) * load<T>(norm + n);
      square[r] = sum;
    }
    transpose<T>(square);
#pragma GCC unroll 16
    for (int r = 1; r < L; ++r) square[0] += square[r];
    store<T>(total + first, square[0]);
  }
}

// One key head and the query heads that share it; columns first to first + columns of the values.
template <class T>
struct Forward {
  const LinearAttention& task;
  int64_t batch, kv_head, first, columns;
  Vec<T> bad{};

  bool run() {
    constexpr int C = kChunk<T>;
    const int64_t dim = task.dim, wide = rounded_up(dim, kLanes<T>), value_wide = rounded_up(task.value_dim, kLanes<T>);
    const int64_t bytes = 2 * Arena::room<T>(C * wide) + Arena::room<T>(C * value_wide) + Arena::room<T>(wide);
    Arena arena;
    if (!arena.open(bytes + Causal<T>::room(dim, columns))) return false;
    const Panel<T> query{arena.take<T>(C * wide), wide}, key{arena.take<T>(C * wide), wide};
    const Panel<T> value{arena.take<T>(C * value_wide), value_wide};
    T* norm = arena.take<T>(wide);
    std::memset(query.at, 0, bytes);  // what pads a row is zero from now on
    const Causal<T> sums(arena, dim, first, columns);

    read_state(sums.state, norm);
    const Source<T> keys(task.key, batch, kv_head, dim, task.map, task.key_scale);
    const Source<T> values(task.value, batch, kv_head, task.value_dim);
    const int64_t group = task.heads / task.kv_heads;
    for (int64_t token = 0; token < task.tokens; token += C) {
      const Tokens tokens{token, 1, task.tokens - token < C ? task.tokens - token : C};
      read_rows(keys, tokens, key, bad);
      read_rows(values, tokens, value, bad);
      sums.meet(key);
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        // A query of minus infinity has features of zero, which its output would not show.
        read_rows(Source<T>(task.query, batch, h, dim, task.map, task.query_scale), tokens, query, bad);
        sums.read(query, value, tokens.count);
        write(h, tokens, query, norm, sums);
      }
      sums.grow(key, value, tokens.count);
      for (int64_t n = 0; n < wide; n += kLanes<T>) {
        Vec<T> sum{};
        for (int64_t r = 0; r < tokens.count; ++r) sum += load<T>(key.at + r * wide + n);
        store<T>(norm + n, load<T>(norm + n) + sum);
      }
    }
    write_state(sums.state, norm);
    return true;
  }

  // A state without columns is no address, and still has a norm.
  void read_state(const Panel<T>& state, T* norm) const {
    const int64_t head = batch * task.kv_heads + kv_head;
    const T* from = static_cast<const T*>(task.state) + head * task.dim * task.value_dim + first;
    for (int64_t f = 0; task.state && f < task.dim; ++f)
      std::memcpy(state.at + f * state.step, from + f * task.value_dim, columns * sizeof(T));
    if (task.norm) std::memcpy(norm, static_cast<const T*>(task.norm) + head * task.dim, task.dim * sizeof(T));
  }

  void write_state(const Panel<T>& state, const T* norm) {
    const int64_t head = batch * task.kv_heads + kv_head;
    T* to = static_cast<T*>(task.next_state) + head * task.dim * task.value_dim + first;
    Vec<T> nan_sum{};
    for (int64_t f = 0; task.next_state && f < task.dim; ++f)
      change_row(state.at + f * state.step, to + f * task.value_dim, columns, [&](int64_t, Vec<T> x) {
        nan_sum += x * Vec<T>{};
        return x;
      });
    bad += nan_sum;
    if (task.next_norm && first == 0)
      std::memcpy(static_cast<T*>(task.next_norm) + head * task.dim, norm, task.dim * sizeof(T));
  }

  void write(int64_t h, const Tokens& tokens, const Panel<T>& query, const T* norm, const Causal<T>& sums) {
    const int64_t row = (batch * task.heads + h) * task.tokens + tokens.first;
    T total[kChunk<T>];
    sum_totals<T>(sums.scores(), query, norm, tokens.count, total);
    if (first == 0) std::memcpy(static_cast<T*>(task.total) + row, total, tokens.count * sizeof(T));
    for (int64_t r = 0; r < tokens.count; ++r) {
      const Quotient<T> mean(total[r] == 0 ? T(1) : total[r]);
      T* to = static_cast<T*>(task.output) + (row + r) * task.value_dim + first;
      Vec<T> nan_sum{};
      change_row(sums.x.at + r * sums.x.step, to, columns, [&](int64_t, Vec<T> sum) {
        const Vec<T> y = mean(sum);
        nan_sum += y * Vec<T>{};
        return y;
      });
      bad += nan_sum;
    }
  }
};

}  // namespace sweep

template <class T>
int32_t run_linear_attention(const LinearAttention& task) {
  const int64_t heads = task.batch * task.kv_heads;
  const double products = 2.0 * task.batch * task.heads * task.tokens * task.dim * task.value_dim;
  const int64_t threads = sweep::worthwhile(task.threads, products);
  const sweep::Pieces pieces = sweep::cut<T>(task.value_dim, heads, threads);
  int32_t not_finite = 0, out_of_memory = 0;
  auto work = [&](int64_t item) {
    const int64_t head = item / pieces.count, first = item % pieces.count * pieces.size;
    const int64_t left = task.value_dim - first;
    sweep::Forward<T> forward{task, head / task.kv_heads, head % task.kv_heads, first,
                              left < pieces.size ? left : pieces.size};
    if (!forward.run())
      raise(out_of_memory);
    else if (sweep::is_bad<T>(forward.bad))
      raise(not_finite);
  };
  parallel(threads, heads * pieces.count, work);
  return out_of_memory ? kNoMemory : not_finite ? kNotFinite : kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
