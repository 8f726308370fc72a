// y = act((x - mean) * inv_std * scale + offset (+ side)).
#include "cc/core/batch_norm_columns.h"
#include "cc/core/batch_norm_mask.h"

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

  void operator()(int64_t chunk, int /*worker*/) const {
    const int64_t begin = chunk * plan.chunk;
    const int64_t end = Min(begin + plan.chunk, plan.elements);
    if (activate != nullptr || args.mask != nullptr) {
      for (int64_t at = begin; at < end; at += kBufferElements) {
        Buffered(at, Min(at + kBufferElements, end));
      }
    } else {
      Normalize(begin, end, y.At(begin));
    }
    if (y.stream) FlushStores();
  }

  template <class Out>
  void Normalize(int64_t begin, int64_t end, Output<Out> out) const {
    if (args.activation == Activation::kRelu) {
      side() != nullptr ? Normalize<true, true>(begin, end, out)
                        : Normalize<true, false>(begin, end, out);
    } else {
      side() != nullptr ? Normalize<false, true>(begin, end, out)
                        : Normalize<false, false>(begin, end, out);
    }
  }

  template <bool kRelu, bool kSide, class Out>
  void Normalize(int64_t begin, int64_t end, Output<Out> out) const {
    ForDenseRows(
        plan, columns, begin, end,
        [&](int64_t at, int64_t rows, int64_t width, const Columns<A>& local) {
          ApplyRows<kRelu, kSide>(x() + at, kSide ? side() + at : nullptr, rows,
                                  width, width, width, local,
                                  out.At(at - begin));
        });
  }

  // What needs more than one pass over the values makes them in the cache.
  void Buffered(int64_t begin, int64_t end) const {
    alignas(64) A buffer[kBufferElements];
    const int64_t n = end - begin;
    Normalize(begin, end, Output<A>{buffer, false});
    if (activate != nullptr) activate(buffer, n, static_cast<A>(args.alpha));
    if (args.mask != nullptr) PackMask(buffer, n, args.mask + begin / 8);
    ForColumns<A>(n, [&](int64_t j, auto partial, int count) {
      constexpr bool kPartial = decltype(partial)::value;
      y.template Store<kPartial>(
          begin + j, LoadColumns<kPartial>(buffer + j, count), count);
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
