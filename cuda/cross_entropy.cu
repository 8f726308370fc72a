// loss = log(sum of e^x over a row) - x[label], and x_grad = (e^x / sum - [the
// class is the label]) * dloss. Each reads a row once.
#include "cuda/cross_entropy.h"
#include "cuda/rows.h"

namespace tfo::cuda {
namespace {

// Vectors of x in a thread's registers at a time.
constexpr int kHeld = 4;

// The largest of some x, and the sum of e^(x - largest).
template <class T>
struct ExpSum {
  // Not that of a NaN, whose sum is NaN.
  float largest = -INFINITY;
  float sum = 0;

  // e^(x - largest). From minus infinity itself nothing can be subtracted.
  __device__ float Exp(float x) const {
    return ExpFor<T>(x - (largest == -INFINITY ? 0.0f : largest));
  }
  // The same bits whichever of the two is merged into the other.
  __device__ void Merge(const ExpSum& other) {
    const bool above = other.largest > largest;
    const ExpSum less = above ? *this : other;
    if (above) *this = other;
    sum += less.sum * Exp(less.largest);
  }
  __device__ ExpSum Exchange(int bit) const {
    return {__shfl_xor_sync(kWholeWarp, largest, bit),
            __shfl_xor_sync(kWholeWarp, sum, bit)};
  }
};

// A row of x and of x_grad. Its vectors begin at multiples of 16 bytes, so that
// any number of classes is read in vectors: the first one may begin with
// elements of the row before.
template <class T>
struct Row {
  std::int64_t start;  // of the first vector, in the array
  VectorSpan span;     // from there

  __device__ Row(const Rows& rows, std::int64_t row) {
    const std::int64_t first = row * rows.depth;
    const std::int64_t before = first % kVector<T>;
    start = first - before;
    span = {before, row < rows.rows ? before + rows.depth : 0,
            rows.arrays_aligned};
  }

  // Calls body(vectors, at) for as much of the row at a time as the threads
  // hold; the vectors' places count from `at`. What is not of the row reads as
  // minus infinity.
  template <class Body>
  __device__ void ForParts(const T* x, const Body& body) const {
    const std::int64_t part = std::int64_t{kHeld} * blockDim.x * kVector<T>;
    for (std::int64_t at = 0; at < span.end; at += part) {
      const auto load = [&](std::int64_t i) {
        return span.Load(x + start, at + i, -INFINITY);
      };
      const std::int64_t left = span.end - at;
      body(
          RowVectors<T, kHeld, decltype(load)>(left < part ? left : part, load),
          at);
    }
  }
};

template <class T>
struct ForwardTerms {
  Labels labels;
  const T* x;
  T* loss;
  float *largest, *inverse_sum;
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 3)
    ForwardKernel(Rows rows, ForwardTerms<T> terms) {
  ForRows(rows, false, [&](std::int64_t row) {
    const bool writes = row < rows.rows && threadIdx.x == 0;
    float of_label = NAN;
    if (writes) {
      const std::int64_t label = terms.labels[row];
      if (Labels::IsClass(label, rows.depth))
        of_label = ToFloat(terms.x[row * rows.depth + label]);
    }
    ExpSum<T> total;
    Row<T>(rows, row).ForParts(terms.x, [&](const auto& vectors, std::int64_t) {
      ExpSum<T> some;
      vectors.ForEach([&](const Vector<T>& v, std::int64_t) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i)
          some.largest = fmaxf(some.largest, v[i]);
      });
      vectors.ForEach([&](const Vector<T>& v, std::int64_t) {
#pragma unroll
        for (int i = 0; i < kVector<T>; ++i) some.sum += some.Exp(v[i]);
      });
      total.Merge(some);
    });
    total = TotalOfRow(total, static_cast<ExpSum<T>*>(SharedMemory()));
    if (writes) {
      terms.loss[row] =
          FromFloat<T>(logf(total.sum) + (total.largest - of_label));
      terms.largest[row] = total.largest;
      terms.inverse_sum[row] = 1.0f / total.sum;
    }
  });
}

template <class T>
struct GradientTerms {
  Labels labels;
  const T* x;
  const float *largest, *inverse_sum;
  const T* dloss;
  T* x_grad;
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 3)
    GradientKernel(Rows rows, GradientTerms<T> terms) {
  // The last rows, which the forward pass read last, may be in the cache.
  ForRows(rows, true, [&](std::int64_t index) {
    if (index >= rows.rows) return;
    const Row<T> row(rows, index);
    const std::int64_t label = terms.labels[index];
    const float dloss =
        Labels::IsClass(label, rows.depth) ? ToFloat(terms.dloss[index]) : NAN;
    const float largest = terms.largest[index];
    const float inverse_sum = terms.inverse_sum[index];
    const std::int64_t label_at = row.span.begin + label;
    row.ForParts(terms.x, [&](const auto& vectors, std::int64_t begin) {
      vectors.ForEach([&](const Vector<T>& v, std::int64_t i) {
        const std::int64_t at = begin + i;
        float x_grad[kVector<T>];
#pragma unroll
        for (int j = 0; j < kVector<T>; ++j) {
          const float softmax = ExpFor<T>(v[j] - largest) * inverse_sum;
          x_grad[j] = (softmax - (at + j == label_at ? 1.0f : 0.0f)) * dloss;
        }
        row.span.Store(x_grad, terms.x_grad + row.start, at);
      });
    });
  });
}

}  // namespace

Status CrossEntropyForward(const CrossEntropyArgs& args, Stream stream) {
  const SoftmaxShape& shape = args.shape;
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return LaunchRows<ExpSum<T>>(
        "SparseSoftmaxCrossEntropy", shape.rows, shape.depth, kVector<T>, kHeld,
        Aligned(args.x), stream, ForwardKernel<T>,
        ForwardTerms<T>{args.labels, static_cast<const T*>(args.x),
                        static_cast<T*>(args.loss),
                        static_cast<float*>(args.largest),
                        static_cast<float*>(args.inverse_sum)});
  });
}

Status CrossEntropyGradient(const CrossEntropyGradientArgs& args,
                            Stream stream) {
  const CrossEntropyArgs& forward = args.forward;
  const SoftmaxShape& shape = forward.shape;
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return LaunchRows<ExpSum<T>>(
        "SparseSoftmaxCrossEntropyGrad", shape.rows, shape.depth, kVector<T>,
        kHeld, Aligned(forward.x, args.x_grad), stream, GradientKernel<T>,
        GradientTerms<T>{forward.labels, static_cast<const T*>(forward.x),
                         static_cast<const float*>(forward.largest),
                         static_cast<const float*>(forward.inverse_sum),
                         static_cast<const T*>(args.dloss),
                         static_cast<T*>(args.x_grad)});
  });
}

}  // namespace tfo::cuda
