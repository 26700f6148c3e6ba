// One decode step of a whole model: one new token for each of `rows` texts.
//
// A model is a list of parts with residual connections, then norms and the output matrix:
//
//   h = norm(x)                            or h = x where the part has no norm before it
//   x = x + part(h)                        pre-norm;   x = h + part(h)  where `from_normed` (post-norm)
//   logits = final_norms(x) output^T
//
//   self-attention    q, k, v = h first^T; rotary turns q and k; k and v go into a column of the cache;
//                     part = attention(q, keys, values) second^T
//   cross-attention   q = h first^T; keys and values were made before
//   feed-forward      part = activation(h first^T) second^T, or (activation(gate) * up) second^T
//
// All threads run through all parts together and wait for one another after each product and each attention. What is small (norms,
// merging the pieces of an attention) every thread computes for itself. Outputs are shared in blocks of eight rows of
// a matrix; the first half of the blocks is dealt out in advance, so that a thread that waits can prefetch its next
// weights, the rest is taken in falling portions. Attention is shared by row, key head and piece of kKeys keys.
// No bit of a row depends on the other rows or on the threads.
#pragma once

#include "activation.h"
#include "decode.h"
#include "interface.h"
#include "model_program.h"
#include "weight_products.h"

namespace regard {
namespace REGARD_ISA {
namespace model_step {

constexpr int64_t kKeys = 256;          // of one piece of an attention
constexpr int64_t kUnit = 8;            // rows of a matrix that are never shared between threads
constexpr int64_t kAheadMost = 192 << 10;  // bytes that a waiting thread prefetches

inline float sum_rest(float sum, const float* x, int64_t from, int64_t to, float shift, bool square) {
  for (int64_t n = from; n < to; ++n) sum += square ? (x[n] - shift) * (x[n] - shift) : x[n];
  return sum;
}

// The sum of x, or of (x - shift)^2, by four vectors.
template <bool kSquare>
inline float total(const float* x, int64_t count, float shift) {
  constexpr int L = kLanes<float>;
  Vec<float> sum[4] = {};
  int64_t n = 0;
  for (; n + 4 * L <= count; n += 4 * L)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Vec<float> one = load<float>(x + n + k * L) - splat<float>(shift);
      sum[k] += kSquare ? one * one : one;
    }
  return sum_rest(sum_of<float>((sum[0] + sum[1]) + (sum[2] + sum[3])), x, n, count, shift, kSquare);
}

inline void normalize(const StepNorm& norm, const float* x, int64_t count, float* to) {
  float shift = 0, factor = 1;
  if (norm.kind == kLayerNorm) {
    shift = total<false>(x, count, 0) / static_cast<float>(count);
    factor = 1 / __builtin_sqrtf(total<true>(x, count, shift) / static_cast<float>(count) + static_cast<float>(norm.eps));
  } else if (norm.kind == kRmsNorm) {
    factor = 1 / __builtin_sqrtf(total<true>(x, count, 0) / static_cast<float>(count) + static_cast<float>(norm.eps));
  }
  for (int64_t n = 0; n < count; ++n) {
    float y = (x[n] - shift) * factor;
    if (norm.weight) y *= norm.weight[n];
    if (norm.bias) y += norm.bias[n];
    to[n] = y;
  }
}

// One head's channels with the first `rotary` of them turned by the angles of one position.
inline void rotate(const ModelPart& part, const float* cosine, const float* sine, const float* from, float* to) {
  const int64_t half = part.rotary / 2;
  for (int64_t n = 0; n < half; ++n) {
    const int64_t a = part.rotary_pairs ? 2 * n : n, b = part.rotary_pairs ? 2 * n + 1 : n + half;
    const float first = from[a], second = from[b];
    to[a] = first * cosine[n] - second * sine[n];
    to[b] = second * cosine[n] + first * sine[n];
  }
  for (int64_t n = part.rotary; n < part.dim; ++n) to[n] = from[n];
}

inline void activate_some(Activation activation, float* numbers, int64_t count) {
  constexpr int kAtOnce = kSide * kLanes<float>;
  const int64_t whole = count / kAtOnce;
  activate_all<float>(activation, numbers, whole * kSide);
  if (whole * kAtOnce == count) return;
  float some[kAtOnce] = {};
  const int64_t rest = count - whole * kAtOnce;
  for (int64_t n = 0; n < rest; ++n) some[n] = numbers[whole * kAtOnce + n];
  activate_all<float>(activation, some, kSide);
  for (int64_t n = 0; n < rest; ++n) numbers[whole * kAtOnce + n] = some[n];
}

// Matrices that stand one below the other and are one matrix to everything around them.
struct Stack {
  const PackedMatrix* matrices;
  int64_t count, rows = 0, cols;

