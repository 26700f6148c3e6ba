// The arguments of the kernels for grids of tokens; included by interface.h.
#pragma once

#include <cstdint>

namespace regard {

enum class DType : int64_t;

// Attention between the channels of a group, over all tokens; see channel_attention.h.
struct ChannelAttention {
  DType dtype;  // kFloat32 or kFloat64
  int64_t threads;
  int64_t batch, tokens, groups, channels;  // channels of a group
  double scale;
  const void* qkv;  // (batch, token, 3, group, channel), contiguous
  void* output;     // (batch, token, group, channel), contiguous
};

// A 3 x 3 convolution of each channel, and the layer norm of its result; see grid_convolution.h.
struct GridConvolution {
  DType dtype;  // kFloat32 or kFloat64
  int64_t threads;
  int64_t batch, rows, columns, channels;
  double eps;
  const void* x;            // (batch, row, column, channel), contiguous, like both results
  const void* weight;       // (3, 3, channel)
  const void* bias;         // (channel)
  const void* norm_weight;  // (channel), or null for ones
  const void* norm_bias;    // (channel), or null for zeros
  void* output;
  void* normed;
};

}  // namespace regard
