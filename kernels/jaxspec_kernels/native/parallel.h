// Shares work among the threads of XLA's pool and the calling thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jaxspec {

// Calls run(part) for every part in [0, num_parts), on as many threads as useful.
//
// Threads claim one part at a time, and so does the caller: it never waits for a thread
// that has not begun, so it may itself run in the pool. A task that begins late finds no
// parts left and touches nothing of the call.
template <typename Run>
void for_each_part(xla::ffi::ThreadPool& pool, int64_t num_parts, const Run& run) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), num_parts) - 1;
  if (helpers < 1) {
    for (int64_t part = 0; part < num_parts; ++part) run(part);
    return;
  }
  auto shared = std::make_shared<Shared>();
  auto work = [shared, num_parts, &run] {
    for (;;) {
      const int64_t part = shared->next.fetch_add(1, std::memory_order_relaxed);
      if (part >= num_parts) return;
      run(part);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t helper = 0; helper < helpers; ++helper)
    pool.Schedule(decltype(work)(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < num_parts;) {
    // A part takes tens of microseconds: less than a thread takes to fall asleep.
    if (++spins > 4096) std::this_thread::yield();
  }
}

}  // namespace jaxspec
