// y = max(x, 0) + alpha * min(x, 0), and with the slope s = 1, alpha or, where
// x is zero, 0:
//
//   x_grad = dy * s,  alpha_grad = sum over rows of dy * min(x, 0).
#include "cc/core/elementwise.h"
#include "cc/core/prelu.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kCyclesPerElement = 2;
// Short rows are taken several at a time, so that they fill vectors.
constexpr int64_t kLeastWidth = 512, kWidthMultiple = 16;
// Columns of a task: with their sums they stay in the first-level cache.
constexpr int64_t kTaskColumns = 2048;
// Parts of the rows with sums of their own, which are added in order.
constexpr int64_t kMostSlices = 64, kLeastSlice = 16384;

// x as rows of `width` columns, of which the last one may be partial, with
// alpha for every column.
template <class T>
class WideRows {
 public:
  using A = Accumulator<T>;

  explicit WideRows(const PreluShape& shape)
      : size_(shape.rows * shape.depth),
        depth_(shape.depth),
        groups_(depth_ >= kLeastWidth
                    ? 1
                    : CeilDiv(kLeastWidth, depth_ * kWidthMultiple) *
                          kWidthMultiple),
        width_(groups_ * depth_),
        pitch_(CeilDiv(width_, kLanes<A>) * kLanes<A>),
        tiles_(CeilDiv(width_, kTaskColumns)) {}

  int64_t rows() const { return CeilDiv(size_, width_); }
  int64_t pitch() const { return pitch_; }
  int64_t tiles() const { return tiles_; }
  // Tasks are parts of the rows times tiles.
  int64_t Slices() const {
    const int64_t slices = CeilDiv(size_, kLeastSlice * tiles_);
    return Max(Min(slices, kMostSlices), 1);
  }

  // False when scratch memory ran out.
  bool Spread(const void* alpha, const Scratch& scratch) {
    A* const spread = scratch.Allocate<A>(pitch_);
    if (spread == nullptr) return false;
    const T* const from = static_cast<const T*>(alpha);
    for (int64_t group = 0; group < groups_; ++group) {
      ForColumns<A>(depth_, [&](int64_t j, auto partial, int n) {
        constexpr bool kPartial = decltype(partial)::value;
        StoreColumns<kPartial>(spread + group * depth_ + j,
                               LoadColumns<kPartial>(from + j, n), n);
      });
    }
    alpha_ = spread;
    return true;
  }

  // Calls step(element, column, alpha, Partial<P>, n) for a tile of the rows
  // [begin, end).
  template <class Step>
  TFO_INLINE void ForTile(int64_t begin, int64_t end, int64_t tile,
                          const Step& step) const {
    const int64_t first = tile * kTaskColumns;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t width = Min(width_, size_ - row * width_);
      ForColumns<A>(Min(kTaskColumns, width - first),
                    [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                      constexpr bool kPartial = decltype(partial)::value;
                      step(row * width_ + first + j, first + j,
                           LoadColumns<kPartial>(alpha_ + first + j, n),
                           partial, n);
                    });
    }
  }

  // An output like x.
  Output<T> OutputAt(void* data, const void* input, const void* other) const {
    return OutputOfRows<T>(rows(), width_, data, input, other);
  }

  // Adds `slices` of sums over rows, and those of the same element of alpha.
  void Reduce(A* sums, int64_t slices, void* to) const {
    for (int64_t slice = 1; slice < slices; ++slice) {
      for (int64_t j = 0; j < pitch_; j += kLanes<A>)
        Store(sums + j, Load(sums + j) + Load(sums + slice * pitch_ + j));
    }
    ForColumns<A>(depth_, [&](int64_t j, auto partial, int n) {
      constexpr bool kPartial = decltype(partial)::value;
      Vec<A> sum{};
      for (int64_t group = 0; group < groups_; ++group)
        sum += LoadColumns<kPartial>(sums + group * depth_ + j, n);
      StoreColumns<kPartial>(static_cast<T*>(to) + j, sum, n);
    });
  }

 private:
  const int64_t size_, depth_;
  const int64_t groups_;  // rows of x in one of these
  const int64_t width_, pitch_, tiles_;
  const A* alpha_ = nullptr;
};

