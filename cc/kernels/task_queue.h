// One call's tasks, and the threads that take them.
#ifndef TFO_CC_KERNELS_TASK_QUEUE_H_
#define TFO_CC_KERNELS_TASK_QUEUE_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cc/core/parallel.h"
#include "tensorflow/core/platform/threadpool.h"

namespace tf_fused_ops {

// Blocks of tasks, of which one worker takes the first and others the last.
class alignas(64) BlockRange {
 public:
  void Set(std::uint32_t begin, std::uint32_t end) {
    bounds_ = Bounds(begin, end);
  }
  // Whether there was one left.
  bool TakeFirst(std::uint32_t* block) {
    return Take(block,
                [](std::uint32_t& begin, std::uint32_t&) { return begin++; });
  }
  bool TakeLast(std::uint32_t* block) {
    return Take(block,
                [](std::uint32_t&, std::uint32_t& end) { return --end; });
  }

 private:
  static std::uint64_t Bounds(std::uint64_t begin, std::uint64_t end) {
    return end << 32 | begin;
  }

  template <class Shrink>
  bool Take(std::uint32_t* block, const Shrink& shrink) {
    std::uint64_t bounds = bounds_.load(std::memory_order_relaxed);
    for (;;) {
      auto begin = static_cast<std::uint32_t>(bounds);
      auto end = static_cast<std::uint32_t>(bounds >> 32);
      if (begin >= end) return false;
      *block = shrink(begin, end);
      if (bounds_.compare_exchange_weak(bounds, Bounds(begin, end)))
        return true;
    }
  }

  std::atomic<std::uint64_t> bounds_{0};
};

// How often the calling thread looks whether the others are done before it
// sleeps: for about as long as their last blocks take, which is less than being
// woken takes (measured, ops of less than a millisecond: 0.94 to 1 of the time;
// no difference where several callers share the pool).
constexpr int kPolls = 500;

// The calling thread and those of the pool have a range of tasks each, since
// neighbouring tasks read neighbouring memory, and help the others when they
// are done. They are as many threads as the pool has: with one more, they would
// push each other off the cores. Whoever comes late finds nothing left, so that
// nothing waits for a pool whose threads are busy.
class TaskQueue {
 public:
  TaskQueue(std::int64_t num_tasks, std::int64_t block, int num_workers,
            tfo::Parallel::Task task, void* context)
      : num_tasks_(num_tasks),
        block_(block),
        task_(task),
        context_(context),
        ranges_(num_workers) {
    const std::int64_t blocks = (num_tasks + block - 1) / block;
    for (int i = 0; i < num_workers; ++i) {
      ranges_[i].Set(
          static_cast<std::uint32_t>(blocks * i / num_workers),
          static_cast<std::uint32_t>(blocks * (i + 1) / num_workers));
    }
  }

  void Work(int worker) {
    std::uint32_t block;
    while (Take(worker, &block)) {
      const std::int64_t begin = block * block_;
      const std::int64_t end = std::min(begin + block_, num_tasks_);
      for (std::int64_t i = begin; i < end; ++i) task_(context_, i, worker);
      if (done_.fetch_add(end - begin) + end - begin == num_tasks_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_ = true;
        condition_.notify_all();
      }
    }
  }

  void Wait() {
    for (int i = 0; i < kPolls; ++i) {
      if (done_.load(std::memory_order_acquire) == num_tasks_) return;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    condition_.wait(lock, [this] { return finished_; });
  }

 private:
  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  bool Take(int worker, std::uint32_t* block) {
    if (ranges_[worker].TakeFirst(block)) return true;
    const int n = static_cast<int>(ranges_.size());
    for (int i = 1; i < n; ++i) {
      if (ranges_[(worker + i) % n].TakeLast(block)) return true;
    }
    return false;
  }

  const std::int64_t num_tasks_, block_;
  const tfo::Parallel::Task task_;
  void* const context_;
  std::vector<BlockRange> ranges_;
  std::atomic<std::int64_t> done_{0};
  std::mutex mutex_;
  std::condition_variable condition_;
  bool finished_ = false;
};

// Tasks are handed out in blocks just large enough to hide the cost of that:
// the finer, the more evenly the threads end.
constexpr std::int64_t kBlockCycles = 40000;
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 31;

inline void RunTasks(void* opaque_pool, std::int64_t num_tasks,
                     std::int64_t cost_per_task, tfo::Parallel::Task task,
                     void* context) {
  auto* pool = static_cast<tsl::thread::ThreadPool*>(opaque_pool);
  const std::int64_t block =
      std::max(kBlockCycles / (cost_per_task > 0 ? cost_per_task : 1),
               num_tasks / kMostBlocks) +
      1;
  const int threads = static_cast<int>(std::min<std::int64_t>(
      pool->NumThreads(), (num_tasks + block - 1) / block));
  if (threads <= 1) {
    for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i, 0);
    return;
  }
  auto queue =
      std::make_shared<TaskQueue>(num_tasks, block, threads, task, context);
  for (int worker = 1; worker < threads; ++worker) {
    pool->Schedule([queue, worker] { queue->Work(worker); });
  }
  queue->Work(0);
  queue->Wait();
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_TASK_QUEUE_H_
