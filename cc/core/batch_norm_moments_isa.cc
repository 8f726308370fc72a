// Mean and sum of squared deviations per channel.
//
// Within a block, deviations are taken from a shift: the mean of all elements
// that the lane has seen in its split. A later block holds at most four times
// as many, so the between-block part of the variance bounds what cancellation
// can lose, whatever the data. Blocks, lanes and splits are merged in float64
// by Chan's formula.
#include "cc/core/batch_norm_plan.h"
#include "cc/core/batch_norm_reduce.h"
#include "cc/core/batch_norm_rows.h"
#include "cc/core/moments.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kFirstBlock = 8;
constexpr int64_t kLastBlock = 128;

// One lane after the other, n elements each.
void MergeLanes(int64_t lanes, double n, const double* mean,
                const double* squares, double* out_mean, double* out_squares) {
  constexpr int kVector = kLanes<double>;
  Vec<double> mean_vector{}, squares_vector{}, between{};
  double total = 0, within = 0, spread = 0;
  int64_t whole = lanes / kVector * kVector;
  // Deviations from the first lane's mean: the means may be large and close to
  // one another.
  const double center = mean[0];
  for (int64_t j = 0; j < whole; j += kVector) {
    const Vec<double> d = Load(mean + j) - center;
    mean_vector += d;
    squares_vector += Load(squares + j);
  }
  for (int i = 0; i < kVector; ++i)
    total += mean_vector[i], within += squares_vector[i];
  for (int64_t j = whole; j < lanes; ++j)
    total += mean[j] - center, within += squares[j];
  const double average = center + total / static_cast<double>(lanes);
  for (int64_t j = 0; j < whole; j += kVector) {
    const Vec<double> d = Load(mean + j) - average;
    between += d * d;
  }
  for (int i = 0; i < kVector; ++i) spread += between[i];
  for (int64_t j = whole; j < lanes; ++j)
    spread += (mean[j] - average) * (mean[j] - average);
  *out_mean = average;
  *out_squares = within + n * spread;
}

template <class T>
class MomentsReducer {
 public:
  using A = Accumulator<T>;
  struct Context {
    const T* x;
  };

  MomentsReducer(const Context& context, int64_t lanes, int64_t /*column*/)
      : x_(context.x), lanes_(lanes) {
    const int64_t padded = PaddedLanes(lanes);
    Fill(shift_, padded, A(0));
    Fill(sum_, padded, A(0));
    Fill(square_, padded, A(0));
    Fill(mean_, lanes, 0.0);
    Fill(squares_, lanes, 0.0);
  }

  void Add(int64_t offset, int64_t rows, int64_t stride, int64_t width) {
    if (low_ + extra_ == 0 && block_low_ + block_extra_ == 0) {
      EstimateShift(x_ + offset, Min(rows, kFirstBlock), stride, width);
    }
    while (rows > 0) {
      const int64_t n = Min(rows, limit_ - in_block_);
      MomentsRows(x_ + offset, n, stride, width, shift_, sum_, square_);
      if (width < lanes_) {
        tail_ = width;
        block_extra_ += n;
      } else {
        block_low_ += n;
      }
      in_block_ += n;
      offset += n * stride;
      rows -= n;
      if (in_block_ == limit_) Flush();
    }
  }

  void Finish(int64_t fold, int64_t group, int64_t inner, double* mean,
              double* squares) {
    Flush();
    const double low = static_cast<double>(low_),
                 high = static_cast<double>(low_ + extra_);
    if (inner == lanes_) {  // one channel
      double tail_mean = 0, tail_squares = 0;
      *mean = 0;
      *squares = 0;
      if (tail_ > 0)
        MergeLanes(tail_, high, mean_, squares_, &tail_mean, &tail_squares);
      if (low_ > 0)
        MergeLanes(lanes_ - tail_, low, mean_ + tail_, squares_ + tail_, mean,
                   squares);
      MergeMoments(1, low * static_cast<double>(lanes_ - tail_),
                   high * static_cast<double>(tail_), &tail_mean, &tail_squares,
                   mean, squares);
      return;
    }
    double count = tail_ >= group ? high : low;
    for (int64_t g = 1; g < fold; ++g) {
      const double n = tail_ >= (g + 1) * group ? high : low;
      MergeMoments(group, count, n, mean_ + g * group, squares_ + g * group,
                   mean_, squares_);
      count += n;
    }
    for (int64_t c = 0; c < group / inner; ++c) {
      if (inner == 1) {
        mean[c] = mean_[c];
        squares[c] = squares_[c];
      } else {
        MergeLanes(inner, count, mean_ + c * inner, squares_ + c * inner,
                   mean + c, squares + c);
      }
    }
  }

