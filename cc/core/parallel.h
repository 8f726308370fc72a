// The only way the core reaches threads: a pool handed in by the caller.
#ifndef TFO_CC_CORE_PARALLEL_H_
#define TFO_CC_CORE_PARALLEL_H_

#include <cstdint>

namespace tfo {

// Tasks are numbered; which worker runs one is the pool's business, so results
// may depend on the task's index only.
struct Parallel {
  using Task = void (*)(void* context, std::int64_t index, int worker);

  // Runs task(context, 0..num_tasks-1, worker) with worker in [0, num_workers),
  // and returns when all are done.
  void (*run)(void* pool, std::int64_t num_tasks, std::int64_t cost_per_task,
              Task task, void* context);
  void* pool;
  int num_workers;
};

// Says that AMX's registers, 8 KiB, need not be kept for this thread any more.
inline __attribute__((always_inline)) void ReleaseAmx() {
#if defined(__AMX_TILE__)
  __asm__ volatile("tilerelease");
#endif
}

// Calls body(index, worker) for every index in [0, num_tasks). The cost, in
// cycles, lets the pool keep small work on the calling thread.
template <class Body>
inline __attribute__((always_inline)) void ParallelFor(
    const Parallel& parallel, std::int64_t num_tasks,
    std::int64_t cost_per_task, Body& body) {
  parallel.run(
      parallel.pool, num_tasks, cost_per_task,
      [](void* context, std::int64_t index, int worker) {
        (*static_cast<Body*>(context))(index, worker);
        ReleaseAmx();
      },
      &body);
}

}  // namespace tfo

#endif  // TFO_CC_CORE_PARALLEL_H_
