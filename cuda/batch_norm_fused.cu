// One grid whose blocks are all resident: each keeps its part of the tensors in
// shared memory, the grid meets twice (parts are written, channels are
// finished), and the kept parts are applied.
#include <cooperative_groups.h>

#include "cuda/batch_norm_fused.h"

namespace tfo::cuda {
namespace {

// Several blocks a multiprocessor keep more loads in flight than one would.
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kReservedBytes = 1024;  // of shared memory, for each block

// Reduces, meets, finishes the channels, meets.
template <class Source, class Finish>
__device__ void ReduceTogether(const Columns& columns, const VectorArray& array,
                               const Source& source, const Finish& finish,
                               typename Source::Accumulator* partials,
                               typename Source::Kept* kept) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  typename Source::Kept* own = kept + thread;
  ReduceColumns(columns, array, source, partials, SharedMemory(),
                [&](int k, const typename Source::Row& row) {
                  own[k * threads] = Source::Keep(row);
                });
  grid.sync();
  const Parts parts{columns.splits,
                    columns.width / (columns.channels * columns.inner),
                    columns.channels, columns.inner};
  const int warps = threads / kWarp;  // whole ones
  if (thread / kWarp < warps) {
    FinishChannels(parts, partials, finish,
                   std::int64_t{blockIdx.x} * warps + thread / kWarp,
                   std::int64_t{gridDim.x} * warps, thread % kWarp);
  }
  grid.sync();
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 2)
    FusedForwardKernel(Columns columns, VectorArray array,
                       MomentsSource<T> source, StatisticsFinish statistics,
                       ApplyTerms<T, true> terms, Moments<>* partials,
                       std::size_t kept_offset) {
  auto* kept = reinterpret_cast<typename MomentsSource<T>::Kept*>(
      static_cast<char*>(SharedMemory()) + kept_offset);
  ReduceTogether(columns, array, source, statistics, partials, kept);
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  const Normalizer<kVector<T>> normalizer(terms.parameters,
                                          ColumnLanes{columns, thread.lane});
  const int threads = blockDim.x * blockDim.y;
  kept += threadIdx.y * blockDim.x + threadIdx.x;
  ForRowGroups<2 * kUnroll>(
      thread, array, 0, columns.full_rows, columns.rows,
      [&](auto count, const VectorArray& part, std::int64_t row) {
        constexpr int kRows = decltype(count)::value;
        Vector<T> side[kRows];
        const auto at = [&](int u) {
          return (row + u * thread.step) * columns.width + thread.lane;
        };
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          if (terms.side != nullptr) side[u] = part.Load(terms.side, at(u));
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u, kept += threads)
          terms(part, at(u), normalizer, kept->x, side[u]);
      });
}

template <class Source>
__global__ void __launch_bounds__(kBlockThreads, 2)
    FusedGradientKernel(Columns columns, VectorArray array, Source source,
                        GradientFinish finish,
                        GradientApplyTerms<typename Source::Element> terms,
                        Sums<2>* partials, std::size_t kept_offset) {
  auto* kept = reinterpret_cast<typename Source::Kept*>(
      static_cast<char*>(SharedMemory()) + kept_offset);
  ReduceTogether(columns, array, source, finish, partials, kept);
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  const typename GradientApplyTerms<typename Source::Element>::Lanes lanes(
      terms, source.parameters, ColumnLanes{columns, thread.lane});
  kept += threadIdx.y * blockDim.x + threadIdx.x;
  for (std::int64_t row = thread.row; row < columns.rows;
       row += thread.step, kept += blockDim.x * blockDim.y) {
    const std::int64_t at = row * columns.width + thread.lane;
    terms(source, array, at, lanes, source.Restore(array, at, *kept));
  }
}

// How to run a kernel on the whole tensor at once; `fits` where that can be.
template <class Source>
struct FusedPlan {
  Columns columns;
  std::size_t kept_offset, shared_bytes;
  bool fits = false;

