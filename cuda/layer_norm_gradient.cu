// With n = (x - mean) * inv_std and g = dy * scale:
//
//   x_grad = inv_std * (g - mean of g - n * mean of g * n),  without the mean
//   of g where that of x is not subtracted,
//   scale_grad = sum over rows of dy * n,  offset_grad = sum over rows of dy.
#include "cuda/channel_reduce.h"
#include "cuda/layer_norm.h"
#include "cuda/rows.h"

namespace tfo::cuda {
namespace {

constexpr int kHeld = 2;  // vectors of x, and of dy

// ---- Over rows: scale_grad and offset_grad ----------------------------------

template <class T>
struct VectorGradientSource {
  using Element = T;
  using Accumulator = Sums<2>;
  static constexpr int kBlocks = 4;
  static constexpr int kLanes = kVector<T>;

  std::int64_t rows, depth;
  const T *dy, *x;
  const float *mean, *inv_std;

  // Of the first lane.
  struct Row {
    Vector<T> dy, x;
    std::int64_t row;
    float mean, inv_std;
  };

  // Whether the rows are those of the matrix of columns.
  __device__ bool IsWhole() const { return depth % kRowUnit == 0; }

  __device__ Row Load(const VectorArray& array, std::int64_t at,
                      std::int64_t row) const {
    if (!IsWhole()) row = at / depth;
    Row loaded{array.Load(dy, at), array.Load(x, at), row, 0, 0};
    if (row < rows) {
      loaded.mean = mean[row];
      loaded.inv_std = inv_std[row];
    }
    return loaded;
  }

  class Thread {
   public:
    template <class Lanes>
    __device__ Thread(const VectorGradientSource&, const Lanes&) {}

    template <int N>
    __device__ void Add(const VectorGradientSource& source,
                        const VectorArray& array, const std::int64_t (&at)[N],
                        const Row (&rows)[N]) {
#pragma unroll
      for (int u = 0; u < N; ++u)
        AddTail(source, array, at[u], rows[u], kLanes);
    }

    __device__ void AddTail(const VectorGradientSource& source,
                            const VectorArray&, std::int64_t at, const Row& row,
                            int n) {
      const bool whole = source.IsWhole();
      std::int64_t r = row.row, end = (r + 1) * source.depth - at;
      float mean = row.mean, inv_std = row.inv_std;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (i >= n) continue;
        if (!whole && i == end) {
          mean = source.mean[++r];
          inv_std = source.inv_std[r];
          end += source.depth;
        }
        const float normal = (row.x[i] - mean) * inv_std;
        scale_grad_[i] = fmaf(row.dy[i], normal, scale_grad_[i]);
        offset_grad_[i] += row.dy[i];
      }
    }

    __device__ Sums<2> Lane(int i) const {
      Sums<2> sums;
      sums.value[0] = scale_grad_[i];
      sums.value[1] = offset_grad_[i];
      return sums;
    }

   private:
    float scale_grad_[kLanes] = {}, offset_grad_[kLanes] = {};
  };
};

struct VectorGradientFinish {
  float *scale_grad, *offset_grad;

  __device__ void operator()(std::int64_t j,
                             const Sums<2, double>& total) const {
    scale_grad[j] = static_cast<float>(total.value[0]);
    offset_grad[j] = static_cast<float>(total.value[1]);
  }
};

// ---- Along rows: x_grad -----------------------------------------------------

template <class T>
struct InputGradientTerms {
  bool subtract_mean;
  const T *dy, *x;
  const float *scale, *mean, *inv_std;
  T* x_grad;
};

// Backwards, as the last rows that the sums over rows have read are those that
// the cache still holds.
template <class T>
__global__ void __launch_bounds__(kBlockThreads, 4)
    InputGradientKernel(Rows rows, InputGradientTerms<T> terms) {
  using Total = Sums<2>;
  constexpr int kLanes = kVector<T>;
  Total* const shared = static_cast<Total*>(SharedMemory());
  const float share = 1.0f / static_cast<float>(rows.depth);
  ForRows(rows, true, [&](std::int64_t row) {
    const bool exists = row < rows.rows;
    const VectorArray array{exists ? rows.depth : 0, rows.aligned};
    const T* const dy = terms.dy + row * rows.depth;
    const T* const x = terms.x + row * rows.depth;
    struct Pair {
      Vector<T> dy, x;
    };
    const auto load = [&](std::int64_t at) {
      return Pair{array.Load(dy, at), array.Load(x, at)};
    };
    const RowVectors<T, kHeld, decltype(load)> vectors(array.size, load);
    const float mean = exists ? terms.mean[row] : 0.0f;
    const float inv_std = exists ? terms.inv_std[row] : 0.0f;

    // The scale is zero past the end, and so is dy.
    Total sums;
    vectors.ForEach([&](const Pair& v, std::int64_t at) {
      float scale[kLanes];
      LoadFloats(array, terms.scale, at, scale);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float g = v.dy[i] * scale[i];
        sums.value[0] += g;
        sums.value[1] = fmaf(g, (v.x[i] - mean) * inv_std, sums.value[1]);
      }
    });
    const Total total = TotalOfRow(sums, shared);
    const float mean_g = terms.subtract_mean ? total.value[0] * share : 0.0f;
    const float mean_gn = total.value[1] * share;
    vectors.ForEach([&](const Pair& v, std::int64_t at) {
      float x_grad[kLanes];
      LoadFloats(array, terms.scale, at, x_grad);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const float normal = (v.x[i] - mean) * inv_std;
        x_grad[i] = (v.dy[i] * x_grad[i] - mean_g - normal * mean_gn) * inv_std;
      }
      array.Store(x_grad, terms.x_grad + row * rows.depth, at);
    });
  });
}

}  // namespace

Status LayerNormGradient(const LayerNormGradientArgs& args,
                         const Scratch& scratch, Stream stream) {
  const LayerNormShape& shape = args.shape;
  if (shape.depth == 0) return {};
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    const auto* const dy = static_cast<const T*>(args.dy);
    const auto* const x = static_cast<const T*>(args.x);
    const auto* const scale = static_cast<const float*>(args.scale);
    const auto* const mean = static_cast<const float*>(args.mean);
    const auto* const inv_std = static_cast<const float*>(args.inv_std);
    // Before x_grad, which may take the place of dy or x.
    TFO_CUDA_RETURN_IF_ERROR(ReduceChannels(
        "LayerNormGrad", shape.rows, shape.depth, 1,
        VectorArray{shape.rows * shape.depth, Aligned(dy, x)},
        VectorGradientSource<T>{shape.rows, shape.depth, dy, x, mean, inv_std},
        VectorGradientFinish{static_cast<float*>(args.scale_grad),
                             static_cast<float*>(args.offset_grad)},
        scratch, stream));
    return LaunchRows<Sums<2>>(
        "LayerNormGrad", shape.rows, shape.depth, kVector<T>, kHeld,
        Aligned(dy, x, scale, args.x_grad), stream, InputGradientKernel<T>,
        InputGradientTerms<T>{shape.subtract_mean, dy, x, scale, mean, inv_std,
                              static_cast<T*>(args.x_grad)});
  });
}

}  // namespace tfo::cuda
