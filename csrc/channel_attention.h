// Attention between the channels of a group, summed over all tokens.
//
//   S[i][j]   = sum_n scale q[n][i] k[n][j]            n: tokens, i and j: channels of one group
//   A[i]      = softmax_j S[i][j]
//   out[n][i] = sum_j A[i][j] v[n][j]
//
// q, k and v of a token lie beside one another. For S, some tokens of q and k at a time are copied together (they lie so
// far apart that the first cache would not keep them), and tiles of rows times a panel of two vectors stay in registers.
// For the output, rows of v meet panels of the transposed A, as in gemm.h. One item is one group of one image: nothing
// depends on threads or on the batch.
#pragma once

#include "gemm.h"
#include "grid_tasks.h"

namespace regard {
namespace REGARD_ISA {
namespace channels {

constexpr int64_t kTokens = 128;                  // that are multiplied at a time, so that they stay in the first cache
constexpr int kTile = REGARD_BYTES == 64 ? 8 : 6;  // rows of S in registers, beside two vectors

// One group: its tokens are `stride` numbers apart.
template <class T>
struct Group {
  const T *query, *key, *value;
  T* output;
  int64_t stride, output_stride, tokens, channels;
  T scale;
};

// Numbers of scratch memory: a piece of q, filled up to whole tiles; the same piece of k, the scores, and panels of A,
// filled up to whole panels.
template <class T>
struct Room {
  int64_t tall, panels, width;
  int64_t query, key, scores, weights;
  explicit Room(int64_t channels)
      : tall((channels + kTile - 1) / kTile * kTile),
        panels((channels + gemm::kPanel<T> - 1) / gemm::kPanel<T>),
        width(panels * gemm::kPanel<T>),
        query((tall + 15) / 16 * 16 * kTokens),
        key(width * kTokens),
        scores(tall * width),
        weights(channels * width) {}
  int64_t numbers() const { return query + key + scores + weights; }
};

// to[n][c] = scale from[n][c] for some tokens; rows of `to` have `width` numbers.
template <class T>
REGARD_INLINE void copy(const T* from, int64_t stride, int64_t tokens, int64_t channels, T scale, T* to, int64_t width) {
  constexpr int L = kLanes<T>;
  for (int64_t n = 0; n < tokens; ++n) {
    int64_t c = 0;
    for (; c + L <= channels; c += L) store<T>(to + n * width + c, load<T>(from + n * stride + c) * splat<T>(scale));
    for (; c < channels; ++c) to[n * width + c] = from[n * stride + c] * scale;
  }
}

// S += q^T k over all tokens, piece by piece.
template <class T>
void add_scores(const Group<T>& group, const Room<T>& room, T* query, T* key, T* scores) {
  constexpr int L = kLanes<T>, P = gemm::kPanel<T>;
  const int64_t C = group.channels;
  for (int64_t n = 0; n < room.query + room.key + room.scores; ++n) query[n] = 0;  // they lie behind one another
  for (int64_t start = 0; start < group.tokens; start += kTokens) {
    const int64_t count = group.tokens - start < kTokens ? group.tokens - start : kTokens;
    copy<T>(group.query + start * group.stride, group.stride, count, C, group.scale, query, room.tall);
    copy<T>(group.key + start * group.stride, group.stride, count, C, T(1), key, room.width);
    for (int64_t i = 0; i < C; i += kTile)
      for (int64_t panel = 0; panel < room.panels; ++panel) {
        Vec<T> sum[kTile][2];
        T* to = scores + i * room.width + panel * P;
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
          sum[r][0] = load<T>(to + r * room.width);
          sum[r][1] = load<T>(to + r * room.width + L);
        }
        const T *q = query + i, *k = key + panel * P;
        for (int64_t n = 0; n < count; ++n) {
          const Vec<T> low = load<T>(k + n * room.width), high = load<T>(k + n * room.width + L);
#pragma GCC unroll 8
          for (int r = 0; r < kTile; ++r) {
            const Vec<T> one = splat<T>(q[n * room.tall + r]);
            sum[r][0] += one * low;
            sum[r][1] += one * high;
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kTile; ++r) {
          store<T>(to + r * room.width, sum[r][0]);
          store<T>(to + r * room.width + L, sum[r][1]);
        }
      }
  }
}

// The softmax of each row of scores, turned over into panels: weights[panel][j][i].
template <class T>
void take_softmax(const Room<T>& room, int64_t C, T* scores, T* weights) {
  constexpr int P = gemm::kPanel<T>;
  for (int64_t n = 0; n < room.weights; ++n) weights[n] = 0;
  for (int64_t i = 0; i < C; ++i) {
    T* row = scores + i * room.width;
    T top = row[0];
    for (int64_t j = 1; j < C; ++j) top = row[j] > top ? row[j] : top;
    for (int64_t j = 0; j < room.width; j += kLanes<T>)
      store<T>(row + j, exp2<T>((load<T>(row + j) - splat<T>(top)) * splat<T>(T(1.4426950408889634))));
    T sum = 0;
    for (int64_t j = 0; j < C; ++j) sum += row[j];
    for (int64_t j = 0; j < C; ++j) weights[(i / P * C + j) * P + i % P] = row[j] / sum;
  }
}

// rows[r] of a strip for the tokens from `first` on; surplus ones are the last token again.
template <class T>
REGARD_INLINE void point(const Group<T>& group, int64_t first, const T* (&x)[gemm::kStrip]) {
#pragma GCC unroll 6
  for (int r = 0; r < gemm::kStrip; ++r)
    x[r] = group.value + (first + r < group.tokens ? first + r : group.tokens - 1) * group.stride;
}

template <class T>
void write_output(const Group<T>& group, const Room<T>& room, const T* weights) {
  constexpr int L = kLanes<T>, P = gemm::kPanel<T>;
  const int64_t C = group.channels;
  for (int64_t n = 0; n < group.tokens; n += gemm::kStrip) {
    const T* x[gemm::kStrip];
    point<T>(group, n, x);
    for (int64_t panel = 0; panel < room.panels; ++panel) {
      Vec<T> sum[gemm::kStrip][2] = {};
      gemm::add_products<T>(x, weights + panel * C * P, C, sum);
      const int64_t left = C - panel * P;
      for (int r = 0; r < gemm::kStrip && n + r < group.tokens; ++r) {
        T* to = group.output + (n + r) * group.output_stride + panel * P;
        if (left >= P) {
          store<T>(to, sum[r][0]);
          store<T>(to + L, sum[r][1]);
        } else {
          T some[P];
          store<T>(some, sum[r][0]);
          store<T>(some + L, sum[r][1]);
          for (int64_t c = 0; c < left; ++c) to[c] = some[c];
        }
      }
    }
  }
}

}  // namespace channels

template <class T>
int32_t run_channel_attention(const ChannelAttention& task) {
  if (task.batch <= 0 || task.tokens <= 0 || task.groups <= 0 || task.channels <= 0) return kOk;
  const int64_t C = task.channels, dim = task.groups * C;
  const channels::Room<T> room(C);
  const double worth = static_cast<double>(task.batch) * task.groups * task.tokens * C * C / 1e5;
  const int64_t threads = worth < static_cast<double>(task.threads) ? static_cast<int64_t>(worth) + 1 : task.threads;
  int32_t failed = 0;
  auto work = [&](int64_t item) {
    T* memory = static_cast<T*>(scratch(room.numbers() * static_cast<int64_t>(sizeof(T))));
    if (!memory) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    T *query = memory, *key = query + room.query, *scores = key + room.key, *weights = scores + room.scores;
    const int64_t image = item / task.groups, first = item % task.groups * C;
    const T* qkv = static_cast<const T*>(task.qkv) + image * task.tokens * 3 * dim + first;
    T* output = static_cast<T*>(task.output) + image * task.tokens * dim + first;
    const channels::Group<T> group{qkv, qkv + dim, qkv + 2 * dim, output, 3 * dim, dim, task.tokens, C, static_cast<T>(task.scale)};
    channels::add_scores<T>(group, room, query, key, scores);
    channels::take_softmax<T>(room, C, scores, weights);
    channels::write_output<T>(group, room, weights);
  };
  parallel(threads, task.batch * task.groups, work);
  return failed ? kNoMemory : kOk;
}

}  // namespace REGARD_ISA
}  // namespace regard
