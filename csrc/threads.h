// Work shared between threads. The code behind it is compiled once, for every machine: templates of the standard
// library must not be instantiated by the files that are compiled for one instruction set, for the linker keeps one
// copy of each, whichever it likes.
#pragma once

#include <cstdint>

namespace regard {

// Calls work(context, item) for every item below `items`, in increasing order of start, on up to `threads` threads.
void run_items(int64_t threads, int64_t items, void (*work)(void* context, int64_t item), void* context);

template <class Work>
inline __attribute__((always_inline)) void parallel(int64_t threads, int64_t items, Work& work) {
  run_items(threads, items, [](void* context, int64_t item) { (*static_cast<Work*>(context))(item); }, &work);
}

// Lets several items add to one place in a fixed order, whichever thread runs them: the item with turn `n` waits until `n`
// others have passed. Items must be started in order, as `parallel` does, or the wait might never end.
class Turns {
 public:
  explicit Turns(int64_t places);
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;
  void wait(int64_t place, int64_t turn) const;
  void pass(int64_t place);

 private:
  void* done_;
};

// Threads that run one function together, from beginning to end, and wait for one another inside it.
struct Team {
  int64_t threads;
  int64_t arrived, turn;

  // Says that this thread has come to the next meeting: its number, or -1 for the last to come, who need not wait.
  int64_t arrive() {
    const int64_t now = __atomic_load_n(&turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) < threads) return now;
    __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&turn, now + 1, __ATOMIC_RELEASE);
    return -1;
  }
  bool passed(int64_t meeting) const { return __atomic_load_n(&turn, __ATOMIC_ACQUIRE) != meeting; }
};

// A moment's rest for a thread that waits: a few instructions at first, later a chance for other threads of its core.
void pause_thread(int64_t times);

// Calls work(context, team, thread) on up to `threads` threads at once.
void run_team(int64_t threads, void (*work)(void* context, Team& team, int64_t thread), void* context);

template <class Work>
inline __attribute__((always_inline)) void together(int64_t threads, Work& work) {
  run_team(
      threads, [](void* context, Team& team, int64_t thread) { (*static_cast<Work*>(context))(team, thread); }, &work);
}

// Memory of this thread that is kept between calls: at least `bytes`, aligned for every vector. What it held is lost.
// Returns null when there is none.
void* scratch(int64_t bytes);

// Asks the system for large pages under memory that is about to be written for the first time. A block of tens of megabytes is
// new at every call (the allocator hands it back each time), and 4 KB pages would cost more than a light attention.
void use_huge_pages(void* memory, int64_t bytes);

}  // namespace regard
