// One or few queries against long rows of keys: as fast as memory can be read.
//
// The keys of a row are cut into pieces at fixed places, so that threads can share one long row and the bits depend on
// nothing but the row. A piece is read once for all queries and all heads that share it: first its keys, which gives
// the scores, then its values. Numbers of one key lie across the lanes. The pieces of a query are put together in their
// order by their maxima and sums.
#pragma once

#include <cstdlib>

#include "tile.h"

namespace regard {
namespace REGARD_ISA {
namespace decoding {

constexpr int64_t kPiece = 1024;    // keys
constexpr int64_t kRowsAtOnce = 32; // values that stay in the first cache while all queries read them
constexpr int64_t kAhead = 4096;    // bytes that are prefetched before they are needed
constexpr int kPanel = 8;           // vectors of an output in registers

// The hardware sees the next page too late, and several rows at once not at all.
REGARD_INLINE void fetch(const char* row, int64_t bytes) {
  for (int64_t n = 0; n < bytes; n += 64) __builtin_prefetch(row + kAhead + n);
}

// query . row for as many rows as a vector has lanes; the query is padded with zeros.
template <class T, DType kKind>
REGARD_INLINE Vec<T> dots(const T* query, const char* const (&row)[kLanes<T>], int64_t dim) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[L] = {};
  int64_t d = 0;
  for (; d + L <= dim; d += L) {
    const Vec<T> q = load<T>(query + d);
#pragma GCC unroll 16
    for (int n = 0; n < L; ++n) sum[n] += q * load_as<T, kKind>(row[n], d / L);
  }
  if (d < dim) {
    T rest[L][L] = {};
    for (int n = 0; n < L; ++n) convert<T>(row[n] + d * size_of(kKind), kKind, dim - d, rest[n]);
    const Vec<T> q = load<T>(query + d);
#pragma GCC unroll 16
    for (int n = 0; n < L; ++n) sum[n] += q * load<T>(rest[n]);
  }
  return sums_of<T>(sum);
}

// V vectors of output += sum_j weight[j] row_j for `count` rows.
template <class T, DType kKind, int V, bool kFetch>
REGARD_INLINE void add_columns(const T* weight, const char* rows, int64_t stride, int64_t count, T* output) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) sum[v] = load<T>(output + v * L);
  for (int64_t j = 0; j < count; ++j) {
    const char* row = rows + j * stride;
    const Vec<T> one = splat<T>(weight[j]);
    if constexpr (kFetch) fetch(row, V * L * size_of(kKind));
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[v] += one * load_as<T, kKind>(row, v);
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) store<T>(output + v * L, sum[v]);
}

template <class T, DType kKind, bool kFetch>
void add_rows(const T* weight, const char* rows, int64_t stride, int64_t count, int64_t value_dim, T* output) {
  constexpr int L = kLanes<T>;
  const int64_t bytes = size_of(kKind);
  int64_t d = 0;
  for (; d + kPanel * L <= value_dim; d += kPanel * L)
    add_columns<T, kKind, kPanel, kFetch>(weight, rows + d * bytes, stride, count, output + d);
  for (; d + 2 * L <= value_dim; d += 2 * L)
    add_columns<T, kKind, 2, kFetch>(weight, rows + d * bytes, stride, count, output + d);
  for (; d + L <= value_dim; d += L)
    add_columns<T, kKind, 1, kFetch>(weight, rows + d * bytes, stride, count, output + d);
  if (d == value_dim) return;
  Vec<T> sum = load<T>(output + d);
  for (int64_t j = 0; j < count; ++j) {
    T rest[L] = {};
    convert<T>(rows + j * stride + d * bytes, kKind, value_dim - d, rest);
    sum += splat<T>(weight[j]) * load<T>(rest);
  }
  store<T>(output + d, sum);
}

// What a query knows after one piece: the largest score (a power of two), the sum of weights, and the output so far.
template <class T>
struct Partial {
  T *largest, *sum, *output;

  explicit Partial(T* place) : largest(place), sum(place + 1), output(place + kLanes<T>) {}
  static int64_t size(int64_t value_dim) { return rounded_up(value_dim, kLanes<T>) + kLanes<T>; }
};

// One piece of one key head, for the query heads of its group and all their queries.
template <class T, DType kKind>
class Piece {
 public:
  Piece(const Decode& task, int64_t batch, int64_t kv_head, int64_t first)
      : task_(task),
        batch_(batch),
        kv_head_(kv_head),
        first_(first),
        group_(task.heads / task.kv_heads),
        sharers_(group_ * task.queries),
        wide_(rounded_up(task.dim, kLanes<T>)),
        key_(task.key, kKind, batch, kv_head, task.dim),
        value_(task.value, kKind, batch, kv_head, task.value_dim) {}

