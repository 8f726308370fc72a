// y = (x - mean) * inv_std * scale + offset.
#include "cuda/layer_norm.h"
#include "cuda/rows.h"

namespace tfo::cuda {
namespace {

constexpr int kHeld = 4;

template <class T>
struct ForwardTerms {
  bool subtract_mean;
  float epsilon;
  const T* x;
  const float *scale, *offset;
  T* y;
  float *mean, *inv_std;
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 4)
    ForwardKernel(Rows rows, ForwardTerms<T> terms) {
  using Total = Sums<2>;
  constexpr int kLanes = kVector<T>;
  Total* const shared = static_cast<Total*>(SharedMemory());
  const float share = 1.0f / static_cast<float>(rows.depth);
  ForRows(rows, false, [&](std::int64_t row) {
    const VectorArray array{row < rows.rows ? rows.depth : 0, rows.aligned};
    const T* const x = terms.x + row * rows.depth;
    const auto load = [&](std::int64_t at) { return array.Load(x, at); };
    const RowVectors<T, kHeld, decltype(load)> vectors(array.size, load);

    float mean = 0;
    if (terms.subtract_mean) {
      Sums<1> sum;
      vectors.ForEach([&](const Vector<T>& v, std::int64_t) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) sum.value[0] += v[i];
      });
      mean = TotalOfRow(sum, static_cast<Sums<1>*>(SharedMemory())).value[0] *
             share;
    }
    // The sum of deviations corrects the rounding of the mean: Chan, Golub and
    // LeVeque, "Algorithms for computing the sample variance", 1983.
    Sums<2> deviations;
    vectors.ForEach([&](const Vector<T>& v, std::int64_t at) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float deviation = at + i < array.size ? v[i] - mean : 0.0f;
        deviations.value[0] += deviation;
        deviations.value[1] = fmaf(deviation, deviation, deviations.value[1]);
      }
    });
    const Total total = TotalOfRow(deviations, shared);
    float variance = total.value[1] * share;
    if (terms.subtract_mean) {
      const float shift = total.value[0] * share;
      mean += shift;
      variance -= shift * shift;
    }
    const float inv_std =
        1.0f / sqrtf((variance < 0 ? 0 : variance) + terms.epsilon);
    if (threadIdx.x == 0 && row < rows.rows) {
      terms.mean[row] = mean;
      terms.inv_std[row] = inv_std;
    }
    vectors.ForEach([&](const Vector<T>& v, std::int64_t at) {
      float scale[kLanes], y[kLanes];
      LoadFloats(array, terms.scale, at, scale);
      LoadFloats(array, terms.offset, at, y);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        y[i] = fmaf((v[i] - mean) * inv_std, scale[i], y[i]);
      }
      array.Store(y, terms.y + row * rows.depth, at);
    });
  });
}

}  // namespace

Status LayerNormForward(const LayerNormArgs& args, Stream stream) {
  const LayerNormShape& shape = args.shape;
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return LaunchRows<Sums<2>>(
        "LayerNorm", shape.rows, shape.depth, kVector<T>, kHeld,
        Aligned(args.x, args.scale, args.offset, args.y), stream,
        ForwardKernel<T>,
        ForwardTerms<T>{shape.subtract_mean, static_cast<float>(args.epsilon),
                        static_cast<const T*>(args.x),
                        static_cast<const float*>(args.scale),
                        static_cast<const float*>(args.offset),
                        static_cast<T*>(args.y), static_cast<float*>(args.mean),
                        static_cast<float*>(args.inv_std)});
  });
}

}  // namespace tfo::cuda
