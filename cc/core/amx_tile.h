// The register tile of pairs of bfloat16 on AMX: up to 2 x 2 registers of sums,
// each of 16 rows and a vector of columns.
//
// An instruction multiplies 16 operands of each row of a by as many rows of b.
// Rows of a along which operands do not follow each other are transposed first.
//
// Of numbers that are sums of bfloat16, what is no number is computed again by
// multiply-adds: there may be an infinite number in it, which has no parts.
#ifndef TFO_CC_CORE_AMX_TILE_H_
#define TFO_CC_CORE_AMX_TILE_H_

#include <type_traits>

#include "cc/core/address_map.h"
#include "cc/core/amx_products.h"

#if defined(__AMX_BF16__)

namespace tfo::TFO_ISA {
namespace {

// A tile of kHalves registers of rows and kVectors of columns.
template <class E, int kHalves, int kVectors>
class AmxTile {
 public:
  AmxTile(const TileOperands<E>& t, int rows)
      : t_(t),
        upper_((rows + kHalves - 1) / kHalves),
        lower_(rows - upper_),
        products_(upper_, *t.prefetch) {}

  // Rows along which operands follow each other, half of them and the other
  // half equally far apart.
  TFO_INLINE void RunRows() {
    const std::int64_t pitch = t_.row_offset[1 % (upper_ + lower_)];
    const std::int64_t to_lower = lower_ > 0 ? t_.row_offset[upper_] : 0;
    const std::int64_t length = t_.num_segments > 0 ? t_.segments[0].length : 1;
    // Equal steps, so that there is no rest.
    const std::int64_t depth =
        Max(CeilDiv(length, Max(CeilDiv(length, kAmxDepth), 1)), 1);
    SetAmxShapes(upper_, lower_, static_cast<int>(depth));
    const auto steps = [&](int panel, auto step) TFO_INLINE_LAMBDA {
      const E* const first_b = t_.b + panel * t_.b_panel;
      const E* b = first_b;
      for (std::int64_t s = 0; s < t_.num_segments; ++s) {
        const E* a = t_.a + t_.segments[s].offset;
        if (t_.b_offset != nullptr) b = first_b + t_.b_offset[s];
        std::int64_t k = t_.segments[s].length;
        for (; k >= depth; k -= depth, a += depth, b += depth * t_.b_stride) {
          step(Operands{{a, t_.a_plane},
                        pitch,
                        to_lower,
                        {b, t_.b_plane},
                        t_.b_stride,
                        depth});
        }
        if (k > 0) {
          step(PadStep(s, {a, t_.a_plane}, {b, t_.b_plane}, k, depth));
          b += k * t_.b_stride;
        }
      }
    };
    // A panel is finished while the next one is multiplied.
    CutRows();
    Finisher<decltype(steps)> last{*this, steps};
    for (int panel = 0; panel < t_.num_panels; ++panel) {
      float* const sums = sums_ + panel % 2 * kSumsPanel;
      const Sums from = StartOf(panel);
      const auto between = [&]() TFO_INLINE_LAMBDA { last.FinishSome(); };
      if (!kSplit && t_.y == nullptr) {
        products_.Multiply(steps, panel, from, between);
        products_.Write(t_.c + panel * t_.c_panel, t_.c_stride);
        continue;
      }
      products_.Multiply(steps, panel, kSplit ? Sums{nullptr, 0} : from,
                         between);
      products_.Write(sums, kSumsStride);
      last.FinishAll();
      last.Begin(panel, kSplit ? from : Sums{nullptr, 0}, sums);
    }
    last.FinishAll();
  }

