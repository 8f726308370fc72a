// y = e^(z - max) / sum over a row, and x_grad = (dy - sum of dy * y) * y *
// scale.
#include "cuda/rows.h"
#include "cuda/softmax.h"

namespace tfo::cuda {
namespace {

// Vectors in a thread's registers: of x, and of dy and y each.
constexpr int kHeld = 4, kHeldGradient = 2;

struct Maximum {
  float value = -INFINITY;

  // A NaN is left out; what is made of the maximum is NaN anyway.
  __device__ void Merge(const Maximum& other) {
    value = fmaxf(value, other.value);
  }
  __device__ Maximum Exchange(int bit) const {
    return {__shfl_xor_sync(kWholeWarp, value, bit)};
  }
};

// A bit for each lane of a vector: whether it is in the row, and whether the
// mask keeps it.
struct LaneBits {
  unsigned inside, kept;

  __device__ bool Inside(int i) const { return (inside >> i & 1) != 0; }
  __device__ bool Kept(int i) const { return (kept >> i & 1) != 0; }
};

// Of N lanes at element `at` of a row of `size`; `keep` is its mask, or null.
template <int N>
__device__ LaneBits LaneBitsAt(const std::uint8_t* keep, std::int64_t at,
                               std::int64_t size) {
  const std::int64_t left = size - at;
  const unsigned inside = (1u << (left < N ? static_cast<int>(left) : N)) - 1;
  LaneBits bits{inside, inside};
  if (keep == nullptr) return bits;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (bits.Inside(i) && keep[at + i] == 0) bits.kept &= ~(1u << i);
  }
  return bits;
}

template <class T>
struct ForwardTerms {
  float scale, masked;
  bool zero_masked;
  SoftmaxMask mask;
  const T* x;
  T* y;
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 4)
    ForwardKernel(Rows rows, ForwardTerms<T> terms) {
  constexpr int kLanes = kVector<T>;
  ForRows(rows, false, [&](std::int64_t row) {
    const bool exists = row < rows.rows;
    const VectorArray array{exists ? rows.depth : 0, rows.aligned};
    const std::uint8_t* const keep =
        exists && terms.mask.keep != nullptr ? terms.mask.Row(row) : nullptr;
    const T* const x = terms.x + row * rows.depth;
    struct Scores {
      Vector<T> x;
      LaneBits bits;
    };
    const auto load = [&](std::int64_t at) {
      return Scores{array.Load(x, at),
                    LaneBitsAt<kLanes>(keep, at, array.size)};
    };
    const RowVectors<T, kHeld, decltype(load)> vectors(array.size, load);
    // Lanes past the end are as good as minus infinity.
    const auto z = [&](const Scores& v, int i) {
      const float other = v.bits.Inside(i) ? terms.masked : -INFINITY;
      return v.bits.Kept(i) ? v.x[i] * terms.scale : other;
    };

    Maximum largest;
    vectors.ForEach([&](const Scores& v, std::int64_t) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) largest.Merge({z(v, i)});
    });
    const float top =
        TotalOfRow(largest, static_cast<Maximum*>(SharedMemory())).value;
    Sums<1> sum;
    vectors.ForEach([&](const Scores& v, std::int64_t) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (v.bits.Inside(i)) sum.value[0] += ExpFor<T>(z(v, i) - top);
      }
    });
    const float factor =
        1.0f / TotalOfRow(sum, static_cast<Sums<1>*>(SharedMemory())).value[0];
    vectors.ForEach([&](const Scores& v, std::int64_t at) {
      float y[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        y[i] = ExpFor<T>(z(v, i) - top) * factor;
        if (terms.zero_masked && !v.bits.Kept(i)) y[i] = 0;
      }
      array.Store(y, terms.y + row * rows.depth, at);
    });
  });
}

template <class T>
struct GradientTerms {
  float scale;
  bool zero_masked;
  SoftmaxMask mask;
  const T *dy, *y;
  T* x_grad;
};

template <class T>
__global__ void __launch_bounds__(kBlockThreads, 4)
    GradientKernel(Rows rows, GradientTerms<T> terms) {
  constexpr int kLanes = kVector<T>;
  ForRows(rows, false, [&](std::int64_t row) {
    const bool exists = row < rows.rows;
    const VectorArray array{exists ? rows.depth : 0, rows.aligned};
    const std::uint8_t* const keep =
        exists && terms.mask.keep != nullptr ? terms.mask.Row(row) : nullptr;
    const T* const dy = terms.dy + row * rows.depth;
    const T* const y = terms.y + row * rows.depth;
    struct Pair {
      Vector<T> dy, y;
      LaneBits bits;
    };
    const auto load = [&](std::int64_t at) {
      return Pair{array.Load(dy, at), array.Load(y, at),
                  LaneBitsAt<kLanes>(keep, at, array.size)};
    };
    const RowVectors<T, kHeldGradient, decltype(load)> vectors(array.size,
                                                               load);
    Sums<1> sum;
    vectors.ForEach([&](const Pair& v, std::int64_t) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (!terms.zero_masked || v.bits.Kept(i))
          sum.value[0] = fmaf(v.dy[i], v.y[i], sum.value[0]);
      }
    });
    const float total =
        TotalOfRow(sum, static_cast<Sums<1>*>(SharedMemory())).value[0];
    vectors.ForEach([&](const Pair& v, std::int64_t at) {
      float x_grad[kLanes];
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        x_grad[i] = (v.dy[i] - total) * v.y[i] * terms.scale;
        if (!v.bits.Kept(i)) x_grad[i] = 0;
      }
      array.Store(x_grad, terms.x_grad + row * rows.depth, at);
    });
  });
}

}  // namespace

Status SoftmaxForward(const SoftmaxArgs& args, Stream stream) {
  const SoftmaxShape& shape = args.shape;
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return LaunchRows<Sums<1>>(
        "Softmax", shape.rows, shape.depth, kVector<T>, kHeld,
        Aligned(args.x, args.y), stream, ForwardKernel<T>,
        ForwardTerms<T>{static_cast<float>(args.scale),
                        static_cast<float>(args.masked), args.zero_masked,
                        args.mask, static_cast<const T*>(args.x),
                        static_cast<T*>(args.y)});
  });
}

Status SoftmaxGradient(const SoftmaxGradientArgs& args, Stream stream) {
  const SoftmaxShape& shape = args.shape;
  return WithElement(shape.dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return LaunchRows<Sums<1>>(
        "SoftmaxGrad", shape.rows, shape.depth, kVector<T>, kHeldGradient,
        Aligned(args.dy, args.y, args.x_grad), stream, GradientKernel<T>,
        GradientTerms<T>{static_cast<float>(args.scale), args.zero_masked,
                         args.mask, static_cast<const T*>(args.dy),
                         static_cast<const T*>(args.y),
                         static_cast<T*>(args.x_grad)});
  });
}

}  // namespace tfo::cuda
