// Waiting for what another thread is about to have done.
#ifndef TFO_CC_CORE_SPIN_H_
#define TFO_CC_CORE_SPIN_H_

#if defined(__unix__)
#include <sched.h>
#endif

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

// One wait of a loop. The other thread is soon done, unless it has lost its
// core: then it gets this one.
class Spin {
 public:
  TFO_INLINE void Wait() {
    if (polls_ < kPolls) {
      ++polls_;
      Pause();
    } else {
      Yield();
    }
  }

 private:
  // Some ten microseconds.
  static constexpr int kPolls = 500;

  static TFO_INLINE void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  static TFO_INLINE void Yield() {
#if defined(__unix__)
    sched_yield();
#endif
  }

  int polls_ = 0;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SPIN_H_
