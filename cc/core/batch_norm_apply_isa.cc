// y = act((x - mean) * inv_std * scale + offset (+ side)).
#include "cc/core/batch_norm_columns.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
struct Apply {
  using A = Accumulator<T>;

  const BatchNormApplyArgs& args;
  const BatchNormPlan& plan;
  Columns<A> columns;
  ArrayFunction<A>* activate;  // null for none and relu
  Output<T> y;

  const T* x() const { return static_cast<const T*>(args.x); }
  const T* side() const { return static_cast<const T*>(args.side); }

  // From the end on: the reduction of x before has left that in the caches.
  void operator()(int64_t task, int /*worker*/) const {
    const int64_t begin = (plan.num_chunks - 1 - task) * plan.chunk;
    const int64_t end = Min(begin + plan.chunk, plan.elements);
    MaskWriter mask(args.mask == nullptr ? nullptr : args.mask + begin / 8);
    if (activate != nullptr) {
      for (int64_t at = begin; at < end; at += kBufferElements) {
        Buffered(at, Min(at + kBufferElements, end), &mask);
      }
    } else if (args.mask != nullptr) {
      Normalize<true>(begin, end, y.At(begin), &mask);
    } else {
      Normalize<false>(begin, end, y.At(begin), nullptr);
    }
    if (args.mask != nullptr) mask.Finish();
    if (y.stream) FlushStores();
  }

  template <bool kMask, class Out>
  void Normalize(int64_t begin, int64_t end, Output<Out> out,
                 MaskWriter* mask) const {
    if (args.activation == Activation::kRelu) {
      side() != nullptr ? Normalize<true, true, kMask>(begin, end, out, mask)
                        : Normalize<true, false, kMask>(begin, end, out, mask);
    } else {
      side() != nullptr ? Normalize<false, true, kMask>(begin, end, out, mask)
                        : Normalize<false, false, kMask>(begin, end, out, mask);
    }
  }

  template <bool kRelu, bool kSide, bool kMask, class Out>
  void Normalize(int64_t begin, int64_t end, Output<Out> out,
                 MaskWriter* mask) const {
    ForDenseRows(
        plan, columns, begin, end,
        [&](int64_t at, int64_t rows, int64_t width, const Columns<A>& local) {
          ApplyRows<kRelu, kSide, kMask>(
              x() + at, kSide ? side() + at : nullptr, rows, width, width,
              local, out.At(at - begin), mask);
        });
  }

  // Activations that need more than one pass over the values make them in the
  // cache.
  void Buffered(int64_t begin, int64_t end, MaskWriter* mask) const {
    alignas(64) A buffer[kBufferElements];
    const int64_t n = end - begin;
    Normalize<false>(begin, end, Output<A>{buffer, false}, nullptr);
    activate(buffer, n, static_cast<A>(args.alpha));
    ForColumns<A>(n, [&](int64_t j, auto partial, int count) {
      constexpr bool kPartial = decltype(partial)::value;
      const Vec<A> value = LoadColumns<kPartial>(buffer + j, count);
      if (args.mask != nullptr) mask->Put(PositiveBits(value), count);
      y.template Store<kPartial>(begin + j, value, count);
    });
  }
};

}  // namespace

BatchNormApplyFunction BatchNormApply;

bool BatchNormApply(const BatchNormApplyArgs& args, const Parallel& parallel,
                    const Scratch& scratch) {
  const BatchNormPlan plan = PlanBatchNorm(args.shape);
  if (plan.num_chunks == 0) return true;
  return WithStorage(args.shape.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    using A = Accumulator<T>;
    Columns<A> columns;
    if (!AllocateColumns(plan, scratch, &columns)) return false;
    SetColumns(plan, args.parameters, columns);
    const bool direct = args.activation == Activation::kNone ||
                        args.activation == Activation::kRelu;
    Apply<T> apply{
        args,
        plan,
        columns,
        direct ? nullptr : ArrayActivation<false, A>(args.activation),
        {static_cast<T*>(args.y), Streams<T>(plan, args.y, args.x, args.side)}};
    ParallelFor(parallel, plan.num_chunks, plan.chunk, apply);
    return true;
  });
}

}  // namespace tfo::TFO_ISA
