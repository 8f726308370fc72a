// Scratch memory that calls use one after the other.
#ifndef TFO_CC_CORE_SHARED_SCRATCH_H_
#define TFO_CC_CORE_SHARED_SCRATCH_H_

#include "cc/core/scratch.h"

namespace tfo {
namespace {

// Hands calls that ask alike, one after the other, the same memory.
class SharedScratch {
 public:
  explicit SharedScratch(const Scratch& scratch) : scratch_(scratch) {}

  // For the next call.
  Scratch Next() {
    next_ = 0;
    return {[](void* owner, std::int64_t bytes) {
              return static_cast<SharedScratch*>(owner)->Allocate(bytes);
            },
            this};
  }

 private:
  struct Block {
    void* data;
    std::int64_t bytes;
  };
  static constexpr int kCapacity = 64;

  void* Allocate(std::int64_t bytes) {
    if (next_ == kCapacity) return scratch_.Allocate<char>(bytes);
    Block& block = blocks_[next_++];
    if (block.bytes < bytes) block = {scratch_.Allocate<char>(bytes), bytes};
    if (block.data == nullptr) block.bytes = 0;
    return block.data;
  }

  const Scratch& scratch_;
  Block blocks_[kCapacity] = {};
  int next_ = 0;
};

}  // namespace
}  // namespace tfo

#endif  // TFO_CC_CORE_SHARED_SCRATCH_H_
