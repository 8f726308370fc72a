// Quantized products of few rows: the time is that of reading the weights,
// which are multiplied as they come from memory. Nothing is packed.
#ifndef TFO_CC_CORE_QUANTIZED_FEW_ROWS_H_
#define TFO_CC_CORE_QUANTIZED_FEW_ROWS_H_

#include "cc/core/counts.h"
#include "cc/core/quantized_rows.h"

namespace tfo::TFO_ISA {
namespace {

// Rows whose sums fill the registers, and vectors of sums that do.
constexpr int kIntegerRows = 4;
constexpr int kIntegerSums = TFO_VECTOR_BYTES == 64 ? 16 : 8;
// Columns of a task, where there are enough of these: neighbours, which lie on
// the same pages.
constexpr int64_t kMostIntegerColumns = 512, kLeastIntegerColumns = 128;
constexpr int64_t kIntegerTasksOfWorker = 4;
// Of the depth, which all columns of a task go through in turn.
constexpr int64_t kIntegerDepth = 256;
// Rows of the weights that are fetched ahead, into the second-level cache,
// which takes more requests at a time (measured on a Zen 4, one row times
// 4096x11008: 0.66 of the time, with two threads 0.8; one line of each row into
// the first does nothing).
constexpr int64_t kIntegersAhead = 64;

// More rows are worth packing for.
constexpr int64_t kFewQuantizedRows = 16;

// Columns whose elements are in as many vectors as a group has elements.
constexpr int kMixedColumns = kGroupSize * kLanes<Int>;

// Groups of kMixedColumns neighbouring columns from as many rows as a group has
// elements: those behind the last of `rows` are anything. The columns are
// mixed, see UnmixColumns.
template <bool kWhole>
TFO_INLINE void LoadMixed(const std::int8_t* from, int64_t pitch, int64_t rows,
                          int64_t columns, Vec<Int> (&groups)[kGroupSize]) {
  ElementVec row[kGroupSize];
#pragma GCC unroll 4
  for (int i = 0; i < kGroupSize; ++i) {
    const std::int8_t* const at = from + Min(i, rows - 1) * pitch;
    row[i] = kWhole ? LoadElements(at) : LoadSomeElements(at, columns);
  }
  InterleaveElements(row, groups);
#pragma GCC unroll 4
  for (int i = 0; i < kGroupSize; ++i)
    groups[i] ^= static_cast<Int>(kGroupOffsets);
}

// Of the sums of mixed columns: a part of 128 bits holds those of four
// neighbours, which the same part of the next vector goes on with.
TFO_INLINE void UnmixColumns(Int* sums) {
  constexpr int kParts = TFO_VECTOR_BYTES / 16;
  Int mixed[kMixedColumns];
  __builtin_memcpy(mixed, sums, sizeof(mixed));
  for (int v = 0; v < kGroupSize; ++v) {
    for (int part = 0; part < kParts; ++part) {
      __builtin_memcpy(sums + (part * kGroupSize + v) * 4,
                       mixed + (v * kParts + part) * 4, 16);
    }
  }
}

template <class T>
class FewQuantizedRows {
 public:
  FewQuantizedRows(const QuantizedMatMulArgs& args, const QuantizedRows& a,
                   const QuantizedOutput<T>& output, int workers)
      : args_(args), a_(a), output_(output), groups_(args.rows, kIntegerRows) {
    const int64_t tasks = kIntegerTasksOfWorker * workers;
    columns_ = Min(CeilDiv(CeilDiv(args.columns, tasks), kLeastIntegerColumns) *
                       kLeastIntegerColumns,
                   kMostIntegerColumns);
  }

  int64_t tasks() const { return CeilDiv(args_.columns, columns_); }
  int64_t columns() const { return columns_; }
  // What a worker has room for.
  int64_t sums() const { return args_.rows * columns_; }

  // Computes the columns of a task.
  void operator()(int64_t task, Int* sums) const {
    const int64_t first = task * columns_;
    const int64_t n = Min(args_.columns - first, columns_);
    args_.transpose_b ? DotColumns(first, n, sums) : AddColumns(first, n, sums);
    Int panel[kIntegerRows * kSumColumns];
    for (int64_t group = 0; group < groups_.count(); ++group) {
      const int64_t row = groups_.Begin(group);
      const int rows = static_cast<int>(groups_.Size(group));
      for (int64_t j = 0; j < n; j += kSumColumns) {
        for (int i = 0; i < rows; ++i) {
          __builtin_memcpy(panel + i * kSumColumns,
                           sums + (row + i) * columns_ + j,
                           kSumColumns * sizeof(Int));
        }
        output_.Write(row, rows, first + j,
                      static_cast<int>(Min(n - j, kSumColumns)), panel);
      }
    }
    output_.Finish();
  }

 private:
  static_assert(kLeastIntegerColumns % kMixedColumns == 0 &&
                kLeastIntegerColumns % kSumColumns == 0 &&
                kIntegerDepth % kGroupSize == 0 &&
                kIntegerRows <= kTileRows<IntegerGroup> &&
                kIntegerSums >= kGroupSize * kIntegerRows);

  // Some of the weights: rows [k, k + depth), n columns.
  struct Block {
    const std::int8_t* data;
    int64_t k, depth, n;
  };

  const IntegerGroup* Row(int64_t row, int64_t k) const {
    return a_.groups + row * a_.pitch + k / kGroupSize;
  }

