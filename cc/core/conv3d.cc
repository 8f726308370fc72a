#include "cc/core/conv3d.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cc/core/dispatch.h"
#include "cc/core/pre_activation_gradient.h"
#include "cc/core/shared_scratch.h"

namespace tfo {
namespace {

// Of images whose channels come from several planes, of which as many are
// gathered at a time, whatever the number of workers: what is done to them, and
// so the order of sums, depends on how many they are.
constexpr std::int64_t kImageBytes = 8 << 20;

// Where windows have no more than one plane, or one pixel of each of several,
// the whole is a convolution of images as it stands in memory.
bool AsImages(const ConvShape& s, const ConvDepth& d, ConvShape* images) {
  *images = s;
  if (d.kernel == 1 && d.stride == 1 && d.pad == 0) {
    images->batch = s.batch * d.in;
    return true;
  }
  if (s.kernel_h == 1 && s.kernel_w == 1 && s.stride_h == 1 &&
      s.stride_w == 1 && s.pad_top == 0 && s.pad_left == 0 &&
      s.in_h == s.out_h && s.in_w == s.out_w) {
    images->in_h = d.in;
    images->out_h = d.out;
    images->in_w = images->out_w = s.in_h * s.in_w;
    images->kernel_h = d.kernel;
    images->stride_h = d.stride;
    images->dilation_h = d.dilation;
    images->pad_top = d.pad;
    return true;
  }
  return false;
}

// The planes under windows along the depth: window i of a volume has plane
// (i * step + offset + tap * tap_step) / divisor under a tap, where that is
// whole and inside.
struct PlaneWindows {
  const char* data;
  std::int64_t windows, planes;  // of a volume
  std::int64_t taps, step, offset, tap_step, divisor;
  std::int64_t pixels, bytes;  // of a plane; of a pixel

  // Null where there is none.
  const char* Plane(std::int64_t window, std::int64_t tap) const {
    const std::int64_t at = window % windows * step + offset + tap * tap_step;
    if (at < 0 || at % divisor != 0 || at / divisor >= planes) return nullptr;
    return data + (window / windows * planes + at / divisor) * pixels * bytes;
  }
};

// Windows [begin, end) as images [pixels, taps, channels].
void GatherImages(const PlaneWindows& w, std::int64_t begin, std::int64_t end,
                  const Parallel& parallel, char* to) {
  constexpr std::int64_t kPixels = 256;
  if (w.bytes == 0) return;
  const std::int64_t parts = (w.pixels + kPixels - 1) / kPixels;
  auto gather = [&](std::int64_t index, int /*worker*/) {
    const std::int64_t window = index / parts, first = index % parts * kPixels;
    const std::int64_t last = std::min(first + kPixels, w.pixels);
    for (std::int64_t tap = 0; tap < w.taps; ++tap) {
      const char* const from = w.Plane(begin + window, tap);
      char* at = to + ((window * w.pixels + first) * w.taps + tap) * w.bytes;
      const std::int64_t run = w.taps == 1 ? (last - first) * w.bytes : w.bytes;
      for (std::int64_t i = first * w.bytes; i < last * w.bytes; i += run) {
        if (from == nullptr) {
          std::memset(at, 0, run);
        } else {
          std::memcpy(at, from + i, run);
        }
        at += w.taps * w.bytes;
      }
    }
  };
  ParallelFor(parallel, (end - begin) * parts, kPixels * w.taps * w.bytes / 8,
              gather);
}

// [a, b, run] to [b, a, run], of runs of `bytes`.
void ExchangeAxes(const void* from, std::int64_t a, std::int64_t b,
                  std::int64_t bytes, const Parallel& parallel, void* to) {
  if (bytes == 0) return;
  auto copy = [&](std::int64_t i, int /*worker*/) {
    for (std::int64_t j = 0; j < b; ++j) {
      std::memcpy(static_cast<char*>(to) + (j * a + i) * bytes,
                  static_cast<const char*>(from) + (i * b + j) * bytes, bytes);
    }
  };
  ParallelFor(parallel, a, b * bytes / 8, copy);
}

// How many windows are gathered at a time.
std::int64_t WindowsTogether(const PlaneWindows& w, std::int64_t count) {
  const std::int64_t image =
      std::max<std::int64_t>(w.taps * w.pixels * w.bytes, 1);
  return std::clamp<std::int64_t>(kImageBytes / image, 1,
                                  std::max<std::int64_t>(count, 1));
}

// Calls body(images, begin, end), which tells whether there was memory, for all
// windows, some at a time.
template <class Body>
bool ForImages(const PlaneWindows& w, std::int64_t count,
               const Parallel& parallel, const Scratch& scratch, Body body) {
  const std::int64_t together = WindowsTogether(w, count);
  char* const images =
      scratch.Allocate<char>(together * w.taps * w.pixels * w.bytes);
  if (images == nullptr) return false;
  for (std::int64_t begin = 0; begin < count; begin += together) {
    const std::int64_t end = std::min(begin + together, count);
    GatherImages(w, begin, end, parallel, images);
    if (!body(images, begin, end)) return false;
  }
  return true;
}

// [count, ...] of `bytes` each: from element `i` on.
template <class P>
P* From(P* data, std::int64_t i, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Byte*>(data) + i * bytes;
}

struct Sizes {
  std::int64_t element, x_pixel, y_pixel, y_plane, x_plane;  // in bytes
  std::int64_t taps;                                         // of a plane