 private:
  // The mean of the first rows, computed as their first row plus the mean
  // deviation from it.
  void EstimateShift(const T* x, int64_t rows, int64_t stride, int64_t width) {
    ForColumns<A>(width, [&](int64_t j, auto partial, int n) {
      StoreColumns<decltype(partial)::value>(
          shift_ + j, LoadColumns<decltype(partial)::value>(x + j, n), n);
    });
    MomentsRows(x, rows, stride, width, shift_, sum_, square_);
    for (int64_t j = 0; j < width; ++j) {
      shift_[j] += sum_[j] / static_cast<A>(rows);
      sum_[j] = square_[j] = 0;
    }
  }

  void Flush() {
    if (in_block_ == 0) return;
    const double low = static_cast<double>(low_),
                 high = static_cast<double>(low_ + extra_);
    const double block_low = static_cast<double>(block_low_);
    const double block_high = static_cast<double>(block_low_ + block_extra_);
    MergeBlock(tail_, high, block_high, shift_, sum_, square_, mean_, squares_);
    MergeBlock(lanes_ - tail_, low, block_low, shift_ + tail_, sum_ + tail_,
               square_ + tail_, mean_ + tail_, squares_ + tail_);
    for (int64_t j = 0; j < lanes_; ++j) {
      shift_[j] = static_cast<A>(mean_[j]);
      sum_[j] = square_[j] = 0;
    }
    low_ += block_low_;
    extra_ += block_extra_;
    block_low_ = block_extra_ = in_block_ = 0;
    limit_ = Min(4 * limit_, kLastBlock);
  }

  const T* x_;
  int64_t lanes_;
  int64_t tail_ = 0;             // the first lanes, which partial rows reach
  int64_t low_ = 0, extra_ = 0;  // merged rows: complete ones, partial ones
  int64_t block_low_ = 0, block_extra_ = 0, in_block_ = 0;
  int64_t limit_ = kFirstBlock;
  alignas(64) A shift_[kStackLanes];
  alignas(64) A sum_[kStackLanes];
  alignas(64) A square_[kStackLanes];
  alignas(64) double mean_[kStackLanes];
  alignas(64) double squares_[kStackLanes];
};

}  // namespace

BatchNormMomentsFunction BatchNormMoments;

bool BatchNormMoments(const BatchNormShape& shape, const void* x,
                      const Parallel& parallel, const Scratch& scratch,
                      double* mean, double* sum_of_squares) {
  const BatchNormPlan plan = PlanBatchNorm(shape);
  Fill(mean, shape.channels, 0.0);
  Fill(sum_of_squares, shape.channels, 0.0);
  if (plan.num_splits == 0) return true;
  double* means = scratch.Allocate<double>(2 * plan.num_splits * plan.channels);
  if (means == nullptr) return false;
  double* squares = means + plan.num_splits * plan.channels;
  WithStorage(shape.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    Reduce<MomentsReducer<T>>(plan, {static_cast<const T*>(x)}, means, squares,
                              parallel);
  });
  for (int64_t split = 0; split < plan.num_splits; ++split) {
    const int64_t begin = SplitBegin(plan, split),
                  end = SplitBegin(plan, split + 1);
    MergeMoments(plan.channels, static_cast<double>(begin),
                 static_cast<double>(end - begin),
                 means + split * plan.channels, squares + split * plan.channels,
                 mean, sum_of_squares);
  }
  return true;
}

}  // namespace tfo::TFO_ISA
