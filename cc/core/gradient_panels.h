// dz on its way to the filter gradient: panels of a band's pixels, as that
// meets them and as the input gradient does, and what is to be had from them
// alone.
#ifndef TFO_CC_CORE_GRADIENT_PANELS_H_
#define TFO_CC_CORE_GRADIENT_PANELS_H_

#include "cc/core/filter_gradient_sums.h"

namespace tfo::TFO_ISA {
namespace {

// Bounds the panels that are gathered together before they are paired.
constexpr std::int64_t kNumbersBytes = 256 << 10;

template <class T>
class GradientPanels {
 public:
  using A = Accumulator<T>;
  using E = Operand<T>;

  GradientPanels(const FilterGradient<T>& g, const FilterGradientPlan& p)
      : g_(g), p_(p) {
    pixels_ = p.dz_front + p.bands.images * p.dz_image + p.dz_back;
    parity_size_ = (p.transposed ? NumOperands<E>(pixels_)
                                 : p.bands.images * p.bands.rows *
                                       NumOperands<E>(p.bands.columns)) *
                   kColumns;
    panel_size_ = p.parities * parity_size_;
    together_ = p.panels_per_group;
    if constexpr (kPaired) {
      numbers_panel_ = pixels_ * kColumns;
      constexpr std::int64_t kMost = kNumbersBytes / sizeof(A);
      together_ = Min(together_, Max(kMost / numbers_panel_, 1));
    } else {
      numbers_panel_ = panel_size_;
    }
  }

  // `dense` computes the input gradient; null: nothing does here. False when
  // scratch memory ran out.
  bool Allocate(const DenseInputGradient<T>* dense, int workers,
                const Scratch& scratch) {
    dense_ = dense;
    dense_size_ = kPaired && dense != nullptr ? dense->size() : 0;
    dz_ = scratch.Allocate<E>(kPlanes<E> * plane() * workers);
    numbers_ = scratch.Allocate<A>(NumbersSize() * workers);
    dense_dz_ = scratch.Allocate<E>(kPlanes<E> * dense_size_ * workers);
    return dz_ != nullptr && numbers_ != nullptr && dense_dz_ != nullptr;
  }

  // Of a panel, with what lies between images.
  std::int64_t pixels() const { return pixels_; }
  // Of what pairs begin at even pixels, or at odd ones.
  std::int64_t parity_size() const { return parity_size_; }
  std::int64_t panel_size() const { return panel_size_; }
  std::int64_t plane() const { return p_.panels_per_group * panel_size_; }

  E* Of(int worker) const { return dz_ + worker * kPlanes<E> * plane(); }
  const E* OfInputGradient(int worker) const {
    return kPaired ? dense_dz_ + worker * kPlanes<E> * dense_size_ : Of(worker);
  }

  // Gathers panels: the first lines of all images, then their second ones, or
  // image after image. `first`: bias and side input gradients are wanted.
  void Gather(const FilterGradientBand& band, const Range& panels, bool first,
              A* sums, int worker) {
    E* const dz = Of(worker);
    for (std::int64_t panel = panels.begin; panel < panels.end;
         panel += together_) {
      GatherSome(band, {panel, Min(panel + together_, panels.end)}, first, sums,
                 dz + (panel - panels.begin) * panel_size_, worker);
    }
  }

 private:
  static constexpr int kColumns = kTileColumns<A>;
  static constexpr bool kPaired = kElements<E> > 1;

  std::int64_t NumbersSize() const {
    return kPaired ? together_ * numbers_panel_ : 0;
  }

