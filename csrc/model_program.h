// What a decode step of a whole model is told: a list of parts that is made once for each model, and what changes from
// step to step. All fields are eight bytes wide; src/regard/kernels/model_step.py packs them in this order.
#pragma once

#include <cstdint>

#include "weights.h"

namespace regard {

enum NormKind : int64_t { kNoNorm = 0, kLayerNorm = 1, kRmsNorm = 2 };
enum PartKind : int64_t { kSelfAttention = 0, kCrossAttention = 1, kFeedForward = 2 };

// (x - mean) / sqrt(variance + eps) weight + bias, or x / sqrt(mean(x^2) + eps) weight; weight and bias may be null.
struct StepNorm {
  NormKind kind;
  const float *weight, *bias;
  double eps;
};

// One part with a residual connection around it; see model_step.h.
struct ModelPart {
  PartKind kind;
  StepNorm norm;        // before the part
  int64_t from_normed;  // whether the residual connection begins after the norm
  // (q | k | v), q, or the hidden channels, gate above up where `gated`: rows in up to three formats, for files of llama.cpp
  // store them as matrices of their own. The last ones may have no rows.
  PackedMatrix first[3];
  const float* first_bias;
  PackedMatrix second;
  const float* second_bias;
  // Attention: channels of a query and of a value, ALiBi's slopes or null, channels that rotate in halves or in pairs, and the
  // number of its cache in the step.
  int64_t heads, kv_heads, dim, value_dim;
  double scale;
  const float* slopes;
  int64_t rotary, rotary_pairs;
  int64_t cache;
  int64_t window;  // tokens before the newest that it sees; -1: all
  // Feed-forward.
  int64_t activation, gated;
};

// Keys and values (row, kv_head, token, dim) with strides in numbers. Text `row` sees tokens start[row] <= j < stop[row]
// that are in the window, and at least one. `start` may be null for 0, `stop` for `column + 1`: the column that a
// self-attention writes its newest token into.
struct StepCache {
  float *key, *value;
  int64_t key_row, key_head, key_token;
  int64_t value_row, value_head, value_token;
  int64_t column;
  const int64_t *start, *stop;

  int64_t last(int64_t row) const { return stop ? stop[row] : column + 1; }
  int64_t first(int64_t row, int64_t window) const {
    const int64_t begin = start ? start[row] : 0, seen = window < 0 ? 0 : last(row) - 1 - window;
    return begin > seen ? begin : seen;
  }
};

struct ModelStep {
  int64_t threads, rows, dim, part_count;
  const ModelPart* parts;
  const StepCache* caches;
  const float *cosine, *sine;  // (row, rotary / 2) of the new tokens' positions
  int64_t rotation_row;        // stride of rows, 0 where all have the same position
  const float* x;              // (row, dim): embeddings and positions of the new tokens, or null:
  PackedMatrix embedding;      // then x = embedding_scale embedding[token] + position_table[position]
  double embedding_scale;
  const float* position_table;  // or null
  const int64_t *tokens, *positions;  // (row)
  StepNorm final_norm[2];      // one after the other; the second may be none
  PackedMatrix output;         // no rows: no logits
  float* hidden;               // (row, dim) after the final norms, or null
  float* logits;               // (row, rows of the output)
};

}  // namespace regard
