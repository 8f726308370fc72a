#include "cc/core/cache.h"

#include <algorithm>
#include <atomic>
#include <fstream>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace tfo {
namespace {

// Larger caches are shared with others (measured with 480 MiB, two threads that
// write memory and read it again: past the caches 0.7 of the time for 100 MB
// and 200 MB, 0.92 for 51 MB, 1.34 for 32 MB).
constexpr std::int64_t kMostKept = 48 << 20;

// Zero or less where it is not known.
std::int64_t LastLevelBytes() {
  // What a processor shares with others; sysconf may add up those of a package
  // (seen with glibc 2.36: 320 MiB where each eight cores of a Zen 4 have 32).
  std::ifstream size("/sys/devices/system/cpu/cpu0/cache/index3/size");
  std::int64_t kibibytes = 0;
  if (size >> kibibytes && size.get() == 'K') return kibibytes << 10;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  return 0;
#endif
}

std::int64_t Default() {
  constexpr std::int64_t kLeast = 32 << 20;
  return std::min(std::max(LastLevelBytes(), kLeast) / 2, kMostKept);
}

std::atomic<std::int64_t>& Streamed() {
  static std::atomic<std::int64_t> streamed{Default()};
  return streamed;
}

}  // namespace

std::int64_t StreamedBytes() {
  return Streamed().load(std::memory_order_relaxed);
}

void SetStreamedBytes(std::int64_t bytes) {
  Streamed().store(bytes > 0 ? bytes : Default(), std::memory_order_relaxed);
}

}  // namespace tfo
