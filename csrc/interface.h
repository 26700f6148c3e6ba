// What Python hands over: plain numbers and addresses, eight bytes each, in the order of these fields.
// src/regard/kernels/ packs the same fields; tensors have a last stride of one unless it says otherwise.
#pragma once

#include <cstdint>

namespace regard {

enum class Number : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// What a kernel answers.
enum Answer : int32_t {
  kFine = 0,
  kNotFinite = 1,  // a result is infinite or NaN: the caller looks where that may come from and asks again
  kTooTall = 2,    // a tile holds more queries than this machine's vectors
  kNoMemory = 3,
};

// A tensor (batch, head, token, dim): address and strides of batch, head and token, counted in numbers.
struct Tensor4 {
  const void* data;
  int64_t batch, head, token;
};

// Softmax attention over a program; see plan.h for its words. T is the number computed with: float for the half kinds.
struct Attention {
  Number kind;  // of query, key and value; everything else is T
  int64_t threads;
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  double beta;
  Tensor4 query, key, value;
  void* output;                   // (batch, head, query, value_dim), contiguous
  void* sums;                     // log-sum-exp (batch, head, query)
  const int32_t* program;
  const uint64_t* masks;
  // A bias that depends on a difference of codes: table[head][query_code[i] - key_code[j]], outside of it zero.
  const void* table;
  int64_t table_head, table_size;  // stride of heads (0: one for all), entries
  const int32_t* query_code;
  const int32_t* key_code;
  // A bias that is a tensor, with strides 0 where it is the same for all.
  const void* bias;
  int64_t bias_batch, bias_head, bias_query, bias_key;
  // Only for the way back.
  const void* upstream;                       // gradient of the output, contiguous
  void *query_slope, *key_slope, *value_slope;  // contiguous
  void* table_slope;                          // (batch, head, entry), zero before; its first row becomes the sum
  void* bias_slope;                           // with the strides of the bias
};

// One or few queries against long rows of keys. Query n of a row sees keys start[n] <= j < stop[n].
struct Decode {
  Number kind;
  int64_t threads;
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  double beta;
  Tensor4 query, key, value;
  void* output;  // (batch, head, query, value_dim), contiguous
  void* sums;    // log-sum-exp (batch, head, query), or null
  const int64_t* start;  // (batch, query)
  const int64_t* stop;
};

// Causal linear attention on features: equally many queries and keys after a state.
//
//   output_i = phi(q_i) . S_i / phi(q_i) . z_i,   S_i = state + sum_{j <= i} phi(k_j) v_j^T,   z_i likewise without v
struct Linear {
  Number kind;  // kFloat32 or kFloat64, of everything
  int64_t threads;
  int64_t batch, heads, kv_heads, tokens, dim, value_dim;
  int64_t map;                      // phi: 0 for numbers that are features already, 1 for elu(x) + 1
  double query_scale, key_scale;    // what phi multiplies its argument with; 1 where there is none
  Tensor4 query, key, value;
  const void *state, *norm;         // (batch, kv_head, dim, value_dim), (batch, kv_head, dim), or null for zero
  void *output, *total;             // (batch, head, token, value_dim), normalised; (batch, head, token): the normaliser
  void *next_state, *next_norm;     // or null
  const void* upstream;             // gradient of the output, contiguous
  void *query_slope, *key_slope, *value_slope;  // contiguous
  const void *next_state_slope, *next_norm_slope;  // gradients of the state after the tokens, or null
  void *state_slope, *norm_slope;   // gradients of the state before them, or null
};

// A linear layer for few rows: output[m][n] = bias[n] + sum_k x[m][k] weight[n][k].
struct Few {
  Number kind;  // kFloat32 or kFloat64, of everything
  int64_t threads;
  int64_t rows, in, out;
  const void* x;       // (rows, in)
  int64_t x_row;       // stride of its rows
  const void* weight;  // (out, in)
  int64_t weight_row;
  const void* bias;    // (out), contiguous, or null
  void* output;        // (rows, out), contiguous
};

// A linear layer for many rows: output[m][n] = bend(bias[n] + sum_k x[m][k] weight[n][k]).
enum Bend : int64_t { kStraight = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3 };

struct Many {
  Number kind;  // kFloat32 or kFloat64, of everything
  int64_t threads;
  int64_t rows, in, out;
  const void* x;       // (rows, in)
  int64_t x_row;       // stride of its rows
  const void* weight;  // (out, in)
  int64_t weight_row;
  const void* bias;    // (out), contiguous, or null
  void* output;        // (rows, out), contiguous
  Bend bend;
};

// One set of kernels, compiled for one instruction set.
struct Kernels {
  const char* name;
  int32_t lanes;  // float32 numbers in a vector; for the scalar twins, of the programs they are given
  int32_t (*attention)(const Attention&);
  int32_t (*attention_backward)(const Attention&);
  int32_t (*decode)(const Decode&);
  int32_t (*linear)(const Linear&);
  int32_t (*linear_backward)(const Linear&);
  int32_t (*few)(const Few&);
  int32_t (*many)(const Many&);
  void (*exp2)(Number kind, const void* from, void* to, int64_t count);
  double (*peak)(int64_t threads, double seconds);  // operations a second of nothing but multiply-adds
};

}  // namespace regard
