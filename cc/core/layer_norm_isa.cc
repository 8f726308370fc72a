// y = n * scale + offset with n = (x - mean) * inv_std, and, with g = dy *
// scale,
//
//   x_grad = inv_std * (g - mean of g - n * mean of g * n),  without the mean
//   of g where that of x is not subtracted,
//   scale_grad = sum over rows of dy * n,  offset_grad = sum over rows of dy.
//
// A row is read several times, but from memory only once.
#include "cc/core/counts.h"
#include "cc/core/elementwise.h"
#include "cc/core/layer_norm.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kCyclesPerVector = 8;
// Rows at a time: their sums do not wait for each other, and sums over rows are
// stored once for all of them.
constexpr int kRowsTogether = 4;
// Parts of the rows with sums of their own, which are added in order.
constexpr int64_t kMostSlices = 64, kLeastSlice = 16384;

template <class A>
TFO_INLINE A MeanOf(Vec<A> sums, int64_t count) {
  double sum = 0;
  for (int l = 0; l < kLanes<A>; ++l) sum += static_cast<double>(sums[l]);
  return static_cast<A>(sum / static_cast<double>(count));
}

// Calls body(row, count) for the rows [begin, end), a few together.
template <class Body>
TFO_INLINE void ForRows(int64_t begin, int64_t end, const Body& body) {
  for (int64_t row = begin; row < end; row += kRowsTogether) {
    WithCount<kRowsTogether>(Min(end - row, kRowsTogether),
                             [&](auto count)
                                 TFO_INLINE_LAMBDA { body(row, count); });
  }
}

template <int kRows, class T>
void ForwardRows(const LayerNormArgs& args, int64_t row, const Output<T>& y) {
  using A = Accumulator<T>;
  const int64_t depth = args.shape.depth;
  const T* const x = static_cast<const T*>(args.x) + row * depth;
  const auto load = [&](int r, int64_t j, auto partial,
                        int n) TFO_INLINE_LAMBDA {
    return LoadColumns<decltype(partial)::value>(x + r * depth + j, n);
  };
  Vec<A> sums[kRows] = {}, squares[kRows] = {};
  A mean[kRows] = {}, inv_std[kRows];
  if (args.shape.subtract_mean) {
    ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
      for (int r = 0; r < kRows; ++r) {
        FetchAhead(x + r * depth + j);
        sums[r] += load(r, j, partial, n);
      }
    });
    for (int r = 0; r < kRows; ++r) mean[r] = MeanOf<A>(sums[r], depth);
  }
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    for (int r = 0; r < kRows; ++r) {
      if (!args.shape.subtract_mean) FetchAhead(x + r * depth + j);
      Vec<A> v = load(r, j, partial, n) - mean[r];
      if (decltype(partial)::value) v = FirstLanes<A>(v, n);
      squares[r] += v * v;
    }
  });
  for (int r = 0; r < kRows; ++r) {
    const double variance = MeanOf<A>(squares[r], depth);
    inv_std[r] = static_cast<A>(1 / __builtin_sqrt(variance + args.epsilon));
    static_cast<A*>(args.mean)[row + r] = mean[r];
    static_cast<A*>(args.inv_std)[row + r] = inv_std[r];
  }
  const A* const scales = static_cast<const A*>(args.scale);
  const A* const offsets = static_cast<const A*>(args.offset);
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    const Vec<A> scale = LoadColumns<kPartial>(scales + j, n);
    const Vec<A> offset = LoadColumns<kPartial>(offsets + j, n);
    for (int r = 0; r < kRows; ++r) {
      const Vec<A> normal = (load(r, j, partial, n) - mean[r]) * inv_std[r];
      y.template Store<kPartial>((row + r) * depth + j, normal * scale + offset,
                                 n);
    }
  });
}

template <class T>
void Forward(const LayerNormArgs& args, const Parallel& parallel) {
  const LayerNormShape& s = args.shape;
  const Output<T> y = OutputOfRows<T>(s.rows, s.depth, args.y, args.x);
  const int64_t rows =
      Max(kTaskElements / Max(s.depth, 1) / kRowsTogether, 1) * kRowsTogether;
  auto run = [&](int64_t task, int /*worker*/) {
    ForRows(task * rows, Min((task + 1) * rows, s.rows),
            [&](int64_t row, auto count) TFO_INLINE_LAMBDA {
              ForwardRows<decltype(count)::value>(args, row, y);
            });
    if (y.stream) FlushStores();
  };
  ParallelFor(
      parallel, CeilDiv(s.rows, rows),
      rows * CeilDiv(s.depth, kLanes<Accumulator<T>>) * kCyclesPerVector, run);
}

