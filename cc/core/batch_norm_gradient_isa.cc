// The gradients of y = act((x - mean) * inv_std * scale + offset (+ side)):
// sums per channel, then x_grad and side_grad.
#include "cc/core/batch_norm_columns.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kBlock = 128;  // rows summed in the accumulator's type before
                                 // they are added in float64

template <class T>
struct Gradient {
  using A = Accumulator<T>;

  const BatchNormGradientArgs& args;
  const BatchNormPlan& plan;
  Columns<A> columns;
  ArrayFunction<A>* slope;  // null where no buffer gives the slopes
  T* kept;                  // where dz is kept; null: nowhere

  const T* x() const { return static_cast<const T*>(args.x); }
  const T* dy() const { return static_cast<const T*>(args.dy); }
  const T* side() const { return static_cast<const T*>(args.side); }

  // The slopes of rows * width <= kBufferElements elements, `width` of them a
  // row.
  void Slopes(int64_t offset, int64_t rows, int64_t stride, int64_t width,
              const Columns<A>& local, A* to) const {
    const Output<A> out{to, false};
    if (side() != nullptr) {
      ApplyRows<false, true, false>(x() + offset, side() + offset, rows, stride,
                                    width, local, out, nullptr);
    } else {
      ApplyRows<false, false, false>(x() + offset, x(), rows, stride, width,
                                     local, out, nullptr);
    }
    slope(to, rows * width, static_cast<A>(args.alpha));
  }
};

template <class T, SlopeKind kSlope>
class GradientReducer {
 public:
  using A = Accumulator<T>;
  using Context = Gradient<T>;

  GradientReducer(const Context& context, int64_t lanes, int64_t column)
      : context_(context), lanes_(lanes) {
    columns_ = local_.Of(context.plan, context.columns, column);
    Fill(block_, lanes, A(0));
    Fill(block_x_, lanes, A(0));
    Fill(sum_, lanes, 0.0);
    Fill(sum_x_, lanes, 0.0);
  }

  void Add(int64_t offset, int64_t rows, int64_t stride, int64_t width) {
    while (rows > 0) {
      int64_t n = Min(rows, kBlock - in_block_);
      if constexpr (kSlope == SlopeKind::kBuffer) {
        n = Min(n, kBufferElements / width);
        context_.Slopes(offset, n, stride, width, columns_, slopes_);
      }
      GradientSumRows<kSlope>(
          context_.dy() + offset, context_.x() + offset,
          SlopeSource<A>{context_.args.mask, offset, slopes_}, n, stride, width,
          columns_, block_, block_x_,
          context_.kept == nullptr ? nullptr : context_.kept + offset);
      in_block_ += n;
      offset += n * stride;
      rows -= n;
      if (in_block_ == kBlock) Flush();
    }
  }

  void Finish(int64_t fold, int64_t group, int64_t inner, double* sum,
              double* sum_x) {
    Flush();
    for (int64_t c = 0; c < group / inner; ++c) {
      double total = 0, total_x = 0;
      for (int64_t g = 0; g < fold; ++g) {
        for (int64_t j = g * group + c * inner; j < g * group + (c + 1) * inner;
             ++j) {
          total += sum_[j];
          total_x += sum_x_[j];
        }
      }
      sum[c] = total;
      sum_x[c] = total_x;
    }
  }

 private:
  void Flush() {
    for (int64_t j = 0; j < lanes_; ++j) {
      sum_[j] += block_[j];
      sum_x_[j] += block_x_[j];
      block_[j] = block_x_[j] = 0;
    }
    in_block_ = 0;
  }

  const Context& context_;
  int64_t lanes_;
  Columns<A> columns_;
  LocalColumns<A> local_;
  int64_t in_block_ = 0;
  alignas(64) A block_[kStackLanes];
  alignas(64) A block_x_[kStackLanes];
  alignas(64) A slopes_[kSlope == SlopeKind::kBuffer ? kBufferElements : 1];
  alignas(64) double sum_[kStackLanes];
  alignas(64) double sum_x_[kStackLanes];
};

template <class T, SlopeKind kSlope>
struct GradientApply {
  using A = Accumulator<T>;

  const Gradient<T>& context;

  void operator()(int64_t task, int /*worker*/) const {
    if (context.args.training) {
      context.args.side_grad != nullptr ? Run<true, true>(task)
                                        : Run<true, false>(task);
    } else {
      context.args.side_grad != nullptr ? Run<false, true>(task)
                                        : Run<false, false>(task);
    }
  }

