// The C interface, and the choice of instruction set when the library is loaded.
#include <atomic>
#include <cstring>

#include "interface.h"
#include "threads.h"

namespace regard {
namespace scalar {
extern const Kernels kernels;
}
namespace plain {
extern const Kernels kernels;
}
#ifdef REGARD_X86
namespace avx2 {
extern const Kernels kernels;
}
#endif
#ifdef REGARD_AVX512
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512vnni {
extern const Kernels kernels;
}
#endif

namespace {

bool runs_here(const Kernels& some) {
#ifdef REGARD_X86
  __builtin_cpu_init();
#ifdef REGARD_AVX512
  if (&some == &avx512vnni::kernels && !__builtin_cpu_supports("avx512vnni")) return false;
  if (&some == &avx512::kernels || &some == &avx512vnni::kernels)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#endif
  // Every processor with AVX2 converts float16 (F16C), too.
  if (&some == &avx2::kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  (void)some;
  return true;
}

// Best first.
const Kernels* const kAll[] = {
#ifdef REGARD_AVX512
    &avx512vnni::kernels,
    &avx512::kernels,
#endif
#ifdef REGARD_X86
    &avx2::kernels,
#endif
    &plain::kernels,
    &scalar::kernels,
};

const Kernels* best() {
  for (const Kernels* some : kAll)
    if (runs_here(*some)) return some;
  return &plain::kernels;
}

std::atomic<const Kernels*> used{best()};

const Kernels& now() { return *used.load(std::memory_order_relaxed); }

}  // namespace
}  // namespace regard

#define REGARD_EXPORT extern "C" __attribute__((visibility("default")))

REGARD_EXPORT int32_t regard_attention(const void* words) {
  return regard::now().attention(*static_cast<const regard::Attention*>(words));
}
REGARD_EXPORT int32_t regard_attention_backward(const void* words) {
  return regard::now().attention_backward(*static_cast<const regard::Attention*>(words));
}
REGARD_EXPORT int32_t regard_decode(const void* words) {
  return regard::now().decode(*static_cast<const regard::Decode*>(words));
}
REGARD_EXPORT int32_t regard_linear_attention(const void* words) {
  return regard::now().linear_attention(*static_cast<const regard::LinearAttention*>(words));
}
REGARD_EXPORT int32_t regard_linear_attention_backward(const void* words) {
  return regard::now().linear_attention_backward(*static_cast<const regard::LinearAttention*>(words));
}
REGARD_EXPORT int32_t regard_gemv(const void* words) {
  return regard::now().gemv(*static_cast<const regard::LinearLayer*>(words));
}
REGARD_EXPORT int32_t regard_gemm(const void* words) {
  return regard::now().gemm(*static_cast<const regard::Gemm*>(words));
}
REGARD_EXPORT int32_t regard_pack_weight(const void* words) {
  return regard::now().pack_weight(*static_cast<const regard::PackWeight*>(words));
}
REGARD_EXPORT int32_t regard_channel_attention(const void* words) {
  return regard::now().channel_attention(*static_cast<const regard::ChannelAttention*>(words));
}
REGARD_EXPORT int32_t regard_grid_convolution(const void* words) {
  return regard::now().grid_convolution(*static_cast<const regard::GridConvolution*>(words));
}
REGARD_EXPORT int32_t regard_weight_products(const void* words) {
  return regard::now().weight_products(*static_cast<const regard::WeightProducts*>(words));
}
REGARD_EXPORT int32_t regard_model_step(const void* words) {
  return regard::now().model_step(*static_cast<const regard::ModelStep*>(words));
}
REGARD_EXPORT int32_t regard_matmul(const void* words) {
  return regard::now().matmul(*static_cast<const regard::Matmul*>(words));
}
REGARD_EXPORT int32_t regard_norm(const void* words) {
  return regard::now().norm(*static_cast<const regard::Norm*>(words));
}
REGARD_EXPORT int32_t regard_norm_backward(const void* words) {
  return regard::now().norm_backward(*static_cast<const regard::Norm*>(words));
}
REGARD_EXPORT int32_t regard_greedy(const float* logits, int64_t rows, int64_t count, int64_t* tokens, float* scores) {
  return regard::now().greedy(logits, rows, count, tokens, scores);
}
REGARD_EXPORT void regard_exp2(int64_t dtype, const void* from, void* to, int64_t count) {
  regard::now().exp2(static_cast<regard::DType>(dtype), from, to, count);
}
REGARD_EXPORT void regard_use_huge_pages(void* memory, int64_t bytes) { regard::use_huge_pages(memory, bytes); }
REGARD_EXPORT double regard_peak(int64_t threads, double seconds) { return regard::now().peak(threads, seconds); }
REGARD_EXPORT const char* regard_name() { return regard::now().name; }
REGARD_EXPORT int32_t regard_lanes() { return regard::now().lanes; }
// Uses the named kernels from now on; 0 if they exist and run here.
REGARD_EXPORT int32_t regard_use(const char* name) {
  for (const regard::Kernels* some : regard::kAll)
    if (std::strcmp(some->name, name) == 0 && regard::runs_here(*some)) {
      regard::used.store(some);
      return 0;
    }
  return 1;
}
// Fields of eight bytes in each struct, so that the other side can notice that it packs something else.
REGARD_EXPORT int32_t regard_fields(int32_t which) {
  switch (which) {
    case 0: return sizeof(regard::Attention) / 8;
    case 1: return sizeof(regard::Decode) / 8;
    case 2: return sizeof(regard::LinearAttention) / 8;
    case 3: return sizeof(regard::LinearLayer) / 8;
    case 4: return sizeof(regard::Gemm) / 8;
    case 5: return sizeof(regard::WeightProducts) / 8;
    case 6: return sizeof(regard::ModelPart) / 8;
    case 7: return sizeof(regard::StepCache) / 8;
    case 8: return sizeof(regard::ModelStep) / 8;
    case 9: return sizeof(regard::PackWeight) / 8;
    case 10: return sizeof(regard::ChannelAttention) / 8;
    case 11: return sizeof(regard::GridConvolution) / 8;
    case 12: return sizeof(regard::Matmul) / 8;
    default: return sizeof(regard::Norm) / 8;
  }
}
