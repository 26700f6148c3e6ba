// The scalar reference: the same tasks by plain loops, one pair after the other, summed in double. They are slow and simple on
// purpose; tests hold the vector kernels against them.
#define REGARD_ISA scalar
#define REGARD_BYTES 16

#include <cmath>
#include <limits>
#include <vector>

#include "plan.h"
#include "scalar_decode.h"
#include "scalar_dropout.h"
#include "scalar_grid.h"
#include "scalar_linear_layer.h"
#include "scalar_linear_attention.h"
#include "scalar_matmul.h"
#include "scalar_model_step.h"
#include "scalar_weights.h"
#include "tile.h"

namespace regard {
namespace scalar {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
std::vector<double> row_of(const Tensor4& tensor, DType dtype, int64_t b, int64_t h, int64_t token, int64_t dim) {
  std::vector<T> numbers(dim);
  const Rows<T> rows(tensor, dtype, b, h, dim);
  convert<T>(rows.base + token * rows.stride, dtype, dim, numbers.data());
  return std::vector<double>(numbers.begin(), numbers.end());
}

// The content score of one pair.
template <class T>
double content(const Attention& task, int64_t b, int64_t h, int64_t query, int64_t key) {
  const auto q = row_of<T>(task.query, task.dtype, b, h, query, task.dim);
  const auto k = row_of<T>(task.key, task.dtype, b, h / (task.heads / task.kv_heads), key, task.dim);
  double sum = 0;
  for (int64_t d = 0; d < task.dim; ++d) sum += q[d] * k[d];
  return sum * task.scale;
}

// The score of one pair.
template <class T>
double score(const Attention& task, int64_t b, int64_t h, int64_t query, int64_t key) {
  double sum = 0;
  if (task.table) {
    const int64_t entry = int64_t(task.query_code[query]) - task.key_code[key];
    if (entry >= 0 && entry < task.table_size) sum += static_cast<const T*>(task.table)[h * task.table_head + entry];
  }
  if (task.bias)
    sum += static_cast<const T*>(
        task.bias)[b * task.bias_batch + h * task.bias_head + query * task.bias_query + key * task.bias_key];
  // Minus infinity hides a pair, whatever its content.
  return sum == -kInfinity ? sum : sum + content<T>(task, b, h, query, key);
}

// Calls visit(b, h, query, key) for every pair that the program allows.
template <class Visit>
void every_pair(const Attention& task, Visit visit) {
  const Program program(task.program);
  for (int32_t part = 0; part < program.parts(); ++part)
    for (int64_t b = 0; b < task.batch; ++b) {
      const List list = program.list(part, b);
      for (int32_t n = 0; n < list.tiles; ++n) {
        const Tile tile = program.tile(list, n);
        for (int32_t r = 0; r < tile.runs; ++r)
          for (int32_t i = 0; i < tile.run[r].count; ++i) {
            const Run& run = tile.run[r];
            const uint64_t word = run.mask < 0 ? ~uint64_t(0) : task.masks[run.mask + i];
            for (int32_t q = 0; q < tile.queries; ++q)
              if (word >> q & 1)
                for (int64_t h = 0; h < task.heads; ++h) visit(b, h, tile.query[q], run.start + i * run.step);
          }
      }
    }
}

template <class T>
int32_t forward(const Attention& task) {
  const int64_t rows = task.batch * task.heads * task.queries;
  std::vector<double> top(rows, -kInfinity), sum(rows, 0), output(rows * task.value_dim, 0);
  auto place = [&](int64_t b, int64_t h, int64_t query) { return (b * task.heads + h) * task.queries + query; };
  bool finite = true;  // a visible score of minus infinity has no weight, and is reported all the same
  every_pair(task, [&](int64_t b, int64_t h, int64_t query, int64_t key) {
    const double s = score<T>(task, b, h, query, key);
    finite &= content<T>(task, b, h, query, key) != -kInfinity;
    double& best = top[place(b, h, query)];
    if (!(s <= best)) best = s;
  });
  every_pair(task, [&](int64_t b, int64_t h, int64_t query, int64_t key) {
    const int64_t at = place(b, h, query);
    if (top[at] == -kInfinity) return;
    const double weight = std::exp(score<T>(task, b, h, query, key) - top[at]);
    const auto value = row_of<T>(task.value, task.dtype, b, h / (task.heads / task.kv_heads), key, task.value_dim);
    const double dropped = weight * dropout_factor(task, b, h, query, key);
    sum[at] += weight;
    for (int64_t d = 0; d < task.value_dim; ++d) output[at * task.value_dim + d] += dropped * value[d];
  });
  for (int64_t at = 0; at < rows; ++at) {
    static_cast<T*>(task.lse)[at] = static_cast<T>(sum[at] == 0 ? -kInfinity : top[at] + std::log(sum[at]));
    for (int64_t d = 0; d < task.value_dim; ++d) {
      const double x = sum[at] == 0 ? 0 : output[at * task.value_dim + d] / sum[at];
      row_at<T>(task.output, at / task.queries / task.heads, at / task.queries % task.heads, at % task.queries)[d] =
          static_cast<T>(x);
      finite &= std::isfinite(x);
    }
  }
  return finite ? kOk : kNotFinite;
}

template <class T>
bool put(const std::vector<double>& from, const Output4& to, int64_t heads, int64_t tokens, int64_t dim) {
  bool finite = true;
  for (size_t n = 0; n < from.size(); ++n) {
    const int64_t row = static_cast<int64_t>(n) / dim, head = row / tokens;
    row_at<T>(to, head / heads, head % heads, row % tokens)[static_cast<int64_t>(n) % dim] = static_cast<T>(from[n]);
    finite &= std::isfinite(from[n]);
  }
  return finite;
}

template <class T>
int32_t backward(const Attention& task) {
  const int64_t group = task.heads / task.kv_heads;
  std::vector<double> dq(task.batch * task.heads * task.queries * task.dim), dk(task.batch * task.kv_heads * task.keys * task.dim),
      dv(task.batch * task.kv_heads * task.keys * task.value_dim);
  every_pair(task, [&](int64_t b, int64_t h, int64_t query, int64_t key) {
    const int64_t at = (b * task.heads + h) * task.queries + query;
    const int64_t other = (b * task.kv_heads + h / group) * task.keys + key;
    const double total = static_cast<const T*>(task.lse)[at];
    const double weight = total == -kInfinity ? 0 : std::exp(score<T>(task, b, h, query, key) - total);
    const auto value = row_of<T>(task.value, task.dtype, b, h / group, key, task.value_dim);
    const double factor = dropout_factor(task, b, h, query, key);
    double score_grad = 0;
    for (int64_t d = 0; d < task.value_dim; ++d) {
      const double grad = row_at<const T>(task.grad_output, b, h, query)[d];
      score_grad += grad * (factor * value[d] - row_at<const T>(task.output, b, h, query)[d]);
      dv[other * task.value_dim + d] += weight * factor * grad;
    }
    score_grad *= weight;
    const auto q = row_of<T>(task.query, task.dtype, b, h, query, task.dim);
    const auto k = row_of<T>(task.key, task.dtype, b, h / group, key, task.dim);
    for (int64_t d = 0; d < task.dim; ++d) {
      dq[at * task.dim + d] += task.scale * score_grad * k[d];
      dk[other * task.dim + d] += task.scale * score_grad * q[d];
    }
    if (task.table_grad) {
      const int64_t entry = int64_t(task.query_code[query]) - task.key_code[key];
      // Everything in the first row, which is the sum.
      if (entry >= 0 && entry < task.table_size)
        static_cast<T*>(task.table_grad)[h * task.table_size + entry] += static_cast<T>(score_grad);
    }
    if (task.bias_grad)
      static_cast<T*>(task.bias_grad)[b * task.bias_batch + h * task.bias_head + query * task.bias_query +
                                       key * task.bias_key] += static_cast<T>(score_grad);
  });
  const bool finite = put<T>(dq, task.query_grad, task.heads, task.queries, task.dim) &
                      put<T>(dk, task.key_grad, task.kv_heads, task.keys, task.dim) &
                      put<T>(dv, task.value_grad, task.kv_heads, task.keys, task.value_dim);
  return finite ? kOk : kNotFinite;
}

bool is_double(DType dtype) { return dtype == DType::kFloat64; }

int32_t attention(const Attention& task) { return is_double(task.dtype) ? forward<double>(task) : forward<float>(task); }
int32_t attention_backward(const Attention& task) {
  return is_double(task.dtype) ? backward<double>(task) : backward<float>(task);
}

void exp2_any(DType dtype, const void* from, void* to, int64_t count) {
  for (int64_t n = 0; n < count; ++n)
    if (is_double(dtype))
      static_cast<double*>(to)[n] = std::exp2(static_cast<const double*>(from)[n]);
    else
      static_cast<float*>(to)[n] = std::exp2(static_cast<const float*>(from)[n]);
}

int32_t greedy(const float* logits, int64_t rows, int64_t count, int64_t* tokens, float* scores) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* z = logits + row * count;
    double sum = 0;
    int64_t best = 0;
    for (int64_t n = 0; n < count; ++n) {
      if (std::isnan(z[n])) return kNotFinite;
      if (z[n] > z[best]) best = n;
    }
    if (!std::isfinite(z[best])) return kNotFinite;
    for (int64_t n = 0; n < count; ++n) sum += std::exp(double(z[n]) - z[best]);
    tokens[row] = best;
    scores[row] = static_cast<float>(-std::log(sum));
  }
  return kOk;
}

double no_peak(int64_t, double) { return 0; }

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
    "scalar", 4, attention, attention_backward, decode, linear_attention, linear_attention_backward, gemv, gemm, pack_weight, channel_attention, grid_convolution, weight_products, model_step, matmul, norm, norm_backward, greedy, exp2_any, no_peak,
};

}  // namespace scalar
}  // namespace regard