  // From the end on: the sums before have left that in the caches.
  template <bool kCentered, bool kSide>
  void Run(int64_t task) const {
    const BatchNormPlan& plan = context.plan;
    const BatchNormGradientArgs& args = context.args;
    // One output past the caches at most: stores that alternate between two
    // can break up the lines of both (measured: a quarter of the bandwidth).
    const Output<T> x_grad{
        static_cast<T*>(args.x_grad),
        !kSide && Streams<T>(plan, args.x_grad, args.dy, args.x)};
    const Output<T> side_grad{
        static_cast<T*>(args.side_grad),
        Streams<T>(plan, args.side_grad, nullptr, args.dy)};
    const int64_t begin = (plan.num_chunks - 1 - task) * plan.chunk;
    const int64_t end = Min(begin + plan.chunk, plan.elements);
    constexpr bool kBuffer = kSlope == SlopeKind::kBuffer;
    const int64_t step = kBuffer ? kBufferElements : plan.chunk;
    alignas(64) A slopes[kBuffer ? kBufferElements : 1];
    for (int64_t from = begin; from < end; from += step) {
      ForDenseRows(plan, context.columns, from, Min(from + step, end),
                   [&](int64_t at, int64_t rows, int64_t width,
                       const Columns<A>& local) {
                     if constexpr (kBuffer)
                       context.Slopes(at, rows, width, width, local, slopes);
                     GradientRows<kSlope, kCentered, kSide>(
                         context.dy() + at, context.x() + at,
                         SlopeSource<A>{args.mask, at, slopes}, rows, width,
                         local, x_grad.At(at),
                         kSide ? side_grad.At(at) : side_grad);
                   });
    }
    if (x_grad.stream || side_grad.stream) FlushStores();
  }
};

SlopeKind SlopeKindOf(const BatchNormGradientArgs& args) {
  if (args.activation == Activation::kNone) return SlopeKind::kOne;
  if (args.mask != nullptr) return SlopeKind::kMask;
  const bool from_x = args.activation == Activation::kRelu && !args.side;
  return from_x ? SlopeKind::kRelu : SlopeKind::kBuffer;
}

// Calls body(context, Kind) with the columns' parameters set, Kind::value being
// the SlopeKind.
template <SlopeKind K>
struct Kind {
  static constexpr SlopeKind value = K;
};

template <class Body>
bool WithGradient(const BatchNormGradientArgs& args, void* dz,
                  const BatchNormPlan& plan, const Scratch& scratch,
                  const Body& body) {
  return WithStorage(args.shape.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    using A = Accumulator<T>;
    Columns<A> columns;
    if (!AllocateColumns(plan, scratch, &columns)) return false;
    SetColumns(plan, args.parameters, columns);
    const Gradient<T> context{args, plan, columns,
                              ArrayActivation<true, A>(args.activation),
                              static_cast<T*>(dz)};
    switch (SlopeKindOf(args)) {
      case SlopeKind::kOne:
        body(context, storage, Kind<SlopeKind::kOne>{});
        break;
      case SlopeKind::kRelu:
        body(context, storage, Kind<SlopeKind::kRelu>{});
        break;
      case SlopeKind::kMask:
        body(context, storage, Kind<SlopeKind::kMask>{});
        break;
      case SlopeKind::kBuffer:
        body(context, storage, Kind<SlopeKind::kBuffer>{});
    }
    return true;
  });
}

}  // namespace

BatchNormGradientSumsFunction BatchNormGradientSums;
BatchNormGradientApplyFunction BatchNormGradientApply;

bool BatchNormGradientSums(const BatchNormGradientArgs& args, void* dz,
                           const Parallel& parallel, const Scratch& scratch,
                           double* sum_dz, double* sum_dz_x) {
  const BatchNormPlan plan = PlanBatchNorm(args.shape);
  const int64_t channels = plan.channels;
  Fill(sum_dz, channels, 0.0);
  Fill(sum_dz_x, channels, 0.0);
  if (plan.num_splits == 0) return true;
  double* sums = scratch.Allocate<double>(2 * plan.num_splits * channels);
  if (sums == nullptr) return false;
  double* sums_x = sums + plan.num_splits * channels;
  const bool done = WithGradient(
      args, dz, plan, scratch,
      [&](const auto& context, auto storage, auto kind) {
        using Reducer = GradientReducer<typename decltype(storage)::type,
                                        decltype(kind)::value>;
        Reduce<Reducer>(plan, context, sums, sums_x, parallel);
      });
  for (int64_t split = 0; split < plan.num_splits; ++split) {
    for (int64_t c = 0; c < channels; ++c) {
      sum_dz[c] += sums[split * channels + c];
      sum_dz_x[c] += sums_x[split * channels + c];
    }
  }
  return done;
}

bool BatchNormGradientApply(const BatchNormGradientArgs& args,
                            const double* pull, const Parallel& parallel,
                            const Scratch& scratch) {
  const BatchNormPlan plan = PlanBatchNorm(args.shape);
  if (plan.num_chunks == 0) return true;
  return WithGradient(
      args, nullptr, plan, scratch,
      [&](const auto& context, auto storage, auto kind) {
        using T = typename decltype(storage)::type;
        using A = Accumulator<T>;
        if (args.training) {
          ForColumnChannels(plan, [&](int64_t j, int64_t c) {
            context.columns.pull[j] = static_cast<A>(pull[c]);
            context.columns.pull_x[j] = static_cast<A>(pull[plan.channels + c]);
          });
        }
        GradientApply<T, decltype(kind)::value> apply{context};
        ParallelFor(parallel, plan.num_chunks, plan.chunk, apply);
      });
}

}  // namespace tfo::TFO_ISA
