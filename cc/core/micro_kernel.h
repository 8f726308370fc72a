// The register tile: every product of the project is a sum of these.
//
//   c[i, j] = start[i, j] + sum over segments, sum over k:
//                a[segment.offset + row_offset[i] + k] * b[k, j]
//
// or, of rows that lie together, a[segment.offset + i + k * k_stride]. The rows
// of `b` are consecutive over all segments (a batch-reduce product), unless
// each has a place of its own; a segment is where the address of `a` jumps: the
// next filter row, the next image row.
#ifndef TFO_CC_CORE_MICRO_KERNEL_H_
#define TFO_CC_CORE_MICRO_KERNEL_H_

#include "cc/core/integers.h"
#include "cc/core/moments.h"
#include "cc/core/operand.h"
#include "cc/core/streaming.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

struct Segment {
  std::int64_t offset, length;
};

// Rows of a tile that lie together in the output; `offset` from its first row
// to the first of these there.
struct RowRun {
  int first, count;
  std::int64_t offset;
};

// As many accumulators as leave registers for one row of b and one broadcast
// element of a.
#if defined(__AVX512F__)
constexpr int kRegisterRows = 14;
#else
constexpr int kRegisterRows = 6;
#endif
template <class E>
constexpr int kTileRows = kRegisterRows;
// Whether a tile transposes rows that lie together, which it should do once for
// several panels.
template <class E>
constexpr bool kTransposesRows = false;
#if defined(__AMX_BF16__)
template <>
constexpr int kTileRows<BFloat16Pair> = 32;
template <class T>
constexpr int kTileRows<SplitPair<T>> = 32;
template <>
constexpr bool kTransposesRows<BFloat16Pair> = true;
template <class T>
constexpr bool kTransposesRows<SplitPair<T>> = true;
#endif
// Whether there are registers for the addresses of all rows of a, which may
// then lie anywhere; otherwise they are equally far apart.
constexpr bool kRowsAnywhere = kRegisterRows <= 6;
constexpr int kTileVectors = 2;
template <class A>
constexpr int kTileColumns = kTileVectors * kLanes<A>;
// Panels that a tile's rows meet in one call, as many as the lines to prefetch
// leave room for (measured with AVX2: 0.8 to 0.92 of the time of 1x1
// convolutions of up to 512 channels, beside a call for each).
constexpr int kPanelsPerCall = 4;

// What a step of as few tiles as hold `rows` takes, in fourths of a row's time:
// each tile half a row's more, and no less than four rows', since it waits for
// its row of b then.
template <class E>
TFO_INLINE std::int64_t StepTime(std::int64_t rows) {
  const std::int64_t tiles = CeilDiv(rows, kTileRows<E>);
  return Max(4 * rows, 16 * tiles) + 2 * tiles;
}

// Cache lines that will be needed after this tile. They are asked for one at a
// time while it is computed, so that memory works while the arithmetic does; a
// burst of requests would stall both. They are wanted in the first-level cache
// (measured with AVX-512 and AVX2, 1x1 and 3x3 convolutions: 0.8 to 1.0 of the
// time, beside the second-level one; filter gradients 0.95 to 0.99).
struct PrefetchList {
  static constexpr int kCapacity = 256;

  const void* lines[kCapacity + 1];
  int count = 0;

  TFO_INLINE void Clear() { count = 0; }
  // As many of the `n` lines from `first` on, `pitch` bytes apart, as there is
  // room for.
  TFO_INLINE void Add(const void* first, std::int64_t n, std::int64_t pitch) {
    const char* line = static_cast<const char*>(first);
    const int end =
        static_cast<int>(n < kCapacity - count ? count + n : kCapacity);
    for (; count < end; line += pitch) lines[count++] = line;
  }
};

template <class E>
struct TileOperands {
  using A = Accumulator<E>;

