// Causal linear attention, backward. With u_i = g_i / total_i and e_i = u_i . output_i, g the gradient of the output,
//
//   d query_i = sum_{j <= i} (u_i . v_j - e_i) phi(k_j)
//   d key_j   = sum_{i >= j} (u_i . v_j - e_i) phi(q_i)
//   d value_j = sum_{i >= j} (phi(q_i) . phi(k_j)) u_i
//
// are three causal products (linear_sweep.h), the last two from the last token to the first. A column of ones beside
// the values and one of -e beside u make the gradient of the normaliser a part of them.
#pragma once

#include "linear_attention_sweep.h"

namespace regard {
namespace REGARD_ISA {
namespace sweep {

enum Wanted { kQuery = 1, kKey = 2, kValue = 4 };

// Gradients of one key head and of the query heads that share it: of the queries, or of the keys, the values or both;
// columns first to first + columns, or all of them where both are wanted.
template <class T>
struct Backward {
  const LinearAttention& task;
  int64_t batch, kv_head;
  int wanted;
  int64_t first, columns;
  Vec<T> bad{};

  int64_t dim = 0, value_dim = 0, group = 0, head = 0;
  Panel<T> query{}, key{}, value{}, grads{};

  bool run() {
    constexpr int L = kLanes<T>, C = kChunk<T>;
    dim = task.dim, value_dim = task.value_dim;
    group = task.heads / task.kv_heads, head = batch * task.kv_heads + kv_head;
    const int64_t wide = rounded_up(dim, L), value_wide = rounded_up(value_dim + 1, L);
    const int64_t bytes = 2 * Arena::room<T>(C * wide) + 2 * Arena::room<T>(C * value_wide);
    const bool both = wanted == (kKey | kValue);
    const int64_t key_columns = both ? dim : columns, value_columns = both ? value_dim : columns;
    Arena arena;
    if (!arena.open(bytes + (wanted & kValue ? Causal<T>::room(dim, value_columns) : 0) +
                    (wanted & (kQuery | kKey) ? Causal<T>::room(value_dim + 1, key_columns) : 0)))
      return false;
    query = {arena.take<T>(C * wide), wide}, key = {arena.take<T>(C * wide), wide};
    value = {arena.take<T>(C * value_wide), value_wide}, grads = {arena.take<T>(C * value_wide), value_wide};
    std::memset(query.at, 0, bytes);
    for (int64_t r = 0; r < C; ++r) value.at[r * value_wide + value_dim] = 1;
    if (wanted == kQuery) {
      forward(Causal<T>(arena, value_dim + 1, first, columns));
    } else if (both) {
      const Causal<T> keys(arena, value_dim + 1, 0, dim), values(arena, dim, 0, value_dim);
      back(&keys, &values);
    } else {
      const Causal<T> one(arena, wanted == kKey ? value_dim + 1 : dim, first, columns);
      back(wanted == kKey ? &one : nullptr, wanted == kValue ? &one : nullptr);
    }
    return true;
  }

  void forward(const Causal<T>& queries) {
    read_turned(task.state, task.norm, queries);
    for (int64_t token = 0; token < task.tokens; token += kChunk<T>) {
      const Tokens tokens{token, 1, at_most(task.tokens - token)};
      read_keys(tokens);
      queries.meet(value);
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        read_grad_output(h, tokens);
        if (task.map) read_query(h, tokens);
        queries.read(grads, key, tokens.count);
        T* to = static_cast<T*>(task.query_grad) + (batch * task.heads + h) * task.tokens * dim;
        write(to, dim, tokens, queries, task.map ? &query : nullptr, task.query_scale);
      }
      queries.grow(value, key, tokens.count);
    }
  }

