// dz = dy * act'(saved), and its sum per channel.
#include "cuda/activation.h"
#include "cuda/bias_act.h"
#include "cuda/channel_reduce.h"

namespace tfo::cuda {
namespace {

template <class T>
struct SlopeSource {
  using Element = T;
  using Accumulator = Sums<1>;
  static constexpr int kBlocks = 4;
  static constexpr int kLanes = kVector<T>;

  const T *dy, *saved;  // saved is null for Activation::kNone
  T* dz;                // null: not wanted
  Activation activation;
  float alpha;

  struct Row {
    Vector<T> dy, saved;
  };

  __device__ Row Load(const VectorArray& array, std::int64_t at,
                      std::int64_t /*row*/) const {
    Row row;
    row.dy = array.Load(dy, at);
    if (saved != nullptr) row.saved = array.Load(saved, at);
    return row;
  }

  class Thread {
   public:
    template <class Lanes>
    __device__ Thread(const SlopeSource&, const Lanes&) {}

    template <int N>
    __device__ void Add(const SlopeSource& source, const VectorArray& array,
                        const std::int64_t (&at)[N], const Row (&rows)[N]) {
#pragma unroll
      for (int u = 0; u < N; ++u)
        AddTail(source, array, at[u], rows[u], kLanes);
    }

    __device__ void AddTail(const SlopeSource& source, const VectorArray& array,
                            std::int64_t at, const Row& row, int n) {
      float dz[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        dz[i] = source.saved != nullptr ? row.saved[i] : 0;
      }
      ActivationSlopes<T>(source.activation, source.alpha, dz);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        dz[i] *= row.dy[i];
        if (i < n) sum_[i] += dz[i];
      }
      if (source.dz != nullptr) array.Store(dz, source.dz, at);
    }

    __device__ Sums<1> Lane(int i) const {
      Sums<1> sums;
      sums.value[0] = sum_[i];
      return sums;
    }

   private:
    float sum_[kLanes] = {};
  };
};

template <class T>
struct BiasGradFinish {
  T* bias_grad;  // null: not wanted

  __device__ void operator()(std::int64_t channel,
                             const Sums<1, double>& total) const {
    if (bias_grad != nullptr) {
      bias_grad[channel] = FromFloat<T>(static_cast<float>(total.value[0]));
    }
  }
};

}  // namespace

Status BiasActGradient(const BiasActGradientArgs& args, const Scratch& scratch,
                       Stream stream) {
  if (args.channels == 0) return {};
  return WithElement(args.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const VectorArray array{args.outer * args.channels * args.inner,
                            Aligned(args.dy, args.saved, args.dz)};
    const SlopeSource<T> source{static_cast<const T*>(args.dy),
                                args.activation == Activation::kNone
                                    ? nullptr
                                    : static_cast<const T*>(args.saved),
                                static_cast<T*>(args.dz), args.activation,
                                static_cast<float>(args.alpha)};
    return ReduceChannels(
        "BiasActGradient", args.outer, args.channels, args.inner, array, source,
        BiasGradFinish<T>{static_cast<T*>(args.bias_grad)}, scratch, stream);
  });
}

}  // namespace tfo::cuda
