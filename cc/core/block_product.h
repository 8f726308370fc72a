// Products of blocks that a cache holds, by the register tile.
#ifndef TFO_CC_CORE_BLOCK_PRODUCT_H_
#define TFO_CC_CORE_BLOCK_PRODUCT_H_

#include "cc/core/elementwise.h"
#include "cc/core/pack.h"
#include "cc/core/tile.h"

namespace tfo::TFO_ISA {
namespace {

// What products of blocks multiply: float32 as it is, since AMX gains little by
// its parts where blocks are small (measured with attention, 512 queries and
// keys of depth 64: 1.05 of the time forward, 0.97 in the gradient; 197 of
// them: 0.9 and 0.8).
template <class T>
struct BlockOperandOf : OperandOf<T> {};
template <>
struct BlockOperandOf<float> {
  using type = float;
};
template <class T>
using BlockOperand = typename BlockOperandOf<T>::type;

// Room for rows of `columns` that are written in whole panels.
template <class A>
TFO_INLINE int64_t WholePanels(int64_t columns) {
  return NumPanels<A>(columns) * kTileColumns<A>;
}

// The memory of a worker.
template <class T>
struct OfWorkers {
  T* data;
  int64_t size;

  // False when scratch memory ran out.
  bool Prepare(int64_t elements, const Parallel& parallel,
               const Scratch& scratch) {
    size = CeilDiv(elements, 64) * 64;
    data = scratch.Allocate<T>(size * parallel.num_workers);
    return data != nullptr;
  }
  T* operator[](int worker) const { return data + worker * size; }
};

// The left factor: operands of its rows, `pitch` from one row to the next; or,
// where rows lie together, from one of a row's operands to the next.
template <class E>
struct BlockRows {
  OperandsIn<E> data;
  int64_t pitch;
};

// Operands that a step of the tile takes at once: factors are filled up with
// zeros to whole steps.
template <class E>
constexpr int64_t kDepthStep = kTransposesRows<E> ? 16 : 1;

template <class E>
TFO_INLINE int64_t WholeSteps(int64_t depth) {
  return CeilDiv(NumOperands<E>(depth), kDepthStep<E>) * kDepthStep<E>;
}

// Operands between rows of `depth` elements: whole cache lines.
template <class E>
TFO_INLINE int64_t BlockPitch(int64_t depth) {
  return CeilDiv(NumOperands<E>(depth), 16) * 16;
}

// Elements of as many operands as a vector holds.
template <class E>
constexpr int64_t kVectorElements = kElements<E> * kLanes<Accumulator<E>>;

// Operands of vectors that follow each other.
template <class E>
TFO_INLINE void StoreOperands(OperandsIn<E> to,
                              const Vec<Accumulator<E>> (&v)[kElements<E>]) {
  if constexpr (kElements<E> == 1) {
    StoreAs<E>(to, {v[0]});
  } else {
    StoreAs(Elements<E>(to), v[0], v[1]);
  }
}

// Gathers rows that lie `stride` apart.
template <class T, class E>
void GatherRows(const T* from, int64_t stride, int64_t rows, int64_t depth,
                const BlockRows<E>& to) {
  for (int64_t i = 0; i < rows; ++i, from += stride) {
    const OperandsIn<E> row = to.data + i * to.pitch;
    for (int64_t j = 0; j < depth; j += kVectorElements<E>)
      StoreAs<E>(row + j / kElements<E>, LoadColumn<E>(from + j, depth - j));
  }
}

// The right factor, in panels.
template <class E>
class BlockPanels {
 public:
  using A = Accumulator<E>;

  static int64_t Size(int64_t rows, int64_t columns) {
    return kPlanes<E> * Plane(WholeSteps<E>(rows), columns) +
           kRowsBehind<E> * kWidth;
  }

  explicit BlockPanels(E* memory) : data_{memory, 0} {}

  template <class T>
  void Pack(const T* from, const FilterMap& map, int64_t rows,
            int64_t columns) {
    depth_ = WholeSteps<E>(rows);
    columns_ = columns;
    data_.plane = Plane(depth_, columns);
    PackPanels<T, E>(from, map, rows, columns, panel_stride(), data_);
    Zero(data_.first + kPlanes<E> * data_.plane, kRowsBehind<E> * kWidth);
    const int64_t filled = NumOperands<E>(rows);
    for (int64_t p = 0; filled < depth_ && p < NumPanels<A>(columns); ++p)
      Zero(data_ + (p * depth_ + filled) * kWidth, (depth_ - filled) * kWidth);
  }

  // The panels that hold columns [begin, end); begin is a panel's first.
  BlockPanels Part(int64_t begin, int64_t end) const {
    BlockPanels part(*this);
    part.data_ = data_ + begin * depth_;
    part.columns_ = end - begin;
    return part;
  }

  int64_t panel_stride() const { return depth_ * kWidth; }
  int64_t depth() const { return depth_; }
  int64_t columns() const { return columns_; }
  OperandsIn<E> data() const { return data_; }

 private:
  static constexpr int64_t kWidth = kTileColumns<A>;

  static int64_t Plane(int64_t depth, int64_t columns) {
    return NumPanels<A>(columns) * kWidth * depth;
  }

  OperandsIn<E> data_;
  int64_t depth_ = 0, columns_ = 0;
};

// c = a * b, or c += a * b. c has room for whole panels.
template <bool kContiguousK, class E>
void MultiplyBlock(const BlockRows<E>& a, int64_t rows, const BlockPanels<E>& b,
                   bool add, Accumulator<E>* c, int64_t c_stride) {
  constexpr int64_t kWidth = kTileColumns<Accumulator<E>>;
  int64_t row_offset[kTileRows<E>];
  for (int i = 0; i < kTileRows<E>; ++i) row_offset[i] = i * a.pitch;
  PrefetchList prefetch;
  const Segment segment{0, b.depth()};
  const EvenParts parts(rows, kTileRows<E>);
  for (int64_t part = 0; part < parts.count(); ++part) {
    const int64_t row = parts.Begin(part);
    for (int64_t column = 0; column < b.columns();) {
      const int64_t rest = b.columns() - column;
      Accumulator<E>* const to = c + row * c_stride + column;
      TileOperands<E> tile{a.data.first + row * (kContiguousK ? a.pitch : 1),
                           row_offset,
                           a.pitch,
                           &segment,
                           1,
                           b.data().first + column * b.depth(),
                           kWidth,
                           add ? to : nullptr,
                           c_stride,
                           to,
                           c_stride,
                           &prefetch};
      tile.a_plane = a.data.plane;
      tile.b_plane = b.data().plane;
      tile.b_goes_on = true;
      tile.JoinPanels(rest, b.panel_stride());
      RunTile<E, kContiguousK>(static_cast<int>(parts.Size(part)),
                               static_cast<int>(Min(rest, kWidth)), tile);
      column += tile.num_panels * kWidth;
    }
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_BLOCK_PRODUCT_H_
