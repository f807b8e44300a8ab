// Threads that work on one step together, and wait for each other by the hundred times a step.
//
// A step is one task that all threads run from its beginning to its end, meeting at barriers. They
// spin there, since others are a few microseconds behind, and give up the core after a while, since
// something else may need it to get on. Between steps they sleep.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include <sched.h>

namespace fullbore {

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int rank = 1; rank < size; rank++) threads_.emplace_back([this, rank] { work(rank); });
  }

  ~Team() {
    stopping_ = true;
    steps_.fetch_add(1);
    steps_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs task(argument, rank) once on every thread, this one included; returns when all are done.
  void run(void (*task)(void*, int), void* argument) {
    task_ = task;
    argument_ = argument;
    steps_.fetch_add(1);
    steps_.notify_all();
    task(argument, 0);
    barrier();
  }

  // Returns when every thread of the team has come here.
  void barrier() {
    if (size_ == 1) return;
    const unsigned round = rounds_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      rounds_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; rounds_.load(std::memory_order_acquire) == round; spins++) {
      if (spins < SPINS) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int SPINS = 4000;  // some 50 microseconds

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void work(int rank) {
    unsigned seen = 0;
    for (;;) {
      for (int spins = 0; steps_.load(std::memory_order_acquire) == seen && spins < SPINS; spins++)
        pause();
      steps_.wait(seen, std::memory_order_acquire);
      seen++;
      if (stopping_) return;
      task_(argument_, rank);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  void (*task_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  std::atomic<unsigned> steps_{0}, rounds_{0};
  std::atomic<int> arrived_{0};
  std::atomic<bool> stopping_{false};
};

// The part of `count` things that is `rank`'s, of `size` parts as even as can be.
struct Share {
  int begin, end;
  Share(int count, int rank, int size)
      : begin(int(int64_t(count) * rank / size)), end(int(int64_t(count) * (rank + 1) / size)) {}
};

}  // namespace fullbore
