// The register tile of pairs of bfloat16 on AMX: up to 2 x 2 registers of sums,
// each of 16 rows and a vector of columns.
//
// An instruction multiplies 16 operands of each row of a by as many rows of b.
// Rows of a along which operands do not follow each other are transposed first.
#ifndef TFO_CC_CORE_AMX_TILE_H_
#define TFO_CC_CORE_AMX_TILE_H_

#include "cc/core/micro_kernel.h"
#include "cc/core/parallel.h"

#if defined(__AMX_BF16__)

namespace tfo::TFO_ISA {
namespace {

constexpr int kAmxRows = 16;   // of a register
constexpr int kAmxDepth = 16;  // operands in a row of one
constexpr int kAmxColumns = kLanes<float>;

// Cache lines to ask for in a step, which takes as long as 16 or more vectors'
// multiply-adds.
constexpr int kAmxLinesPerStep = 4;

// The shapes of the registers, as the processor reads them.
struct alignas(64) AmxShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Registers of sums: of the upper rows, then of the lower ones.
enum AmxRegister : int {
  kUpperLeft,
  kUpperRight,
  kLowerLeft,
  kLowerRight,
  kUpperA,
  kLowerA,
  kLeftB,
  kRightB
};

// The compilers' intrinsics do not say that these read memory.
template <AmxRegister kTo>
TFO_INLINE void LoadAmx(const void* from, std::int64_t bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes),
                   "i"(kTo)
                   : "memory");
}
template <AmxRegister kFrom>
TFO_INLINE void StoreAmx(void* to, std::int64_t bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes),
                   "i"(kFrom)
                   : "memory");
}
template <AmxRegister kTo>
TFO_INLINE void ZeroAmx() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTo));
}
template <AmxRegister kSums, AmxRegister kA, AmxRegister kB>
TFO_INLINE void MultiplyAmx() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums),
                   "i"(kA), "i"(kB));
}

// Gives the registers their shapes, which costs as much as several steps unless
// they have them (measured: 80 ns, and nothing).
inline void SetAmxShapes(int upper, int lower, int depth) {
  AmxShapes wanted, set;
  const auto shape = [&](AmxRegister i, int rows, int operands) {
    // Registers without rows are no shape.
    wanted.rows[i] = static_cast<std::uint8_t>(rows > 0 ? rows : 1);
    wanted.row_bytes[i] =
        static_cast<std::uint16_t>(operands * sizeof(BFloat16Pair));
  };
  shape(kUpperLeft, upper, kAmxColumns);
  shape(kUpperRight, upper, kAmxColumns);
  shape(kLowerLeft, lower, kAmxColumns);
  shape(kLowerRight, lower, kAmxColumns);
  shape(kUpperA, upper, depth);
  shape(kLowerA, lower, depth);
  shape(kLeftB, depth, kAmxColumns);
  shape(kRightB, depth, kAmxColumns);
  __asm__ volatile("sttilecfg %0" : "=m"(set));
  if (_mm512_cmpneq_epi64_mask(_mm512_load_si512(&set),
                               _mm512_load_si512(&wanted)) != 0) {
    __asm__ volatile("ldtilecfg %0" ::"m"(wanted));
  }
}

// A tile of kHalves registers of rows and kVectors of columns.
template <int kHalves, int kVectors>
class AmxTile {
 public:
  using E = BFloat16Pair;

  AmxTile(const TileOperands<E>& t, int rows)
      : t_(t),
        upper_((rows + kHalves - 1) / kHalves),
        lower_(rows - upper_),
        line_(t.prefetch->lines),
        last_line_(line_ + t.prefetch->count) {}

  // Rows along which operands follow each other.
  TFO_INLINE void RunRows() {
    const std::int64_t pitch = t_.row_offset[1 % (upper_ + lower_)];
    const std::int64_t length = t_.num_segments > 0 ? t_.segments[0].length : 1;
    // Equal steps, so that there is no rest.
    const std::int64_t depth =
        Max(CeilDiv(length, Max(CeilDiv(length, kAmxDepth), 1)), 1);
    SetAmxShapes(upper_, lower_, static_cast<int>(depth));
    for (int panel = 0; panel < t_.num_panels; ++panel) {
      Start(t_.start, t_.start_stride, panel * t_.c_panel);
      const E* const first_b = t_.b + panel * t_.b_panel;
      const E* b = first_b;
      for (std::int64_t s = 0; s < t_.num_segments; ++s) {
        const E* a = t_.a + t_.segments[s].offset;
        if (t_.b_offset != nullptr) b = first_b + t_.b_offset[s];
        std::int64_t k = t_.segments[s].length;
        for (; k >= depth; k -= depth, a += depth, b += depth * t_.b_stride)
          Step(a, pitch, b, t_.b_stride);
        if (k > 0) {
          StepOver(a, pitch, b, static_cast<int>(k), static_cast<int>(depth));
          b += k * t_.b_stride;
        }
      }
      if (t_.y == nullptr) {
        Write(t_.c + panel * t_.c_panel, t_.c_stride);
      } else {
        Write(sums_, kSumsStride);
        FinishPanel(panel, sums_);
      }
    }
  }

