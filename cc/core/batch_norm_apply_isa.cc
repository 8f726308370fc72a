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

  const T* x() const { return static_cast<const T*>(args.x); }
  const T* side() const { return static_cast<const T*>(args.side); }
  T* y() const { return static_cast<T*>(args.y); }

  void operator()(int64_t chunk, int /*worker*/) const {
    const int64_t begin = chunk * plan.chunk;
    const int64_t end =
        Min(begin + plan.chunk, plan.outer * plan.channels * plan.inner);
    const bool whole = activate == nullptr && args.mask == nullptr;
    const int64_t step = whole ? plan.chunk : kBufferElements;
    for (int64_t at = begin; at < end; at += step) {
      const int64_t stop = Min(at + step, end);
      if (activate != nullptr) {
        ActivatePart(at, stop);
      } else if (args.activation == Activation::kRelu) {
        Normalize<true>(at, stop, y() + at);
      } else {
        Normalize<false>(at, stop, y() + at);
      }
      if (args.mask != nullptr)
        PackMask(y() + at, stop - at, args.mask + at / 8);
    }
  }

  template <bool kRelu, class Out>
  void Normalize(int64_t begin, int64_t end, Out* out) const {
    ForDenseRows(
        plan, columns, begin, end,
        [&](int64_t at, int64_t rows, int64_t width, const Columns<A>& local) {
          if (side() != nullptr) {
            ApplyRows<kRelu, true>(x() + at, side() + at, rows, width, width,
                                   width, local, out + (at - begin));
          } else {
            ApplyRows<kRelu, false>(x() + at, x(), rows, width, width, width,
                                    local, out + (at - begin));
          }
        });
  }

  void ActivatePart(int64_t begin, int64_t end) const {
    const A alpha = static_cast<A>(args.alpha);
    if constexpr (kIs16Bit<T>) {
      alignas(64) A buffer[kBufferElements];
      Normalize<false>(begin, end, buffer);
      activate(buffer, end - begin, alpha);
      ForColumns<A>(end - begin, [&](int64_t j, auto partial, int n) {
        constexpr bool kPartial = decltype(partial)::value;
        StoreColumns<kPartial>(y() + begin + j,
                               LoadColumns<kPartial>(buffer + j, n), n);
      });
    } else {
      Normalize<false>(begin, end, y() + begin);
      activate(y() + begin, end - begin, alpha);
    }
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
        args, plan, columns,
        direct ? nullptr : ArrayActivation<false, A>(args.activation)};
    ParallelFor(parallel, plan.num_chunks, plan.chunk, apply);
    return true;
  });
}

}  // namespace tfo::TFO_ISA
