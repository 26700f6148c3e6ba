// The one product that linear attention and all of its gradients are made of, for a chunk of tokens after a state:
//
//   x_i = a_i . (S + sum_{j <= i} b_j c_j^T)        S: (inner, columns), the sum over all tokens before the chunk
//
//   output     a = phi(q)   b = phi(k)   c = v
//   d query    a = u        b = v        c = phi(k)
//   d value    a = phi(k)   b = phi(q)   c = u          from the last token to the first
//   d key      a = v        b = u        c = phi(q)     likewise
//
// Everything is row-major: tokens are rows, the columns of c and S lie across the lanes, and only b is turned over, for
// the scores a_i . b_j. A column of the result needs no other column, so any set of columns may be computed alone, with
// the same bits.
#pragma once

#include "elu1.h"
#include "tile.h"

namespace regard {
namespace REGARD_ISA {
namespace sweep {

// Tokens in a chunk. Their own triangle costs (chunk / 2) (inner + columns) a token, the state 2 inner columns: a small
// chunk is cheap until loading and storing the state shows. Measured with 16, 24, 32 and 48.
template <class T>
constexpr int kChunk = kLanes<T> > 8 ? 2 * kLanes<T> : 24;

// sum[r][v] += sum_k a(r, k) rows[k][v], where a(r, k) is a[r][k], or a[k][r] if it is turned.
template <class T, int R, int V, bool kTurned>
REGARD_INLINE void add_products(Vec<T> (&sum)[R][V], const T* a, int64_t a_step, int64_t inner, const T* rows,
                                int64_t step) {
  for (int64_t k = 0; k < inner; ++k) {
    Vec<T> row[V];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) row[v] = load<T>(rows + k * step + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> one = splat<T>(kTurned ? a[k * a_step + r] : a[r * a_step + k]);
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[r][v] += one * row[v];
    }
  }
}

template <class T, int R, int V>
REGARD_INLINE void load_all(Vec<T> (&sum)[R][V], const T* from, int64_t step) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) sum[r][v] = load<T>(from + r * step + v * kLanes<T>);
}

template <class T, int R, int V>
REGARD_INLINE void store_all(const Vec<T> (&sum)[R][V], T* to, int64_t step) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) store<T>(to + r * step + v * kLanes<T>, sum[r][v]);
}

// Rows of numbers, each `step` from the next: a chunk of tokens, or a state. Steps are multiples of the lanes.
template <class T>
struct Panel {
  T* at;
  int64_t step;
};

// scores[i][j] = a_i . b_j
template <class T>
struct Scores {
  Panel<T> a;
  int64_t inner;
  const T* b_turned;  // (inner, kChunk)
  T* scores;          // (kChunk, kChunk)

  template <int R, int V>
  REGARD_INLINE void run(int64_t row, int64_t column) const {
    Vec<T> sum[R][V];
    clear<T, V, R>(sum);
    add_products<T, R, V, false>(sum, a.at + row * a.step, a.step, inner, b_turned + column, kChunk<T>);
    store_all<T, R, V>(sum, scores + row * kChunk<T> + column, kChunk<T>);
  }
};

// x_i (+)= a_i . S + sum_{j <= i} scores[i][j] c_j; scores above the diagonal are zero.
template <class T>
struct Read {
  Panel<T> a;
  int64_t inner;  // 0 to leave the state out
  Panel<T> state;
  const T* scores;
  Panel<T> c, x;
  bool add;

  template <int R, int V>
  REGARD_INLINE void run(int64_t row, int64_t column) const {
    Vec<T> sum[R][V];
    T* to = x.at + row * x.step + column;
    if (add)
      load_all<T, R, V>(sum, to, x.step);
    else
      clear<T, V, R>(sum);
    add_products<T, R, V, false>(sum, a.at + row * a.step, a.step, inner, state.at + column, state.step);
    add_products<T, R, V, false>(sum, scores + row * kChunk<T>, kChunk<T>, row + R, c.at + column, c.step);
    store_all<T, R, V>(sum, to, x.step);
  }
};