  // Rows that lie together. They are transposed once for all panels.
  TFO_INLINE void RunColumns() {
    SetAmxShapes(upper_, lower_, kAmxDepth);
    const bool in_memory = t_.y == nullptr;
    float* const c = in_memory ? t_.c : sums_;
    const std::int64_t c_stride = in_memory ? t_.c_stride : kSumsStride;
    const std::int64_t c_panel = in_memory ? t_.c_panel : kSumsPanel;
    Cursor at{t_};
    bool first = true;
    do {
      int steps = 0;
      for (; steps < kAmxSteps && !at.Done(); ++steps) {
        const E* columns[kAmxDepth];
        counts_[steps] = at.Next(columns, rows_[steps]);
        for (int half = 0; half < kHalves; ++half)
          TransposeA(columns, counts_[steps], half, a_ + steps * kRegistersOfA);
      }
      for (int panel = 0; panel < t_.num_panels; ++panel) {
        first ? Start(t_.start, t_.start_stride, panel * t_.c_panel)
              : Start(c, c_stride, panel * c_panel);
        for (int step = 0; step < steps; ++step) {
          const E* b = t_.b + panel * t_.b_panel + rows_[step][0];
          std::int64_t b_pitch = t_.b_stride;
          if (counts_[step] < kAmxDepth || t_.b_offset != nullptr) {
            CopyB(t_.b + panel * t_.b_panel, rows_[step], counts_[step],
                  kAmxDepth);
            b = b_;
            b_pitch = kVectors * kAmxColumns;
          }
          Step(a_ + step * kRegistersOfA, kAmxDepth, b, b_pitch);
        }
        Write(c + panel * c_panel, c_stride);
      }
      first = false;
    } while (!at.Done());
    for (int panel = 0; !in_memory && panel < t_.num_panels; ++panel)
      FinishPanel(panel, sums_ + panel * kSumsPanel);
  }

 private:
  // Operands that the registers of a hold, and the steps whose operands are
  // transposed at a time: half of the first-level cache.
  static constexpr std::int64_t kRegistersOfA = kHalves * kAmxRows * kAmxDepth;
  static constexpr int kAmxSteps = 8;
  // Finished sums.
  static constexpr std::int64_t kSumsStride = kVectors * kAmxColumns;
  static constexpr std::int64_t kSumsPanel = kHalves * kAmxRows * kSumsStride;

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

  // Adds the products of as many operands as the registers of a are wide.
  TFO_INLINE void Step(const E* a, std::int64_t a_pitch, const E* b,
                       std::int64_t b_pitch) {
    const std::int64_t a_bytes = a_pitch * sizeof(E),
                       b_bytes = b_pitch * sizeof(E);
    for (int i = 0; i < kAmxLinesPerStep && line_ < last_line_; ++i)
      __builtin_prefetch(*line_++, 0, 2);
    LoadAmx<kLeftB>(b, b_bytes);
    LoadAmx<kUpperA>(a, a_bytes);
    MultiplyAmx<kUpperLeft, kUpperA, kLeftB>();
    if constexpr (kVectors > 1) {
      LoadAmx<kRightB>(b + kAmxColumns, b_bytes);
      MultiplyAmx<kUpperRight, kUpperA, kRightB>();
    }
    if constexpr (kHalves > 1) {
      LoadAmx<kLowerA>(a + upper_ * a_pitch, a_bytes);
      MultiplyAmx<kLowerLeft, kLowerA, kLeftB>();
      if constexpr (kVectors > 1) MultiplyAmx<kLowerRight, kLowerA, kRightB>();
    }
  }

  // A step of `k` operands, fewer than the registers are wide.
  void StepOver(const E* a, std::int64_t a_pitch, const E* b, int k,
                int depth) {
    const auto some = static_cast<__mmask16>((1u << k) - 1);
    for (int i = 0; i < upper_ + lower_; ++i) {
      _mm512_store_si512(a_ + i * kAmxDepth,
                         _mm512_maskz_loadu_epi32(some, a + i * a_pitch));
    }
    std::int64_t rows[kAmxDepth];
    for (int i = 0; i < k; ++i) rows[i] = i * t_.b_stride;
    CopyB(b, rows, k, depth);
    Step(a_, kAmxDepth, b_, kVectors * kAmxColumns);
  }

  // `count` rows of b, and zero behind them.
  TFO_INLINE void CopyB(const E* b, const std::int64_t* rows, int count,
                        int depth) {
    for (int i = 0; i < depth; ++i) {
      for (int j = 0; j < kVectors * kAmxColumns; j += kAmxColumns)
        Store(b_ + i * kVectors * kAmxColumns + j,
              i < count ? Load(b + rows[i] + j) : Vec<float>{});
    }
  }

