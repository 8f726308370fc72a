// Temporary memory, from the caller's allocator.
#ifndef TFO_CC_CORE_SCRATCH_H_
#define TFO_CC_CORE_SCRATCH_H_

#include <cstdint>

namespace tfo {

struct Scratch {
  // 64-byte aligned memory that lives until the call it was handed to returns;
  // null when there is none.
  void* (*allocate)(void* owner, std::int64_t bytes);
  void* owner;

  template <class T>
  T* Allocate(std::int64_t count) const {
    const std::int64_t size = sizeof(T);
    return static_cast<T*>(allocate(owner, count > 0 ? count * size : size));
  }
};

}  // namespace tfo

#endif  // TFO_CC_CORE_SCRATCH_H_