  const E* a;
  const std::int64_t* row_offset;
  std::int64_t k_stride;
  const Segment* segments;
  std::int64_t num_segments;
  const E* b;
  std::int64_t b_stride;
  const A* start;  // what sums begin from; null: zero
  std::int64_t start_stride;
  A* c;
  std::int64_t c_stride;
  PrefetchList* prefetch;
  // Where sums go instead of c, and what is done to them before.
  ElementOf<E>* y = nullptr;
  std::int64_t y_stride = 0;
  const A* scale = nullptr;  // a row for the sums; null: one
  const A* bias = nullptr;   // a row added after that; null: zero
  const ElementOf<E>* side_input = nullptr;   // added then, as far apart as y
  Activation activation = Activation::kNone;  // none, relu or relu6
  bool stream = false;                        // stores bypass the caches
  // Takes the moments of what is stored, an entry a panel; null: nothing does.
  TileMoments<A, kTileColumns<A>>* moments = nullptr;
  // Tiles beside each other, of the same rows of a, that are computed in turn.
  int num_panels = 1;
  std::int64_t b_panel = 0;                // from one panel of b to the next
  std::int64_t c_panel = kTileColumns<A>;  // likewise of c and start
  // Whether numbers follow behind the rows of a segment: they may be read.
  bool b_goes_on = false;
  // Where a segment's rows of b begin; null: behind those of the one before.
  const std::int64_t* b_offset = nullptr;
  // From one plane to the next.
  std::int64_t a_plane = 0, b_plane = 0;
  // Where rows belong in y; none: all of them together. Only of tiles that have
  // more than kRegisterRows.
  const RowRun* runs = nullptr;
  int num_runs = 0;

  // Goes on to as many whole panels of `columns` as are computed in a call.
  TFO_INLINE void JoinPanels(std::int64_t columns, std::int64_t panel_stride) {
    num_panels = static_cast<int>(
        Min(Max(columns / kTileColumns<A>, 1), kPanelsPerCall));
    b_panel = panel_stride;
  }
};

// Rows of b asked for ahead of their use, from the second-level cache.
constexpr int kRowsAhead = 16;
template <class E>
constexpr int kLineOperands = 64 / sizeof(E);

// Short tiles hold several sums for each element, of every n-th k: as many
// multiply-adds are under way at a time as the processor has room for.
template <int kRows, int kVectors>
constexpr int kSums = kRows * kVectors >= 8   ? 1
                      : kRows * kVectors >= 4 ? 2
                                              : 4;
// Steps between two requests for memory. The loop's own instructions would
// slow down a short step (of half a vector, measured with a Zen 4: 0.9 to 0.95
// of the time).
template <int kRows, int kVectors, bool kHalf>
constexpr int kStepsPerLine =
    kSums<kRows, kVectors> > 1    ? kSums<kRows, kVectors>
    : kHalf || kRegisterRows <= 6 ? 2
                                  : 1;

// Terms that are added one after the other. The rounding errors of longer sums
// grow with their length: these are added to a total (measured, rms error of
// 64 rows times 4096x256, beside TensorFlow's 0.36e-6: 1.15e-6 without).
constexpr std::int64_t kMostTerms = 256;

// Column k of the tile's rows of a: rows with addresses of their own, equally
// far apart, or together in memory.
template <class E, int kRows, bool kContiguousK>
class Rows {
 public:
  TFO_INLINE explicit Rows(const TileOperands<E>& t)
      : begin_(t.a),
        offset_(t.row_offset),
        row_stride_(kContiguousK && kRows > 1 ? t.row_offset[1] : 1),
        k_stride_(kContiguousK ? 1 : t.k_stride) {}

  // From column k of what begins at `offset` on.
  TFO_INLINE void Start(std::int64_t offset, std::int64_t k) {
    k_ = k;
    if constexpr (kPointers) {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) at_[i] = begin_ + offset + offset_[i];
    } else {
      at_[0] = begin_ + offset + k * k_stride_;
    }
  }
  TFO_INLINE void Advance() {
    if constexpr (kPointers) {
      ++k_;
    } else {
      at_[0] += k_stride_;
    }
  }
  TFO_INLINE E operator[](int i) const {
    return kPointers ? at_[i][k_] : at_[0][i * row_stride_];
  }

 private:
  static constexpr bool kPointers = kContiguousK && kRowsAnywhere;

  const E* const begin_;
  const std::int64_t* const offset_;
  const std::int64_t row_stride_, k_stride_;
  const E* at_[kPointers ? kRows : 1];
  std::int64_t k_;
};

// Whether half of the last vector of columns may be left out: some processors
// take two passes for a whole one of 64 bytes (measured with a Zen 4, 3x3
// convolutions to 24 and 40 channels: 0.75 and 0.89 of the time).
template <class E>
constexpr bool kHasHalfVectors =
#if defined(__AVX512F__)
    std::is_same_v<E, float> || std::is_same_v<E, BFloat16Pair>;
#else
    false;
#endif

// Of what there must be a multiple of columns for tiles to write them to y.
template <class E>
constexpr int kWrittenColumns =
    kLanes<Accumulator<E>> /
    (kHasHalfVectors<E> && !kTransposesRows<E> ? 2 : 1);