  Sizes(DType dtype, const ConvShape& s)
      : element(SizeOf(dtype)),
        x_pixel(s.in_c * element),
        y_pixel(s.out_c * element),
        y_plane(s.out_h * s.out_w * y_pixel),
        x_plane(s.in_h * s.in_w * x_pixel),
        taps(s.kernel_h * s.kernel_w) {}
};

PlaneWindows InputWindows(const ConvShape& s, const ConvDepth& d,
                          const Sizes& sizes, const void* x) {
  return {static_cast<const char*>(x),
          d.out,
          d.in,
          d.kernel,
          d.stride,
          -d.pad,
          d.dilation,
          1,
          s.in_h * s.in_w,
          sizes.x_pixel};
}

// Those of dz that a plane of x meets.
PlaneWindows OutputWindows(const ConvShape& s, const ConvDepth& d,
                           const Sizes& sizes, const void* dz) {
  return {static_cast<const char*>(dz),
          d.in,
          d.out,
          d.kernel,
          1,
          d.pad,
          -d.dilation,
          d.stride,
          s.out_h * s.out_w,
          sizes.y_pixel};
}

bool InputGradient(const ConvGradientArgs& args, const ConvDepth& d,
                   const void* dz, const Parallel& parallel,
                   const Scratch& scratch) {
  const ConvShape& s = args.shape;
  const Sizes sizes(args.dtype, s);
  // [taps, pixel taps and c, k] to [pixel taps and c, taps, k].
  char* const filters =
      scratch.Allocate<char>(d.kernel * sizes.taps * s.in_c * sizes.y_pixel);
  if (filters == nullptr) return false;
  ExchangeAxes(args.filters, d.kernel, sizes.taps * s.in_c, sizes.y_pixel,
               parallel, filters);
  SharedScratch shared(scratch);
  ConvGradientArgs images{args.dtype, s,       Activation::kNone, 0,
                          nullptr,    nullptr, args.input,        filters,
                          nullptr,    nullptr, nullptr,           nullptr};
  images.shape.out_c *= d.kernel;
  return ForImages(
      OutputWindows(s, d, sizes, dz), s.batch * d.in, parallel, scratch,
      [&](const char* gathered, std::int64_t begin, std::int64_t end) {
        images.shape.batch = end - begin;
        images.dy = gathered;
        images.input_gradient = From(args.input_gradient, begin, sizes.x_plane);
        return ComputeConvGradient(images, parallel, shared.Next());
      });
}

// Tap by tap, of all images at once: sums of parts would be rounded.
bool FiltersGradient(const ConvGradientArgs& args, const ConvDepth& d,
                     const void* dz, const Parallel& parallel,
                     const Scratch& scratch) {
  const ConvShape& s = args.shape;
  const Sizes sizes(args.dtype, s);
  PlaneWindows windows = InputWindows(s, d, sizes, args.input);
  windows.taps = 1;
  const std::int64_t count = s.batch * d.out;
  char* const gathered = scratch.Allocate<char>(count * sizes.x_plane);
  if (gathered == nullptr) return false;
  SharedScratch shared(scratch);
  ConvGradientArgs images{args.dtype, s,       Activation::kNone, 0,
                          dz,         nullptr, gathered,          args.filters,
                          nullptr,    nullptr, nullptr,           nullptr};
  images.shape.batch = count;
  for (std::int64_t t = 0; t < d.kernel; ++t) {
    GatherImages(windows, 0, count, parallel, gathered);
    windows.offset += d.dilation;
    images.filters_gradient =
        From(args.filters_gradient, t, sizes.taps * s.in_c * sizes.y_pixel);
    if (!ComputeConvGradient(images, parallel, shared.Next())) return false;
  }
  return true;
}

// The kernels' own order of filters, which all images share; null where they
// read them as they are. False when scratch memory ran out.
bool PackFilters(const Kernels& kernels, const ConvForwardArgs& args,
                 const Parallel& parallel, const Scratch& scratch,
                 const void** packed) {
  SharedScratch shared(scratch);
  const std::int64_t bytes = kernels.conv_packed_bytes(args, shared.Next());
  *packed = nullptr;
  if (bytes == 0) return true;
  char* const to = scratch.Allocate<char>(bytes);
  *packed = to;
  return to != nullptr &&
         kernels.conv_pack_filters(args, parallel, shared.Next(), to);
}

}  // namespace

bool ComputeConv3D(const ConvForwardArgs& args, const ConvDepth& d,
                   const Parallel& parallel, const Scratch& scratch) {
  const ConvShape& s = args.shape;
  ConvForwardArgs images = args;
  if (AsImages(s, d, &images.shape)) {
    return ForwardKernels(args.dtype, images.shape)
        .conv_forward(images, parallel, scratch);
  }
  const Sizes sizes(args.dtype, s);
  // [taps, pixel taps, c and k] to [pixel taps, taps, c and k].
  char* const filters =
      scratch.Allocate<char>(d.kernel * sizes.taps * s.in_c * sizes.y_pixel);
  if (filters == nullptr) return false;
  ExchangeAxes(args.filters, d.kernel, sizes.taps, s.in_c * sizes.y_pixel,
               parallel, filters);
  const PlaneWindows windows = InputWindows(s, d, sizes, args.input);
  const std::int64_t count = s.batch * d.out;
  images.filters = filters;
  images.shape.in_c *= d.kernel;
  images.shape.batch = WindowsTogether(windows, count);
  const Kernels& kernels = ForwardKernels(args.dtype, images.shape);
  // The kernels pack filters that they meet once as suits them.
  if (images.shape.batch < count &&
      !PackFilters(kernels, images, parallel, scratch, &images.packed_filters))
    return false;
  SharedScratch shared(scratch);
  return ForImages(
      windows, count, parallel, scratch,
      [&](const char* gathered, std::int64_t begin, std::int64_t end) {
        images.shape.batch = end - begin;
        images.input = gathered;
        images.y = From(args.y, begin, sizes.y_plane);
        images.pre_activation = From(args.pre_activation, begin, sizes.y_plane);
        images.side_input = From(args.side_input, begin, sizes.y_plane);
        return kernels.conv_forward(images, parallel, shared.Next());
      });
}

bool ComputeConv3DGradient(const ConvGradientArgs& args, const ConvDepth& d,
                           const Parallel& parallel, const Scratch& scratch) {
  const ConvShape& s = args.shape;
  ConvGradientArgs images = args;
  if (AsImages(s, d, &images.shape))
    return ComputeConvGradient(images, parallel, scratch);
  const void* dz;
  return ComputePreActivationGradient(
             args,
             PixelShape(s.batch * d.out, s.out_h, s.out_w, s.out_c, false),
             parallel, scratch, &dz) &&
         (args.input_gradient == nullptr ||
          InputGradient(args, d, dz, parallel, scratch)) &&
         (args.filters_gradient == nullptr ||
          FiltersGradient(args, d, dz, parallel, scratch));
}

}  // namespace tfo
