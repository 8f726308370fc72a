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

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace tfo::cuda {

constexpr std::int64_t kRowUnit = 8;  // elements in a byte of a mask; also
                                      // whole vectors of every type
constexpr int kTileVectors = 32;
// Vectors in flight, per thread and tensor: where a thread has registers to
// spare, and elsewhere.
constexpr int kElementwiseUnroll = 4;
constexpr int kUnroll = 2;

struct Columns {
  std::int64_t elements, channels, inner;
  std::int64_t width;  // lanes
  std::int64_t rows;   // the partial one counted
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

// Calls body(u, row) for up to N of a thread's rows, from `row` on and below
// `rows`; returns how many there were.
template <int N, class Body>
__device__ int ForUnrolled(std::int64_t row, std::int64_t step,
                           std::int64_t rows, const Body& body) {
  int n = 0;
#pragma unroll
  for (int u = 0; u < N; ++u) {
    if (row + u * step >= rows) break;
    body(u, row + u * step);
    n = u + 1;
  }
  return n;
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