  // Fills partials, which follow one another with `step` numbers between them: head by head, query by query.
  bool run(T* partials, int64_t step) {
    Arena arena;
    if (!arena.open(Arena::room<T>(sharers_ * wide_) + Arena::room<T>(sharers_ * kPiece) +
                    2 * Arena::room<int64_t>(sharers_)))
      return false;
    queries_ = arena.take<T>(sharers_ * wide_), scores_ = arena.take<T>(sharers_ * kPiece);
    low_ = arena.take<int64_t>(sharers_), high_ = arena.take<int64_t>(sharers_);
    for (int64_t n = 0; n < sharers_; ++n) {
      const int64_t query = batch_ * task_.queries + n % task_.queries;
      low_[n] = clamped(task_.start[query]), high_[n] = clamped(task_.stop[query]);
      if (low_[n] < high_[n]) {
        lowest_ = low_[n] < lowest_ ? low_[n] : lowest_;
        highest_ = high_[n] > highest_ ? high_[n] : highest_;
      }
      const Partial<T> partial(partials + n * step);
      *partial.largest = -std::numeric_limits<T>::infinity(), *partial.sum = 0;
      std::memset(partial.output, 0, rounded_up(task_.value_dim, kLanes<T>) * sizeof(T));
    }
    if (lowest_ >= highest_) return true;
    read_queries();
    score();
    for (int64_t n = 0; n < sharers_; ++n)
      if (low_[n] < high_[n]) weigh(scores_ + n * kPiece, low_[n], high_[n], Partial<T>(partials + n * step));
    add_values(partials, step);
    return true;
  }

  // Whether a visible score is minus infinity.
  bool infinite() const { return infinite_; }

 private:
  // A key's place, counted from the first of the piece.
  int64_t clamped(int64_t key) const { return key < first_ ? 0 : key > first_ + kPiece ? kPiece : key - first_; }

  // Scores are kept as powers of two, which are what the exponential is made of.
  void read_queries() {
    const T scale = static_cast<T>(task_.scale * 1.4426950408889634074);
    for (int64_t n = 0; n < sharers_; ++n) {
      const Rows<T> rows(task_.query, kKind, batch_, kv_head_ * group_ + n / task_.queries, task_.dim);
      T* to = queries_ + n * wide_;
      const T* from = rows.row(n % task_.queries, to);
      for (int64_t d = 0; d < wide_; ++d) to[d] = d < task_.dim ? from[d] * scale : 0;
    }
  }

  void score() {
    constexpr int L = kLanes<T>;
    IntVec<T> lane;
    for (int n = 0; n < L; ++n) lane[n] = n;
    Vec<T> least = Vec<T>{};
    for (int64_t at = lowest_ / L * L; at < highest_; at += L) {
      const char* row[L];
      for (int n = 0; n < L; ++n) {
        const int64_t place = at + n < lowest_ ? lowest_ : at + n < highest_ ? at + n : highest_ - 1;
        row[n] = key_.base + (first_ + place) * key_.stride;
        fetch(row[n], task_.dim * size_of(kKind));
      }
      for (int64_t n = 0; n < sharers_; ++n) {
        Vec<T> found = dots<T, kKind>(queries_ + n * wide_, row, task_.dim);
        if (task_.slopes) {
          const T slope = static_cast<const T*>(task_.slopes)[kv_head_ * group_ + n / task_.queries] * T(1.4426950408889634074);
          const T far = static_cast<T>(task_.position + n % task_.queries - first_ - at);
          found -= splat<T>(slope) * (splat<T>(far) - __builtin_convertvector(lane, Vec<T>));
        }
        const auto from = static_cast<typename Kind<T>::Whole>(low_[n] - at);
        const auto to = static_cast<typename Kind<T>::Whole>(high_[n] - at);
        const IntVec<T> shown = (lane >= from) & (lane < to);
        least = smaller<T>(least, choose<T>(shown, found, Vec<T>{}));
        store<T>(scores_ + n * kPiece + at, choose<T>(shown, found, infinity<T>(-1)));
      }
    }
    // A visible score of minus infinity has no weight and would pass unseen.
    for (int n = 0; n < L; ++n) infinite_ |= least[n] == -std::numeric_limits<T>::infinity();
  }

  // Scores become weights. Where all of them are minus infinity, so are the weights zero.
  static void weigh(T* scores, int64_t low, int64_t high, const Partial<T>& partial) {
    constexpr int L = kLanes<T>;
    Vec<T> top = infinity<T>(-1);
    for (int64_t at = low / L * L; at < high; at += L) top = larger<T>(top, load<T>(scores + at));
    *partial.largest = largest_of<T>(top);
    const T none = -std::numeric_limits<T>::infinity();
    const Vec<T> shift = splat<T>(*partial.largest == none ? T(0) : *partial.largest);
    Vec<T> sum{};
    for (int64_t at = low / L * L; at < high; at += L) {
      const Vec<T> weight = exp2<T>(load<T>(scores + at) - shift);
      store<T>(scores + at, weight);
      sum += weight;
    }
    *partial.sum = sum_of<T>(sum);
  }