  // Of weights [depth, columns].
  void AddColumns(int64_t first, int64_t n, Int* sums) const {
    __builtin_memset(sums, 0,
                     static_cast<std::size_t>(this->sums()) * sizeof(Int));
    constexpr int64_t kWide = kIntegerSums / kGroupSize;
    for (int64_t k = 0; k < args_.depth; k += kIntegerDepth) {
      const int64_t depth = Min(args_.depth - k, kIntegerDepth);
      const std::int8_t* const data = args_.b + k * args_.columns + first;
      for (int64_t j = 0; j < n;) {
        // As many as one row leaves registers for: what is read of them for
        // other rows is in the first cache.
        const int64_t columns = Min(n - j, kWide * kMixedColumns);
        AddBlock({data + j, k, depth, columns}, sums + j);
        j += columns;
      }
    }
    for (int64_t i = 0; i < args_.rows; ++i) {
      for (int64_t j = 0; j < n; j += kMixedColumns)
        UnmixColumns(sums + i * columns_ + j);
    }
  }

  void AddBlock(const Block& b, Int* sums) const {
    for (int64_t group = 0; group < groups_.count(); ++group) {
      const int64_t row = groups_.Begin(group);
      WithCount<kIntegerRows>(groups_.Size(group), [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        constexpr int kBlocks = kIntegerSums / (kGroupSize * kRows);
        Int* const to = sums + row * columns_;
        int64_t j = 0;
        for (; j + kBlocks * kMixedColumns <= b.n; j += kBlocks * kMixedColumns)
          AddTile<kRows, kBlocks, true>(b, j, row, to + j);
        for (; j + kMixedColumns <= b.n; j += kMixedColumns)
          AddTile<kRows, 1, true>(b, j, row, to + j);
        if (j < b.n) AddTile<kRows, 1, false>(b, j, row, to + j);
      });
    }
  }

  // Adds the products of kRows rows to the sums of neighbouring columns.
  template <int kRows, int kBlocks, bool kWhole>
  void AddTile(const Block& b, int64_t column, int64_t row, Int* to) const {
    constexpr int kVectors = kBlocks * kGroupSize;
    Vec<Int> sums[kRows][kVectors];
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v)
        sums[i][v] = Load(to + i * columns_ + v * kLanes<Int>);
    }
    const std::int8_t* from = b.data + column;
    const IntegerGroup* a = Row(row, b.k);
    const auto add = [&](int64_t rows) TFO_INLINE_LAMBDA {
      Vec<Int> x[kRows];
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) x[i] = Splat(a[i * a_.pitch]);
#pragma GCC unroll 8
      for (int block = 0; block < kBlocks; ++block) {
        Vec<Int> groups[kGroupSize];
        LoadMixed<kWhole>(from + block * kMixedColumns, args_.columns, rows,
                          b.n - column, groups);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int v = 0; v < kGroupSize; ++v) {
            Vec<Int>& sum = sums[i][block * kGroupSize + v];
            sum = Accumulate(sum, x[i], groups[v]);
          }
        }
      }
    };
    int64_t k = 0;
    for (; k + kGroupSize <= b.depth; k += kGroupSize) {
#pragma GCC unroll 4
      for (int i = 0; i < kGroupSize; ++i) {
        const std::int8_t* const ahead =
            from + (kIntegersAhead + i) * args_.columns;
#pragma GCC unroll 4
        for (int line = 0; line < kBlocks * kMixedColumns; line += 64)
          __builtin_prefetch(ahead + line, 0, 2);
      }
      add(kGroupSize);
      from += kGroupSize * args_.columns;
      ++a;
    }
    if (k < b.depth) add(b.depth - k);
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v)
        Store(to + i * columns_ + v * kLanes<Int>, sums[i][v]);
    }
  }

  // Of weights [columns, depth].
  void DotColumns(int64_t first, int64_t n, Int* sums) const {
    for (int64_t group = 0; group < groups_.count(); ++group) {
      const int64_t row = groups_.Begin(group);
      WithCount<kIntegerRows>(groups_.Size(group), [&](auto count) {
        constexpr int kRows = decltype(count)::value;
        constexpr int kCount = kRows <= 2 ? 4 : 2;
        Int* const to = sums + row * columns_;
        int64_t j = 0;
        for (; j + kCount <= n; j += kCount)
          Dot<kRows, kCount>(first + j, row, to + j);
        for (; j < n; ++j) Dot<kRows, 1>(first + j, row, to + j);
      });
    }
  }

  template <int kRows, int kCount>
  void Dot(int64_t column, int64_t row, Int* to) const {
    constexpr int64_t kTogether = kGroupSize * kLanes<Int>;
    const std::int8_t* const b = args_.b + column * args_.depth;
    const IntegerGroup* const a = Row(row, 0);
    Vec<Int> sums[kRows][kCount]{};
    for (int64_t k = 0; k < args_.depth; k += kTogether) {
      Vec<Int> q[kCount];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j)
        q[j] = LoadColumnOfGroups(b + j * args_.depth + k, args_.depth - k);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        Vec<Int> x;
        __builtin_memcpy(&x, a + i * a_.pitch + k / kGroupSize, sizeof(x));
#pragma GCC unroll 4
        for (int j = 0; j < kCount; ++j)
          sums[i][j] = Accumulate(sums[i][j], x, q[j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kCount; ++j) {
        std::uint32_t sum = 0;
        for (int l = 0; l < kLanes<Int>; ++l)
          sum += static_cast<std::uint32_t>(sums[i][j][l]);
        to[i * columns_ + j] = static_cast<Int>(sum);
      }
    }
  }

  const QuantizedMatMulArgs& args_;
  const QuantizedRows a_;
  const QuantizedOutput<T>& output_;
  const EvenParts groups_;
  int64_t columns_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_QUANTIZED_FEW_ROWS_H_
