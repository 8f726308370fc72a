// The phases forward: moments, and their use.
#include "cuda/batch_norm_fused.h"
#include "cuda/batch_norm_kernels.h"

namespace tfo::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;

struct MomentsFinish {
  float *mean, *sum_of_squares;

  __device__ void operator()(std::int64_t c,
                             const Moments<double>& moments) const {
    mean[c] = static_cast<float>(moments.mean);
    sum_of_squares[c] = static_cast<float>(moments.squares);
  }
};

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
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 2)
    ApplyKernel(Columns columns, VectorArray array, ApplyTerms<T> terms) {
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  const Normalizer<kVector<T>> normalizer(terms.parameters,
                                          ColumnLanes{columns, thread.lane});
  for (std::int64_t row = thread.row; row < columns.rows;
       row += kUnroll * thread.step) {
    Vector<T> x[kUnroll], side[kUnroll];
    std::int64_t at[kUnroll];
    const int n =
        ForUnrolled(row, thread.step, columns.rows, [&](int u, std::int64_t r) {
          at[u] = (columns.rows - 1 - r) * columns.width + thread.lane;
          x[u] = array.Load(terms.x, at[u]);
          if (terms.side != nullptr) side[u] = array.Load(terms.side, at[u]);
        });
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u < n) terms(array, at[u], normalizer, x[u], side[u]);
    }
  }
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
  const BatchNormShape& shape = args.apply.shape;
  return {static_cast<const float*>(args.moving_mean),
          static_cast<const float*>(args.moving_variance),
          args.epsilon,
          args.momentum,
          static_cast<double>(shape.outer) * static_cast<double>(shape.inner),
          args.unbiased,
          static_cast<float*>(args.new_mean),
          static_cast<float*>(args.new_variance),
          static_cast<float*>(args.saved_mean),
          static_cast<float*>(args.saved_inv_std)};
}

}  // namespace

Status BatchNormMoments(const BatchNormShape& shape, const void* x, float* mean,
                        float* sum_of_squares, const Scratch& scratch,
                        Stream stream) {
  if (shape.channels == 0) return {};
  return ReduceMoments("BatchNormMoments", shape, x,
                       MomentsFinish{mean, sum_of_squares}, scratch, stream);
}

Status BatchNormApply(const BatchNormApplyArgs& args, Stream stream) {
  const BatchNormShape& shape = args.shape;
  if (shape.outer * shape.channels * shape.inner == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const Columns columns =
        PlanColumns(shape.outer, shape.channels, shape.inner, kVector<T>,
                    device.multiprocessors * kBlocksPerMultiprocessor);
    return Launch("BatchNormApply", {columns.Grid(), columns.Block()}, stream,
                  ApplyKernel<T>, columns,
                  ArrayOf(shape, Aligned(args.x, args.side, args.y)),
                  ApplyTermsOf<T>(args));
  });
}

Status BatchNormForward(const BatchNormForwardArgs& args,
                        const Scratch& scratch, Stream stream) {
  const BatchNormShape& shape = args.apply.shape;
  if (shape.channels == 0) return {};
  BatchNormApplyArgs apply = args.apply;
  apply.parameters.mean = args.saved_mean;
  apply.parameters.inv_std = args.saved_inv_std;
  const StatisticsFinish statistics = StatisticsOf(args);
  if (!args.training) {
    TFO_CUDA_RETURN_IF_ERROR(Launch(
        "BatchNormForward",
        {dim3(static_cast<unsigned>(CeilDiv(shape.channels, kBlockThreads))),
         dim3(kBlockThreads)},
        stream, MovingStatisticsKernel, shape.channels, statistics));
    return BatchNormApply(apply, stream);
  }
  bool done = false;
  TFO_CUDA_RETURN_IF_ERROR(
      FusedForward(apply, statistics, scratch, stream, &done));
  if (done) return {};
  TFO_CUDA_RETURN_IF_ERROR(ReduceMoments(
      "BatchNormForward", shape, args.apply.x, statistics, scratch, stream));
  return BatchNormApply(apply, stream);
}

}  // namespace tfo::cuda
