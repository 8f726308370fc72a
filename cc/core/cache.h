// What the processor's caches hold.
#ifndef TFO_CC_CORE_CACHE_H_
#define TFO_CC_CORE_CACHE_H_

#include <cstdint>

namespace tfo {

// The size from which on an output of a contraction is stored past the caches:
// half of the last-level cache, or of 32 MiB if that is less, but 48 MiB at
// most. A reader may still find a smaller one there (measured with 32 MiB: 0.65
// of the time at 51 MB, 0.95 at 13 MB; together with a reader, at 20 to 39 MB,
// 1x1 convolutions 0.88 to 0.98, depthwise ones 0.77 to 0.84; with 260 MiB, 1x1
// convolutions and their batch norm: 0.7 to 0.98 of the time when 20 to 51 MB
// are not stored past them).
std::int64_t StreamedBytes();

// Replaces it, for tests; 0 restores it.
void SetStreamedBytes(std::int64_t bytes);

}  // namespace tfo

#endif  // TFO_CC_CORE_CACHE_H_
