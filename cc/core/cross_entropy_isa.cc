// Cross entropy and its gradient. Forward and backward each read a row from
// memory once. Losses near zero need e^0 to be one, which that of half
// precision is not.
#include "cc/core/cross_entropy.h"
#include "cc/core/softmax_rows.h"

namespace tfo::TFO_ISA {
namespace {

// Columns that a first cache holds, from their largest to their sum.
constexpr int64_t kBlockColumns = 2048;

template <class T>
void ForwardRow(const CrossEntropyArgs& args, int64_t row) {
  using A = Accumulator<T>;
  const int64_t depth = args.shape.depth;
  const T* const x = static_cast<const T*>(args.x) + row * depth;
  A largest = -A(__builtin_inf()), sum = 0;
  for (int64_t begin = 0; begin < depth; begin += kBlockColumns) {
    const T* const some = x + begin;
    const int64_t columns = Min(kBlockColumns, depth - begin);
    const A before = largest;
    Vec<A> most = Splat(before);
    ForColumns<A>(columns,
                  [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                    constexpr bool kPartial = decltype(partial)::value;
                    FetchAhead(some + j);
                    Vec<A> v = LoadColumns<kPartial>(some + j, n);
                    if constexpr (kPartial)
                      v = FirstLanes<A>(v, n, MinusInfinity<A>());
                    most = Larger<A>(v, most);
                  });
    largest = LargestOverLanes<A>(most)[0];
    // From nothing but minus infinity itself nothing can be subtracted.
    const A from = largest == -A(__builtin_inf()) ? A(0) : largest;
    const Vec<A> more = SumOver<A>(
        columns, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
          constexpr bool kPartial = decltype(partial)::value;
          const Vec<A> e =
              ExpOfNegative<A>(LoadColumns<kPartial>(some + j, n) - from);
          return kPartial ? FirstLanes<A>(e, n) : e;
        });
    sum = sum * ExpOfNegative<A>(Splat(before - from))[0] + more[0];
  }
  const double of_label = LoadOne(x + args.labels.ClassOf(row, depth));
  StoreOne(static_cast<T*>(args.loss) + row,
           static_cast<A>(__builtin_log(static_cast<double>(sum)) +
                          (static_cast<double>(largest) - of_label)));
  static_cast<A*>(args.largest)[row] = largest;
  static_cast<A*>(args.inverse_sum)[row] = A(1) / sum;
}

template <class T>
void GradientRow(const CrossEntropyGradientArgs& args, int64_t row,
                 const Output<T>& x_grad) {
  using A = Accumulator<T>;
  const CrossEntropyArgs& f = args.forward;
  const int64_t depth = f.shape.depth, label = f.labels.ClassOf(row, depth);
  const T* const x = static_cast<const T*>(f.x) + row * depth;
  const A largest = static_cast<const A*>(f.largest)[row];
  const A inverse = static_cast<const A*>(f.inverse_sum)[row];
  const A dloss = LoadOne(static_cast<const T*>(args.dloss) + row);
  const auto softmax = [&](Vec<A> v) TFO_INLINE_LAMBDA {
    return ExpOfNegative<A>(v - largest) * inverse;
  };
  // x_grad may be x.
  const A of_label = (softmax(Splat(LoadOne(x + label)))[0] - A(1)) * dloss;
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    FetchAhead(x + j);
    x_grad.template Store<kPartial>(
        row * depth + j, softmax(LoadColumns<kPartial>(x + j, n)) * dloss, n);
  });
  if (x_grad.stream) FlushStores();
  StoreOne(x_grad.data + row * depth + label, of_label);
}

}  // namespace

CrossEntropyForwardFunction CrossEntropyForward;
CrossEntropyGradientFunction CrossEntropyGradient;

void CrossEntropyForward(const CrossEntropyArgs& args,
                         const Parallel& parallel) {
  WithStorage(args.shape.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    ForRows<T>(args.shape, false, parallel,
               [&](int64_t row, int) { ForwardRow<T>(args, row); });
  });
}

void CrossEntropyGradient(const CrossEntropyGradientArgs& args,
                          const Parallel& parallel) {
  const SoftmaxShape& s = args.forward.shape;
  WithStorage(s.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    const Output<T> x_grad =
        OutputOfRows<T>(s.rows, s.depth, args.x_grad, args.forward.x);
    ForRows<T>(s, x_grad.stream, parallel,
               [&](int64_t row, int) { GradientRow<T>(args, row, x_grad); });
  });
}

}  // namespace tfo::TFO_ISA