  void back(const Causal<T>* keys, const Causal<T>* values) {
    if (keys) read_turned(task.next_state_grad, task.next_norm_grad, *keys);
    if (values) read_plain(task.next_state_grad, *values);
    for (int64_t last = task.tokens - 1; last >= 0; last -= kChunk<T>) {
      const Tokens tokens{last, -1, at_most(last + 1)};
      read_keys(tokens);
      // What the query heads of a group send to a key is summed up in x.
      for (int64_t g = 0; g < group; ++g) {
        read_query(kv_head * group + g, tokens);
        read_grad_output(kv_head * group + g, tokens);
        if (keys) {
          keys->meet(grads);
          keys->read(value, query, tokens.count, g == 0, g > 0);
          // Both states hold the same sums, and turning one over costs a sixth of summing up the other.
          values ? keys->grow_last(grads, query, tokens.count) : keys->grow(grads, query, tokens.count);
        }
        if (values) {
          values->meet(query);
          values->read(key, grads, tokens.count, g == 0, g > 0);
          values->grow(query, grads, tokens.count);
        }
      }
      if (keys && values) keys->take_turned(*values);
      T* key_grad = static_cast<T*>(task.key_grad) + head * task.tokens * dim;
      T* value_grad = static_cast<T*>(task.value_grad) + head * task.tokens * value_dim;
      if (keys) write(key_grad, dim, tokens, *keys, task.map ? &key : nullptr, task.key_scale);
      if (values) write(value_grad, value_dim, tokens, *values, nullptr, 1);
    }
    if (keys && task.norm_grad) {
      const T* row = keys->state.at + value_dim * keys->state.step;
      put_row(row, static_cast<T*>(task.norm_grad) + head * dim + keys->first, keys->columns);
    }
    if (values && task.state_grad)
      for (int64_t f = 0; f < dim; ++f)
        put_row(values->state.at + f * values->state.step,
                static_cast<T*>(task.state_grad) + (head * dim + f) * value_dim + values->first, values->columns);
  }

  static int64_t at_most(int64_t left) { return left < kChunk<T> ? left : kChunk<T>; }

  void read_plain(const void* state, const Causal<T>& sums) const {
    const T* from = static_cast<const T*>(state) + head * dim * value_dim + sums.first;
    for (int64_t f = 0; state && f < dim; ++f)
      std::memcpy(sums.state.at + f * sums.state.step, from + f * value_dim, sums.columns * sizeof(T));
  }

  // (dim, value_dim) becomes (value_dim, dim), with the norm below.
  void read_turned(const void* state, const void* norm, const Causal<T>& sums) const {
    const T* from = static_cast<const T*>(state) + (head * dim + sums.first) * value_dim;
    for (int64_t n = 0; state && n < sums.columns; ++n)
      for (int64_t d = 0; d < value_dim; ++d) sums.state.at[d * sums.state.step + n] = from[n * value_dim + d];
    if (norm)
      std::memcpy(sums.state.at + value_dim * sums.state.step,
                  static_cast<const T*>(norm) + head * dim + sums.first, sums.columns * sizeof(T));
  }

  void read_query(int64_t h, const Tokens& tokens) {
    read_rows(Source<T>(task.query, batch, h, dim, task.map, task.query_scale), tokens, query, bad);
  }
  void read_keys(const Tokens& tokens) {
    read_rows(Source<T>(task.key, batch, kv_head, dim, task.map, task.key_scale), tokens, key, bad);
    read_rows(Source<T>(task.value, batch, kv_head, value_dim), tokens, value, bad);
  }