  explicit Stack(const PackedMatrix& one) : matrices(&one), count(1), rows(one.rows), cols(one.cols) {}
  explicit Stack(const PackedMatrix (&some)[3]) : matrices(some), count(3), cols(some[0].cols) {
    for (const PackedMatrix& one : some) rows += one.rows;
  }

  bool known() const {
    for (int64_t n = 0; n < count; ++n)
      if (matrices[n].rows && !weights::knows(matrices[n])) return false;
    return true;
  }

  // The matrix whose format needs activations to be prepared, or null; all such formats prepare them alike.
  const PackedMatrix* prepared_for(int64_t x_rows) const {
    for (int64_t n = 0; n < count; ++n)
      if (matrices[n].rows && weights::prepared_bytes(matrices[n], x_rows)) return &matrices[n];
    return nullptr;
  }

  void products(const float* x, const void* ready, int64_t x_rows, const float* bias, int64_t first, int64_t last, float* output,
                int64_t output_row) const {
    int64_t start = 0;
    for (int64_t n = 0; n < count; start += matrices[n].rows, ++n) {
      const int64_t stop = start + matrices[n].rows, from = first > start ? first : start, to = last < stop ? last : stop;
      if (from < to)
        weights::products(matrices[n], x, cols, ready, x_rows, bias ? bias + start : nullptr, from - start, to - start,
                          output + start, output_row);
    }
  }
};

// x of the new tokens, as it is given or from the tables.
inline void embed(const ModelStep& step, float* x) {
  if (step.x) {
    std::memcpy(x, step.x, step.rows * step.dim * sizeof(float));
    return;
  }
  const float scale = static_cast<float>(step.embedding_scale);
  for (int64_t row = 0; row < step.rows; ++row) {
    float* to = x + row * step.dim;
    quantized::read_row(step.embedding, step.tokens[row], to);
    const float* added = step.position_table ? step.position_table + step.positions[row] * step.dim : nullptr;
    for (int64_t n = 0; n < step.dim; ++n) to[n] = to[n] * scale + (added ? added[n] : 0.0f);
  }
}

// Sizes of the buffers, in numbers.
struct Sizes {
  int64_t first = 0, merged = 0, partials = 0, prepared = 0, pieces = 1, query = 0;

  explicit Sizes(const ModelStep& step) {
    auto most = [](int64_t& size, int64_t other) { size = other > size ? other : size; };
    for (int64_t n = 0; n < step.part_count; ++n) {
      const ModelPart& part = step.parts[n];
      const Stack stack(part.first);
      most(first, stack.rows);
      if (const PackedMatrix* read = stack.prepared_for(step.rows)) most(prepared, weights::prepared_bytes(*read, step.rows));
      most(prepared, weights::prepared_bytes(part.second, step.rows));
      if (part.kind == kFeedForward) continue;
      const StepCache& cache = step.caches[part.cache];
      int64_t here = 1;
      for (int64_t row = 0; row < step.rows; ++row)
        most(here, (cache.last(row) - cache.first(row, part.window) + kKeys - 1) / kKeys);
      most(pieces, here);
      most(merged, part.heads * part.value_dim);
      most(query, part.heads / part.kv_heads * part.dim);
      most(partials, step.rows * part.heads * here * decoding::Partial<float>::size(part.value_dim));
    }
    most(prepared, step.output.rows ? weights::prepared_bytes(step.output, step.rows) : 0);
  }
};

class Worker {
 public:
  Worker(const ModelStep& step, Team& team, int64_t thread, int64_t* counters, const Sizes& sizes, char* shared, char* own)
      : step_(step), team_(team), thread_(thread), counters_(counters), sizes_(sizes) {
    auto take = [](char*& from, int64_t count) {
      float* made = reinterpret_cast<float*>(from);
      from += bytes(count);
      return made;
    };
    x_ = take(shared, step.rows * step.dim), delta_ = take(shared, step.rows * step.dim);
    first_ = take(shared, step.rows * sizes.first), partials_ = take(shared, sizes.partials);
    normed_ = take(own, step.rows * step.dim), merged_ = take(own, step.rows * sizes.merged);
    query_ = take(own, sizes.query), prepared_ = own;
  }

