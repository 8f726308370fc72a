// Moments per lane: mean and sum of squared deviations, merged in float64 by
// Chan's formula.
#ifndef TFO_CC_CORE_MOMENTS_H_
#define TFO_CC_CORE_MOMENTS_H_

#include <cstdint>

#include "cc/core/simd.h"

namespace tfo::TFO_ISA {
namespace {

// Merges n elements' moments into those of m elements, lane by lane.
TFO_INLINE void MergeMoments(std::int64_t lanes, double m, double n,
                             const double* __restrict mean_n,
                             const double* __restrict squares_n,
                             double* __restrict mean,
                             double* __restrict squares) {
  if (n == 0) return;
  const double part = n / (m + n), weight = m * part;
  for (std::int64_t j = 0; j < lanes; ++j) {
    const double delta = mean_n[j] - mean[j];
    mean[j] += delta * part;
    squares[j] += squares_n[j] + delta * delta * weight;
  }
}

// The same for a block of n elements, given as sums of deviations from a shift.
template <class A, class Sum>
TFO_INLINE void MergeBlock(std::int64_t lanes, double m, double n,
                           const A* __restrict shift, const Sum* __restrict sum,
                           const Sum* __restrict square,
                           double* __restrict mean,
                           double* __restrict squares) {
  if (n == 0) return;
  const double inverse = 1 / n, part = n / (m + n), weight = m * part;
  for (std::int64_t j = 0; j < lanes; ++j) {
    const double total = sum[j];
    const double deviation = total * inverse;
    const double within = square[j] - total * deviation;
    const double delta = (shift[j] + deviation) - mean[j];
    mean[j] += delta * part;
    squares[j] += (within < 0 ? 0 : within) + delta * delta * weight;
  }
}

// Moments of the columns of register tiles that a worker computes one after
// the other.
//
// Deviations are taken from a shift, the mean of the first tile's rows, and
// summed up in registers for a tile at a time. The first tile's part of the
// variance bounds what cancellation can lose, whatever the data.
template <class A, int kColumns>
struct TileMoments {
  double count;
  alignas(64) double sum[kColumns];
  alignas(64) double square[kColumns];
  alignas(64) A shift[kColumns];
};

// Adds a vector of accumulators to sums in float64.
template <class A>
TFO_INLINE void AddWidened(Vec<A> v, double* to) {
  if constexpr (sizeof(A) == sizeof(double)) {
    Store(to, Load(to) + v);
  } else {
    typedef float Half __attribute__((vector_size(TFO_VECTOR_BYTES / 2)));
    Half halves[2];
    __builtin_memcpy(halves, &v, sizeof(v));
    for (int i = 0; i < 2; ++i) {
      double* const half = to + i * kLanes<double>;
      Store(half, Load(half) + __builtin_convertvector(halves[i], Vec<double>));
    }
  }
}

// Adds the rows of a tile, which are lost. A function of its own leaves the
// registers of those tiles alone that nobody wants the moments of.
template <class A, int kRows, int kVectors, int kColumns>
__attribute__((noinline)) void AddTile(Vec<A> (&tile)[kRows][kVectors],
                                       TileMoments<A, kColumns>* moments) {
  // The sum of all rows, pairwise.
  const auto sum_rows = [](Vec<A>(&rows)[kRows][kVectors], int j)
                            TFO_INLINE_LAMBDA {
#pragma GCC unroll 4
                              for (int step = 1; step < kRows; step *= 2) {
#pragma GCC unroll 16
                                for (int i = 0; i + step < kRows; i += 2 * step)
                                  rows[i][j] += rows[i + step][j];
                              }
                              return rows[0][j];
                            };
  if (moments->count == 0) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vec<A> total = tile[0][j];
#pragma GCC unroll 16
      for (int i = 1; i < kRows; ++i) total += tile[i][j];
      Store(moments->shift + j * kLanes<A>, total / A(kRows));
      for (int k = 0; k < kLanes<A>; ++k)
        moments->sum[j * kLanes<A> + k] = moments->square[j * kLanes<A> + k] =
            0;
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const Vec<A> shift = Load(moments->shift + j * kLanes<A>);
    Vec<A> squares[2]{};
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      tile[i][j] -= shift;
      squares[i % 2] += tile[i][j] * tile[i][j];
    }
    AddWidened<A>(squares[0] + squares[1], moments->square + j * kLanes<A>);
    AddWidened<A>(sum_rows(tile, j), moments->sum + j * kLanes<A>);
  }
  moments->count += kRows;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_MOMENTS_H_
