// Softmax of rows and its gradient. A row is read from memory once.
#include "cc/core/softmax_rows.h"

namespace tfo::TFO_ISA {
namespace {

// `e` has room for a row in whole vectors.
template <class T, bool kMask>
void ForwardRow(const SoftmaxArgs& args, int64_t row, const Output<T>& y,
                Accumulator<T>* e) {
  using A = Accumulator<T>;
  const int64_t depth = args.shape.depth;
  const T* const x = static_cast<const T*>(args.x) + row * depth;
  const std::uint8_t* const keep = kMask ? args.mask.Row(row) : nullptr;
  const Vec<A> scale = Splat(static_cast<A>(args.scale));
  const Vec<A> masked = Splat(static_cast<A>(args.masked));
  Vec<A> largest = MinusInfinity<A>();
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    FetchAhead(x + j);
    Vec<A> z = LoadColumns<kPartial>(x + j, n) * scale;
    if constexpr (kMask) z = Kept<A>(keep + j, n, z, masked);
    if constexpr (kPartial) z = FirstLanes<A>(z, n, MinusInfinity<A>());
    Store(e + j, z);
    largest = Larger<A>(z, largest);
  });
  const Vec<A> top = LargestOverLanes<A>(largest);
  const Vec<A> sum =
      SumOver<A>(depth, [&](int64_t j, auto, int) TFO_INLINE_LAMBDA {
        const Vec<A> value = ExpOfNegative<T>(Load(e + j) - top);
        Store(e + j, value);
        return value;
      });
  const Vec<A> factor = A(1) / sum;
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    Vec<A> value = Load(e + j) * factor;
    if (kMask && args.zero_masked)
      value = Kept<A>(keep + j, n, value, Vec<A>{});
    y.template Store<decltype(partial)::value>(row * depth + j, value, n);
  });
}

template <class T>
bool Forward(const SoftmaxArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  using A = Accumulator<T>;
  const SoftmaxShape& s = args.shape;
  const int64_t pitch = CeilDiv(s.depth, 16) * 16;
  A* const rows = scratch.Allocate<A>(parallel.num_workers * pitch);
  if (rows == nullptr) return false;
  const Output<T> y = OutputOfRows<T>(s.rows, s.depth, args.y, args.x);
  ForRows<T>(s, y.stream, parallel, [&](int64_t row, int worker) {
    A* const e = rows + worker * pitch;
    args.mask.keep != nullptr ? ForwardRow<T, true>(args, row, y, e)
                              : ForwardRow<T, false>(args, row, y, e);
  });
  return true;
}

template <class T, bool kMask>
void GradientRow(const SoftmaxGradientArgs& args, int64_t row,
                 const Output<T>& x_grad) {
  using A = Accumulator<T>;
  const int64_t depth = args.shape.depth;
  const T* const dy = static_cast<const T*>(args.dy) + row * depth;
  const T* const y = static_cast<const T*>(args.y) + row * depth;
  const std::uint8_t* const keep = kMask ? args.mask.Row(row) : nullptr;
  const Vec<A> sum =
      SumOver<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
        constexpr bool kPartial = decltype(partial)::value;
        FetchAhead(dy + j);
        FetchAhead(y + j);
        const Vec<A> term =
            LoadColumns<kPartial>(dy + j, n) * LoadColumns<kPartial>(y + j, n);
        return kMask && args.zero_masked ? Kept<A>(keep + j, n, term, Vec<A>{})
                                         : term;
      });
  const Vec<A> scale = Splat(static_cast<A>(args.scale));
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    Vec<A> gradient = (LoadColumns<kPartial>(dy + j, n) - sum) *
                      LoadColumns<kPartial>(y + j, n) * scale;
    if constexpr (kMask) gradient = Kept<A>(keep + j, n, gradient, Vec<A>{});
    x_grad.template Store<kPartial>(row * depth + j, gradient, n);
  });
}

template <class T>
void Gradient(const SoftmaxGradientArgs& args, const Parallel& parallel) {
  const SoftmaxShape& s = args.shape;
  const Output<T> x_grad =
      OutputOfRows<T>(s.rows, s.depth, args.x_grad, args.dy, args.y);
  ForRows<T>(s, x_grad.stream, parallel, [&](int64_t row, int /*worker*/) {
    args.mask.keep != nullptr ? GradientRow<T, true>(args, row, x_grad)
                              : GradientRow<T, false>(args, row, x_grad);
  });
}

}  // namespace

SoftmaxForwardFunction SoftmaxForward;
SoftmaxGradientFunction SoftmaxGradient;

bool SoftmaxForward(const SoftmaxArgs& args, const Parallel& parallel,
                    const Scratch& scratch) {
  return WithStorage(args.shape.dtype, [&](auto storage) {
    return Forward<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

void SoftmaxGradient(const SoftmaxGradientArgs& args,
                     const Parallel& parallel) {
  WithStorage(args.shape.dtype, [&](auto storage) {
    Gradient<typename decltype(storage)::type>(args, parallel);
  });
}

}  // namespace tfo::TFO_ISA