  // Rows that lie together. They are transposed once for all panels.
  TFO_INLINE void RunColumns() {
    SetAmxShapes(upper_, lower_, kAmxDepth);
    CutRows();
    const bool in_memory = t_.y == nullptr;
    float* const c = in_memory ? t_.c : results_;
    const std::int64_t c_stride = in_memory ? t_.c_stride : kSumsStride;
    const std::int64_t c_panel = in_memory ? t_.c_panel : kSumsPanel;
    Cursor at{t_};
    bool first = true;
    do {
      int count = 0;
      for (; count < kAmxSteps && !at.Done(); ++count) {
        const E* columns[kAmxDepth];
        counts_[count] = at.Next(columns, rows_[count]);
        for (int plane = 0; plane < kPlanes<E>; ++plane) {
          for (int half = 0; half < kHalves; ++half) {
            TransposeA(columns, plane * t_.a_plane, counts_[count], half,
                       a_ + (count * kPlanes<E> + plane) * kRegistersOfA);
          }
        }
      }
      const bool last = at.Done();
      for (int panel = 0; panel < t_.num_panels; ++panel) {
        const In b{t_.b + panel * t_.b_panel, t_.b_plane};
        const auto steps = [&](int, auto step) TFO_INLINE_LAMBDA {
          for (int i = 0; i < count; ++i) {
            Operands o{{a_ + i * kPlanes<E> * kRegistersOfA, kRegistersOfA},
                       kAmxDepth,
                       upper_ * kAmxDepth,
                       b + rows_[i][0],
                       t_.b_stride,
                       kAmxDepth};
            if (counts_[i] < kAmxDepth || t_.b_offset != nullptr) {
              o.b = CopyB(b, rows_[i], counts_[i], kAmxDepth);
              o.b_pitch = kSumsStride;
            }
            step(o);
          }
        };
        float* const sums = c + panel * c_panel;
        const Sums from = first ? StartOf(panel) : Sums{sums, c_stride};
        Finisher<decltype(steps)> finisher{*this, steps};
        if constexpr (kSplit) {
          products_.Multiply(steps, panel, {nullptr, 0}, [] {});
          products_.Write(sums_, kSumsStride);
          finisher.Begin(panel, from, sums_);
          if (!last) finisher.WriteTo(sums, c_stride);
        } else {
          products_.Multiply(steps, panel, from, [] {});
          products_.Write(sums, c_stride);
          if (last && !in_memory) finisher.Begin(panel, {nullptr, 0}, sums);
        }
        finisher.FinishAll();
      }
      first = false;
    } while (!at.Done());
  }

 private:
  using Products = AmxProducts<E, kHalves, kVectors>;
  using In = typename Products::In;
  using Operands = typename Products::Operands;
  using Sums = typename Products::Sums;
  static constexpr bool kSplit = kPlanes<E> > 1;
  // Operands that the registers of a hold, and the steps whose operands are
  // transposed at a time: half of the first-level cache.
  static constexpr std::int64_t kRegistersOfA = kHalves * kAmxRows * kAmxDepth;
  static constexpr int kAmxSteps = kSplit ? 4 : 8;
  static constexpr int kBlockRows = 8;
  // Finished sums.
  static constexpr std::int64_t kSumsStride = kVectors * kAmxColumns;
  static constexpr std::int64_t kSumsPanel = kHalves * kAmxRows * kSumsStride;

  TFO_INLINE Sums StartOf(int panel) const {
    if (t_.start == nullptr) return {nullptr, 0};
    return {t_.start + panel * t_.c_panel, t_.start_stride};
  }

  // Rows that are finished together; `shift` is their place in y beside that of
  // the tile's rows.
  struct RowBlock {
    int first, count;
    std::int64_t shift;
  };

  // Goes through the depth of a tile whose rows lie together.
  struct Cursor {
    const TileOperands<E>& t;
    std::int64_t b = 0, segment = 0, k = 0;

    TFO_INLINE bool Done() {
      while (segment < t.num_segments && t.segments[segment].length == k) {
        ++segment;
        k = 0;
      }
      return segment == t.num_segments;
    }
    // The next columns of a and offsets of rows of b, up to kAmxDepth; how many
    // there are.
    TFO_INLINE int Next(const E** columns, std::int64_t* rows) {
      int count = 0;
      while (count < kAmxDepth && !Done()) {
        const Segment& s = t.segments[segment];
        if (k == 0 && t.b_offset != nullptr) b = t.b_offset[segment];
        const std::int64_t end = Min(s.length, k + kAmxDepth - count);
        for (; k < end; ++k, ++count, b += t.b_stride) {
          columns[count] = t.a + s.offset + k * t.k_stride;
          rows[count] = b;
        }
      }
      return count;
    }
  };

  // A step of `k` operands, fewer than the registers are wide, which end a
  // segment. Its columns of a are copied once, if there is room for them. Zero
  // times what is no number is mended with the rest of that.
  TFO_INLINE Operands PadStep(std::int64_t segment, In a, In b, std::int64_t k,
                              std::int64_t depth) {
    const std::int64_t place = Min(segment, kAmxSteps - 1);
    const In padded{a_ + place * kPlanes<E> * kRegistersOfA, kRegistersOfA};
    if (segment >= num_padded_) {
      num_padded_ = Min(segment + 1, kAmxSteps - 1);
      const auto some = static_cast<__mmask16>((1u << k) - 1);
      for (int plane = 0; plane < kPlanes<E>; ++plane) {
        E* const to = a_ + (place * kPlanes<E> + plane) * kRegistersOfA;
        for (int i = 0; i < upper_ + lower_; ++i) {
          _mm512_store_si512(
              to + i * kAmxDepth,
              _mm512_maskz_loadu_epi32(some, a[plane] + t_.row_offset[i]));
        }
      }
    }
    const std::int64_t to_lower = upper_ * kAmxDepth;
    if (kSplit && t_.b_goes_on)
      return {padded, kAmxDepth, to_lower, b, t_.b_stride, k};
    std::int64_t rows[kAmxDepth];
    for (int i = 0; i < k; ++i) rows[i] = i * t_.b_stride;
    return {padded,      kAmxDepth,
            to_lower,    CopyB(b, rows, static_cast<int>(k), depth),
            kSumsStride, k};
  }

