// Cross entropy and its gradient. Forward and backward each read a row from
// memory once. Losses near zero need e^0 to be one, which that of half
// precision is not.
#include "cc/core/cross_entropy.h"
#include "cc/core/softmax_rows.h"

namespace tfo::TFO_ISA {
namespace {

// Columns that a first cache holds, from their largest to their sums.
constexpr int64_t kBlockColumns = 2048;

template <class T>
const T* RowOf(const void* rows, bool one, int64_t row, int64_t depth) {
  return static_cast<const T*>(rows) + (one ? 0 : row * depth);
}

// The label of a row that is one class.
template <class T>
class OneClass {
 public:
  using A = Accumulator<T>;
  static constexpr bool kDense = false;

  OneClass(const CrossEntropyArgs& args, int64_t row)
      : label_(args.labels.ClassOf(row, args.shape.depth)) {}

  int64_t label() const { return label_; }

  // What is summed over the columns, e among it; `below` is x - largest.
  template <bool kPartial>
  TFO_INLINE Sums<A, 1> Terms(int64_t, int, Vec<A> e, Vec<A>) const {
    return {{e}};
  }
  // Takes the sums of a block whose largest x is `higher` than before.
  void Add(const Sums<A, 1>&, A /*higher*/) {}
  double Loss(const T* x, A largest, double log_sum) const {
    return log_sum + (static_cast<double>(largest) -
                      static_cast<double>(LoadOne(x + label_)));
  }

 private:
  int64_t label_;
};

// The labels of a row that are a number for each class.
template <class T>
class EachClass {
 public:
  using A = Accumulator<T>;
  static constexpr bool kDense = true;

  EachClass(const CrossEntropyArgs& args, int64_t row)
      : labels_(RowOf<T>(args.probabilities.data, args.probabilities.one_row,
                         row, args.shape.depth)) {}

  template <bool kPartial>
  TFO_INLINE Vec<A> Load(int64_t j, int n) const {
    FetchAhead(labels_ + j);
    return LoadColumns<kPartial>(labels_ + j, n);
  }

  // Where x is minus infinity, a label of zero makes NaN, as in TensorFlow.
  template <bool kPartial>
  TFO_INLINE Sums<A, 3> Terms(int64_t j, int n, Vec<A> e, Vec<A> below) const {
    const Vec<A> labels = Load<kPartial>(j, n);
    return {{e, labels, labels * below}};
  }
  void Add(const Sums<A, 3>& block, A higher) {
    // Not also by nothing, of which infinite labels would make NaN.
    if (higher > 0) below_ -= sum_ * higher;
    sum_ += block.of[1][0];
    below_ += block.of[2][0];
  }
  double Loss(const T*, A, double log_sum) const {
    // Without classes, the sum has no logarithm.
    return (sum_ == 0 ? 0 : sum_ * log_sum) - below_;
  }

 private:
  const T* labels_;
  // Of the labels, and of those times x - largest.
  double sum_ = 0, below_ = 0;
};

template <class T, class RowLabels>
void ForwardRow(const CrossEntropyArgs& args, int64_t row) {
  using A = Accumulator<T>;
  const A lowest = -A(__builtin_inf());
  const int64_t depth = args.shape.depth;
  const T* const x = RowOf<T>(args.x, args.one_x, row, depth);
  RowLabels labels(args, row);
  A largest = lowest, sum = 0;
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
    const A from = largest == lowest ? A(0) : largest;
    const auto more = SumOver<A>(
        columns, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
          constexpr bool kPartial = decltype(partial)::value;
          const Vec<A> below = LoadColumns<kPartial>(some + j, n) - from;
          const Vec<A> e = ExpOfNegative<A>(below);
          return labels.template Terms<kPartial>(
              begin + j, n, kPartial ? FirstLanes<A>(e, n) : e, below);
        });
    sum = sum * ExpOfNegative<A>(Splat(before - from))[0] + more.of[0][0];
    labels.Add(more, before == lowest ? A(0) : from - before);
  }
  const double log_sum = __builtin_log(static_cast<double>(sum));
  StoreOne(static_cast<T*>(args.loss) + row,
           static_cast<A>(labels.Loss(x, largest, log_sum)));
  static_cast<A*>(args.largest)[row] = largest;
  static_cast<A*>(args.inverse_sum)[row] = A(1) / sum;
}

template <class T, class RowLabels>
void GradientRow(const CrossEntropyGradientArgs& args, int64_t row,
                 const Output<T>& x_grad) {
  using A = Accumulator<T>;
  const CrossEntropyArgs& f = args.forward;
  const int64_t depth = f.shape.depth;
  const T* const x = RowOf<T>(f.x, f.one_x, row, depth);
  const RowLabels labels(f, row);
  const A largest = static_cast<const A*>(f.largest)[row];
  const A inverse = static_cast<const A*>(f.inverse_sum)[row];
  const A dloss = LoadOne(static_cast<const T*>(args.dloss) + row);
  const auto softmax = [&](Vec<A> v) TFO_INLINE_LAMBDA {
    return ExpOfNegative<A>(v - largest) * inverse;
  };
  A of_label{};
  if constexpr (!RowLabels::kDense) {
    // x_grad may be x.
    const Vec<A> v = softmax(Splat(LoadOne(x + labels.label())));
    of_label = (v[0] - A(1)) * dloss;
  }
  ForColumns<A>(depth, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    FetchAhead(x + j);
    Vec<A> v = softmax(LoadColumns<kPartial>(x + j, n));
    if constexpr (RowLabels::kDense) v -= labels.template Load<kPartial>(j, n);
    x_grad.template Store<kPartial>(row * depth + j, v * dloss, n);
  });
  if constexpr (!RowLabels::kDense) {
    if (x_grad.stream) FlushStores();
    StoreOne(x_grad.data + row * depth + labels.label(), of_label);
  }
}

template <class T, class RowLabels>
void Forward(const CrossEntropyArgs& args, const Parallel& parallel) {
  ForRows<T>(args.shape, false, parallel,
             [&](int64_t row, int) { ForwardRow<T, RowLabels>(args, row); });
}

template <class T, class RowLabels>
void Gradient(const CrossEntropyGradientArgs& args, const Parallel& parallel) {
  const CrossEntropyArgs& f = args.forward;
  const Output<T> x_grad = OutputOfRows<T>(
      f.shape.rows, f.shape.depth, args.x_grad, f.x, f.probabilities.data);
  ForRows<T>(f.shape, x_grad.stream, parallel, [&](int64_t row, int) {
    GradientRow<T, RowLabels>(args, row, x_grad);
  });
}

}  // namespace

CrossEntropyForwardFunction CrossEntropyForward;
CrossEntropyGradientFunction CrossEntropyGradient;

void CrossEntropyForward(const CrossEntropyArgs& args,
                         const Parallel& parallel) {
  WithStorage(args.shape.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    args.probabilities.given ? Forward<T, EachClass<T>>(args, parallel)
                             : Forward<T, OneClass<T>>(args, parallel);
  });
}

void CrossEntropyGradient(const CrossEntropyGradientArgs& args,
                          const Parallel& parallel) {
  const CrossEntropyArgs& f = args.forward;
  WithStorage(f.shape.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    f.probabilities.given ? Gradient<T, EachClass<T>>(args, parallel)
                          : Gradient<T, OneClass<T>>(args, parallel);
  });
}

}  // namespace tfo::TFO_ISA
