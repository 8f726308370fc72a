// The phases forward: moments, and their use.
#include "cuda/batch_norm_fused.h"
#include "cuda/batch_norm_kernels.h"

namespace tfo::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;

struct MomentsFinish {
  std::int64_t channels;
  double count;
  double* moments;

  __device__ void operator()(std::int64_t c,
                             const Moments<double>& total) const {
    moments[c] = count;
    moments[channels + c] = total.mean;
    moments[2 * channels + c] = total.squares;
  }
};

// Chan's combination of the replicas' moments, in their order.
__global__ void __launch_bounds__(kBlockThreads)
    CombineKernel(std::int64_t channels, std::int64_t num_replicas,
                  const double* moments, StatisticsFinish finish) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  Moments<double> total;
  for (std::int64_t replica = 0; replica < num_replicas; ++replica) {
    const double* own = moments + replica * 3 * channels + c;
    total.Merge({own[0], own[channels], own[2 * channels]});
  }
  finish(c, total);
}

// Without training the moving averages are the statistics.
__global__ void __launch_bounds__(kBlockThreads)
    MovingStatisticsKernel(std::int64_t channels, StatisticsFinish s) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  s.new_mean[c] = s.saved_mean[c] = s.moving_mean[c];
  s.new_variance[c] = s.moving_variance[c];
  s.saved_inv_std[c] =
      static_cast<float>(1 / sqrt(s.moving_variance[c] + s.epsilon));
}

// Backwards, as the last rows that the moments have read are those that the
// cache still holds.
template <class T, bool kAny>
__global__ void __launch_bounds__(kBlockThreads, 2)
    ApplyKernel(Columns columns, VectorArray array, ApplyTerms<T, kAny> terms) {
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  const Normalizer<kVector<T>> normalizer(terms.parameters,
                                          ColumnLanes{columns, thread.lane});
  ForRowGroups<kAny ? kUnroll : 2 * kUnroll>(
      thread, array, columns.rows - columns.full_rows, columns.rows,
      columns.rows, [&](auto count, const VectorArray& part, std::int64_t row) {
        constexpr int kRows = decltype(count)::value;
        Vector<T> x[kRows], side[kRows];
        std::int64_t at[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const std::int64_t r = columns.rows - 1 - (row + u * thread.step);
          at[u] = r * columns.width + thread.lane;
          x[u] = part.Load(terms.x, at[u]);
          if (terms.side != nullptr) side[u] = part.Load(terms.side, at[u]);
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u)
          terms(part, at[u], normalizer, x[u], side[u]);
      });
}

template <class Finish>
Status ReduceMoments(const char* name, const BatchNormShape& shape,
                     const void* x, const Finish& finish,
                     const Scratch& scratch, Stream stream) {
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return ReduceChannels(name, shape.outer, shape.channels, shape.inner,
                          ArrayOf(shape, Aligned(x)),
                          MomentsSource<T>{static_cast<const T*>(x)}, finish,
                          scratch, stream);
  });
}

StatisticsFinish StatisticsOf(const BatchNormForwardArgs& args) {
  return {static_cast<const float*>(args.moving_mean),
          static_cast<const float*>(args.moving_variance),
          args.epsilon,
          args.momentum,
          args.unbiased,
          static_cast<float*>(args.new_mean),
          static_cast<float*>(args.new_variance),
          static_cast<float*>(args.saved_mean),
          static_cast<float*>(args.saved_inv_std)};
}

// y, with the statistics that the forward op has made.
Status Apply(const BatchNormForwardArgs& forward, Stream stream) {
  BatchNormApplyArgs args = forward.apply;
  args.parameters.mean = forward.saved_mean;
  args.parameters.inv_std = forward.saved_inv_std;
  const BatchNormShape& shape = args.shape;
  if (shape.outer * shape.channels * shape.inner == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const Columns columns =
        PlanColumns(shape.outer, shape.channels, shape.inner, kVector<T>,
                    device.multiprocessors * kBlocksPerMultiprocessor);
    const auto launch = [&](const auto& terms, auto kernel) {
      return Launch("BatchNormApply", {columns.Grid(), columns.Block()}, stream,
                    kernel, columns,
                    ArrayOf(shape, Aligned(args.x, args.side, args.y)), terms);
    };
    return IsReluOrNone(args.activation)
               ? launch(ApplyTermsOf<T, false>(args), ApplyKernel<T, false>)
               : launch(ApplyTermsOf<T, true>(args), ApplyKernel<T, true>);
  });
}

}  // namespace

Status BatchNormLocalMoments(const BatchNormShape& shape, const void* x,
                             const Scratch& scratch, Stream stream,
                             double* moments) {
  if (shape.channels == 0) return {};
  return ReduceMoments("BatchNormMoments", shape, x,
                       MomentsFinish{shape.channels, Count(shape), moments},
                       scratch, stream);
}

Status BatchNormForwardFromMoments(const BatchNormForwardArgs& args,
                                   std::int64_t num_replicas,
                                   const double* moments, Stream stream) {
  const std::int64_t channels = args.apply.shape.channels;
  if (channels == 0) return {};
  TFO_CUDA_RETURN_IF_ERROR(LaunchForEach("BatchNormApply", channels, stream,
                                         CombineKernel, channels, num_replicas,
                                         moments, StatisticsOf(args)));
  return Apply(args, stream);
}

Status BatchNormForward(const BatchNormForwardArgs& args,
                        const Scratch& scratch, Stream stream) {
  const BatchNormShape& shape = args.apply.shape;
  if (shape.channels == 0) return {};
  const StatisticsFinish statistics = StatisticsOf(args);
  if (!args.training) {
    TFO_CUDA_RETURN_IF_ERROR(LaunchForEach("BatchNormForward", shape.channels,
                                           stream, MovingStatisticsKernel,
                                           shape.channels, statistics));
    return Apply(args, stream);
  }
  bool done = false;
  TFO_CUDA_RETURN_IF_ERROR(
      FusedForward(args, statistics, scratch, stream, &done));
  if (done) return {};
  TFO_CUDA_RETURN_IF_ERROR(ReduceMoments(
      "BatchNormForward", shape, args.apply.x, statistics, scratch, stream));
  return Apply(args, stream);
}

}  // namespace tfo::cuda