  // `count` rows of b, and zero behind them.
  TFO_INLINE In CopyB(In b, const std::int64_t* rows, int count,
                      std::int64_t depth) {
    constexpr std::int64_t kPlane = kAmxDepth * kSumsStride;
    for (int plane = 0; plane < kPlanes<E>; ++plane) {
      E* const to = b_ + plane * kPlane;
      for (int i = 0; i < depth; ++i) {
        for (int j = 0; j < kSumsStride; j += kAmxColumns) {
          Store(to + i * kSumsStride + j,
                i < count ? Load(b[plane] + rows[i] + j) : Vec<float>{});
        }
      }
    }
    return {b_, kPlane};
  }

  // The rows of one half from `count` of their columns, and zero behind them.
  TFO_INLINE void TransposeA(const E* const* columns, std::int64_t plane,
                             int count, int half, E* to) {
    const int rows = half == 0 ? upper_ : lower_;
    const auto some = static_cast<__mmask16>((1u << rows) - 1);
    Vec<float> v[kAmxDepth];
#pragma GCC unroll 16
    for (int i = 0; i < kAmxDepth; ++i) {
      v[i] = i < count ? (Vec<float>)_mm512_maskz_loadu_ps(
                             some, columns[i] + plane + half * upper_)
                       : Vec<float>{};
    }
    Transpose<float>(v);
#pragma GCC unroll 16
    for (int i = 0; i < kAmxRows; ++i)
      Store(to + (half * upper_ + i) * kAmxDepth, v[i]);
  }

  // Cuts the rows that are wanted into blocks that fit the vector registers.
  TFO_INLINE void CutRows() {
    const RowRun all{0, upper_ + lower_, 0};
    const bool in_runs = t_.y != nullptr && t_.num_runs > 0;
    const int num_runs = in_runs ? t_.num_runs : 1;
    num_blocks_ = 0;
    for (int i = 0; i < num_runs; ++i) {
      const RowRun& run = in_runs ? t_.runs[i] : all;
      const std::int64_t shift = run.offset - run.first * t_.y_stride;
      int row = run.first, rest = run.count;
      for (int size = kBlockRows; size > 0; size /= 2) {
        for (; rest >= size; rest -= size, row += size)
          blocks_[num_blocks_++] = {row, size, shift};
      }
    }
  }

  template <int kRows>
  static TFO_INLINE void LoadSums(const float* from, std::int64_t stride,
                                  Vec<float> (&sum)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        sum[i][j] = Load(from + i * stride + j * kAmxColumns);
    }
  }

  // Finishes a panel's sums, block by block. Adds them to `from`, and writes
  // them to c if there is one.
  template <class Steps>
  struct Finisher {
    AmxTile& tile;
    const Steps& steps;
    int panel = 0, block = 1 << 30;
    Sums from{};
    float* sums = nullptr;
    float* c = nullptr;
    std::int64_t c_stride = 0;

    TFO_INLINE void Begin(int the_panel, const Sums& start, float* the_sums) {
      panel = the_panel;
      from = start;
      sums = the_sums;
      block = 0;
    }
    TFO_INLINE void WriteTo(float* to, std::int64_t stride) {
      c = to;
      c_stride = stride;
    }
    TFO_INLINE void FinishSome() {
      if (block < tile.num_blocks_) FinishBlock();
    }
    TFO_INLINE void FinishAll() {
      while (block < tile.num_blocks_) FinishBlock();
    }

   private:
    __attribute__((noinline)) void FinishBlock() {
      const RowBlock& rows = tile.blocks_[block++];
      switch (rows.count) {
        case 8:
          return FinishRows<8>(rows);
        case 4:
          return FinishRows<4>(rows);
        case 2:
          return FinishRows<2>(rows);
        default:
          return FinishRows<1>(rows);
      }
    }