  void add_values(T* partials, int64_t step) {
    const int64_t size = sharers_ == 1 ? kPiece : kRowsAtOnce;
    for (int64_t at = lowest_; at < highest_; at += size) {
      const int64_t stop = at + size < highest_ ? at + size : highest_;
      for (int64_t n = 0; n < sharers_; ++n) {
        const int64_t from = low_[n] > at ? low_[n] : at, to = high_[n] < stop ? high_[n] : stop;
        if (from >= to) continue;
        const auto add = n == 0 ? add_rows<T, kKind, true> : add_rows<T, kKind, false>;
        add(scores_ + n * kPiece + from, value_.base + (first_ + from) * value_.stride, value_.stride, to - from,
            task_.value_dim, Partial<T>(partials + n * step).output);
      }
    }
  }

  bool infinite_ = false;
  const Decode& task_;
  const int64_t batch_, kv_head_, first_, group_, sharers_, wide_;
  const Rows<T> key_, value_;
  T *queries_ = nullptr, *scores_ = nullptr;
  int64_t *low_ = nullptr, *high_ = nullptr, lowest_ = kPiece, highest_ = 0;
};

// Puts the pieces of one query together; false if the output is not finite.
template <class T>
bool merge(const Decode& task, int64_t row, T* partials, int64_t pieces, int64_t step) {
  T largest = -std::numeric_limits<T>::infinity(), total = 0;
  for (int64_t n = 0; n < pieces; ++n) {
    const T one = *Partial<T>(partials + n * step).largest;
    largest = one > largest ? one : largest;
  }
  T* output = static_cast<T*>(task.output) + row * task.value_dim;
  for (int64_t d = 0; d < task.value_dim; ++d) output[d] = T(0);
  for (int64_t n = 0; n < pieces; ++n) {
    const Partial<T> partial(partials + n * step);
    if (*partial.sum == 0) continue;  // nothing was seen; a NaN is something
    const T weight = exp2<T>(splat<T>(*partial.largest - largest))[0];
    total += weight * *partial.sum;
    for (int64_t d = 0; d < task.value_dim; ++d) output[d] += weight * partial.output[d];
  }
  if (task.lse)
    static_cast<T*>(task.lse)[row] =
        total == 0 ? -std::numeric_limits<T>::infinity()
                   : static_cast<T>((largest + __builtin_log2(static_cast<double>(total))) * 0.69314718055994530942);
  if (total == 0) return true;
  T bad = total * 0;
  for (int64_t d = 0; d < task.value_dim; ++d) {
    output[d] /= total;
    bad += output[d] * 0;
  }
  return bad == 0;
}

struct Memory {
  void* at;
  explicit Memory(int64_t bytes) : at(std::malloc(bytes)) {}
  ~Memory() { std::free(at); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

template <class T, DType kKind>
int32_t run(const Decode& task) {
  const int64_t rows = task.batch * task.heads * task.queries, group = task.heads / task.kv_heads;
  int64_t begin = task.keys, end = 0;
  for (int64_t n = 0; n < task.batch * task.queries; ++n) {
    if (task.start[n] >= task.stop[n]) continue;
    begin = task.start[n] < begin ? task.start[n] : begin;
    end = task.stop[n] > end ? task.stop[n] : end;
  }
  begin = begin < end ? begin / kPiece * kPiece : end;
  const int64_t pieces = (end - begin + kPiece - 1) / kPiece;
  // A partial result for each (batch, kv_head, piece, head of the group, query).
  const int64_t size = Partial<T>::size(task.value_dim), sharers = group * task.queries;
  Memory memory(rows * pieces * size * static_cast<int64_t>(sizeof(T)) + 64);
  if (!memory.at) return kNoMemory;
  T* partials = static_cast<T*>(memory.at);
  int32_t not_finite = 0, out_of_memory = 0;
  auto work = [&](int64_t item) {
    const int64_t head = item / pieces;
    Piece<T, kKind> piece(task, head / task.kv_heads, head % task.kv_heads, begin + item % pieces * kPiece);
    if (!piece.run(partials + item * sharers * size, size)) raise(out_of_memory);
    if (piece.infinite()) raise(not_finite);
  };
  // A thread is worth waking for what takes longer to read than the waking.
  const double numbers = static_cast<double>(task.batch * task.kv_heads * (end - begin)) * (task.dim + task.value_dim);
  const double worth = numbers * static_cast<double>(sharers) / 1e5;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  parallel(threads, task.batch * task.kv_heads * pieces, work);
  if (out_of_memory) return kNoMemory;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = row / sharers;  // of the keys: the query heads of a group are neighbours
    T* first = partials + (head * pieces * sharers + row % sharers) * size;
    if (!merge<T>(task, row, first, pieces, sharers * size)) not_finite = 1;
  }
  return not_finite ? kNotFinite : kOk;
}

}  // namespace decoding

template <class T>
int32_t run_decode(const Decode& task) {
  if constexpr (sizeof(T) == 8) {
    return decoding::run<T, DType::kFloat64>(task);
  } else {
    if (task.dtype == DType::kBFloat16) return decoding::run<T, DType::kBFloat16>(task);
    if (task.dtype == DType::kFloat16) return decoding::run<T, DType::kFloat16>(task);
    return decoding::run<T, DType::kFloat32>(task);
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
