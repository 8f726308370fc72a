// Sums over all elements of a channel, in two stages of fixed order: blocks
// reduce parts, then a warp a channel merges the parts and finishes.
//
// What is summed is a Source:
//   Element                      the type of the tensors' elements
//   Accumulator                  Sums or Moments
//   kBlocks                      the least on a multiprocessor
//   struct Row                   what is read at one vector of positions
//   Row Load(array, at, row) const            `row` of the matrix of columns; 0
//                                             of planes
//   class Thread                 the running values of a vector of lanes:
//     Thread(source, lanes)        `lanes` reads vectors of [channels]
//     void Add(source, array, at, rows)         whole ones, together
//     void AddTail(source, array, at, row, n)   the first n lanes of one
//     Accumulator Lane(i) const
// What becomes of a channel's total is a Finish: operator()(channel, total).
#ifndef TFO_CUDA_CHANNEL_REDUCE_H_
#define TFO_CUDA_CHANNEL_REDUCE_H_

#include "cc/core/scratch.h"
#include "cuda/columns.h"
#include "cuda/reduce.h"

namespace tfo::cuda {

// Planes of `inner` elements, a multiple of the vector, that belong to one
// channel each; a block takes every splits-th group of a channel's vectors.
struct Planes {
  std::int64_t outer, channels, inner;
  std::int64_t splits;
};

// Planes shorter than this are treated as columns.
constexpr std::int64_t kMinPlaneVectors = 16;

// What a thread reads of a vector of [channels]: one value a lane.
struct ColumnLanes {
  const Columns& columns;
  std::int64_t lane;
  template <int N, class T>
  __device__ void Load(const T* from, float (&to)[N]) const {
    LoadChannels(columns, lane, from, to);
  }
};

struct PlaneLanes {
  std::int64_t channel;
  template <int N, class T>
  __device__ void Load(const T* from, float (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = ToFloat(from[channel]);
  }
};

// Reduces what the block owns to partials[split][lane]. keep(k, row) sees the
// k-th row of the thread as it was loaded, the tail as its last one.
template <class Source, class Keep>
__device__ void ReduceColumns(const Columns& columns, const VectorArray& array,
                              const Source& source,
                              typename Source::Accumulator* partials,
                              void* shared, const Keep& keep) {
  using Accumulator = typename Source::Accumulator;
  constexpr int kLanes = kVector<typename Source::Element>;
  const ColumnThread thread(columns);
  const bool owner = thread.lane < columns.width;
  Accumulator lanes[kLanes];
  if (owner) {
    typename Source::Thread sums(source, ColumnLanes{columns, thread.lane});
    const std::int64_t full_rows = columns.full_rows;
    int kept = 0;
    ForRowGroups<kUnroll>(
        thread, array, 0, full_rows, full_rows,
        [&](auto count, const VectorArray& part, std::int64_t row) {
          constexpr int kRows = decltype(count)::value;
          typename Source::Row rows[kRows];
          std::int64_t at[kRows];
#pragma unroll
          for (int u = 0; u < kRows; ++u) {
            const std::int64_t r = row + u * thread.step;
            at[u] = r * columns.width + thread.lane;
            rows[u] = source.Load(part, at[u], r);
            keep(kept++, rows[u]);
          }
          sums.Add(source, part, at, rows);
        });
    const std::int64_t tail = full_rows * columns.width + thread.lane;
    if (full_rows % thread.step == thread.row && full_rows < columns.rows) {
      const typename Source::Row row = source.Load(array, tail, full_rows);
      keep(kept, row);
      const std::int64_t left = columns.elements - tail;
      const int lanes_left = left < kLanes ? static_cast<int>(left) : kLanes;
      sums.AddTail(source, array, tail, row, left < 0 ? 0 : lanes_left);
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) lanes[i] = sums.Lane(i);
  }
  ReduceRows(lanes, static_cast<Accumulator*>(shared));
  if (owner && threadIdx.y == 0) {
    const std::int64_t split = blockIdx.x / columns.tiles;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      partials[split * columns.width + thread.lane + i] = lanes[i];
    }
  }
}

template <class Source>
__global__ void __launch_bounds__(kBlockThreads, Source::kBlocks)
    ReduceColumnsKernel(Columns columns, VectorArray array, Source source,
                        typename Source::Accumulator* partials) {
  ReduceColumns(columns, array, source, partials, SharedMemory(),
                [](int, const typename Source::Row&) {});
}

// Merges the values of a block of whole warps into that of thread 0.
template <class A>
__device__ void ReduceBlock(A* value, A* shared) {
  ReduceWarp(value);
  const int thread = threadIdx.x, warps = blockDim.x / kWarp;
  if (thread % kWarp == 0) shared[thread / kWarp] = *value;
  __syncthreads();
  if (thread == 0) {
    for (int warp = 1; warp < warps; ++warp) value->Merge(shared[warp]);
  }
}

template <class Source>
__global__ void __launch_bounds__(kBlockThreads, Source::kBlocks)
    ReducePlanesKernel(Planes planes, VectorArray array, Source source,
                       typename Source::Accumulator* partials) {
  using Accumulator = typename Source::Accumulator;
  constexpr int kLanes = kVector<typename Source::Element>;
  const std::int64_t channel = blockIdx.x % planes.channels;
  const std::int64_t split = blockIdx.x / planes.channels;
  const std::int64_t vectors = planes.inner / kLanes;  // of a plane
  const std::int64_t step = planes.splits * blockDim.x;
  const std::int64_t plane_step = step / vectors, rest = step % vectors;
  typename Source::Thread sums(source, PlaneLanes{channel});
  const std::int64_t first = split * blockDim.x + threadIdx.x;
  std::int64_t plane = first / vectors, vector = first % vectors;
  // Takes the next vector of the thread.
  const auto next = [&] {
    const std::int64_t at =
        (plane * planes.channels + channel) * planes.inner + vector * kLanes;
    plane += plane_step;
    vector += rest;
    if (vector >= vectors) {
      vector -= vectors;
      ++plane;
    }
    return at;
  };
  const auto add = [&](auto count, const VectorArray& part) {
    constexpr int kRows = decltype(count)::value;
    typename Source::Row rows[kRows];
    std::int64_t at[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      at[u] = next();
      rows[u] = source.Load(part, at[u], 0);
    }
    sums.Add(source, part, at, rows);
  };
  if (array.aligned) {
    while (plane + (kUnroll - 1) * (plane_step + 1) < planes.outer)
      add(RowCount<kUnroll>{}, Endless());
  }
  while (plane < planes.outer) add(RowCount<1>{}, array);
  Accumulator total = sums.Lane(0);
#pragma unroll
  for (int i = 1; i < kLanes; ++i) total.Merge(sums.Lane(i));
  ReduceBlock(&total, static_cast<Accumulator*>(SharedMemory()));
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// Where the parts of a channel are: [splits, groups, channels, inner].
struct Parts {
  std::int64_t splits, groups, channels, inner;

  __host__ __device__ std::int64_t size() const {
    return splits * groups * channels * inner;
  }
};

// Merges the parts of the channels `warp`, `warp` + `warps`, ..., each by one
// warp.
template <class Accumulator, class Finish>
__device__ void FinishChannels(const Parts& parts, const Accumulator* partials,
                               const Finish& finish, std::int64_t warp,
                               std::int64_t warps, int lane) {
  const std::int64_t count = parts.splits * parts.groups * parts.inner;
  for (std::int64_t channel = warp; channel < parts.channels;
       channel += warps) {
    typename Accumulator::Wide total;
    for (std::int64_t part = lane; part < count; part += kWarp) {
      const std::int64_t group = part / parts.inner;
      total.Merge(partials[(group * parts.channels + channel) * parts.inner +
                           part % parts.inner]
                      .Widen());
    }
    ReduceWarp(&total);
    if (lane == 0) finish(channel, total);
  }
}

template <class Accumulator, class Finish>
__global__ void __launch_bounds__(kBlockThreads)
    FinishChannelsKernel(Parts parts, const Accumulator* partials,
                         Finish finish) {
  const std::int64_t thread =
      std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  FinishChannels(parts, partials, finish, thread / kWarp,
                 std::int64_t{gridDim.x} * blockDim.x / kWarp,
                 threadIdx.x % kWarp);
}

inline Status OutOfScratch(const char* name) {
  return RuntimeStatus(cudaErrorMemoryAllocation, name);
}

// `array` is that of the Source's tensors, of [outer, channels, inner] with at
// least one channel; without elements every total is empty.
template <class Source, class Finish>
Status ReduceChannels(const char* name, std::int64_t outer,
                      std::int64_t channels, std::int64_t inner,
                      VectorArray array, const Source& source,
                      const Finish& finish, const Scratch& scratch,
                      Stream stream) {
  using Accumulator = typename Source::Accumulator;
  constexpr int kLanes = kVector<typename Source::Element>;
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  Parts parts{0, 1, channels, 1};
  Accumulator* partials = nullptr;
  std::int64_t resident;
  if (array.size > 0 && inner % kLanes == 0 &&
      inner >= kMinPlaneVectors * kLanes) {
    const dim3 block(kBlockThreads);
    const std::size_t shared = sizeof(Accumulator) * kBlockThreads / kWarp;
    TFO_CUDA_RETURN_IF_ERROR(ResidentBlocks(name, device, kBlockThreads, shared,
                                            ReducePlanesKernel<Source>,
                                            &resident));
    const std::int64_t vectors = outer * (inner / kLanes);
    const Planes planes{
        outer, channels, inner,
        std::clamp<std::int64_t>(resident / channels, 1,
                                 CeilDiv(vectors, kBlockThreads * kUnroll))};
    parts.splits = planes.splits;
    partials = scratch.Allocate<Accumulator>(parts.size());
    if (partials == nullptr) return OutOfScratch(name);
    TFO_CUDA_RETURN_IF_ERROR(Launch(
        name,
        {dim3(static_cast<unsigned>(channels * planes.splits)), block, shared},
        stream, ReducePlanesKernel<Source>, planes, array, source, partials));
  } else if (array.size > 0) {
    constexpr int kThreads = kBlockThreads;
    const std::size_t most =
        RowsReductionBytes<Accumulator>(dim3(2, kThreads / 2), kLanes);
    TFO_CUDA_RETURN_IF_ERROR(ResidentBlocks(
        name, device, kThreads, most, ReduceColumnsKernel<Source>, &resident));
    const Columns columns =
        PlanColumns(outer, channels, inner, kLanes, resident);
    parts = {columns.splits, columns.width / (channels * inner), channels,
             inner};
    partials = scratch.Allocate<Accumulator>(parts.size());
    if (partials == nullptr) return OutOfScratch(name);
    TFO_CUDA_RETURN_IF_ERROR(Launch(
        name,
        {columns.Grid(), columns.Block(),
         RowsReductionBytes<Accumulator>(columns.Block(), kLanes)},
        stream, ReduceColumnsKernel<Source>, columns, array, source, partials));
  }
  const std::int64_t warps = kBlockThreads / kWarp;
  return Launch(name,
                {dim3(static_cast<unsigned>(CeilDiv(channels, warps))),
                 dim3(kBlockThreads)},
                stream, FinishChannelsKernel<Accumulator, Finish>, parts,
                static_cast<const Accumulator*>(partials), finish);
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CHANNEL_REDUCE_H_