  static int64_t bytes(int64_t count) { return (count * 4 + 63) / 64 * 64 + 64; }
  static int64_t shared_bytes(const ModelStep& step, const Sizes& sizes) {
    return 2 * bytes(step.rows * step.dim) + bytes(step.rows * sizes.first) + bytes(sizes.partials);
  }
  static int64_t own_bytes(const ModelStep& step, const Sizes& sizes) {
    return bytes(step.rows * step.dim) + bytes(step.rows * sizes.merged) + bytes(sizes.query) + bytes(sizes.prepared / 4 + 16);
  }

  void run() {
    for (int64_t n = 0; n < step_.part_count; ++n) {
      const ModelPart& part = step_.parts[n];
      for (int64_t row = 0; row < step_.rows; ++row)
        normalize(part.norm, x(row), step_.dim, normed_ + row * step_.dim);
      if (part.kind == kFeedForward)
        feed_forward(part);
      else
        attention(part);
      const bool last = n + 1 == step_.part_count;
      meet(last ? Stack(step_.output) : Stack(step_.parts[n + 1].first), !last && step_.parts[n + 1].gated ? 2 : 1);
    }
    finish();
  }

  bool finite() const { return finite_; }
  bool out_of_memory() const { return out_of_memory_; }

 private:
  float* x(int64_t row) { return x_ + row * step_.dim; }

  // Waits for all threads, and prefetches the first weights of the next product meanwhile.
  void meet(const Stack& next, int64_t shares) {
    int64_t most = 0;
    const char* ahead = nullptr;
    if (next.rows) {
      const int64_t units = (next.rows / shares + kUnit - 1) / kUnit, own = units / 2 / team_.threads;
      const int64_t share = own * kUnit * next.matrices->stride;
      most = share < kAheadMost ? share : kAheadMost;
      ahead = static_cast<const char*>(next.matrices->data) + thread_ * share;
    }
    const int64_t turn = team_.arrive();
    if (turn < 0) return;
    for (int64_t at = 0, spins = 0; !team_.passed(turn); ++spins) {
      if (at < most) {
        for (int n = 0; n < 8; ++n, at += 64) __builtin_prefetch(ahead + at, 0, 2);
      } else {
        pause_thread(spins);
      }
    }
  }