  template <class... Parameters>
  Status Make(const char* name, const BatchNormShape& shape,
              void (*kernel)(Parameters...)) {
    using Accumulator = typename Source::Accumulator;
    constexpr int kLanes = kVector<typename Source::Element>;
    if (shape.outer * shape.channels * shape.inner == 0) return {};
    Device device;
    TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
    if (!device.cooperative) return {};
    const std::int64_t budget = std::min<std::int64_t>(
        device.shared_bytes_per_multiprocessor / kBlocksPerMultiprocessor -
            kReservedBytes,
        device.shared_bytes_per_block);
    // The whole tensor does not fit if its elements alone do not.
    const std::int64_t bytes = shape.outer * shape.channels * shape.inner /
                               kLanes * sizeof(typename Source::Kept);
    if (budget <= 0 ||
        bytes > budget * kBlocksPerMultiprocessor * device.multiprocessors) {
      return {};
    }
    std::int64_t resident;
    TFO_CUDA_RETURN_IF_ERROR(ResidentBlocks(name, device, kBlockThreads,
                                            static_cast<std::size_t>(budget),
                                            kernel, &resident));
    columns =
        PlanColumns(shape.outer, shape.channels, shape.inner, kLanes, resident);
    if (columns.tiles * columns.splits > resident) return {};
    const dim3 block = columns.Block();
    kept_offset =
        CeilDiv(RowsReductionBytes<Accumulator>(block, kLanes), 16) * 16;
    const std::int64_t rows =
        CeilDiv(columns.rows, columns.splits * block.y);  // of a thread
    shared_bytes =
        kept_offset + rows * block.x * block.y * sizeof(typename Source::Kept);
    fits = static_cast<std::int64_t>(shared_bytes) <= budget;
    return {};
  }
};

}  // namespace

Status FusedForward(const BatchNormForwardArgs& forward,
                    const StatisticsFinish& statistics, const Scratch& scratch,
                    Stream stream, bool* done) {
  BatchNormApplyArgs args = forward.apply;
  args.parameters.mean = forward.saved_mean;
  args.parameters.inv_std = forward.saved_inv_std;
  return WithElement(args.shape.dtype, [&](auto element) -> Status {
    using T = typename decltype(element)::type;
    FusedPlan<MomentsSource<T>> plan;
    TFO_CUDA_RETURN_IF_ERROR(
        plan.Make("BatchNormForward", args.shape, FusedForwardKernel<T>));
    *done = plan.fits;
    if (!plan.fits) return {};
    auto* partials =
        scratch.Allocate<Moments<>>(plan.columns.splits * plan.columns.width);
    if (partials == nullptr) return OutOfScratch("BatchNormForward");
    return Launch("BatchNormForward",
                  {plan.columns.Grid(), plan.columns.Block(), plan.shared_bytes,
                   /*cooperative=*/true},
                  stream, FusedForwardKernel<T>, plan.columns,
                  ArrayOf(args.shape, Aligned(args.x, args.side, args.y)),
                  MomentsSource<T>{static_cast<const T*>(args.x)}, statistics,
                  ApplyTermsOf<T, true>(args), partials, plan.kept_offset);
  });
}

Status FusedGradient(const BatchNormGradientArgs& args,
                     const GradientFinish& finish, const Scratch& scratch,
                     Stream stream, bool* done) {
  return WithElement(args.shape.dtype, [&](auto element) -> Status {
    using T = typename decltype(element)::type;
    return WithGradientSource<T>(args, [&](const auto& source) -> Status {
      using Source = std::decay_t<decltype(source)>;
      FusedPlan<Source> plan;
      TFO_CUDA_RETURN_IF_ERROR(plan.Make("BatchNormGradient", args.shape,
                                         FusedGradientKernel<Source>));
      *done = plan.fits;
      if (!plan.fits) return {};
      auto* partials =
          scratch.Allocate<Sums<2>>(plan.columns.splits * plan.columns.width);
      if (partials == nullptr) return OutOfScratch("BatchNormGradient");
      return Launch(
          "BatchNormGradient",
          {plan.columns.Grid(), plan.columns.Block(), plan.shared_bytes,
           /*cooperative=*/true},
          stream, FusedGradientKernel<Source>, plan.columns,
          ArrayOf(args.shape, GradientAligned(args)), source, finish,
          GradientApplyTermsOf<T>(args, finish.means), partials,
          plan.kept_offset);
    });
  });
}

}  // namespace tfo::cuda
