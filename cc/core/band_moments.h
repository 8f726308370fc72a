// The moments of a contraction's output, band by band.
#ifndef TFO_CC_CORE_BAND_MOMENTS_H_
#define TFO_CC_CORE_BAND_MOMENTS_H_

#include "cc/core/micro_kernel.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/taps.h"

namespace tfo::TFO_ISA {
namespace {

// The moments that tasks have of their bands: [bands, panels].
template <class A>
class BandMoments {
 public:
  using Panel = TileMoments<A, kTileColumns<A>>;

  // False when scratch memory ran out.
  bool Prepare(std::int64_t bands, std::int64_t panels,
               const Scratch& scratch) {
    bands_ = bands;
    panels_ = panels;
    moments_ = scratch.Allocate<Panel>(bands * panels);
    return moments_ != nullptr;
  }

  // The moments of some panels of a band, which begins.
  Panel* Begin(std::int64_t band, const Range& panels) const {
    Panel* const row = moments_ + band * panels_;
    for (std::int64_t i = panels.begin; i < panels.end; ++i) row[i].count = 0;
    return row;
  }

  // Merges the bands in their order.
  void Reduce(std::int64_t channels, const Parallel& parallel,
              double* moments) const {
    auto reduce = [&](std::int64_t panel, int) {
      const std::int64_t first = panel * kTileColumns<A>;
      const std::int64_t lanes = Min(channels - first, kTileColumns<A>);
      double* const mean = moments + first;
      double* const squares = mean + channels;
      for (std::int64_t j = 0; j < lanes; ++j) mean[j] = squares[j] = 0;
      double count = 0;
      for (std::int64_t band = 0; band < bands_; ++band) {
        const Panel& of_band = moments_[band * panels_ + panel];
        MergeBlock(lanes, count, of_band.count, of_band.shift, of_band.sum,
                   of_band.square, mean, squares);
        count += of_band.count;
      }
    };
    ParallelFor(parallel, panels_, bands_ * kTileColumns<A> * 4, reduce);
  }

 private:
  std::int64_t bands_, panels_;
  Panel* moments_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BAND_MOMENTS_H_
