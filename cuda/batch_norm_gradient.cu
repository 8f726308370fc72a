// The phases backward: sums, and their use.
#include "cuda/batch_norm_fused.h"
#include "cuda/batch_norm_kernels.h"

namespace tfo::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;

// Backwards, as the last rows that the sums have read are those that the cache
// still holds.
template <class Source>
__global__ void __launch_bounds__(kBlockThreads, 3)
    GradientApplyKernel(Columns columns, VectorArray array, Source source,
                        GradientApplyTerms<typename Source::Element> terms) {
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  const typename GradientApplyTerms<typename Source::Element>::Lanes lanes(
      terms, source.parameters, ColumnLanes{columns, thread.lane});
  ForRowGroups<kUnroll>(
      thread, array, columns.rows - columns.full_rows, columns.rows,
      columns.rows, [&](auto count, const VectorArray& part, std::int64_t row) {
        constexpr int kRows = decltype(count)::value;
        typename Source::Row rows[kRows];
        std::int64_t at[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const std::int64_t r = columns.rows - 1 - (row + u * thread.step);
          at[u] = r * columns.width + thread.lane;
          rows[u] = source.Load(part, at[u], r);
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u)
          terms(source, part, at[u], lanes, rows[u]);
      });
}

// From the sums of all replicas.
__global__ void __launch_bounds__(kBlockThreads)
    MeansKernel(std::int64_t channels, const double* sums, const float* inv_std,
                GradientMeans means) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  means.Set(c, sums[c], sums[channels + c], sums[2 * channels + c], inv_std[c]);
}

GradientFinish FinishOf(const BatchNormGradientArgs& args,
                        const GradientMeans& means, double* sums) {
  return {args.shape.channels,
          Count(args.shape),
          static_cast<const float*>(args.parameters.inv_std),
          static_cast<float*>(args.scale_grad),
          static_cast<float*>(args.offset_grad),
          means,
          sums};
}

Status Reduce(const char* name, const BatchNormGradientArgs& args,
              const GradientFinish& finish, const Scratch& scratch,
              Stream stream) {
  const BatchNormShape& shape = args.shape;
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return WithGradientSource<T>(args, [&](const auto& source) {
      return ReduceChannels(name, shape.outer, shape.channels, shape.inner,
                            ArrayOf(shape, GradientAligned(args)), source,
                            finish, scratch, stream);
    });
  });
}

Status Apply(const char* name, const BatchNormGradientArgs& args,
             const GradientMeans& means, Stream stream) {
  const BatchNormShape& shape = args.shape;
  if (shape.outer * shape.channels * shape.inner == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const Columns columns =
        PlanColumns(shape.outer, shape.channels, shape.inner, kVector<T>,
                    device.multiprocessors * kBlocksPerMultiprocessor);
    return WithGradientSource<T>(args, [&](const auto& source) {
      return Launch(name, {columns.Grid(), columns.Block()}, stream,
                    GradientApplyKernel<std::decay_t<decltype(source)>>,
                    columns, ArrayOf(shape, GradientAligned(args)), source,
                    GradientApplyTermsOf<T>(args, means));
    });
  });
}

Status AllocateMeans(const char* name, std::int64_t channels,
                     const Scratch& scratch, GradientMeans* means) {
  means->dz = scratch.Allocate<float>(2 * channels);
  means->dz_x = means->dz + channels;
  return means->dz == nullptr ? OutOfScratch(name) : Status{};
}

}  // namespace

Status BatchNormLocalSums(const BatchNormGradientArgs& args,
                          const Scratch& scratch, Stream stream, double* sums) {
  if (args.shape.channels == 0) return {};
  return Reduce("BatchNormGradSums", args,
                FinishOf(args, GradientMeans{nullptr, nullptr}, sums), scratch,
                stream);
}

Status BatchNormGradientFromSums(const BatchNormGradientArgs& args,
                                 const double* sums, const Scratch& scratch,
                                 Stream stream) {
  constexpr const char* kName = "BatchNormGradApply";
  const std::int64_t channels = args.shape.channels;
  if (channels == 0) return {};
  GradientMeans means;
  TFO_CUDA_RETURN_IF_ERROR(AllocateMeans(kName, channels, scratch, &means));
  TFO_CUDA_RETURN_IF_ERROR(
      LaunchForEach(kName, channels, stream, MeansKernel, channels, sums,
                    static_cast<const float*>(args.parameters.inv_std), means));
  return Apply(kName, args, means, stream);
}

Status BatchNormGradient(const BatchNormGradientArgs& args,
                         const Scratch& scratch, Stream stream) {
  constexpr const char* kName = "BatchNormGradient";
  if (args.shape.channels == 0) return {};
  GradientMeans means;
  TFO_CUDA_RETURN_IF_ERROR(
      AllocateMeans(kName, args.shape.channels, scratch, &means));
  const GradientFinish finish = FinishOf(args, means, nullptr);
  bool done = false;
  TFO_CUDA_RETURN_IF_ERROR(FusedGradient(args, finish, scratch, stream, &done));
  if (done) return {};
  TFO_CUDA_RETURN_IF_ERROR(Reduce(kName, args, finish, scratch, stream));
  return Apply(kName, args, means, stream);
}

}  // namespace tfo::cuda
