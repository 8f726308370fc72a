// The phases backward: sums, and their use.
#include "cuda/batch_norm_fused.h"
#include "cuda/batch_norm_kernels.h"

namespace tfo::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;

// Backwards, as the last rows that the sums have read are those that the cache
// still holds.
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 2)
    GradientApplyKernel(Columns columns, VectorArray array,
                        GradientSource<T> source, GradientApplyTerms<T> terms) {
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  const typename GradientApplyTerms<T>::Lanes lanes(
      terms, source.parameters, ColumnLanes{columns, thread.lane});
  for (std::int64_t row = thread.row; row < columns.rows;
       row += kUnroll * thread.step) {
    typename GradientSource<T>::Row rows[kUnroll];
    std::int64_t at[kUnroll];
    const int n =
        ForUnrolled(row, thread.step, columns.rows, [&](int u, std::int64_t r) {
          at[u] = (columns.rows - 1 - r) * columns.width + thread.lane;
          rows[u] = source.Load(array, at[u]);
        });
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u < n) terms(source, array, at[u], lanes, rows[u]);
    }
  }
}

GradientFinish FinishOf(const BatchNormGradientArgs& args, float* sum_dz,
                        float* sum_dz_x) {
  return {static_cast<const float*>(args.parameters.inv_std),
          static_cast<float*>(args.scale_grad),
          static_cast<float*>(args.offset_grad), sum_dz, sum_dz_x};
}

}  // namespace

Status BatchNormGradientSums(const BatchNormGradientArgs& args, float* sum_dz,
                             float* sum_dz_x, const Scratch& scratch,
                             Stream stream) {
  const BatchNormShape& shape = args.shape;
  if (shape.channels == 0) return {};
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return ReduceChannels("BatchNormGradientSums", shape.outer, shape.channels,
                          shape.inner, ArrayOf(shape, GradientAligned(args)),
                          GradientSourceOf<T>(args),
                          FinishOf(args, sum_dz, sum_dz_x), scratch, stream);
  });
}

Status BatchNormGradientApply(const BatchNormGradientArgs& args, double count,
                              const float* sum_dz, const float* sum_dz_x,
                              Stream stream) {
  const BatchNormShape& shape = args.shape;
  if (shape.outer * shape.channels * shape.inner == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const Columns columns =
        PlanColumns(shape.outer, shape.channels, shape.inner, kVector<T>,
                    device.multiprocessors * kBlocksPerMultiprocessor);
    return Launch("BatchNormGradientApply", {columns.Grid(), columns.Block()},
                  stream, GradientApplyKernel<T>, columns,
                  ArrayOf(shape, GradientAligned(args)),
                  GradientSourceOf<T>(args),
                  GradientApplyTermsOf<T>(args, count, sum_dz, sum_dz_x));
  });
}

Status BatchNormGradient(const BatchNormGradientArgs& args,
                         const Scratch& scratch, Stream stream) {
  const BatchNormShape& shape = args.shape;
  if (shape.channels == 0) return {};
  const double count =
      static_cast<double>(shape.outer) * static_cast<double>(shape.inner);
  float* sums = scratch.Allocate<float>(2 * shape.channels);
  if (sums == nullptr) return OutOfScratch("BatchNormGradient");
  float *sum_dz = sums, *sum_dz_x = sums + shape.channels;
  bool done = false;
  TFO_CUDA_RETURN_IF_ERROR(FusedGradient(args, FinishOf(args, sum_dz, sum_dz_x),
                                         count, scratch, stream, &done));
  if (done) return {};
  TFO_CUDA_RETURN_IF_ERROR(
      BatchNormGradientSums(args, sum_dz, sum_dz_x, scratch, stream));
  return BatchNormGradientApply(args, count, sum_dz, sum_dz_x, stream);
}

}  // namespace tfo::cuda