// S += sum_j b_j c_j^T. The chunk is summed up first: the state then rounds once for a chunk, not once for a token.
template <class T>
struct Grow {
  Panel<T> b;
  int64_t count;
  Panel<T> c, state;

  template <int R, int V>
  REGARD_INLINE void run(int64_t row, int64_t column) const {
    Vec<T> sum[R][V];
    T* to = state.at + row * state.step + column;
    clear<T, V, R>(sum);
    add_products<T, R, V, true>(sum, b.at + row, b.step, count, c.at + column, c.step);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) sum[r][v] += load<T>(to + r * state.step + v * kLanes<T>);
    store_all<T, R, V>(sum, to, state.step);
  }
};

// A product in register tiles: R rows and V vectors at a time, and what is left over in smaller ones.
template <int R, int V, class Product>
REGARD_INLINE void rest_rows(const Product& product, int64_t rest, int64_t row, int64_t column) {
  if constexpr (R > 0) {
    if (rest == R)
      product.template run<R, V>(row, column);
    else
      rest_rows<R - 1, V>(product, rest, row, column);
  }
}

template <int V, class Product>
void all_rows(const Product& product, int64_t rows, int64_t column) {
  int64_t row = 0;
  for (; row + kRows<V> <= rows; row += kRows<V>) product.template run<kRows<V>, V>(row, column);
  rest_rows<kRows<V> - 1, V>(product, rows - row, row, column);
}

template <class T, class Product>
void all_tiles(const Product& product, int64_t rows, int64_t columns) {
  int64_t column = 0;
  for (; column + 2 * kLanes<T> <= columns; column += 2 * kLanes<T>) all_rows<2>(product, rows, column);
  if (column < columns) all_rows<1>(product, rows, column);
}

// Scores on and below the diagonal; above it zeros.
template <class T>
void triangle(const Scores<T>& product, int64_t count) {
  constexpr int L = kLanes<T>;
  constexpr int kTall = 8;
  int64_t row = 0;
  for (; row + kTall <= count && row + kTall <= L; row += kTall) product.template run<kTall, 1>(row, 0);
  for (; row < count; row += 4) {
    const int64_t rows = count - row < 4 ? count - row : 4;
    for (int64_t column = 0; column < row + rows;) {
      const int64_t vectors = (row + rows - column + L - 1) / L;
      if (vectors >= 3)
        rest_rows<4, 3>(product, rows, row, column);
      else if (vectors == 2)
        rest_rows<4, 2>(product, rows, row, column);
      else
        rest_rows<4, 1>(product, rows, row, column);
      column += (vectors < 3 ? vectors : 3) * L;
    }
  }
  IntVec<T> lane;
  for (int n = 0; n < L; ++n) lane[n] = n;
  for (int64_t i = 0; i < count; ++i)
    for (int64_t first = i / L * L; first < kChunk<T>; first += L) {
      T* at = product.scores + i * kChunk<T> + first;
      const IntVec<T> last = IntVec<T>{} + static_cast<typename Kind<T>::Whole>(i - first);
      store<T>(at, choose<T>(lane <= last, load<T>(at), Vec<T>{}));
    }
}

// turned[k][i] = rows[i][k] for a whole chunk.
template <class T>
void turn(const Panel<T>& rows, int64_t inner, T* turned) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < kChunk<T>; first += L) {
    const T* from = rows.at + first * rows.step;
    T* to = turned + first;
    // Rows are padded to a multiple of the lanes, and so is what they are turned into.
    for (int64_t k = 0; k < inner; k += L) {
      Vec<T> square[L];
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) square[n] = load<T>(from + n * rows.step + k);
      transpose<T>(square);
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) store<T>(to + (k + n) * kChunk<T>, square[n]);
    }
  }
}