// Calls run(first row, end, tile, slice) for all of them.
template <class T, class Run>
void ForSlices(const WideRows<T>& x, int64_t slices, const Parallel& parallel,
               const Run& run) {
  auto task = [&](int64_t index, int /*worker*/) {
    const int64_t slice = index / x.tiles();
    run(x.rows() * slice / slices, x.rows() * (slice + 1) / slices,
        index % x.tiles(), slice);
  };
  ParallelFor(parallel, slices * x.tiles(),
              CeilDiv(x.rows(), slices) * Min(x.pitch(), kTaskColumns) *
                  kCyclesPerElement,
              task);
}

template <class T>
bool Forward(const PreluArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  using A = Accumulator<T>;
  WideRows<T> rows(args.shape);
  if (!rows.Spread(args.alpha, scratch)) return false;
  const T* const x = static_cast<const T*>(args.x);
  const Output<T> y = rows.OutputAt(args.y, args.x, nullptr);
  ForSlices(rows, rows.Slices(), parallel,
            [&](int64_t begin, int64_t end, int64_t tile, int64_t /*slice*/) {
              rows.ForTile(begin, end, tile,
                           [&](int64_t at, int64_t /*column*/, Vec<A> alpha,
                               auto partial, int n) TFO_INLINE_LAMBDA {
                             constexpr bool kPartial = decltype(partial)::value;
                             FetchAhead(x + at);
                             const Vec<A> v = LoadColumns<kPartial>(x + at, n);
                             y.template Store<kPartial>(
                                 at, v > Vec<A>{} ? v : alpha * v, n);
                           });
              if (y.stream) FlushStores();
            });
  return true;
}

template <class T>
bool Gradient(const PreluGradientArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  using A = Accumulator<T>;
  WideRows<T> rows(args.shape);
  if (!rows.Spread(args.alpha, scratch)) return false;
  const int64_t slices = rows.Slices();
  A* const sums = scratch.Allocate<A>(slices * rows.pitch());
  if (sums == nullptr) return false;
  const T* const dy = static_cast<const T*>(args.dy);
  const T* const x = static_cast<const T*>(args.x);
  const Output<T> x_grad = rows.OutputAt(args.x_grad, args.dy, args.x);
  ForSlices(rows, slices, parallel,
            [&](int64_t begin, int64_t end, int64_t tile, int64_t slice) {
              A* const own = sums + slice * rows.pitch();
              const int64_t first = tile * kTaskColumns;
              for (int64_t j = first;
                   j < Min(first + kTaskColumns, rows.pitch()); j += kLanes<A>)
                Store(own + j, Vec<A>{});
              rows.ForTile(
                  begin, end, tile,
                  [&](int64_t at, int64_t column, Vec<A> alpha, auto partial,
                      int n) TFO_INLINE_LAMBDA {
                    constexpr bool kPartial = decltype(partial)::value;
                    FetchAhead(dy + at);
                    FetchAhead(x + at);
                    const Vec<A> d = LoadColumns<kPartial>(dy + at, n);
                    const Vec<A> v = LoadColumns<kPartial>(x + at, n);
                    const Vec<A> below = v < Vec<A>{} ? d : Vec<A>{};
                    const Vec<A> sum = LoadColumns<kPartial>(own + column, n);
                    StoreColumns<kPartial>(own + column,
                                           v < Vec<A>{} ? sum + d * v : sum, n);
                    x_grad.template Store<kPartial>(
                        at, v > Vec<A>{} ? d : alpha * below, n);
                  });
              if (x_grad.stream) FlushStores();
            });
  rows.Reduce(sums, slices, args.alpha_grad);
  return true;
}

}  // namespace

PreluForwardFunction PreluForward;
PreluGradientFunction PreluGradient;

bool PreluForward(const PreluArgs& args, const Parallel& parallel,
                  const Scratch& scratch) {
  return WithStorage(args.shape.dtype, [&](auto storage) {
    return Forward<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

bool PreluGradient(const PreluGradientArgs& args, const Parallel& parallel,
                   const Scratch& scratch) {
  return WithStorage(args.shape.dtype, [&](auto storage) {
    return Gradient<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
