// Calls that are alike, for groups or images: one after the other, or shared
// among workers.
#ifndef TFO_CC_CORE_SHARES_H_
#define TFO_CC_CORE_SHARES_H_

#include <cstdint>

#include "cc/core/integers.h"
#include "cc/core/parallel.h"
#include "cc/core/shared_scratch.h"
#include "cc/core/spin.h"

namespace tfo::TFO_ISA {
namespace {

// The calling thread alone.
inline Parallel ThisThread() {
  return {[](void*, std::int64_t num_tasks, std::int64_t, Parallel::Task task,
             void* context) {
            for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i, 0);
          },
          nullptr, 1};
}

// Scratch memory that several workers may ask for.
class LockedScratch {
 public:
  explicit LockedScratch(const Scratch& scratch) : scratch_(scratch) {}

  Scratch scratch() {
    return {[](void* owner, std::int64_t bytes) {
              return static_cast<LockedScratch*>(owner)->Allocate(bytes);
            },
            this};
  }

 private:
  void* Allocate(std::int64_t bytes) {
    Spin spin;
    while (__atomic_test_and_set(&locked_, __ATOMIC_ACQUIRE)) spin.Wait();
    void* const data = scratch_.Allocate<char>(bytes);
    __atomic_clear(&locked_, __ATOMIC_RELEASE);
    return data;
  }

  const Scratch& scratch_;
  bool locked_ = false;
};

// Shares of fewer cycles are not worth a thread, nor memory of their own.
constexpr std::int64_t kLeastShare = 1 << 16;

// Calls body(index, threads, scratch memory) for every index in [0, count), as
// long as it returns true; each takes some `cycles`. Where workers can share
// them evenly, each does whole ones, which saves waiting for each other in each
// of them.
template <class Body>
bool ForShares(std::int64_t count, std::int64_t cycles,
               const Parallel& parallel, const Scratch& scratch,
               const Body& body) {
  const auto run = [&](std::int64_t begin, std::int64_t end,
                       const Parallel& threads, const Scratch& memory) {
    SharedScratch shared(memory);
    for (std::int64_t i = begin; i < end; ++i)
      if (!body(i, threads, shared.Next())) return false;
    return true;
  };
  const std::int64_t workers = parallel.num_workers;
  const std::int64_t even = EvenTasks(count, 1, workers);
  const std::int64_t share = count / workers * cycles;
  if (even - count > count / 8 || share < kLeastShare)
    return run(0, count, parallel, scratch);
  LockedScratch locked(scratch);
  bool failed = false;
  auto task = [&](std::int64_t index, int) {
    if (!run(count * index / workers, count * (index + 1) / workers,
             ThisThread(), locked.scratch()))
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  };
  ParallelFor(parallel, workers, share, task);
  return !failed;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SHARES_H_