  void GatherSome(const FilterGradientBand& band, const Range& panels,
                  bool first, A* sums, E* dz, int worker) {
    A* numbers;
    if constexpr (kPaired) {
      numbers = numbers_ + worker * NumbersSize();
    } else {
      numbers = dz;
    }
    const std::int64_t line =
        (p_.transposed ? p_.line : band.columns) * kColumns;
    const std::int64_t image = p_.transposed ? p_.dz_image * kColumns : line;
    const std::int64_t row = p_.transposed ? line : band.images * line;
    const std::int64_t pixels =
        p_.transposed ? p_.dz_front + band.images * p_.dz_image + p_.dz_back
                      : band.images * band.rows * band.columns;
    const std::int64_t out_c = g_.shape.out_c;
    Box box{band.i,
            band.j,
            panels.begin * kColumns,
            band.rows,
            band.columns,
            Min(panels.end * kColumns, out_c) - panels.begin * kColumns};
    const std::int64_t count = panels.end - panels.begin;
    for (std::int64_t i = 0; i < count; ++i) {
      A* const to = numbers + i * numbers_panel_;
      // What is no number would cost time, even in columns that nobody reads.
      if (kPlanes<E> > 1 && box.channels < (i + 1) * kColumns) {
        Zero(to, pixels * kColumns);
      } else if (p_.transposed) {
        ZeroBetween(band, to);
      }
    }
    for (std::int64_t m = 0; m < band.images; ++m) {
      TFO_ISA::GatherPanels<kColumns>(
          g_.dz, g_.dz_map, band.n + m, box,
          numbers + p_.dz_front * kColumns + m * image, row, numbers_panel_);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t panel = panels.begin + i;
      const A* const from = numbers + i * numbers_panel_;
      box.c = panel * kColumns;
      box.channels = Min(out_c - box.c, kColumns);
      if (first) Use(band, panel, box, from, image, row, pixels, sums);
      if constexpr (kPaired) {
        Pair(band, panel, box.channels, from, pixels, dz + i * panel_size_,
             worker);
      }
    }
  }

  // What lies before, between and behind the lines of images.
  void ZeroBetween(const FilterGradientBand& band, A* panel) {
    const std::int64_t gap = p_.line - band.columns;
    Zero(panel, p_.dz_front * kColumns);
    for (std::int64_t m = 0; m < band.images; ++m) {
      const std::int64_t image = p_.dz_front + m * p_.dz_image;
      const std::int64_t end = band.rows * p_.line;
      for (std::int64_t at = band.columns; gap > 0 && at < end; at += p_.line)
        Zero(panel + (image + at) * kColumns, gap * kColumns);
      Zero(panel + (image + end) * kColumns, (p_.dz_image - end) * kColumns);
    }
    Zero(panel + (p_.dz_front + band.images * p_.dz_image) * kColumns,
         p_.dz_back * kColumns);
  }

  // What is to be had from a panel by itself.
  void Use(const FilterGradientBand& band, std::int64_t panel, const Box& box,
           const A* numbers, std::int64_t image, std::int64_t row,
           std::int64_t pixels, A* sums) {
    for (std::int64_t m = 0;
         g_.side_input_gradient != nullptr && m < band.images; ++m) {
      ScatterPanel(numbers + p_.dz_front * kColumns + m * image, row, g_.dz_map,
                   band.n + m, box, g_.side_input_gradient);
    }
    if (g_.bias_gradient != nullptr) {
      SumColumns(numbers, pixels,
                 sums + (panel + 1) * p_.PanelSize<A>() - kColumns,
                 !band.first);
    }
  }

  // A panel as pairs of pixels, and of channels for the input gradient.
  void Pair(const FilterGradientBand& band, std::int64_t panel,
            std::int64_t channels, const A* numbers, std::int64_t pixels, E* dz,
            int worker) {
    if (!p_.transposed) {
      PairRows<E>(numbers, band.images * band.rows, band.columns,
                  {dz, plane()});
    } else {
      PairRows<E>(numbers, 1, pixels, {dz, plane()});
      if (p_.parities > 1) {
        PairRows<E>(numbers + kColumns, 1, pixels - 1,
                    {dz + parity_size_, plane()});
      }
    }
    if (dense_ != nullptr) {
      E* const to = dense_dz_ + worker * kPlanes<E> * dense_size_;
      PairColumns<E>(numbers, pixels, channels,
                     {to + panel * dense_->panel_size(), dense_size_});
    }
  }

  const FilterGradient<T>& g_;
  const FilterGradientPlan& p_;
  const DenseInputGradient<T>* dense_;
  std::int64_t together_;  // panels that are gathered at a time
  std::int64_t pixels_, parity_size_, panel_size_, numbers_panel_, dense_size_;
  // Of each worker: the panels; those that are not paired yet; dz as the input
  // gradient meets it, where that is not as the filter gradient does.
  E *dz_, *dense_dz_;
  A* numbers_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_GRADIENT_PANELS_H_
