// What a tile needs beside its products: memory, sources of numbers, and packing.
#pragma once

#include "half.h"
#include "interface.h"
#include "products.h"
#include "threads.h"

namespace regard {
namespace REGARD_ISA {

// Hands out pieces of one thread's scratch memory. `need` counts first, then `open` gets it all at once.
class Arena {
 public:
  bool open(int64_t bytes) {
    next_ = static_cast<char*>(scratch(bytes));
    return next_ != nullptr;
  }
  template <class U>
  U* take(int64_t count) {
    U* piece = reinterpret_cast<U*>(next_);
    next_ += room<U>(count);
    return piece;
  }
  template <class U>
  static int64_t room(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(U)) + 63) / 64 * 64 + 64;
  }

 private:
  char* next_ = nullptr;
};

// The rows of one head of a tensor; half precision is converted when a row is read.
template <class T>
struct Rows {
  const char* base;
  int64_t stride;  // bytes between tokens
  int64_t dim;
  DType dtype;
  bool direct;  // whether the numbers are T already

  Rows(const Tensor4& tensor, DType number, int64_t batch, int64_t head, int64_t width)
      : base(static_cast<const char*>(tensor.data) + (batch * tensor.batch + head * tensor.head) * size_of(number)),
        stride(tensor.token * size_of(number)),
        dim(width),
        dtype(number),
        direct(number == DType::kFloat32 || number == DType::kFloat64) {}

  // The row of a token; `room` has place for it where it must be converted.
  REGARD_INLINE const T* row(int64_t token, T* room) const {
    const char* place = base + token * stride;
    if (direct) return reinterpret_cast<const T*>(place);
    convert<T>(place, dtype, dim, room);
    return room;
  }
};

// What went wrong, told by any thread: one flag for each answer but the first.
REGARD_INLINE void raise(int32_t& flag) { __atomic_store_n(&flag, 1, __ATOMIC_RELAXED); }

REGARD_INLINE int32_t worst(const int32_t (&flags)[3]) {
  return flags[kNoMemory - 1] ? kNoMemory : flags[kTooTall - 1] ? kTooTall : flags[kNotFinite - 1] ? kNotFinite : kOk;
}

REGARD_INLINE int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// packed[d][q] = rows[q][d] for `width` rows, a multiple of the lanes.
template <class T>
void pack(const T* const* rows, int64_t width, int64_t dim, T* packed) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < width; first += L) {
    const T* const* row = rows + first;
    int64_t d = 0;
    for (; d + L <= dim; d += L) {
      Vec<T> square[L];
#pragma GCC unroll 16
      for (int lane = 0; lane < L; ++lane) square[lane] = load<T>(row[lane] + d);
      transpose<T>(square);
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) store<T>(packed + (d + n) * width + first, square[n]);
    }
    for (; d < dim; ++d)
      for (int lane = 0; lane < L; ++lane) packed[d * width + first + lane] = row[lane][d];
  }
}

template <class T, bool kAdd>
REGARD_INLINE void put(T* to, Vec<T> x) {
  store<T>(to, kAdd ? load<T>(to) + x : x);
}

// rows[q][d] (+)= packed[d][q] * factor[q] for `count` rows.
template <class T, bool kAdd>
void unpack(const T* packed, int64_t count, int64_t width, int64_t dim, const T* factor, T* const* rows) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < count; first += L) {
    const Vec<T> scale = load<T>(factor + first);
    const int64_t lanes = count - first < L ? count - first : L;
    int64_t d = 0;
    for (; d + L <= dim; d += L) {
      Vec<T> square[L];
#pragma GCC unroll 16
      for (int n = 0; n < L; ++n) square[n] = load<T>(packed + (d + n) * width + first) * scale;
      transpose<T>(square);
      if (lanes == L) {
#pragma GCC unroll 16
        for (int lane = 0; lane < L; ++lane) put<T, kAdd>(rows[first + lane] + d, square[lane]);
      } else {
        for (int lane = 0; lane < lanes; ++lane) put<T, kAdd>(rows[first + lane] + d, square[lane]);
      }
    }
    for (; d < dim; ++d)
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const T x = packed[d * width + first + lane] * factor[first + lane];
        rows[first + lane][d] = kAdd ? rows[first + lane][d] + x : x;
      }
  }
}

}  // namespace REGARD_ISA
}  // namespace regard