  // Calls work(first, last) for shares of `units` until none is left.
  template <class Work>
  void share(int64_t units, Work work) {
    const int64_t own = team_.threads > 1 ? units / 2 / team_.threads : 0;
    int64_t* counter = counters_ + 8 * phase_++;
    if (own) work(thread_ * own, (thread_ + 1) * own);
    const int64_t dealt = own * team_.threads;
    int64_t taken = __atomic_load_n(counter, __ATOMIC_RELAXED);
    while (dealt + taken < units) {
      const int64_t left = units - dealt - taken, some = left / (2 * team_.threads) > 1 ? left / (2 * team_.threads) : 1;
      if (!__atomic_compare_exchange_n(counter, &taken, taken + some, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
      work(dealt + taken, dealt + taken + some);
      taken = __atomic_load_n(counter, __ATOMIC_RELAXED);
    }
  }

  // Calls then(first, last) after each share of output[m][n] = bias[n] + x[m] . matrix[n], over `rows` rows of the matrix.
  template <class Then>
  void multiply(const Stack& matrix, const float* bias, const float* x, float* output, Then then) {
    void* ready = prepare(matrix, x);
    share((matrix.rows + kUnit - 1) / kUnit, [&](int64_t first, int64_t last) {
      first *= kUnit, last = last * kUnit < matrix.rows ? last * kUnit : matrix.rows;
      matrix.products(x, ready, step_.rows, bias, first, last, output, matrix.rows);
      then(first, last);
    });
  }

  void* prepare(const Stack& matrix, const float* x) {
    const PackedMatrix* read = matrix.prepared_for(step_.rows);
    if (!read) return nullptr;
    weights::prepare(*read, x, matrix.cols, step_.rows, prepared_);
    return prepared_;
  }

  // The second matrix of a part, added to where the residual connection begins.
  void add(const ModelPart& part, const float* from) {
    const float* base = part.from_normed ? normed_ : x_;
    multiply(Stack(part.second), part.second_bias, from, delta_, [&](int64_t first, int64_t last) {
      for (int64_t row = 0; row < step_.rows; ++row)
        for (int64_t n = first; n < last; ++n) x(row)[n] = base[row * step_.dim + n] + delta_[row * step_.dim + n];
    });
  }

  void feed_forward(const ModelPart& part) {
    const Stack stack(part.first);
    const int64_t hidden = part.second.cols, wide = stack.rows;
    const Activation activation = static_cast<Activation>(part.activation);
    if (!part.gated) {
      multiply(stack, part.first_bias, normed_, first_, [&](int64_t first, int64_t last) {
        for (int64_t row = 0; row < step_.rows; ++row) activate_some(activation, first_ + row * wide + first, last - first);
      });
    } else {
      // Gate and up lie in one matrix, one below the other; the products of a row become its first half.
      void* ready = prepare(stack, normed_);
      float* made = first_ + step_.rows * hidden;
      share((hidden + kUnit - 1) / kUnit, [&](int64_t first, int64_t last) {
        first *= kUnit, last = last * kUnit < hidden ? last * kUnit : hidden;
        for (int64_t half = 0; half < 2; ++half)
          stack.products(normed_, ready, step_.rows, part.first_bias, first + half * hidden, last + half * hidden,
                         half ? made - hidden : first_, hidden);
        for (int64_t row = 0; row < step_.rows; ++row) {
          activate_some(activation, first_ + row * hidden + first, last - first);
          for (int64_t n = first; n < last; ++n) first_[row * hidden + n] *= made[row * hidden + n];
        }
      });
    }
    meet(Stack(part.second), 1);
    add(part, first_);
  }

  void attention(const ModelPart& part) {
    multiply(Stack(part.first), part.first_bias, normed_, first_, [](int64_t, int64_t) {});
    meet(Stack(PackedMatrix{}), 1);
    const StepCache& cache = step_.caches[part.cache];
    int64_t pieces = 1;
    for (int64_t row = 0; row < step_.rows; ++row) {
      const int64_t here = (cache.last(row) - cache.first(row, part.window) + kKeys - 1) / kKeys;
      pieces = here > pieces ? here : pieces;
    }
    const int64_t group = part.heads / part.kv_heads, size = decoding::Partial<float>::size(part.value_dim);
    share(step_.rows * part.kv_heads * pieces, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item)
        attend(part, cache, item / pieces / part.kv_heads, item / pieces % part.kv_heads, item % pieces,
               partials_ + item * group * size, size);
    });
    meet(Stack(part.second), 1);
    merge(part, cache, pieces, size);
    add(part, merged_);
  }

  // One piece of the keys of one row and key head, for the query heads that share it. The piece with the newest token
  // writes it into the cache first.
  void attend(const ModelPart& part, const StepCache& cache, int64_t row, int64_t kv_head, int64_t piece, float* partials,
              int64_t size) {
    const int64_t seen = cache.first(row, part.window), length = cache.last(row) - seen, from = piece * kKeys;
    if (from >= length && piece) return;
    const int64_t group = part.heads / part.kv_heads, wide = Stack(part.first).rows;
    const int64_t keys = length - from < kKeys ? length - from : kKeys;
    const float *made = first_ + row * wide, *cosine = step_.cosine + row * step_.rotation_row,
                *sine = step_.sine + row * step_.rotation_row;
    for (int64_t n = 0; n < group; ++n)
      rotate(part, cosine, sine, made + (kv_head * group + n) * part.dim, query_ + n * part.dim);
    float* key = cache.key + row * cache.key_row + kv_head * cache.key_head;
    float* value = cache.value + row * cache.value_row + kv_head * cache.value_head;
    if (part.kind == kSelfAttention && from + keys == length) {
      const float* fresh = made + part.heads * part.dim;
      rotate(part, cosine, sine, fresh + kv_head * part.dim, key + cache.column * cache.key_token);
      std::memcpy(value + cache.column * cache.value_token, fresh + part.kv_heads * part.dim + kv_head * part.value_dim,
                  part.value_dim * sizeof(float));
    }
    const int64_t begin = seen + from, start = 0, stop = keys > 0 ? keys : 0;
    Decode task{};
    task.batch = task.kv_heads = task.queries = 1, task.heads = group, task.keys = stop;
    task.dim = part.dim, task.value_dim = part.value_dim, task.scale = part.scale;
    task.query = {query_, 0, part.dim, 0};
    task.key = {key + begin * cache.key_token, 0, 0, cache.key_token};
    task.value = {value + begin * cache.value_token, 0, 0, cache.value_token};
    task.start = &start, task.stop = &stop;
    task.slopes = part.slopes ? part.slopes + kv_head * group : nullptr, task.position = length - 1 - from;
    decoding::Piece<float, DType::kFloat32> run(task, 0, 0, 0);
    if (!run.run(partials, size)) out_of_memory_ = true;
    if (run.infinite()) finite_ = false;
  }

