// Sums over pixels on their way to the gradients of filters, bias and side
// input.
#ifndef TFO_CC_CORE_FILTER_GRADIENT_SUMS_H_
#define TFO_CC_CORE_FILTER_GRADIENT_SUMS_H_

#include "cc/core/epilogue.h"
#include "cc/core/filter_gradient_plan.h"

namespace tfo::TFO_ISA {
namespace {

template <class A>
TFO_INLINE void SumColumns(const A* rows, std::int64_t num_rows, A* sums,
                           bool accumulate) {
  constexpr int lanes = kLanes<A>, width = kTileColumns<A>;
  constexpr int kVectors = width / lanes;
  // Several sums of each column: an addition waits for the one before.
  constexpr int kParts = 4;
  Vec<A> sum[kParts][kVectors]{};
  const auto add = [&](int part, std::int64_t row) TFO_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      sum[part][j] += Load(rows + row * width + j * lanes);
  };
  std::int64_t i = 0;
  for (; i + kParts <= num_rows; i += kParts) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) add(part, i + part);
  }
  for (; i < num_rows; ++i) add(0, i);
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const Vec<A> total = (sum[0][j] + sum[1][j]) + (sum[2][j] + sum[3][j]);
    A* const to = sums + j * lanes;
    Store(to, accumulate ? Load(to) + total : total);
  }
}

// Writes gathered dz back as the side input's gradient.
template <class T>
void ScatterPanel(const Accumulator<T>* rows, std::int64_t row_pitch,
                  const AddressMap& map, std::int64_t n, const Box& box,
                  T* to) {
  using A = Accumulator<T>;
  const Epilogue<T> identity{to,   nullptr, nullptr, nullptr, Activation::kNone,
                             A(0), map};
  const EpilogueWriter<T, Activation::kNone> writer{identity, Vec<A>{}};
  for (std::int64_t i = 0; i < box.rows; ++i) {
    for (std::int64_t j = 0; j < box.columns; j += kTileRows<A>) {
      const std::int64_t at =
          map.Offset(n, box.h + i, box.w + j) + box.c * map.c;
      const A* tile = rows + i * row_pitch + j * kTileColumns<A>;
      const int num_rows = static_cast<int>(Min(kTileRows<A>, box.columns - j));
      const int num_columns = static_cast<int>(box.channels);
      map.c == 1 ? writer.Rows(at, box.c, tile, num_rows, num_columns)
                 : writer.Columns(at, box.c, tile, num_rows, num_columns);
    }
  }
}

// Writes the first n <= lanes columns of a filter's row, which lie `stride`
// apart.
template <class T>
TFO_INLINE void StoreColumns(T* to, Vec<Accumulator<T>> v, int n,
                             std::int64_t stride) {
  using A = Accumulator<T>;
  if (stride != 1) {
    for (int l = 0; l < n; ++l) StoreOne(to + l * stride, static_cast<A>(v[l]));
  } else if (n == kLanes<A>) {
    StoreAs(to, v);
  } else {
    StoreAsPartial(to, v, n);
  }
}

// Adds the slices of some rows of sums, [slices, panels, rows, columns of the
// panel], and writes them, `pitch` apart. A panel's rows are read together:
// each slice has a page of its own.
template <class T>
void ReduceRows(const Accumulator<T>* sums, std::int64_t rows,
                const FilterGradientPlan& p, std::int64_t columns,
                std::int64_t stride, std::int64_t pitch, T* to) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  const std::int64_t panel_size = p.PanelSize<A>();
  for (std::int64_t j = 0; j < columns; j += lanes) {
    const A* from =
        sums + j / kTileColumns<A> * panel_size + j % kTileColumns<A>;
    for (std::int64_t i = 0; i < rows; ++i, from += kTileColumns<A>) {
      Vec<A> sum = Load(from);
      for (std::int64_t s = 1; s < p.slices; ++s)
        sum += Load(from + s * p.panels * panel_size);
      StoreColumns(to + i * pitch + j * stride, sum,
                   static_cast<int>(Min(lanes, columns - j)), stride);
    }
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FILTER_GRADIENT_SUMS_H_
