#include "cc/core/few_rows.h"
#include "cc/core/filter_gradient.h"
#include "cc/core/groups.h"
#include "cc/core/small_groups_filter_gradient.h"
#include "cc/core/storage.h"
#include "cc/core/winograd_filter_gradient.h"

namespace tfo::TFO_SHARED_ISA {

ConvGradientFunction ConvGradient;

}  // namespace tfo::TFO_SHARED_ISA

namespace tfo::TFO_ISA {

// In correlations_isa.cc. The input gradient, of one group or of all that are
// computed together; the filter gradient of few columns.
ConvGradientFunction ConvInputGradient, ConvFilterGradientOfFewColumns;

namespace {

// Whether the columns of a filter gradient's tiles are better x's channels than
// dz's: these are few, and x and dz may change places.
template <class T>
bool ExchangesOperands(const FilterGradient<T>& g) {
  using A = Accumulator<T>;
  const ConvShape& s = g.shape;
  // Pairs of pixels are gathered as they are, unless they lie in lines.
  const bool plain = kElements<Operand<T>> == 1 ||
                     kTransposesRows<Operand<T>> || g.dz.saved == nullptr;
  return g.filters_gradient != nullptr && plain && s.groups == 1 &&
         g.x.taps.count > 1 && s.stride_h == 1 && s.stride_w == 1 &&
         2 * s.out_c * CeilDiv(s.in_c, kLanes<A>) <=
             s.in_c * CeilDiv(s.out_c, kLanes<A>);
}

// The same filter gradient as a sum over the pixels of x:
//
//   dw[r, s, c, k] = sum over pixels of dz[pixel under tap -(r, s), k] *
//   x[pixel, c]
template <class T>
bool FilterGradientExchanged(const FilterGradient<T>& g,
                             const Parallel& parallel, const Scratch& scratch) {
  const ConvShape& s = g.shape;
  TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
  if (taps.taps == nullptr) return false;
  InputGradientTaps(s, 0, 0, s.in_h, s.in_w, &taps);
  const Windows<T> dz{g.dz, g.dz_map, s.batch, s.out_h, s.out_w, s.out_c,
                      taps, 1,        1,       s.in_h,  s.in_w};
  ConvShape exchanged = s;
  Swap(exchanged.in_h, exchanged.out_h);
  Swap(exchanged.in_w, exchanged.out_w);
  Swap(exchanged.in_c, exchanged.out_c);
  exchanged.filters_transposed = !s.filters_transposed;
  return ComputeFilterGradient<T>({dz, g.x.source, g.x.map, exchanged,
                                   g.filters_gradient, nullptr, nullptr},
                                  parallel, scratch);
}

// Whether a product of few rows is better than tiles of few columns: of one
// line of pixels under one tap.
template <class T>
bool HasFewColumns(const FilterGradient<T>& g) {
  const ConvShape& s = g.shape;
  return g.filters_gradient != nullptr && s.batch * s.in_h * s.out_h == 1 &&
         s.in_w == s.out_w && s.kernel_h * s.kernel_w == 1 &&
         g.x.taps.count == 1 && g.x.taps.min_w == 0 && g.x.map.c == 1 &&
         s.out_c > 0 && s.out_c <= kFewColumns &&
         s.in_c >= kLeastColumnVectors * kLanes<Accumulator<T>>;
}

// All that a FilterGradient asks for, which is of `args`.
template <class T>
bool FilterGradients(FilterGradient<T> g, const ConvGradientArgs& args,
                     const Parallel& parallel, const Scratch& scratch) {
  if (HasSmallGroups<T>(g.shape))
    return SmallGroupsFilterGradient(g, parallel, scratch);
  const bool few_columns = HasFewColumns(g);
  if (few_columns || ExchangesOperands(g)) {
    if (!(few_columns ? ConvFilterGradientOfFewColumns(args, parallel, scratch)
                      : FilterGradientExchanged(g, parallel, scratch))) {
      return false;
    }
    g.filters_gradient = nullptr;
    if (g.bias_gradient == nullptr && g.side_input_gradient == nullptr)
      return true;
  }
  return args.winograd && g.filters_gradient != nullptr &&
                 g.side_input_gradient == nullptr &&
                 WinogradPays(g.shape, g.x, g.shape.out_c)
             ? FilterGradientByWinograd(g, parallel, scratch)
             : ComputeFilterGradient(g, parallel, scratch);
}

// All gradients, of one group or of all that are computed together.
template <class T>
bool Gradients(const ConvGradientArgs& args, const Parallel& parallel,
               const Scratch& scratch) {
  const ConvShape s = Flatten(args.shape);
  bool wants_input = args.input_gradient != nullptr;
  if (args.filters_gradient != nullptr || args.bias_gradient != nullptr ||
      args.side_input_gradient != nullptr) {
    TapList taps{scratch.Allocate<Tap>(s.kernel_h * s.kernel_w)};
    if (taps.taps == nullptr) return false;
    ForwardTaps(s, &taps);
    FilterGradient<T> g{InputWindows<T>(s, args.input, taps),
                        PreActivationGradient<T>(args),
                        OutputMap(s),
                        s,
                        static_cast<T*>(args.filters_gradient),
                        static_cast<T*>(args.bias_gradient),
                        static_cast<T*>(args.side_input_gradient)};
    if (wants_input && s.groups == 1 && !HasFewColumns(g) &&
        JoinsInputGradient(g)) {
      g.input_gradient = static_cast<T*>(args.input_gradient);
      g.filters = static_cast<const T*>(args.filters);
      g.x_map = InputMap(s);
      wants_input = false;
    }
    if (!FilterGradients(g, args, parallel, scratch)) return false;
  }
  return !wants_input || ConvInputGradient(args, parallel, scratch);
}

template <class T>
bool Gradient(const ConvGradientArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  const ConvShape& s = args.shape;
  if (s.groups == 1) return Gradients<T>(args, parallel, scratch);
  const auto group = [](const ConvGradientArgs& one, const Parallel& threads,
                        const Scratch& own) {
    return Gradients<T>(one, threads, own);
  };
  ConvGradientArgs input = args, sums = args;
  input.filters_gradient = input.bias_gradient = nullptr;
  input.side_input_gradient = nullptr;
  sums.input_gradient = nullptr;
  return (HasSmallGroups<T>(s)
              ? Gradients<T>(sums, parallel, scratch)
              : ForGroups<T>(sums, parallel, scratch, group)) &&
         (HasSmallGroupsBackwards<T>(s)
              ? Gradients<T>(input, parallel, scratch)
              : ForGroups<T>(input, parallel, scratch, group));
}

}  // namespace

bool ConvGradient(const ConvGradientArgs& args, const Parallel& parallel,
                  const Scratch& scratch) {
  const auto own = [&](auto storage) {
    return Gradient<typename decltype(storage)::type>(args, parallel, scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::ConvGradient(args, parallel, scratch);
  };
  return WithStorage(args.dtype, UnlessShared(own, shared));
}

}  // namespace tfo::TFO_ISA
