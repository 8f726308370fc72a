#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/conv_layout.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace tfo::cuda {
namespace {

constexpr int kWarps = 8;  // of a block

unsigned GridOf(std::int64_t blocks) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(blocks, std::numeric_limits<int>::max()));
}

// Two of the three dimensions, j = (b, the nearer of a and c), are contiguous
// on one side, and so is the third, x, on the other. Tiles of j and x pass
// through shared memory, so that reads and writes are contiguous.
struct Reversal {
  std::int64_t near, b, x_size;

  __device__ std::int64_t size() const { return near * b * x_size; }
  __device__ std::int64_t Flat(std::int64_t j, std::int64_t x) const {
    return x * (near * b) + j;
  }
  __device__ std::int64_t Reversed(std::int64_t j, std::int64_t x) const {
    return (j % near * b + j / near) * x_size + x;
  }
};

// A tile row has one unit more than needed, to keep the threads of a warp in
// different banks.
template <class Unit>
using Tile = Unit[kWarp + 1];

template <class Unit, bool kFlatInput>
__global__ void ReverseKernel(Reversal reversal, std::int64_t x_tiles,
                              std::int64_t tiles_per_item,
                              std::int64_t num_tiles, const Unit* input,
                              Unit* output) {
  auto* const tile = static_cast<Tile<Unit>*>(SharedMemory());
  const std::int64_t j_size = reversal.near * reversal.b;
  for (std::int64_t t = blockIdx.x; t < num_tiles; t += gridDim.x) {
    const std::int64_t item = t / tiles_per_item;
    const std::int64_t j0 = t % tiles_per_item / x_tiles * kWarp;
    const std::int64_t x0 = t % tiles_per_item % x_tiles * kWarp;
    const Unit* in = input + item * reversal.size();
    Unit* out = output + item * reversal.size();
    for (int i = threadIdx.y; i < kWarp; i += kWarps) {
      const int dj = kFlatInput ? threadIdx.x : i;
      const int dx = kFlatInput ? i : threadIdx.x;
      const std::int64_t j = j0 + dj, x = x0 + dx;
      if (j >= j_size || x >= reversal.x_size) continue;
      tile[dj][dx] =
          in[kFlatInput ? reversal.Flat(j, x) : reversal.Reversed(j, x)];
    }
    __syncthreads();
    for (int i = threadIdx.y; i < kWarp; i += kWarps) {
      const int dj = kFlatInput ? i : threadIdx.x;
      const int dx = kFlatInput ? threadIdx.x : i;
      const std::int64_t j = j0 + dj, x = x0 + dx;
      if (j >= j_size || x >= reversal.x_size) continue;
      out[kFlatInput ? reversal.Reversed(j, x) : reversal.Flat(j, x)] =
          tile[dj][dx];
    }
    __syncthreads();
  }
}

template <class Unit>
Status LaunchReverse(const ReverseArgs& args, Stream stream) {
  // The greater of a and c is the one that is contiguous alone.
  const bool flat_input = args.a > args.c;
  const Reversal reversal = flat_input ? Reversal{args.c, args.b, args.a}
                                       : Reversal{args.a, args.b, args.c};
  const std::int64_t x_tiles = CeilDiv(reversal.x_size, kWarp);
  const std::int64_t tiles_per_item =
      CeilDiv(reversal.near * reversal.b, kWarp) * x_tiles;
  const std::int64_t num_tiles = args.batch * tiles_per_item;
  if (num_tiles == 0) return {};
  return Launch(
      "ReverseDimensions",
      {dim3(GridOf(num_tiles)), dim3(kWarp, kWarps),
       kWarp * sizeof(Tile<Unit>)},
      stream,
      flat_input ? ReverseKernel<Unit, true> : ReverseKernel<Unit, false>,
      reversal, x_tiles, tiles_per_item, num_tiles,
      static_cast<const Unit*>(args.input), static_cast<Unit*>(args.output));
}

// In units of memory: input rows [batch, in_h] of in_row units, output rows
// [batch, out_h] of out_row units; a warp copies a row.
struct Window {
  std::int64_t in_h, out_h, top;
  std::int64_t in_row, out_row, shift;
};

template <class Unit>
__global__ void WindowKernel(Window window, std::int64_t num_rows,
                             const Unit* input, Unit* output) {
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.y;
       row < num_rows; row += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t i = row % window.out_h + window.top;
    const bool row_inside = i >= 0 && i < window.in_h;
    const Unit* in =
        input + (row / window.out_h * window.in_h + i) * window.in_row;
    for (std::int64_t x = threadIdx.x; x < window.out_row; x += kWarp) {
      const std::int64_t from = x + window.shift;
      const bool inside = row_inside && from >= 0 && from < window.in_row;
      output[row * window.out_row + x] = inside ? in[from] : Unit{};
    }
  }
}

template <class Unit>
Status LaunchWindow(Window window, std::int64_t num_rows,
                    const WindowArgs& args, Stream stream) {
  window.in_row /= sizeof(Unit);
  window.out_row /= sizeof(Unit);
  window.shift /= static_cast<std::int64_t>(sizeof(Unit));
  return Launch("CopyWindow",
                {dim3(GridOf(CeilDiv(num_rows, kWarps))), dim3(kWarp, kWarps)},
                stream, WindowKernel<Unit>, window, num_rows,
                static_cast<const Unit*>(args.input),
                static_cast<Unit*>(args.output));
}

}  // namespace

Status ReverseDimensions(const ReverseArgs& args, Stream stream) {
  return SizeOf(args.dtype) == 2 ? LaunchReverse<std::uint16_t>(args, stream)
                                 : LaunchReverse<std::uint32_t>(args, stream);
}

Status CopyWindow(const WindowArgs& args, Stream stream) {
  const std::int64_t pixel =
      SizeOf(args.dtype) * (args.channels_first ? 1 : args.channels);
  const std::int64_t images =
      args.batch * (args.channels_first ? args.channels : 1);
  const Window window = {args.in_h,          args.out_h,
                         args.top,           args.in_w * pixel,
                         args.out_w * pixel, args.left * pixel};
  const std::int64_t num_rows = images * args.out_h;
  if (num_rows * args.out_w * pixel == 0) return {};
  // The largest unit that divides every row, the shift and both addresses.
  const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(args.input) |
                              reinterpret_cast<std::uintptr_t>(args.output) |
                              window.in_row | window.out_row | window.shift;
  if (bits % 16 == 0)
    return LaunchWindow<uint4>(window, num_rows, args, stream);
  if (bits % 8 == 0) return LaunchWindow<uint2>(window, num_rows, args, stream);
  if (bits % 4 == 0) {
    return LaunchWindow<std::uint32_t>(window, num_rows, args, stream);
  }
  return LaunchWindow<std::uint16_t>(window, num_rows, args, stream);
}

}  // namespace tfo::cuda