// The tokens of a chunk in the order of the sweep: `first`, then one step forward or back each time.
struct Tokens {
  int64_t first, direction, count;
  int64_t operator[](int64_t row) const { return first + direction * row; }
};

// Where a tensor's head is, and what it becomes when it is read.
template <class T>
struct Source {
  const T* base;
  int64_t step;
  int64_t width;
  bool mapped;
  T scale;

  Source(const Tensor4& tensor, int64_t batch, int64_t head, int64_t numbers, bool map = false, double factor = 1)
      : base(static_cast<const T*>(tensor.data) + batch * tensor.batch + head * tensor.head),
        step(tensor.token),
        width(numbers),
        mapped(map),
        scale(static_cast<T>(factor)) {}
};

// Calls change(n, x) for vectors of a row and puts what it answers at the same place of another; the last vector may be
// a part of one, whose missing lanes are zero.
template <class T, class Change>
REGARD_INLINE void change_row(const T* from, T* to, int64_t width, const Change& change) {
  constexpr int L = kLanes<T>;
  int64_t n = 0;
  for (; n + L <= width; n += L) store<T>(to + n, change(n, load<T>(from + n)));
  if (n == width) return;
  T some[L] = {};
  std::memcpy(some, from + n, (width - n) * sizeof(T));
  store<T>(some, change(n, load<T>(some)));
  std::memcpy(to + n, some, (width - n) * sizeof(T));
}

// Prefetches the row that lies `ahead` numbers further. That may be beyond the tensor, where no pointer may point: the address
// is counted as a number.
template <class T>
REGARD_INLINE void fetch_ahead(const T* row, int64_t ahead, int64_t width) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(ahead) * sizeof(T);
  const uintptr_t bytes = static_cast<uintptr_t>(width) * sizeof(T);
  for (uintptr_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(reinterpret_cast<const void*>(place + byte));
}

template <class T>
REGARD_INLINE bool any(IntVec<T> mask) {
  typename Kind<T>::Whole lanes[kLanes<T>], one = 0;
  std::memcpy(lanes, &mask, sizeof lanes);
  for (int n = 0; n < kLanes<T>; ++n) one |= lanes[n];
  return one != 0;
}

// Reads a chunk. A number that is not finite and given to phi, which might hide it, makes `bad` NaN.
template <class T>
void read_rows(const Source<T>& source, const Tokens& tokens, const Panel<T>& rows, Vec<T>& bad) {
  const Vec<T> scale = splat<T>(source.scale);
  IntVec<T> tiny{};
  for (int64_t r = 0; r < tokens.count; ++r) {
    const T* from = source.base + tokens[r] * source.step;
    T* to = rows.at + r * rows.step;
    // The same row of the next chunk; beyond the last token nothing is lost but the request.
    fetch_ahead(from, tokens.direction * kChunk<T> * source.step, source.width);
    if (source.mapped)
      change_row(from, to, source.width, [&](int64_t, Vec<T> x) { return elu1::map<T>(x * scale, tiny); });
    else
      change_row(from, to, source.width, [](int64_t, Vec<T> x) { return x; });
  }
  if (!any<T>(tiny)) return;
  Vec<T> nan_sum{};
  for (int64_t r = 0; r < tokens.count; ++r)
    change_row(source.base + tokens[r] * source.step, rows.at + r * rows.step, source.width, [&](int64_t, Vec<T> x) {
      nan_sum += x * Vec<T>{};
      return elu1::map_any<T>(x * scale);
    });
  bad += nan_sum;
}

template <class T>
bool is_bad(Vec<T> bad) {
  const T sum = sum_of<T>(bad);
  return !(sum == 0);
}

// A causal product with its state: columns first to first + columns of c, over as many chunks as are handed to it.
template <class T>
class Causal {
 public:
  const int64_t inner, first, columns;
  Panel<T> x, state;

