// Work that the tasks of a parallel region do together before their own.
#ifndef TFO_CC_CORE_SHARED_WORK_H_
#define TFO_CC_CORE_SHARED_WORK_H_

#include <cstdint>

#include "cc/core/spin.h"

namespace tfo::TFO_ISA {
namespace {

// One region instead of two: threads are woken, and waited for, once less.
class alignas(64) SharedWork {
 public:
  // Calls body(index) for those of [0, count) that no other task has taken, and
  // returns when all are done. It waits for tasks alone that have begun, so
  // that nothing depends on a thread that is yet to come.
  template <class Body>
  void Finish(std::int64_t count, const Body& body) {
    if (__atomic_load_n(&done_, __ATOMIC_ACQUIRE) == count) return;
    for (std::int64_t i = Next(); i < count; i = Next()) {
      body(i);
      __atomic_fetch_add(&done_, 1, __ATOMIC_RELEASE);
    }
    Spin spin;
    while (__atomic_load_n(&done_, __ATOMIC_ACQUIRE) < count) spin.Wait();
  }

 private:
  std::int64_t Next() {
    return __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
  }

  std::int64_t next_ = 0, done_ = 0;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SHARED_WORK_H_
