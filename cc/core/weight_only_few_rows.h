// Products of few rows with quantized weights: the time is that of reading
// these, which is done once, and no number that they stand for is written.
//
// Integers of a group are summed up less their zero, and the sum is scaled.
#ifndef TFO_CC_CORE_WEIGHT_ONLY_FEW_ROWS_H_
#define TFO_CC_CORE_WEIGHT_ONLY_FEW_ROWS_H_

#include "cc/core/block_product.h"
#include "cc/core/counts.h"
#include "cc/core/dequantize.h"
#include "cc/core/epilogue.h"

namespace tfo::TFO_ISA {
namespace {

// Rows whose sums fill the registers, and the vectors of columns beside them:
// of one or two rows twice as many, which are whole cache lines.
constexpr int kWeightRows = 4;
constexpr int kWeightVectors = TFO_VECTOR_BYTES == 64 ? 4 : 2;
constexpr int kWideRows = 2;
// Columns of a task, where there are enough of these: neighbours, which lie on
// the same pages.
constexpr std::int64_t kMostWeightColumns = 512, kLeastWeightColumns = 128;
constexpr std::int64_t kWeightTasksOfWorker = 4;
// More rows are worth writing the numbers for.
constexpr std::int64_t kFewWeightRows = 16;

// a as numbers, with zeros behind each row.
struct RowsOfRuns {
  float* data;  // [rows, pitch]
  std::int64_t rows, pitch;
  WeightRuns runs;

  const float* Row(std::int64_t i, std::int64_t k) const {
    return data + i * pitch + k;
  }
};

// False when scratch memory ran out.
template <class T>
bool Prepare(const WeightOnlyMatMulArgs& args, const WeightRuns& runs,
             const Scratch& scratch, RowsOfRuns* out) {
  constexpr std::int64_t lanes = kLanes<float>;
  const std::int64_t depth = args.weights.depth;
  const std::int64_t pitch = CeilDiv(depth, lanes) * lanes;
  float* const data = scratch.Allocate<float>(args.rows * pitch);
  if (data == nullptr) return false;
  for (std::int64_t i = 0; i < args.rows; ++i) {
    const T* const from = static_cast<const T*>(args.a) + i * depth;
    for (std::int64_t k = 0; k < depth; k += lanes) {
      const int n = static_cast<int>(Min(depth - k, lanes));
      Store(data + i * pitch + k,
            n == lanes ? LoadAs(from + k) : LoadAsPartial(from + k, n));
    }
  }
  *out = {data, args.rows, pitch, runs};
  return true;
}

// Where n columns of a run's integers are.
struct IntegerBlock {
  const std::uint8_t* numbers;
  std::int64_t pitch;  // bytes from one row of memory to the next
  std::int64_t column, n;
  std::int64_t end;          // the row of memory behind the last
  const std::uint8_t* next;  // what is read after that

