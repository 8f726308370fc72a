// The product of every step of a recurrent layer, whose right factor stays the
// same.
#ifndef TFO_CC_CORE_RECURRENT_PRODUCT_H_
#define TFO_CC_CORE_RECURRENT_PRODUCT_H_

#include "cc/core/block_product.h"

namespace tfo::TFO_ISA {
namespace {

// h [rows, units] times a kernel [units, gates * units], which makes `gates`
// products, each [rows, units]; or, transposed, the sum of gates [rows, units]
// times their parts of the kernel. How a sum is added up depends on how many
// rows a tile has, so the batch is always cut into the same tiles.
template <class T, bool kTransposed>
class RecurrentProduct {
 public:
  using A = Accumulator<T>;

  // Units by which the products may be divided.
  static constexpr int64_t kUnits = kTileColumns<A>;

  // Packs the kernel. False when scratch memory ran out.
  bool Prepare(const T* kernel, int64_t gates, int64_t units, int64_t rows,
               const Parallel& parallel, const Scratch& scratch) {
    gates_ = gates;
    units_ = units;
    rows_ = rows;
    tiles_ = EvenParts(rows, TileRows(rows));
    stride_ = WholePanels<A>(units);
    pitch_ = (kTransposed ? 1 : gates) * stride_;
    products_ = scratch.Allocate<A>(rows * pitch_);
    factors_.plane = kBuffers * rows * num_factors() * FactorPitch();
    factors_.first = scratch.Allocate<E>(kPlanes<E> * factors_.plane);
    const int64_t parts = CeilDiv(units, kPartUnits);
    const int64_t size = CeilDiv(Panels::Size(units, kPartUnits), 64) * 64;
    panels_ = scratch.Allocate<Panels>(gates * parts);
    E* const packed = scratch.Allocate<E>(gates * parts * size);
    if (products_ == nullptr || factors_.first == nullptr ||
        panels_ == nullptr || packed == nullptr) {
      return false;
    }
    const int64_t row = gates * units;
    const FilterMap map =
        kTransposed ? FilterMap{1, row, 0} : FilterMap{row, 1, 0};
    auto pack = [&](int64_t i, int) {
      const int64_t gate = i / parts, begin = i % parts * kPartUnits;
      panels_[i] = Panels(packed + i * size);
      panels_[i].Pack(kernel + gate * units + begin * map.column, map, units,
                      Min(units - begin, kPartUnits));
    };
    ParallelFor(parallel, gates * parts,
                units * kPartUnits / kLanes<A> * kCyclesToPack, pack);
    return true;
  }

  // The rows, tile by tile.
  const EvenParts& tiles() const { return tiles_; }

  // A row of products, of which those of a gate are `stride` from the next.
  A* Products(int64_t row) const { return products_ + row * pitch_; }
  int64_t stride() const { return stride_; }

  // Takes units [begin, begin + n) of h, or of a gate, for the products of step
  // `step`; those of the step before may still be read.
  void Put(int64_t step, int64_t row, int64_t gate, const T* from,
           int64_t begin, int64_t n) const {
    const BlockRows<E> row_of{Factor(step, row, gate) + begin / kElements<E>,
                              0};
    GatherRows(from + begin, 0, 1, n, row_of);
  }

  // The products of tiles [first, last) for units [begin, begin + n).
  void Run(int64_t step, int64_t first, int64_t last, int64_t begin,
           int64_t n) const {
    const int64_t parts = CeilDiv(units_, kPartUnits);
    const auto multiply = [&](int64_t tile, int64_t gate, const Panels& panels,
                              int64_t unit) {
      const int64_t row = tiles_.Begin(tile);
      const BlockRows<E> factor{Factor(step, row, gate),
                                num_factors() * FactorPitch()};
      MultiplyBlock<true>(
          factor, tiles_.Size(tile), panels, kTransposed && gate > 0,
          Products(row) + (kTransposed ? 0 : gate * stride_) + unit, pitch_);
    };
    for (int64_t unit = begin; unit < begin + n;) {
      const int64_t part = unit / kPartUnits, at = unit % kPartUnits;
      const int64_t size = Min(kPartUnits - at, begin + n - unit);
      for (int64_t gate = 0; gate < gates_; ++gate) {
        const Panels panels = panels_[gate * parts + part].Part(at, at + size);
        for (int64_t tile = first; tile < last; ++tile)
          multiply(tile, gate, panels, unit);
      }
      unit += size;
    }
  }

 private:
  using E = BlockOperand<T>;
  using Panels = BlockPanels<E>;
  static_assert(kUnits % kVectorElements<E> == 0);
  // Units of panels that all rows are multiplied by before the next, as a
  // kernel may be larger than the caches.
  static constexpr int64_t kPartUnits = 4 * kUnits;
  static constexpr int64_t kCyclesToPack = 4;  // a vector
  // Eight rows keep as many multiply-adds under way as there is room for; AMX's
  // tiles are better full.
  static constexpr int64_t kMostTileRows =
      kTileRows<E> > 16 || kTileRows<E> < 8 ? kTileRows<E> : 8;
  // Factors of a step and of the next.
  static constexpr int64_t kBuffers = 2;

  // An even number of tiles is shared more evenly.
  static int64_t TileRows(int64_t rows) {
    if (rows <= kMostTileRows) return kMostTileRows;
    return CeilDiv(rows, 2 * CeilDiv(rows, 2 * kMostTileRows));
  }

  int64_t num_factors() const { return kTransposed ? gates_ : 1; }
  int64_t FactorPitch() const { return BlockPitch<E>(units_); }
  OperandsIn<E> Factor(int64_t step, int64_t row, int64_t gate) const {
    const int64_t i = (step % kBuffers * rows_ + row) * num_factors();
    return factors_ + (i + (kTransposed ? gate : 0)) * FactorPitch();
  }

  int64_t gates_ = 0, units_ = 0, rows_ = 0;
  EvenParts tiles_{0, 1};
  int64_t pitch_ = 0, stride_ = 0;
  Panels* panels_ = nullptr;  // part by part of each gate
  OperandsIn<E> factors_{};
  A* products_ = nullptr;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_RECURRENT_PRODUCT_H_