// Whether tiles have more to do with their sums than to store them.
template <class E>
constexpr bool kHasEpilogue = !std::is_integral_v<Accumulator<E>>;

// Stores sums of a tile, the rows of a panel from `row` on; `shift` is added to
// their place in y. kHalf: of the last vector, half goes there (measured with a
// Zen 4, 1x1 convolutions of 8 to 72 channels to 8, 24 and 72: 0.68 to 0.98 of
// the time, beside sums that are stored and read again).
template <class E, int kRows, int kVectors, bool kHalf = false>
TFO_INLINE void Finish(const TileOperands<E>& t, std::int64_t row, int panel,
                       Vec<Accumulator<E>> (&sum)[kRows][kVectors],
                       std::int64_t shift = 0) {
  using A = Accumulator<E>;
  constexpr int kWhole = kVectors - (kHalf ? 1 : 0);
  const auto load = [](const auto* from, int j) TFO_INLINE_LAMBDA {
    from += j * kLanes<A>;
    return j < kWhole ? LoadAs(from) : LoadAsPartial(from, kLanes<A> / 2);
  };
  const auto store = [&](auto* to, std::int64_t stride, auto&& put)
                         TFO_INLINE_LAMBDA {
                           to += row * stride;
#pragma GCC unroll 16
                           for (int i = 0; i < kRows; ++i, to += stride) {
#pragma GCC unroll 4
                             for (int j = 0; j < kVectors; ++j)
                               put(to + j * kLanes<A>, sum[i][j], j);
                           }
                         };
  if (!kHasEpilogue<E> || t.y == nullptr) {
    return store(t.c + panel * t.c_panel, t.c_stride,
                 [](A* to, Vec<A> v, int) TFO_INLINE_LAMBDA { Store(to, v); });
  }
  if constexpr (kHasEpilogue<E>) {
    const std::int64_t column = panel * kTileColumns<A>, at = column + shift;
    if (t.scale != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const Vec<A> scale = load(t.scale + column, j);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) sum[i][j] *= scale;
      }
    }
    if (t.bias != nullptr) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const Vec<A> bias = load(t.bias + column, j);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) sum[i][j] += bias;
      }
    }
    if (t.side_input != nullptr) {
      const ElementOf<E>* side = t.side_input + row * t.y_stride + at;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i, side += t.y_stride) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] += load(side, j);
      }
    }
    using Out = ElementOf<E>;
    const auto activate = [&](auto activation) TFO_INLINE_LAMBDA {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          sum[i][j] = VectorActivation<Out>::template Value<activation.value>(
              sum[i][j], Vec<A>{});
        }
      }
    };
    if (t.activation == Activation::kRelu)
      activate(ActivationConstant<Activation::kRelu>{});
    else if (t.activation == Activation::kRelu6)
      activate(ActivationConstant<Activation::kRelu6>{});
    // Half a vector begins or ends within a line.
    if (!kHalf && t.stream) {
      store(t.y + at, t.y_stride, [](Out* to, Vec<A> v, int) TFO_INLINE_LAMBDA {
        StoreStreaming(to, v);
      });
    } else {
      store(t.y + at, t.y_stride,
            [](Out* to, Vec<A> v, int j) TFO_INLINE_LAMBDA {
              j < kWhole ? StoreAs(to, v) : StoreHalfAs(to, v);
            });
    }
    if (__builtin_expect(t.moments != nullptr, false)) {
      Vec<A> stored[kRows][kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j)
          stored[i][j] = AsStored<Out>(sum[i][j]);
      }
      AddTile(stored, t.moments + panel);
    }
  }
}