  // The rows of one half from `count` of their columns, and zero behind them.
  TFO_INLINE void TransposeA(const E* const* columns, int count, int half,
                             E* to) {
    const int rows = half == 0 ? upper_ : lower_;
    const auto some = static_cast<__mmask16>((1u << rows) - 1);
    Vec<float> v[kAmxDepth];
#pragma GCC unroll 16
    for (int i = 0; i < kAmxDepth; ++i) {
      v[i] = i < count ? (Vec<float>)_mm512_maskz_loadu_ps(
                             some, columns[i] + half * upper_)
                       : Vec<float>{};
    }
    Transpose<float>(v);
#pragma GCC unroll 16
    for (int i = 0; i < kAmxRows; ++i)
      Store(to + (half * upper_ + i) * kAmxDepth, v[i]);
  }

  TFO_INLINE void Start(const float* from, std::int64_t stride,
                        std::int64_t offset) {
    if (from == nullptr) {
      ZeroAmx<kUpperLeft>();
      if constexpr (kVectors > 1) ZeroAmx<kUpperRight>();
      if constexpr (kHalves > 1) ZeroAmx<kLowerLeft>();
      if constexpr (kHalves * kVectors > 2) ZeroAmx<kLowerRight>();
      return;
    }
    from += offset;
    const std::int64_t bytes = stride * sizeof(float);
    const float* const lower = from + upper_ * stride;
    LoadAmx<kUpperLeft>(from, bytes);
    if constexpr (kVectors > 1) LoadAmx<kUpperRight>(from + kAmxColumns, bytes);
    if constexpr (kHalves > 1) LoadAmx<kLowerLeft>(lower, bytes);
    if constexpr (kHalves * kVectors > 2)
      LoadAmx<kLowerRight>(lower + kAmxColumns, bytes);
  }

  TFO_INLINE void Write(float* to, std::int64_t stride) const {
    const std::int64_t bytes = stride * sizeof(float);
    float* const lower = to + upper_ * stride;
    StoreAmx<kUpperLeft>(to, bytes);
    if constexpr (kVectors > 1) StoreAmx<kUpperRight>(to + kAmxColumns, bytes);
    if constexpr (kHalves > 1) StoreAmx<kLowerLeft>(lower, bytes);
    if constexpr (kHalves * kVectors > 2)
      StoreAmx<kLowerRight>(lower + kAmxColumns, bytes);
  }

  TFO_INLINE void FinishPanel(int panel, const float* sums) const {
    const int rows = upper_ + lower_;
    int row = 0;
    for (; row + 8 <= rows; row += 8) FinishRows<8>(panel, row, sums);
    if (rows & 4) row = FinishRows<4>(panel, row, sums);
    if (rows & 2) row = FinishRows<2>(panel, row, sums);
    if (rows & 1) FinishRows<1>(panel, row, sums);
  }

  template <int kRows>
  TFO_INLINE int FinishRows(int panel, int row, const float* sums) const {
    Vec<float> sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        sum[i][j] = Load(sums + (row + i) * kSumsStride + j * kAmxColumns);
    }
    Finish<E, kRows, kVectors>(t_, row, panel, sum);
    return row + kRows;
  }

  const TileOperands<E>& t_;
  const int upper_, lower_;  // rows
  const void* const* line_;
  const void* const* const last_line_;
  // Of steps: operands that do not lie as the registers want them, where rows
  // of b are and how many. Then finished sums.
  alignas(64) E a_[kAmxSteps * kRegistersOfA];
  alignas(64) E b_[kAmxDepth * kVectors * kAmxColumns];
  std::int64_t rows_[kAmxSteps][kAmxDepth];
  int counts_[kAmxSteps];
  alignas(64) float sums_[kPanelsPerCall * kSumsPanel];
};

template <bool kContiguousK, int kHalves, int kVectors>
void RunAmxTileOf(const TileOperands<BFloat16Pair>& t, int rows) {
  AmxTile<kHalves, kVectors> tile(t, rows);
  if constexpr (kContiguousK) {
    tile.RunRows();
  } else {
    tile.RunColumns();
  }
}

template <bool kContiguousK>
TFO_INLINE void RunAmxTile(int rows, int columns,
                           const TileOperands<BFloat16Pair>& t) {
  const bool wide = columns > kAmxColumns;
  if (rows > kAmxRows) {
    wide ? RunAmxTileOf<kContiguousK, 2, 2>(t, rows)
         : RunAmxTileOf<kContiguousK, 2, 1>(t, rows);
  } else {
    wide ? RunAmxTileOf<kContiguousK, 1, 2>(t, rows)
         : RunAmxTileOf<kContiguousK, 1, 1>(t, rows);
  }
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif

#endif  // TFO_CC_CORE_AMX_TILE_H_
