// The arguments of the kernels: plain numbers and addresses, eight bytes each, in the order of these fields.
// src/regard/kernels/ packs the same fields; tensors have a last stride of one unless it says otherwise.
#pragma once

#include <cstdint>

#include "grid_tasks.h"
#include "matmul_task.h"
#include "model_program.h"
#include "weights.h"

namespace regard {

enum class DType : int64_t { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// What a kernel returns.
enum Status : int32_t {
  kOk = 0,
  kNotFinite = 1,  // a result is infinite or NaN: the caller finds out why and calls again
  kTooTall = 2,    // a tile holds more queries than this machine's vectors
  kNoMemory = 3,
  kNoFormat = 4,   // weights in a format that these kernels do not read
};

// A tensor (batch, head, token, dim): address and strides of batch, head and token, counted in numbers.
struct Tensor4 {
  const void* data;
  int64_t batch, head, token;
};

// The same of a tensor that is written.
struct Output4 {
  void* data;
  int64_t batch, head, token;
};

// The row of a token of one head.
template <class T, class Tensor>
inline T* row_at(const Tensor& tensor, int64_t batch, int64_t head, int64_t token = 0) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch + head * tensor.head + token * tensor.token;
}

// Softmax attention over a program; see plan.h for its words. T is the number computed with: float for the half types.
struct Attention {
  DType dtype;  // of query, key and value; everything else is T
  int64_t threads;
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  double scale;
  // Dropout: a weight whose random number of 16 bits is below `drop_below` (0: none is), see dropout.h, is dropped, and
  // the others are multiplied by `keep_scale`.
  uint64_t drop_below, seed;
  double keep_scale;
  // Which numbers the generator knows the queries and keys by, where they are some of a longer sequence; else null.
  const int32_t* query_number;
  const int32_t* key_number;
  Tensor4 query, key, value;
  Output4 output;  // (batch, head, query, value_dim)
  void* lse;       // log-sum-exp (batch, head, query)
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
  // Only for backward.
  Tensor4 grad_output;  // gradient of the output
  Output4 query_grad, key_grad, value_grad;
  void* table_grad;  // (batch, head, entry), zero before; its first row becomes the sum
  void* bias_grad;   // with the strides of the bias
};

// One or few queries against long rows of keys. Query n of a row sees keys start[n] <= j < stop[n].
struct Decode {
  DType dtype;
  int64_t threads;
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  double scale;
  Tensor4 query, key, value;
  void* output;  // (batch, head, query, value_dim), contiguous
  void* lse;     // log-sum-exp (batch, head, query), or null
  const int64_t* start;  // (batch, query)
  const int64_t* stop;
  const void* slopes;  // ALiBi: a score of query n and key j loses slopes[head] (position + n - j), in T; or null
  int64_t position;
};

// Causal linear attention on features: equally many queries and keys after a state.
//
//   output_i = phi(q_i) . S_i / phi(q_i) . z_i,   S_i = state + sum_{j <= i} phi(k_j) v_j^T,   z_i likewise without v
struct LinearAttention {
  DType dtype;  // kFloat32 or kFloat64, of everything
  int64_t threads;
  int64_t batch, heads, kv_heads, tokens, dim, value_dim;
  int64_t map;                      // phi: 0 for numbers that are features already, 1 for elu(x) + 1
  double query_scale, key_scale;    // what phi multiplies its argument with; 1 where there is none
  Tensor4 query, key, value;
  const void *state, *norm;         // (batch, kv_head, dim, value_dim), (batch, kv_head, dim), or null for zero
  void *output, *total;             // (batch, head, token, value_dim), normalised; (batch, head, token): the normaliser
  void *next_state, *next_norm;     // or null
  const void* grad_output;          // gradient of the output, contiguous
  void *query_grad, *key_grad, *value_grad;  // contiguous
  const void *next_state_grad, *next_norm_grad;  // gradients of the state after the tokens, or null
  void *state_grad, *norm_grad;   // gradients of the state before them, or null
};

// A linear layer: output[m][n] = bias[n] + sum_k x[m][k] weight[n][k].
struct LinearLayer {
  DType dtype;  // kFloat32 or kFloat64, of everything
  int64_t threads;
  int64_t rows, in, out;
  const void* x;       // (rows, in)
  int64_t x_row;       // stride of its rows
  const void* weight;  // (out, in)
  int64_t weight_row;
  const void* bias;    // (out), contiguous, or null
  void* output;        // (rows, out), contiguous
};

enum Activation : int64_t { kIdentity = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

// The same with an activation and a residual: output[m][n] = residual[m][n] + activation(bias[n] + sum_k x[m][k] weight[n][k]).
struct Gemm : LinearLayer {
  Activation activation;
  const void* residual;  // (rows, out), not the output itself; or null
  int64_t residual_row;
  const void* packed;  // the weight as `pack_weight` has written it, or null
};

// A weight is laid out for `gemm` once: panels of two vectors of outputs, channel by channel.
struct PackWeight {
  DType dtype;  // kFloat32 or kFloat64
  int64_t threads, in, out;
  const void* weight;  // (out, in)
  int64_t weight_row;
  void* packed;  // (panel, in, outputs of a panel)
};

// One set of kernels, compiled for one instruction set.
struct Kernels {
  const char* name;
  int32_t lanes;  // float32 numbers in a vector; for the scalar reference, of the programs it is given
  int32_t (*attention)(const Attention&);
  int32_t (*attention_backward)(const Attention&);
  int32_t (*decode)(const Decode&);
  int32_t (*linear_attention)(const LinearAttention&);
  int32_t (*linear_attention_backward)(const LinearAttention&);
  int32_t (*gemv)(const LinearLayer&);
  int32_t (*gemm)(const Gemm&);
  int32_t (*pack_weight)(const PackWeight&);
  int32_t (*channel_attention)(const ChannelAttention&);
  int32_t (*grid_convolution)(const GridConvolution&);
  int32_t (*weight_products)(const WeightProducts&);
  int32_t (*model_step)(const ModelStep&);
  int32_t (*matmul)(const Matmul&);
  int32_t (*norm)(const Norm&);
  int32_t (*norm_backward)(const Norm&);
  int32_t (*greedy)(const float* logits, int64_t rows, int64_t count, int64_t* tokens, float* scores);
  void (*exp2)(DType dtype, const void* from, void* to, int64_t count);
  double (*peak)(int64_t threads, double seconds);  // operations a second of nothing but multiply-adds
};

}  // namespace regard