// Of kHalves half vectors of columns.
template <class E, int kRows, int kHalves, bool kContiguousK>
void Tile(const TileOperands<E>& t) {
  using A = Accumulator<E>;
  constexpr int kVectors = (kHalves + 1) / 2;
  constexpr int kParts = kSums<kRows, kVectors>;
  constexpr int kSteps = kStepsPerLine<kRows, kVectors, kHalves == 1>;
  constexpr std::int64_t kColumns = kVectors * kLanes<A>;
  const std::int64_t b_stride = t.b_stride;
  Rows<E, kRows, kContiguousK> rows(t);
  // The last entry, a line in use, is repeated until the tile is done.
  const void** const lines = t.prefetch->lines;
  lines[t.prefetch->count] = t.b;
  const void* const* line = lines;
  for (int panel = 0; panel < t.num_panels; ++panel) {
    const void* const* const last_line =
        lines + t.prefetch->count * (panel + 1) / t.num_panels;
    const E* const first_b = t.b + panel * t.b_panel;
    const E* b = first_b;
    Vec<A> sums[kParts][kRows][kVectors];
    auto& sum = sums[0];
    A total[kRows * kColumns];
    const A* start = t.start == nullptr ? nullptr : t.start + panel * t.c_panel;
    std::int64_t start_stride = t.start_stride;
    const auto step = [&](auto& to) TFO_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors * kLanes<A>; j += kLineOperands<E>)
        __builtin_prefetch(b + kRowsAhead * b_stride + j, 0, 3);
      Vec<A> row[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        row[j] = Load(b + j * kLanes<A>);
        // Measured with AVX-512: 0.6 to 0.97 of the time; but 1.04 with five
        // rows that have addresses of their own.
        if constexpr (!kContiguousK) KeepLoaded(row[j]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const E operand = rows[i];
#pragma GCC unroll 4
        for (int j = 0; j < kHalves / 2; ++j)
          to[i][j] = Accumulate(to[i][j], operand, row[j]);
        if constexpr (kHalves % 2 > 0) {
          constexpr int j = kHalves / 2;
          to[i][j] = AccumulateLow(to[i][j], operand, row[j]);
        }
      }
      rows.Advance();
      b += b_stride;
    };
    std::int64_t s = 0, done = 0;
    for (;;) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) sums[part][i][j] = Vec<A>{};
        }
      }
      for (std::int64_t room = kMostTerms; s < t.num_segments && room > 0;) {
        rows.Start(t.segments[s].offset, done);
        if (t.b_offset != nullptr)
          b = first_b + t.b_offset[s] + done * b_stride;
        std::int64_t k = t.segments[s].length - done;
        if (k <= room) {
          ++s;
          done = 0;
        } else {
          k = room;
          done += k;
        }
        room -= k;
        for (; k >= kSteps; k -= kSteps) {
          __builtin_prefetch(*line, 0, 3);
          line += line != last_line;
#pragma GCC unroll 4
          for (int i = 0; i < kSteps; ++i) step(sums[i % kParts]);
        }
        if constexpr (kSteps > 1)
          for (; k > 0; --k) step(sum);
      }
#pragma GCC unroll 4
      for (int part = 1; part < kParts; ++part) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) sum[i][j] += sums[part][i][j];
        }
      }
      if (start != nullptr) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j)
            sum[i][j] += Load(start + i * start_stride + j * kLanes<A>);
        }
      }
      if (s == t.num_segments) break;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j)
          Store(total + i * kColumns + j * kLanes<A>, sum[i][j]);
      }
      start = total;
      start_stride = kColumns;
    }
    // What there were too few steps for.
    for (; line != last_line; ++line) __builtin_prefetch(*line, 0, 3);
    Finish<E, kRows, kVectors, kHalves % 2 != 0>(t, 0, panel, sum);
  }
}

template <class E>
using TileFunction = void (*)(const TileOperands<E>&);

template <class E, bool kContiguousK, int kHalves, int... kRowsMinusOne>
struct TileRow {
  static constexpr TileFunction<E> kFunctions[] = {
      &Tile<E, kRowsMinusOne + 1, kHalves, kContiguousK>...};
};

template <class E, bool kContiguousK, int kHalves>
TFO_INLINE TileFunction<E> SelectRows(int rows) {
#if defined(__AVX512F__)
  using Row = TileRow<E, kContiguousK, kHalves, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9,
                      10, 11, 12, 13>;
#else
  using Row = TileRow<E, kContiguousK, kHalves, 0, 1, 2, 3, 4, 5>;
#endif
  return Row::kFunctions[rows - 1];
}

template <class E, bool kContiguousK>
TFO_INLINE TileFunction<E> SelectTile(int rows, int columns) {
  constexpr int kVector = kLanes<Accumulator<E>>, kHalf = kVector / 2;
  if constexpr (kHasHalfVectors<E>) {
    if (columns <= kHalf) return SelectRows<E, kContiguousK, 1>(rows);
    if (columns > kVector && columns <= kVector + kHalf)
      return SelectRows<E, kContiguousK, 3>(rows);
  }
  return columns > kVector ? SelectRows<E, kContiguousK, 4>(rows)
                           : SelectRows<E, kContiguousK, 2>(rows);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_MICRO_KERNEL_H_
