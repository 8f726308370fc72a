// y = act(x * scale + bias (+ side)), elementwise over columns.
#include "cuda/activation.h"
#include "cuda/bias_act.h"
#include "cuda/columns.h"

namespace tfo::cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;

template <class T>
struct Operands {
  const T *x, *scale, *bias, *side;
  T *y, *pre_activation;
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 4)
    BiasActKernel(Columns columns, VectorArray array, Operands<T> p,
                  Activation activation, float alpha) {
  constexpr int kLanes = kVector<T>;
  const ColumnThread thread(columns);
  if (thread.lane >= columns.width) return;
  float scale[kLanes], bias[kLanes] = {};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) scale[i] = 1;
  if (p.scale != nullptr) LoadChannels(columns, thread.lane, p.scale, scale);
  if (p.bias != nullptr) LoadChannels(columns, thread.lane, p.bias, bias);
  ForRowGroups<kUnroll>(
      thread, array, 0, columns.full_rows, columns.rows,
      [&](auto count, const VectorArray& part, std::int64_t row) {
        constexpr int kRows = decltype(count)::value;
        Vector<T> x[kRows], side[kRows];
        std::int64_t at[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          at[u] = (row + u * thread.step) * columns.width + thread.lane;
          x[u] = part.Load(p.x, at[u]);
          if (p.side != nullptr) side[u] = part.Load(p.side, at[u]);
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          float z[kLanes];
#pragma unroll
          for (int i = 0; i < kLanes; ++i) {
            z[i] = x[u][i] * scale[i] + bias[i];
            if (p.side != nullptr) z[i] += side[u][i];
          }
          if (p.pre_activation != nullptr)
            part.Store(z, p.pre_activation, at[u]);
          ActivationValues<T>(activation, alpha, z);
          part.Store(z, p.y, at[u]);
        }
      });
}

}  // namespace

Status BiasActForward(const BiasActArgs& args, Stream stream) {
  if (args.outer * args.channels * args.inner == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  return WithElement(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const Columns columns =
        PlanColumns(args.outer, args.channels, args.inner, kVector<T>,
                    device.multiprocessors * kBlocksPerMultiprocessor);
    const VectorArray array{columns.elements, Aligned(args.x, args.side, args.y,
                                                      args.pre_activation)};
    const Operands<T> operands{
        static_cast<const T*>(args.x),    static_cast<const T*>(args.scale),
        static_cast<const T*>(args.bias), static_cast<const T*>(args.side),
        static_cast<T*>(args.y),          static_cast<T*>(args.pre_activation)};
    return Launch("BiasActForward", {columns.Grid(), columns.Block()}, stream,
                  BiasActKernel<T>, columns, array, operands, args.activation,
                  static_cast<float>(args.alpha));
  });
}

}  // namespace tfo::cuda