  Causal(Arena& arena, int64_t numbers, int64_t begin, int64_t gemm)
      : inner(numbers), first(begin), columns(gemm), held_(rounded_up(gemm, kLanes<T>)) {
    x = {arena.take<T>(kChunk<T> * held_), held_};
    state = {arena.take<T>(padded() * held_), held_};
    turned_ = arena.take<T>(kChunk<T> * padded());
    scores_ = arena.take<T>(kChunk<T> * kChunk<T>);
    std::memset(state.at, 0, padded() * held_ * sizeof(T));
  }
  static int64_t room(int64_t inner, int64_t columns) {
    const int64_t held = rounded_up(columns, kLanes<T>), padded = rounded_up(inner, kLanes<T>);
    return Arena::room<T>(kChunk<T> * held) + Arena::room<T>(padded * held) + Arena::room<T>(kChunk<T> * padded) +
           Arena::room<T>(kChunk<T> * kChunk<T>);
  }

  void meet(const Panel<T>& b) const { turn(b, inner, turned_); }

  // x (+)= what the rows of a see of the rows met last, and of the state.
  void read(const Panel<T>& a, const Panel<T>& c, int64_t count, bool with_state = true, bool add = false) const {
    triangle<T>({a, inner, turned_, scores_}, count);
    const Panel<T> some{c.at + first, c.step};
    all_tiles<T>(Read<T>{a, with_state ? inner : 0, state, scores_, some, x, add}, count, held_);
  }
  void grow(const Panel<T>& b, const Panel<T>& c, int64_t count) const {
    all_tiles<T>(Grow<T>{b, count, {c.at + first, c.step}, state}, inner, held_);
  }
  // The last row of the state alone; the others come from the state of another product, turned over.
  void grow_last(const Panel<T>& b, const Panel<T>& c, int64_t count) const {
    const Panel<T> last{state.at + (inner - 1) * state.step, state.step};
    all_tiles<T>(Grow<T>{{b.at + inner - 1, b.step}, count, c, last}, 1, held_);
  }
  void take_turned(const Causal& other) const {
    constexpr int L = kLanes<T>;
    for (int64_t row = 0; row < inner - 1; row += L)
      for (int64_t column = 0; column < columns; column += L) {
        Vec<T> square[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) square[n] = load<T>(other.state.at + (column + n) * other.state.step + row);
        transpose<T>(square);
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n)
          if (row + n < inner - 1) store<T>(state.at + (row + n) * state.step + column, square[n]);
      }
  }
  const T* scores() const { return scores_; }

 private:
  int64_t padded() const { return rounded_up(inner, kLanes<T>); }
  int64_t held_;
  T *turned_, *scores_;
};

// A thread is used only if there are enough products to outweigh waking it.
inline int64_t worthwhile(int64_t threads, double products) {
  const double worth = products / 3e5;
  return worth < static_cast<double>(threads) ? static_cast<int64_t>(worth) + 1 : threads;
}

// Columns that are computed together, and how many such pieces there are.
struct Pieces {
  int64_t size, count;
};

// Cuts columns so that all threads are busy to the end; the bits are the same whatever the cut. A piece alone still
// pays for all scores and features, about a seventh of the whole.
template <class T>
Pieces cut(int64_t columns, int64_t items, int64_t threads) {
  constexpr int64_t kUnit = 2 * kLanes<T>;
  const int64_t units = columns > kUnit ? (columns + kUnit - 1) / kUnit : 1;
  Pieces best{units * kUnit, 1};
  double least = 0;
  for (int64_t count = 1; count <= units; ++count) {
    const int64_t rounds = (items * count + threads - 1) / threads;
    const double cost = static_cast<double>(rounds) * (0.15 + 0.85 / static_cast<double>(count));
    if (count > 1 && cost >= least) continue;
    least = cost;
    best.size = (units + count - 1) / count * kUnit;
    best.count = (units * kUnit + best.size - 1) / best.size;
  }
  return best;
}

}  // namespace sweep
}  // namespace REGARD_ISA
}  // namespace regard
