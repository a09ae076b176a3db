// Threads that share the kernels' jobs.
//
// Not torch's pool: OpenMP's regions end when every thread has been there, so one thread that the
// system has taken off its core holds up all, at each of the hundreds of jobs of a step, and they burn
// the cores of others while they wait. Here whoever has a job works on it at once, helpers join when
// they can, and nobody is waited for but who is at work. Helpers look out for the next job for a short
// while and then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "kernels.h"

namespace lorafleet {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks until holds() is true, for about so long; returns whether it was.
template <class Condition>
bool look_until(const Condition& holds, std::chrono::microseconds limit) {
  auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int looks = 0; looks < 32; ++looks) {
      if (holds()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return holds();
}

class Crew {
 public:
  // The process's one crew. Never destroyed: its threads may outlive the statics.
  static Crew& get() {
    static Crew* crew = new Crew;
    return *crew;
  }

  // How many threads work on a job, the caller's included.
  void set_num_threads(int count) {
    std::lock_guard lock(starting_);
    wanted_.store(count - 1, std::memory_order_relaxed);
    while (started_ < count - 1) {
      std::thread([this, number = started_] { serve(number); }).detach();
      ++started_;
    }
  }

  int num_threads() const { return wanted_.load(std::memory_order_relaxed) + 1; }

  // Runs work(state) on this thread and on each helper that is free. A second job at the same time is
  // done by its own thread alone.
  void run(void (*work)(void*), void* state) {
    if (wanted_.load(std::memory_order_relaxed) < 1 ||
        is_busy_.exchange(true, std::memory_order_acquire)) {
      return work(state);
    }
    work_ = work;
    state_ = state;
    entrance_.store(0, std::memory_order_release);
    published_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) published_.notify_all();
    std::exception_ptr failure;
    try {
      work(state);
    } catch (...) {
      failure = std::current_exception();
    }
    close();
    if (failure == nullptr) failure = failure_;
    failure_ = nullptr;
    has_failed_.store(false, std::memory_order_relaxed);
    is_busy_.store(false, std::memory_order_release);
    if (failure != nullptr) std::rethrow_exception(failure);
  }

 private:
  static constexpr int kClosed = 1 << 30;
  // The longest pauses between two jobs of a step are shorter, those between steps longer.
  static constexpr std::chrono::microseconds kLookout{100};

  // From here on nobody enters the job, and everybody has left it: its state may go.
  void close() {
    entrance_.fetch_or(kClosed, std::memory_order_acq_rel);
    auto is_empty = [&] { return entrance_.load(std::memory_order_acquire) == kClosed; };
    while (!look_until(is_empty, kLookout)) std::this_thread::yield();
  }

  void serve(int number) {
    int seen = 0;
    for (;;) {
      auto is_there = [&] { return published_.load(std::memory_order_acquire) != seen; };
      if (!look_until(is_there, kLookout)) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        published_.wait(seen, std::memory_order_seq_cst);
        num_asleep_.fetch_sub(1, std::memory_order_relaxed);
      }
      seen = published_.load(std::memory_order_acquire);
      if (number >= wanted_.load(std::memory_order_relaxed) || !enter()) continue;
      try {
        work_(state_);
      } catch (...) {
        if (!has_failed_.exchange(true)) failure_ = std::current_exception();
      }
      entrance_.fetch_sub(1, std::memory_order_release);
    }
  }

  bool enter() {
    int inside = entrance_.load(std::memory_order_relaxed);
    while ((inside & kClosed) == 0) {
      if (entrance_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }

  std::mutex starting_;
  int started_ = 0;
  std::atomic<int> wanted_{0};
  void (*work_)(void*) = nullptr;
  void* state_ = nullptr;
  std::exception_ptr failure_;
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_busy_{false};
  alignas(64) std::atomic<int> published_{0};
  std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<int> entrance_{kClosed};
};

}  // namespace lorafleet
