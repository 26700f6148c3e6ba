// OpenMP where the compiler has it (on Linux the very runtime, and so the very pool of threads, that torch uses), else
// threads of the standard library.
#include "threads.h"

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace regard {

void run_items(int64_t threads, int64_t items, void (*work)(void*, int64_t), void* context) {
  if (threads > items) threads = items;
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) work(context, item);
    return;
  }
  std::atomic<int64_t> next{0};
  auto run = [&] {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(context, item);
  };
#ifdef _OPENMP
#pragma omp parallel num_threads(static_cast<int>(threads))
  run();
#else
  std::vector<std::thread> others;
  for (int64_t n = 1; n < threads; ++n) others.emplace_back(run);
  run();
  for (auto& other : others) other.join();
#endif
}

void pause_thread(int64_t times) {
  if (times > 4000) {
    std::this_thread::yield();
  } else {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

void run_team(int64_t threads, void (*work)(void*, Team&, int64_t), void* context) {
  Team team{threads < 1 ? 1 : threads, 0, 0};
#ifdef _OPENMP
  if (team.threads > 1) {
    // OpenMP may have fewer threads to give, which is known inside.
#pragma omp parallel num_threads(static_cast<int>(team.threads))
    {
#pragma omp single
      team.threads = omp_get_num_threads();
      work(context, team, omp_get_thread_num());
    }
    return;
  }
  work(context, team, 0);
#else
  std::vector<std::thread> others;
  for (int64_t n = 1; n < team.threads; ++n) others.emplace_back([&team, work, context, n] { work(context, team, n); });
  work(context, team, 0);
  for (auto& other : others) other.join();
#endif
}

using Counts = std::vector<std::atomic<int64_t>>;

Turns::Turns(int64_t places) : done_(new Counts(places)) {}
Turns::~Turns() { delete static_cast<Counts*>(done_); }

void Turns::wait(int64_t place, int64_t turn) const {
  while ((*static_cast<Counts*>(done_))[place].load(std::memory_order_acquire) != turn) std::this_thread::yield();
}

void Turns::pass(int64_t place) { (*static_cast<Counts*>(done_))[place].fetch_add(1, std::memory_order_release); }

namespace {
struct Kept {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Kept() { std::free(memory); }
};
thread_local Kept kept;
}  // namespace

void* scratch(int64_t bytes) {
  if (bytes > kept.bytes) {
    std::free(kept.memory);
    const int64_t wanted = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    kept.memory = std::aligned_alloc(64, wanted);
    kept.bytes = kept.memory ? wanted : 0;
  }
  return kept.memory;
}

void use_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // Whole pages inside the block only; a system without large pages says no, which is no harm.
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

}  // namespace regard