    template <int kRows>
    TFO_INLINE void FinishRows(const RowBlock& rows) {
      const int row = rows.first;
      Vec<float> sum[kRows][kVectors];
      LoadSums<kRows>(sums + row * kSumsStride, kSumsStride, sum);
      if constexpr (kSplit) {
        __mmask16 none = 0;
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) {
            none |= _mm512_cmp_ps_mask((__m512)sum[i][j], (__m512)sum[i][j],
                                       _CMP_UNORD_Q);
          }
        }
        if (__builtin_expect(none != 0, false)) {
          tile.MultiplyWhole(steps, panel, row, kRows, sums);
          Vec<float> whole[kRows][kVectors];
          LoadSums<kRows>(sums + row * kSumsStride, kSumsStride, whole);
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j)
              sum[i][j] = sum[i][j] == sum[i][j] ? sum[i][j] : whole[i][j];
          }
        }
      }
      if (from.data != nullptr) {
        const float* start = from.data + row * from.stride;
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i, start += from.stride) {
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j)
            sum[i][j] += Load(start + j * kAmxColumns);
        }
      }
      if (c == nullptr) {
        return Finish<E, kRows, kVectors>(tile.t_, row, panel, sum, rows.shift);
      }
      float* to = c + row * c_stride;
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i, to += c_stride) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j)
          Store(to + j * kAmxColumns, sum[i][j]);
      }
    }
  };

  // The products of `rows` rows from one on, without parts. An infinite number
  // is its first part alone.
  template <class Steps>
  __attribute__((noinline, cold)) void MultiplyWhole(const Steps& steps,
                                                     int panel, int first,
                                                     int rows, float* sums) {
    Zero(sums + first * kSumsStride, rows * kSumsStride);
    // Of pairs: the first number, or the second.
    const auto whole = [](In from, bool second) {
      Vec<float> sum{};
      for (int plane = 0; plane < kPlanes<E>; ++plane) {
        const UintVec pair = BitCast<UintVec>(Load(from[plane]));
        const Vec<float> part =
            BitCast<Vec<float>>(second ? pair & 0xffff0000u : pair << 16);
        const Vec<float> more = sum + part;
        sum = plane == 0                                             ? part
              : (BitCast<UintVec>(sum) & 0x7fffffffu) == 0x7f800000u ? sum
                                                                     : more;
      }
      return sum;
    };
    const auto add = [&](const Operands& o) {
      for (int half = 0; half < 2; ++half) {
        for (int i = first; i < first + rows; ++i) {
          alignas(64) E row[kPlanes<E>][kAmxDepth]{};
          const std::int64_t at =
              i < upper_ ? i * o.a_pitch : o.a_lower + (i - upper_) * o.a_pitch;
          for (int plane = 0; plane < kPlanes<E>; ++plane) {
            for (int k = 0; k < o.depth; ++k)
              row[plane][k] = o.a[plane][at + k];
          }
          const Vec<float> a = whole({row[0], kAmxDepth}, half > 0);
          for (int k = 0; k < o.depth; ++k) {
            for (int j = 0; j < kSumsStride; j += kAmxColumns) {
              float* const to = sums + i * kSumsStride + j;
              Store(to,
                    Load(to) + static_cast<float>(a[k]) *
                                   whole(o.b + k * o.b_pitch + j, half > 0));
            }
          }
        }
      }
    };
    steps(panel, add);
  }

  const TileOperands<E>& t_;
  const int upper_, lower_;  // rows
  Products products_;
  // Of steps: operands that do not lie as the registers want them, where rows
  // of b are and how many. Then sums of a panel and of the one before, and
  // those of all panels that are not finished.
  alignas(64) E a_[kAmxSteps * kPlanes<E> * kRegistersOfA];
  alignas(64) E b_[kPlanes<E> * kAmxDepth * kSumsStride];
  std::int64_t rows_[kAmxSteps][kAmxDepth];
  int counts_[kAmxSteps];
  std::int64_t num_padded_ = 0;  // segments whose ends are in a_
  RowBlock blocks_[2 * kAmxRows];
  int num_blocks_ = 0;
  alignas(64) float sums_[2 * kSumsPanel];
  alignas(64) float results_[kPanelsPerCall * kSumsPanel];
};

template <class E, bool kContiguousK, int kHalves, int kVectors>
void RunAmxTileOf(const TileOperands<E>& t, int rows) {
  AmxTile<E, kHalves, kVectors> tile(t, rows);
  if constexpr (kContiguousK) {
    tile.RunRows();
  } else {
    tile.RunColumns();
  }
}

template <class E, bool kContiguousK>
TFO_INLINE void RunAmxTile(int rows, int columns, const TileOperands<E>& t) {
  const bool wide = columns > kAmxColumns;
  // Two lines take two registers, however short they are.
  const bool evenly = !kContiguousK || rows < 3 ||
                      t.row_offset[rows - 1] == (rows - 1) * t.row_offset[1];
  if (rows > kAmxRows || !evenly) {
    wide ? RunAmxTileOf<E, kContiguousK, 2, 2>(t, rows)
         : RunAmxTileOf<E, kContiguousK, 2, 1>(t, rows);
  } else {
    wide ? RunAmxTileOf<E, kContiguousK, 1, 2>(t, rows)
         : RunAmxTileOf<E, kContiguousK, 1, 1>(t, rows);
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif

#endif  // TFO_CC_CORE_AMX_TILE_H_