  // merged[row][head] from the pieces of each head, by every thread for itself.
  void merge(const ModelPart& part, const StepCache& cache, int64_t pieces, int64_t size) {
    const int64_t group = part.heads / part.kv_heads;
    Decode task{};
    task.value_dim = part.value_dim, task.output = merged_;
    for (int64_t row = 0; row < step_.rows; ++row) {
      const int64_t here = (cache.last(row) - cache.first(row, part.window) + kKeys - 1) / kKeys;
      for (int64_t head = 0; head < part.heads; ++head) {
        float* partials = partials_ + ((row * part.kv_heads + head / group) * pieces * group + head % group) * size;
        if (!decoding::merge<float>(task, row * part.heads + head, partials, here > 1 ? here : 1, group * size)) finite_ = false;
      }
    }
  }

  void finish() {
    float bad = 0;
    for (int64_t row = 0; row < step_.rows; ++row) {
      float* hidden = normed_ + row * step_.dim;
      normalize(step_.final_norm[0], x(row), step_.dim, hidden);
      if (step_.final_norm[1].kind != kNoNorm) normalize(step_.final_norm[1], hidden, step_.dim, hidden);
      for (int64_t n = 0; n < step_.dim; ++n) bad += hidden[n] * 0;
    }
    if (bad != 0) finite_ = false;
    if (thread_ == 0 && step_.hidden) std::memcpy(step_.hidden, normed_, step_.rows * step_.dim * sizeof(float));
    if (step_.output.rows) multiply(Stack(step_.output), nullptr, normed_, step_.logits, [](int64_t, int64_t) {});
  }

  const ModelStep& step_;
  Team& team_;
  const int64_t thread_;
  int64_t* counters_;
  const Sizes& sizes_;
  int64_t phase_ = 0;
  float *x_, *delta_, *first_, *partials_, *normed_, *merged_, *query_;
  void* prepared_;
  bool finite_ = true, out_of_memory_ = false;
};

}  // namespace model_step

inline int32_t run_model_step(const ModelStep& step) {
  using namespace model_step;
  if (step.rows <= 0) return kOk;
  for (int64_t n = 0; n < step.part_count; ++n)
    if (!Stack(step.parts[n].first).known() || !weights::knows(step.parts[n].second)) return kNoFormat;
  if (step.output.rows && !weights::knows(step.output)) return kNoFormat;
  if (!step.x && !weights::knows(step.embedding)) return kNoFormat;
  const Sizes sizes(step);
  // A thread is used only for work that takes longer than the meetings of the threads.
  double numbers = 0;
  for (int64_t n = 0; n < step.part_count; ++n)
    numbers += static_cast<double>(Stack(step.parts[n].first).rows * step.parts[n].first[0].cols +
                                   step.parts[n].second.rows * step.parts[n].second.cols);
  const double worth = (numbers + static_cast<double>(step.output.rows * step.output.cols)) * static_cast<double>(step.rows) / 3e5;
  const int64_t threads = worth < static_cast<double>(step.threads) ? static_cast<int64_t>(worth) + 1 : step.threads;
  const int64_t shared = Worker::shared_bytes(step, sizes), own = Worker::own_bytes(step, sizes);
  const int64_t counted = (3 * step.part_count + 1) * 64;  // a line for each phase
  decoding::Memory memory(shared + own * threads + counted + 64);
  if (!memory.at) return kNoMemory;
  char* start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.at) + 63) / 64 * 64);
  std::memset(start, 0, counted);
  embed(step, reinterpret_cast<float*>(start + counted));
  int32_t not_finite = 0, out_of_memory = 0;
  auto work = [&](Team& team, int64_t thread) {
    char* buffers = start + counted;
    Worker worker(step, team, thread, reinterpret_cast<int64_t*>(start), sizes, buffers, buffers + shared + thread * own);
    worker.run();
    if (!worker.finite()) raise(not_finite);
    if (worker.out_of_memory()) raise(out_of_memory);
  };
  together(threads, work);
  return out_of_memory ? kNoMemory : not_finite ? kNotFinite : kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
