// A dense tensor [outer, channels, inner] as a matrix whose columns, called
// lanes, belong to one channel each.
//
// A row is `fold` times [channels, inner], the fewest that make its length a
// multiple of kRowUnit, so that 16-byte vectors never straddle rows whatever
// the number of channels; the last row may be partial. A block owns a tile of
// columns and every `splits`-th group of rows, a thread one vector of lanes:
// what depends on the channel is loaded once a thread.
#ifndef TFO_CUDA_COLUMNS_H_
#define TFO_CUDA_COLUMNS_H_

#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace tfo::cuda {

constexpr std::int64_t kRowUnit = 8;  // elements in a byte of a mask; also
                                      // whole vectors of every type
constexpr int kTileVectors = 32;
// Vectors that a thread loads together, per tensor. The kernels' least blocks a
// multiprocessor are measured: fewer leave registers for more loads, more hide
// what a block computes.
constexpr int kUnroll = 2;

struct Columns {
  std::int64_t elements, channels, inner;
  std::int64_t width;  // lanes
  std::int64_t rows;   // the partial one counted
  std::int64_t full_rows;
  std::int64_t tiles, splits;
  int vector;  // lanes of a thread

  dim3 Block() const {
    const std::int64_t vectors = width / vector;
    const int x = static_cast<int>(
        vectors < kTileVectors ? vectors : std::int64_t{kTileVectors});
    return dim3(x, kBlockThreads / x);
  }
  dim3 Grid() const { return dim3(static_cast<unsigned>(tiles * splits)); }
};

// For kernels of which `blocks` at a time keep the device busy. `elements` must
// not be zero.
inline Columns PlanColumns(std::int64_t outer, std::int64_t channels,
                           std::int64_t inner, int vector,
                           std::int64_t blocks) {
  Columns c{};
  c.elements = outer * channels * inner;
  c.channels = channels;
  c.inner = inner;
  c.vector = vector;
  const std::int64_t group = channels * inner;
  c.width = group * (kRowUnit / std::gcd(group, kRowUnit));
  c.rows = CeilDiv(c.elements, c.width);
  c.full_rows = c.elements / c.width;
  const dim3 block = c.Block();
  c.tiles = CeilDiv(c.width / vector, block.x);
  c.splits =
      std::clamp<std::int64_t>(blocks / c.tiles, 1, CeilDiv(c.rows, block.y));
  return c;
}

// What a thread owns.
struct ColumnThread {
  std::int64_t lane;       // the first of its vector; past the last column:
                           // nothing
  std::int64_t row, step;  // rows row, row + step, ...

  __device__ explicit ColumnThread(const Columns& c) {
    const std::int64_t tile = blockIdx.x % c.tiles;
    const std::int64_t split = blockIdx.x / c.tiles;
    lane = (tile * blockDim.x + threadIdx.x) * c.vector;
    row = split * blockDim.y + threadIdx.y;
    step = c.splits * blockDim.y;
  }
};

// What a full row is a part of: no vector is looked at for itself, so that all
// are loaded before one is waited for.
__device__ constexpr VectorArray Endless() { return {INT64_MAX, true}; }

template <int N>
using RowCount = std::integral_constant<int, N>;

// Calls body(RowCount<n>, part, row) for a thread's rows row, row + step, ...
// below `rows`: for N at a time as long as they are in [begin, end), all of
// them full, and aligned, otherwise for one. `part` is what they are read from;
// `begin` is 0 or 1.
template <int N, class Body>
__device__ void ForRowGroups(const ColumnThread& thread,
                             const VectorArray& array, std::int64_t begin,
                             std::int64_t end, std::int64_t rows,
                             const Body& body) {
  std::int64_t row = thread.row;
  if (row < begin) {
    body(RowCount<1>{}, array, row);
    row += thread.step;
  }
  if (array.aligned) {
    for (; row + (N - 1) * thread.step < end; row += N * thread.step)
      body(RowCount<N>{}, Endless(), row);
  }
  for (; row < rows; row += thread.step) body(RowCount<1>{}, array, row);
}

// to[i] = from[channel of lane + i], as float32.
template <int N, class T>
__device__ void LoadChannels(const Columns& c, std::int64_t lane, const T* from,
                             float (&to)[N]) {
  const std::int64_t plane = lane / c.inner;
  std::int64_t within = lane - plane * c.inner;
  std::int64_t channel = plane % c.channels;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    to[i] = ToFloat(from[channel]);
    if (++within == c.inner) {
      within = 0;
      if (++channel == c.channels) channel = 0;
    }
  }
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_COLUMNS_H_