// Adds to the sums of dy * n and of dy, `pitch` apart.
template <int kRows, class T>
void GradientRows(const LayerNormGradientArgs& args, int64_t row,
                  const Output<T>& x_grad, Accumulator<T>* sums,
                  int64_t pitch) {
  using A = Accumulator<T>;
  const int64_t depth = args.shape.depth;
  const T* const dy = static_cast<const T*>(args.dy) + row * depth;
  const T* const x = static_cast<const T*>(args.x) + row * depth;
  const A* const scales = static_cast<const A*>(args.scale);
  A mean[kRows], inv_std[kRows], mean_g[kRows], mean_gn[kRows];
  for (int r = 0; r < kRows; ++r) {
    mean[r] = static_cast<const A*>(args.mean)[row + r];
    inv_std[r] = static_cast<const A*>(args.inv_std)[row + r];
  }
  const auto normal = [&](int r, int64_t j, auto partial,
                          int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    return (LoadColumns<kPartial>(x + r * depth + j, n) - mean[r]) * inv_std[r];
  };
  Vec<A> sums_g[kRows] = {}, sums_gn[kRows] = {};
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    const Vec<A> scale = LoadColumns<kPartial>(scales + j, n);
    Vec<A> scale_grad = Load(sums + j), offset_grad = Load(sums + pitch + j);
    for (int r = 0; r < kRows; ++r) {
      FetchAhead(dy + r * depth + j);
      FetchAhead(x + r * depth + j);
      const Vec<A> d = LoadColumns<kPartial>(dy + r * depth + j, n);
      const Vec<A> v = normal(r, j, partial, n);
      scale_grad += d * v;
      offset_grad += d;
      sums_g[r] += d * scale;
      sums_gn[r] += d * scale * v;
    }
    Store(sums + j, scale_grad);
    Store(sums + pitch + j, offset_grad);
  });
  for (int r = 0; r < kRows; ++r) {
    mean_g[r] = args.shape.subtract_mean ? MeanOf<A>(sums_g[r], depth) : A(0);
    mean_gn[r] = MeanOf<A>(sums_gn[r], depth);
  }
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    const Vec<A> scale = LoadColumns<kPartial>(scales + j, n);
    for (int r = 0; r < kRows; ++r) {
      const Vec<A> g = LoadColumns<kPartial>(dy + r * depth + j, n) * scale;
      const Vec<A> v = normal(r, j, partial, n);
      x_grad.template Store<kPartial>(
          (row + r) * depth + j, (g - mean_g[r] - v * mean_gn[r]) * inv_std[r],
          n);
    }
  });
}

template <class T>
bool Gradient(const LayerNormGradientArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  const LayerNormShape& s = args.shape;
  const Output<T> x_grad =
      OutputOfRows<T>(s.rows, s.depth, args.x_grad, args.dy, args.x);
  const int64_t pitch = CeilDiv(s.depth, lanes) * lanes;
  const int64_t slices =
      Max(Min(kMostSlices, CeilDiv(s.rows * s.depth, kLeastSlice)), 1);
  A* const sums = scratch.Allocate<A>(slices * 2 * pitch);
  if (sums == nullptr) return false;
  auto run = [&](int64_t slice, int /*worker*/) {
    A* const own = sums + slice * 2 * pitch;
    for (int64_t j = 0; j < 2 * pitch; j += lanes) Store(own + j, Vec<A>{});
    ForRows(s.rows * slice / slices, s.rows * (slice + 1) / slices,
            [&](int64_t row, auto count) TFO_INLINE_LAMBDA {
              GradientRows<decltype(count)::value>(args, row, x_grad, own,
                                                   pitch);
            });
    if (x_grad.stream) FlushStores();
  };
  ParallelFor(parallel, slices,
              s.rows / slices * pitch / lanes * 2 * kCyclesPerVector, run);
  A* const outputs[] = {static_cast<A*>(args.scale_grad),
                        static_cast<A*>(args.offset_grad)};
  for (int i = 0; i < 2; ++i) {
    ForColumns<A>(
        s.depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
          const A* from = sums + i * pitch + j;
          Vec<A> sum{};
          for (int64_t k = 0; k < slices; ++k, from += 2 * pitch)
            sum += Load(from);
          StoreColumns<decltype(partial)::value>(outputs[i] + j, sum, n);
        });
  }
  return true;
}

}  // namespace

LayerNormForwardFunction LayerNormForward;
LayerNormGradientFunction LayerNormGradient;

void LayerNormForward(const LayerNormArgs& args, const Parallel& parallel) {
  WithStorage(args.shape.dtype, [&](auto storage) {
    Forward<typename decltype(storage)::type>(args, parallel);
  });
}

bool LayerNormGradient(const LayerNormGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch) {
  return WithStorage(args.shape.dtype, [&](auto storage) {
    return Gradient<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