  // What is read some rows behind row i of memory, into the second-level cache
  // (measured on a Zen 4, one row times 4096x11008 of 8 bits: 0.58 of the
  // time).
  template <Packing kPacking, int kVectors>
  TFO_INLINE void Fetch(std::int64_t i) const {
    constexpr bool kAlong = kPacking == Packing::kAlongRows;
    constexpr std::int64_t kBlock = kVectors * kLanes<float>;
    const std::int64_t ahead = i + kWeightsAhead;
    const std::uint8_t* const at =
        ahead < end ? numbers + ahead * pitch + (kAlong ? column / 2 : column)
                    : next + (ahead - end) * pitch;
    for (std::int64_t line = 0; line < (kAlong ? kBlock / 2 : kBlock);
         line += 64)
      __builtin_prefetch(at + line, 0, 2);
  }
};

// Adds a run's integers of [depth, columns], less their zeros, times kRows rows
// of a to the sums.
template <Packing kPacking, bool kSigned, int kRows, int kVectors, bool kWhole>
TFO_INLINE void AddRun(const IntegerBlock& b, const RowsOfRuns& a,
                       std::int64_t row, const WeightRun& run,
                       const Vec<float> (&zeros)[kVectors],
                       Vec<float> (&sums)[kRows][kVectors]) {
  constexpr std::int64_t lanes = kLanes<float>;
  constexpr bool kAcross = kPacking == Packing::kAcrossRows;
  const auto add = [&](std::int64_t k, auto bits) TFO_INLINE_LAMBDA {
    constexpr Bits kBits = decltype(bits)::value;
    const std::int64_t at = kAcross ? k / 2 : k;
    const std::uint8_t* const from = b.numbers + at * b.pitch;
    if constexpr (kBits != Bits::kUpper) b.Fetch<kPacking, kVectors>(at);
    Vec<float> q[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t n = kWhole ? lanes : b.n - v * lanes;
      q[v] = Vec<float>{};
      if (kWhole || n > 0) {
        q[v] = LoadIntegers<kBits, kSigned>(from, b.column + v * lanes, n) -
               zeros[v];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec<float> x = Splat(*a.Row(row + i, k));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[i][v] += x * q[v];
    }
  };
  std::int64_t k = run.begin;
  if constexpr (kAcross) {
    for (; k + 2 <= run.end; k += 2) {
      add(k, std::integral_constant<Bits, Bits::kLower>{});
      add(k + 1, std::integral_constant<Bits, Bits::kUpper>{});
    }
    if (k < run.end) add(k, std::integral_constant<Bits, Bits::kLower>{});
  } else {
    constexpr Bits kBits =
        kPacking == Packing::kNone ? Bits::kBytes : Bits::kPairs;
    for (; k < run.end; ++k) add(k, std::integral_constant<Bits, kBits>{});
  }
}

// Adds what run r contributes to some columns of kRows rows to a tile of
// `pitch` numbers a row.
template <Packing kPacking, bool kSigned, int kRows, int kVectors, bool kWhole>
void AddScaledRun(const QuantizedWeights& w, const IntegerBlock& b,
                  const RowsOfRuns& a, std::int64_t row, std::int64_t r,
                  float* tile, std::int64_t pitch) {
  constexpr std::int64_t lanes = kLanes<float>;
  const WeightRun& run = a.runs.data[r];
  const std::int64_t at = run.group * w.columns + b.column;
  const auto load = [&](const float* p, int v) TFO_INLINE_LAMBDA {
    const std::int64_t n = b.n - v * lanes;
    return kWhole || n >= lanes ? Load(p + at + v * lanes)
           : n > 0 ? LoadPartial(p + at + v * lanes, static_cast<int>(n))
                   : Vec<float>{};
  };
  Vec<float> zeros[kVectors]{}, sums[kRows][kVectors]{};
  for (int v = 0; w.zero != nullptr && v < kVectors; ++v)
    zeros[v] = load(w.zero, v);
  AddRun<kPacking, kSigned, kRows, kVectors, kWhole>(b, a, row, run, zeros,
                                                     sums);
  for (int v = 0; v < kVectors && b.n > v * lanes; ++v) {
    const Vec<float> scale = load(w.scale, v);
    for (int i = 0; i < kRows; ++i) {
      float* const to = tile + i * pitch + v * lanes;
      Store(to, Load(to) + sums[i][v] * scale);
    }
  }
}

// Sums of kRows rows with kCount columns whose integers lie in rows of memory:
// of a row each, or of one row in the lower and the upper bits.
template <Packing kPacking, bool kSigned, int kRows, int kCount>
void DotRuns(const QuantizedWeights& w, const std::uint8_t* numbers,
             std::int64_t pitch, std::int64_t column, const RowsOfRuns& a,
             std::int64_t row, float* tile, std::int64_t tile_pitch) {
  constexpr std::int64_t lanes = kLanes<float>;
  constexpr bool kAcross = kPacking == Packing::kAcrossRows;
  constexpr bool kAlong = kPacking == Packing::kAlongRows;
  constexpr std::int64_t kOfLine = kAlong ? 128 : 64;
  constexpr int kMemoryRows = kAcross ? CeilDiv(kCount, 2) : kCount;
  Vec<float> totals[kRows][kCount]{};
  for (std::int64_t r = 0; r < a.runs.count; ++r) {
    const WeightRun& run = a.runs.data[r];
    const auto at = [&](int j) { return (column + j) * w.groups + run.group; };
    Vec<float> zeros[kCount]{}, sums[kRows][kCount]{};
    for (int j = 0; w.zero != nullptr && j < kCount; ++j)
      zeros[j] = Splat(w.zero[at(j)]);
    const auto add = [&](std::int64_t k, std::int64_t n) TFO_INLINE_LAMBDA {
      if (k % kOfLine == 0) {
        // The columns that come next.
        for (int j = 0; j < kMemoryRows; ++j)
          __builtin_prefetch(numbers + (kMemoryRows + j) * pitch +
                             (kAlong ? k / 2 : k));
      }
      Vec<float> q[kCount];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) {
        if constexpr (kAcross) {
          const std::uint8_t* const from = numbers + j / 2 * pitch;
          q[j] = j % 2 == 0 ? LoadIntegers<Bits::kLower, kSigned>(from, k, n)
                            : LoadIntegers<Bits::kUpper, kSigned>(from, k, n);
        } else {
          q[j] = LoadIntegers<kAlong ? Bits::kPairs : Bits::kBytes, kSigned>(
              numbers + j * pitch, k, n);
        }
        q[j] -= zeros[j];
      }
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const Vec<float> x = Load(a.Row(row + i, k));
#pragma GCC unroll 4
        for (int j = 0; j < kCount; ++j) sums[i][j] += x * q[j];
      }
    };
    std::int64_t k = run.begin;
    for (; k + lanes <= run.end; k += lanes) add(k, lanes);
    if (k < run.end) add(k, run.end - k);
    for (int j = 0; j < kCount; ++j) {
      const float scale = w.scale[at(j)];
      for (int i = 0; i < kRows; ++i) totals[i][j] += sums[i][j] * scale;
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCount; ++j) {
      float total = 0;
      for (int l = 0; l < lanes; ++l) total += totals[i][j][l];
      tile[i * tile_pitch + j] = total;
    }
  }
}

// Columns [first, first + n) of all rows, of [depth, columns], to a tile with
// room for whole vectors: of some neighbours in the depth all columns in turn.
template <Packing kPacking, bool kSigned, bool kWide>
void AddColumns(const QuantizedWeights& w, const RowsOfRuns& a,
                std::int64_t first, std::int64_t n, float* tile,
                std::int64_t tile_pitch) {
  constexpr bool kAlong = kPacking == Packing::kAlongRows;
  constexpr bool kAcross = kPacking == Packing::kAcrossRows;
  constexpr int kRowsTogether = kWide ? kWideRows : kWeightRows;
  constexpr int kMost = kWide ? 2 * kWeightVectors : kWeightVectors;
  const std::int64_t pitch = kAlong ? CeilDiv(w.columns, 2) : w.columns;
  const EvenParts groups(a.rows, kRowsTogether);
  const auto bytes = [&](std::int64_t row, std::int64_t column) {
    return w.numbers + row * pitch + (kAlong ? column / 2 : column);
  };
  Zero(tile, a.rows * tile_pitch);
  for (std::int64_t r = 0; r < a.runs.count; ++r) {
    const WeightRun& run = a.runs.data[r];
    const std::int64_t begin = kAcross ? run.begin / 2 : run.begin;
    const std::int64_t end = kAcross ? CeilDiv(run.end, 2) : run.end;
    std::int64_t j = 0;
    const auto add = [&](auto vectors, auto whole) {
      constexpr int kVectors = decltype(vectors)::value;
      const std::int64_t next = j + kVectors * kLanes<float>;
      const IntegerBlock b{
          w.numbers, pitch,
          first + j, n - j,
          end,       next < n ? bytes(begin, first + next) : bytes(end, first)};
      for (std::int64_t group = 0; group < groups.count(); ++group) {
        const std::int64_t row = groups.Begin(group);
        WithCount<kRowsTogether>(groups.Size(group), [&](auto count) {
          AddScaledRun<kPacking, kSigned, decltype(count)::value, kVectors,
                       decltype(whole)::value>(
              w, b, a, row, r, tile + row * tile_pitch + j, tile_pitch);
        });
      }
      j = next;
    };
    using Most = std::integral_constant<int, kMost>;
    using Least = std::integral_constant<int, kWeightVectors>;
    while (j + Most::value * kLanes<float> <= n) add(Most{}, std::true_type{});
    while (j + Least::value * kLanes<float> <= n)
      add(Least{}, std::true_type{});
    while (j < n) add(Least{}, std::false_type{});
  }
}

// The same of [columns, depth], dot product by dot product; `first` is even.
template <Packing kPacking, bool kSigned>
void DotColumns(const QuantizedWeights& w, const RowsOfRuns& a,
                std::int64_t first, std::int64_t n, float* tile,
                std::int64_t tile_pitch) {
  constexpr bool kAlong = kPacking == Packing::kAlongRows;
  constexpr bool kAcross = kPacking == Packing::kAcrossRows;
  const std::int64_t pitch = kAlong ? CeilDiv(w.depth, 2) : w.depth;
  const EvenParts groups(a.rows, kWeightRows);
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    const std::int64_t row = groups.Begin(group);
    float* const to = tile + row * tile_pitch;
    WithCount<kWeightRows>(groups.Size(group), [&](auto count) {
      constexpr int kRows = decltype(count)::value;
      const auto dot = [&](std::int64_t j, auto columns) {
        const std::int64_t column = first + j;
        const std::int64_t at = kAcross ? column / 2 : column;
        DotRuns<kPacking, kSigned, kRows, decltype(columns)::value>(
            w, w.numbers + at * pitch, pitch, column, a, row, to + j,
            tile_pitch);
      };
      // As many sums as leave registers for their factors.
      constexpr int kCount = kRows <= 2 ? 4 : 2;
      std::int64_t j = 0;
      for (; j + kCount <= n; j += kCount)
        dot(j, std::integral_constant<int, kCount>{});
      for (; j + 2 <= n; j += 2) dot(j, std::integral_constant<int, 2>{});
      if (j < n) dot(j, std::integral_constant<int, 1>{});
    });
  }
}