  // u and -e. A normaliser of zero was replaced by one, so it gets no gradient.
  void read_grad_output(int64_t h, const Tokens& tokens) {
    constexpr int L = kLanes<T>;
    for (int64_t r = 0; r < tokens.count; ++r) {
      const int64_t row = (batch * task.heads + h) * task.tokens + tokens[r];
      const T* from = static_cast<const T*>(task.grad_output) + row * value_dim;
      const T* output = static_cast<const T*>(task.output) + row * value_dim;
      T* to = grads.at + r * grads.step;
      const int64_t ahead = tokens.direction * kChunk<T> * value_dim;
      fetch_ahead(from, ahead, value_dim);
      fetch_ahead(output, ahead, value_dim);
      const T total = static_cast<const T*>(task.total)[row];
      const Vec<T> inverse = splat<T>(total == 0 ? T(1) : 1 / total);
      Vec<T> sum{};
      change_row(from, to, value_dim, [&](int64_t n, Vec<T> g) {
        const Vec<T> u = g * inverse;
        if (n + L <= value_dim) sum += u * load<T>(output + n);
        return u;
      });
      T e = sum_of<T>(sum);
      for (int64_t d = value_dim / L * L; d < value_dim; ++d) e += to[d] * output[d];
      to[value_dim] = total == 0 ? T(0) : -e;
    }
  }

  void put_row(const T* from, T* to, int64_t width) {
    Vec<T> nan_sum{};
    change_row(from, to, width, [&](int64_t, Vec<T> x) {
      nan_sum += x * Vec<T>{};
      return x;
    });
    bad += nan_sum;
  }

  // The gradient of features becomes that of what phi was given: it is multiplied by the derivative there.
  void write(T* rows, int64_t width, const Tokens& tokens, const Causal<T>& sums, const Panel<T>* phi, double scale) {
    const Vec<T> factor = splat<T>(static_cast<T>(scale));
    for (int64_t r = 0; r < tokens.count; ++r) {
      const T* from = sums.x.at + r * sums.x.step;
      T* to = rows + tokens[r] * width + sums.first;
      if (!phi) {
        put_row(from, to, sums.columns);
        continue;
      }
      const T* feature = phi->at + r * phi->step + sums.first;
      Vec<T> nan_sum{};
      change_row(from, to, sums.columns, [&](int64_t n, Vec<T> x) {
        const Vec<T> y = x * (elu1::derivative<T>(load<T>(feature + n)) * factor);
        nan_sum += y * Vec<T>{};
        return y;
      });
      bad += nan_sum;
    }
  }
};

}  // namespace sweep

template <class T>
int32_t run_linear_attention_backward(const LinearAttention& task) {
  const int64_t heads = task.batch * task.kv_heads;
  const double products = 6.0 * task.batch * task.heads * task.tokens * task.dim * task.value_dim;
  const int64_t threads = sweep::worthwhile(task.threads, products);
  // Keys and values together read everything once; apart they keep more threads busy.
  const bool together = heads >= threads;
  const sweep::Pieces by_key = sweep::cut<T>(task.dim, 3 * heads, together ? 1 : threads);
  const sweep::Pieces by_value = sweep::cut<T>(task.value_dim, 3 * heads, together ? 1 : threads);
  const int64_t for_values = together ? 0 : by_value.count, for_keys = together ? 1 : by_key.count;
  const int64_t each = for_values + for_keys + by_key.count;
  int32_t not_finite = 0, out_of_memory = 0;
  // All of a head before the next: what the first sweep has read is then still in the cache for the second.
  auto work = [&](int64_t item) {
    const int64_t head = item / each, part = item % each;
    sweep::Backward<T> backward{task, head / task.kv_heads, head % task.kv_heads, sweep::kQuery, 0, 0};
    int64_t piece = part, width = task.dim, size = by_key.size;
    if (part < for_keys) {
      backward.wanted = together ? sweep::kKey | sweep::kValue : sweep::kKey;
    } else if (part < for_keys + for_values) {
      backward.wanted = sweep::kValue;
      piece -= for_keys, width = task.value_dim, size = by_value.size;
    } else {
      piece -= for_keys + for_values;
    }
    backward.first = piece * size;
    backward.columns = width - backward.first < size ? width - backward.first : size;
    if (!backward.run())
      raise(out_of_memory);
    else if (sweep::is_bad<T>(backward.bad))
      raise(not_finite);
  };
  parallel(threads, heads * each, work);
  return out_of_memory ? kNoMemory : not_finite ? kNotFinite : kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
