#include "cc/core/cache.h"

#include <algorithm>
#include <atomic>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace tfo {
namespace {

std::int64_t LastLevelBytes() {
  std::int64_t bytes = 32 << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  // Zero or less where it is not known.
  bytes = std::max<std::int64_t>(bytes, sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
  return bytes;
}

std::atomic<std::int64_t>& Streamed() {
  static std::atomic<std::int64_t> streamed{LastLevelBytes() / 2};
  return streamed;
}

}  // namespace

std::int64_t StreamedBytes() {
  return Streamed().load(std::memory_order_relaxed);
}

void SetStreamedBytes(std::int64_t bytes) {
  Streamed().store(bytes > 0 ? bytes : LastLevelBytes() / 2,
                   std::memory_order_relaxed);
}

}  // namespace tfo