// Either.
template <Packing kPacking, bool kSigned>
void MultiplyColumns(const QuantizedWeights& w, const RowsOfRuns& a,
                     std::int64_t first, std::int64_t n, float* tile,
                     std::int64_t tile_pitch) {
  if (w.transposed) {
    DotColumns<kPacking, kSigned>(w, a, first, n, tile, tile_pitch);
  } else if (a.rows <= kWideRows) {
    AddColumns<kPacking, kSigned, true>(w, a, first, n, tile, tile_pitch);
  } else {
    AddColumns<kPacking, kSigned, false>(w, a, first, n, tile, tile_pitch);
  }
}

// Of at most kFewWeightRows, with runs of whole vectors. False when scratch
// memory ran out.
template <class T>
bool MultiplyFewRows(const WeightOnlyMatMulArgs& args, const WeightRuns& runs,
                     const Parallel& parallel, const Scratch& scratch) {
  constexpr std::int64_t kWidth = kTileColumns<float>;
  static_assert(kLeastWeightColumns % (2 * kWeightVectors * kLanes<float>) ==
                    0 &&
                kLeastWeightColumns % kWidth == 0);
  const QuantizedWeights& w = args.weights;
  const std::int64_t tasks = kWeightTasksOfWorker * parallel.num_workers;
  const std::int64_t columns =
      Min(CeilDiv(CeilDiv(w.columns, tasks), kLeastWeightColumns) *
              kLeastWeightColumns,
          kMostWeightColumns);
  RowsOfRuns a;
  OfWorkers<float> tiles;
  if (!Prepare<T>(args, runs, scratch, &a) ||
      !tiles.Prepare(a.rows * columns, parallel, scratch)) {
    return false;
  }
  const Epilogue<T> epilogue{static_cast<T*>(args.y),
                             nullptr,
                             static_cast<const T*>(args.bias),
                             nullptr,
                             args.activation,
                             static_cast<float>(args.alpha),
                             AddressMap{0, 0, w.columns, 1}};
  const auto multiply = [&](auto packing, std::int64_t first, std::int64_t n,
                            float* tile) {
    constexpr Packing kPacking = decltype(packing)::value;
    w.is_signed
        ? MultiplyColumns<kPacking, true>(w, a, first, n, tile, columns)
        : MultiplyColumns<kPacking, false>(w, a, first, n, tile, columns);
  };
  auto task = [&](std::int64_t index, int worker) {
    const std::int64_t first = index * columns;
    const std::int64_t n = Min(w.columns - first, columns);
    float* const tile = tiles[worker];
    switch (w.packing) {
      case Packing::kNone:
        multiply(std::integral_constant<Packing, Packing::kNone>{}, first, n,
                 tile);
        break;
      case Packing::kAlongRows:
        multiply(std::integral_constant<Packing, Packing::kAlongRows>{}, first,
                 n, tile);
        break;
      case Packing::kAcrossRows:
        multiply(std::integral_constant<Packing, Packing::kAcrossRows>{}, first,
                 n, tile);
    }
    float panel[kFewWeightRows * kWidth + kLanes<float>];
    for (std::int64_t j = 0; j < n; j += kWidth) {
      for (std::int64_t i = 0; i < a.rows; ++i)
        __builtin_memcpy(panel + i * kWidth, tile + i * columns + j,
                         kWidth * sizeof(float));
      WriteTile(epilogue, 0, first + j, panel, static_cast<int>(a.rows),
                static_cast<int>(Min(n - j, kWidth)));
    }
  };
  ParallelFor(parallel, CeilDiv(w.columns, columns),
              w.depth * columns * CeilDiv(a.rows, kWeightRows) / 8, task);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_WEIGHT_ONLY_FEW_ROWS_H_
