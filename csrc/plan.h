// A program: the plan of a pattern as 32-bit words, written by src/regard/kernels/program.py.
//
//   program   parts, tallest tile, whether queries may appear in several parts, batch rows told apart, allowed pairs in all
//             of them (low 31 bits, high bits); then the place of each part
//   part      lists, then the place of each list: one for each batch row that the pattern tells apart, or one for all
//   list      segments, tiles, place of the tiles' places; then for each segment its first and last tile and the lowest and
//             highest key that its tiles touch
//   tile      queries, runs; the queries; for each run the first key, how many, the step between them, and where their
//             masks begin (-1: all queries see all keys of the run); whole runs come first
//
// A mask is a 64-bit word for one key: bit n is set when the tile's query n sees it. All places count words from the
// beginning of the program.
#pragma once

#include <cstdint>

#include "interface.h"
#include "vector.h"

namespace regard {
namespace REGARD_ISA {

struct Run {
  int32_t start, count, step, mask;
};

struct Tile {
  int32_t queries, runs;
  const int32_t* query;
  const Run* run;
};

struct Segment {
  int32_t first, last, low, high;
};

struct List {
  int32_t segments, tiles;
  const int32_t* place;
  const Segment* segment;
};

class Program {
 public:
  explicit Program(const int32_t* words) : words_(words) {}
  int32_t parts() const { return words_[0]; }
  int32_t tallest() const { return words_[1]; }
  bool resumes() const { return words_[2] != 0; }
  // Threads worth waking for so many multiply-adds a pair: each gets at least a few microseconds of work.
  int64_t threads(const Attention& task, int64_t per_pair) const {
    const double pairs = words_[4] + 2147483648.0 * words_[5];
    const double worth = pairs / words_[3] * static_cast<double>(task.batch * task.heads * per_pair) / (1 << 19);
    return worth < static_cast<double>(task.threads) ? 1 + static_cast<int64_t>(worth) : task.threads;
  }
  int32_t lists(int32_t part) const { return words_[words_[6 + part]]; }
  List list(int32_t part, int64_t row) const {
    const int32_t* at = words_ + words_[6 + part];
    const int32_t* found = words_ + at[1 + row % at[0]];
    return List{found[0], found[1], words_ + found[2], reinterpret_cast<const Segment*>(found + 3)};
  }
  Tile tile(const List& list, int32_t number) const {
    const int32_t* at = words_ + list.place[number];
    return Tile{at[0], at[1], at + 2, reinterpret_cast<const Run*>(at + 2 + at[0])};
  }

 private:
  const int32_t* words_;
};

}  // namespace REGARD_ISA
}  // namespace regard
