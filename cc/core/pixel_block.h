// Neighbouring output pixels as one with more channels: the input gradient of a
// strided convolution of few channels.
#ifndef TFO_CC_CORE_PIXEL_BLOCK_H_
#define TFO_CC_CORE_PIXEL_BLOCK_H_

#include "cc/core/integers.h"

namespace tfo::TFO_ISA {
namespace {

// Grid pixel (i, j) stands for the h x w output pixels from (i * h, j * w) on,
// those inside the image, and has the channels of all of them, in the order in
// which those of a line lie in memory.
struct PixelBlock {
  std::int64_t h, w;
  std::int64_t channels;       // of a pixel
  std::int64_t height, width;  // of the output image
  std::int64_t row_pitch;      // from one of its rows to the next
  std::int64_t channel_pitch;  // 1: channels last
  // [tap, pixel]: a matrix of filters, or -1 for none; null: that of the tap.
  const std::int64_t* filters = nullptr;

  TFO_INLINE std::int64_t Pixels() const { return h * w; }
  TFO_INLINE bool ChannelsFirst() const { return channel_pitch != 1; }
  // What the i-th of them is: a channel of a pixel.
  TFO_INLINE std::int64_t Pixel(std::int64_t i) const {
    return ChannelsFirst() ? i / w / channels * w + i % w : i / channels;
  }
  TFO_INLINE std::int64_t Channel(std::int64_t i) const {
    return (ChannelsFirst() ? i / w : i) % channels;
  }
  // Those that lie together in memory, as do those of the next grid pixel.
  TFO_INLINE std::int64_t LineSize() const {
    return ChannelsFirst() ? w : w * channels;
  }
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_PIXEL_BLOCK_H_
