// y = x at random zero, otherwise scaled, elementwise.
#include "cuda/columns.h"
#include "cuda/dropout.h"
#include "cuda/philox.h"

namespace tfo {

template <>
inline constexpr int kUniformBits<__half> = kUniformBits<Half>;
template <>
inline constexpr int kUniformBits<__nv_bfloat16> = kUniformBits<BFloat16>;

namespace cuda {
namespace {

constexpr int kBlocksPerMultiprocessor = 16;
constexpr int kTogether = 4;  // vectors that a thread loads

// Elements that a block takes at a time.
template <class T>
constexpr std::int64_t kTile =
    std::int64_t{kTogether} * kBlockThreads * kVector<T>;

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 3)
    DropoutKernel(VectorArray array, Philox random, std::uint32_t threshold,
                  float scale, const T* x, T* y) {
  constexpr int kLanes = kVector<T>, kStep = kBlockThreads * kLanes;
  constexpr std::uint32_t kMask = (std::uint32_t{1} << kUniformBits<T>)-1;
  const PhiloxBlocks philox(random);
  const auto drop = [&](const VectorArray& part, std::int64_t first) {
    Vector<T> v[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) v[u] = part.Load(x, first + u * kStep);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      float kept[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; i += kPhiloxBlock) {
        std::uint32_t words[kPhiloxBlock];
        philox.Words(
            static_cast<std::uint64_t>(first + u * kStep + i) / kPhiloxBlock,
            words);
#pragma unroll
        for (int j = 0; j < kPhiloxBlock; ++j) {
          kept[i + j] =
              (words[j] & kMask) >= threshold ? v[u][i + j] * scale : 0;
        }
      }
      part.Store(kept, y, first + u * kStep);
    }
  };
  for (std::int64_t tile = blockIdx.x * kTile<T>; tile < array.size;
       tile += gridDim.x * kTile<T>) {
    const std::int64_t first = tile + threadIdx.x * kLanes;
    if (array.aligned && tile + kTile<T> <= array.size) {
      drop(Endless(), first);
    } else {
      drop(array, first);
    }
  }
}

__global__ void StoreKernel(PhiloxStart start, std::uint64_t* key,
                            std::uint64_t* counter) {
  start.Store(key, counter);
}

}  // namespace

Status DropOut(const DropoutArgs& args, Stream stream) {
  if (args.size == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  return WithElement(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const std::int64_t blocks = std::min<std::int64_t>(
        CeilDiv(args.size, kTile<T>),
        device.multiprocessors * kBlocksPerMultiprocessor);
    return Launch(
        "Dropout", {dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads)},
        stream, DropoutKernel<T>,
        VectorArray{args.size, Aligned(args.x, args.y)}, args.dropout.random,
        static_cast<std::uint32_t>(DropoutThreshold<T>(args.dropout.rate)),
        static_cast<float>(args.dropout.scale), static_cast<const T*>(args.x),
        static_cast<T*>(args.y));
  });
}

Status StoreRandomWords(const PhiloxStart& start, std::uint64_t* key,
                        std::uint64_t* counter, Stream stream) {
  return Launch("RandomWords", {dim3(1), dim3(1)}, stream, StoreKernel, start,
                key, counter);
}

}  // namespace cuda
}  // namespace tfo
