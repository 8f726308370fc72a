// The depth of a product, all taps and channels, cut into blocks.
#ifndef TFO_CC_CORE_DEPTH_H_
#define TFO_CC_CORE_DEPTH_H_

#include "cc/core/integers.h"
#include "cc/core/scratch.h"
#include "cc/core/taps.h"

namespace tfo::TFO_ISA {
namespace {

struct Depth {
  std::int64_t most;              // rows of filters in a block
  Segment* segments = nullptr;    // none longer than a block
  std::int64_t* begin = nullptr;  // of each, in rows of filters; then the end
  std::int64_t count = 0;
  std::int64_t per_tap_row = 0;  // segments of one row of taps

  // Where the block ends that begins with segment `first`.
  TFO_INLINE std::int64_t BlockEnd(std::int64_t first) const {
    std::int64_t end = first;
    while (end < count && begin[end + 1] - begin[first] <= most) ++end;
    return end;
  }
};

// False when scratch memory ran out.
TFO_INLINE bool CutDepth(const TapList& taps, std::int64_t channels,
                         std::int64_t pitch, std::int64_t row_pitch,
                         const Scratch& scratch, Depth* depth) {
  const std::int64_t most =
      taps.count + taps.count * channels / depth->most + 1;
  Segment* whole = scratch.Allocate<Segment>(taps.count + 1);
  depth->segments = scratch.Allocate<Segment>(most);
  depth->begin = scratch.Allocate<std::int64_t>(most + 1);
  if (whole == nullptr || depth->segments == nullptr || depth->begin == nullptr)
    return false;
  const std::int64_t count = BuildSegments(taps, {0, taps.PerRow()}, channels,
                                           pitch, row_pitch, whole);
  depth->begin[0] = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const EvenParts parts(whole[i].length, depth->most);
    std::int64_t offset = whole[i].offset;
    for (std::int64_t part = 0; part < parts.count(); ++part) {
      const std::int64_t length = parts.Size(part);
      depth->segments[depth->count] = {offset, length};
      depth->begin[depth->count + 1] = depth->begin[depth->count] + length;
      ++depth->count;
      offset += length;
    }
  }
  depth->per_tap_row = depth->count / Max(taps.rows, 1);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_DEPTH_H_
