// Products of rows, quantized one by one, with 8-bit weights: panels of the
// weights are packed by the task that multiplies all rows with them.
#include "cc/core/block_product.h"
#include "cc/core/epilogue.h"
#include "cc/core/integer_operand.h"
#include "cc/core/quantized_matmul.h"

namespace tfo::TFO_ISA {
namespace {

using Int = std::int32_t;

constexpr int kWidth = kTileColumns<Int>;
constexpr int kRows = kTileRows<IntegerGroup>;

// The left factor as integers.
struct QuantizedRows {
  IntegerGroup* groups;
  int64_t pitch;    // groups from one row to the next
  float* inverse;   // 1 / scale of each row
  Int* correction;  // what the right factor's offset adds to each row's sums
};

// The largest magnitude; a NaN is larger than all numbers.
template <class T>
float LargestMagnitude(const T* x, int64_t depth) {
  Vec<Int> largest{};
  ForColumns<float>(depth, [&](int64_t j, auto partial, int n) {
    const auto bits =
        BitCast<Vec<Int>>(LoadColumns<decltype(partial)::value>(x + j, n));
    const Vec<Int> magnitude = bits & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  });
  Int result = 0;
  for (int l = 0; l < kLanes<float>; ++l)
    result = largest[l] > result ? largest[l] : result;
  return BitCast<float>(result);
}

// Adding 1.5 * 2^23 leaves a number's nearest integer, the even one of two, in
// its lowest bits.
constexpr float kRound = 12582912.f;
constexpr Int kRoundBits = 0x4b400000;

template <class T>
void QuantizeRow(const T* x, int64_t depth, float epsilon,
                 const QuantizedRows& rows, int64_t row) {
  const float range = LargestMagnitude(x, depth) + epsilon;
  const Vec<float> scale = Splat(127.f / range);
  auto* const to =
      reinterpret_cast<GroupElement*>(rows.groups + row * rows.pitch);
  UintVec sums{};
  // Beyond the last element there is room, and zeros are stored.
  ForColumns<float>(depth, [&](int64_t j, auto partial, int n) {
    Vec<float> scaled = LoadColumns<decltype(partial)::value>(x + j, n) * scale;
    KeepLoaded(scaled);  // is rounded before the addition
    const Vec<Int> q = BitCast<Vec<Int>>(scaled + kRound) - kRoundBits;
    sums += (UintVec)q;
    StoreElements(to + j, q);
  });
  std::uint32_t sum = 0;
  for (int l = 0; l < kLanes<float>; ++l) sum += sums[l];
  // Not a number where there is none in the row, or an infinite one.
  rows.inverse[row] = range / 127.f + (range - range);
  rows.correction[row] = static_cast<Int>(sum * kGroupOffset);
}

// How the product is cut into tasks, each of some rows and panels. Memory is
// read in stripes of the panels of a task: where there are few rows, these are
// broad, and the depth is cut into blocks instead, beside which the sums of all
// of a task's rows stay in a cache.
struct QuantizedPlan {
  int64_t depth, block;  // of panels, in groups
  int64_t rows, row_parts;
  int64_t panels, panel_parts;

  // Bytes of packed panels that a task goes over again and again.
  static constexpr int64_t kPackedBytes = 256 << 10;
  // Rows that make up for packing.
  static constexpr int64_t kMostRows = 512, kLeastRows = 64;
  static constexpr int64_t kFewRows = 2 * kRows, kBroad = 16;
  static constexpr int64_t kTasksPerWorker = 4;

  QuantizedPlan(const QuantizedMatMulArgs& args, int workers) {
    constexpr int64_t kGroupRow = kWidth * sizeof(IntegerGroup);
    depth = CeilDiv(args.depth, kGroupSize);
    const int64_t all = CeilDiv(args.columns, kWidth);
    const int64_t wanted = kTasksPerWorker * workers;
    const bool few = args.rows <= kFewRows && !args.transpose_b;
    panels = few ? kBroad : Max(kPackedBytes / (Max(depth, 1) * kGroupRow), 1);
    panels = Min(panels, all);
    row_parts = CeilDiv(args.rows, kMostRows);
    while (panels > 1 && row_parts * CeilDiv(all, panels) < wanted)
      panels = CeilDiv(panels, 2);
    panel_parts = CeilDiv(all, panels);
    const int64_t most = Max(args.rows / kLeastRows, 1);
    row_parts = Max(row_parts, Min(most, CeilDiv(wanted, panel_parts)));
    rows = CeilDiv(CeilDiv(args.rows, row_parts), kRows) * kRows;
    row_parts = CeilDiv(args.rows, rows);
    block = few ? Min(depth, kPackedBytes / (panels * kGroupRow)) : depth;
  }

  int64_t tasks() const { return row_parts * panel_parts; }
  // Tiles whose sums a worker keeps.
  int64_t tiles() const {
    return block < depth ? panels * CeilDiv(rows, kRows) : kPanelsPerCall;
  }
};

template <class T>
class QuantizedProduct {
 public:
  QuantizedProduct(const QuantizedMatMulArgs& args, const QuantizedPlan& plan,
                   const QuantizedRows& a, const float* b_inverse)
      : args_(args),
        plan_(plan),
        a_(a),
        b_inverse_(b_inverse),
        epilogue_{static_cast<T*>(args.y),
                  nullptr,
                  static_cast<const T*>(args.bias),
                  nullptr,
                  args.activation,
                  args.alpha,
                  AddressMap{0, 0, args.columns, 1}} {
    epilogue_.stream = epilogue_.ShouldStream(args.rows * args.columns);
  }

  // Packs the panels of a task to `packed` and multiplies its rows with them;
  // `sums` has room for the plan's tiles.
  void operator()(int64_t task, IntegerGroup* packed, Int* sums) const {
    const int64_t first = task % plan_.panel_parts * plan_.panels * kWidth;
    const int64_t columns = Min(plan_.panels * kWidth, args_.columns - first);
    const int64_t begin = task / plan_.panel_parts * plan_.rows;
    const int64_t end = Min(begin + plan_.rows, args_.rows);
    const EvenParts parts(end - begin, kRows);
    int64_t k = 0;
    do {
      const Segment block{k, Min(plan_.block, plan_.depth - k)};
      Pack(first, columns, block, packed);
      for (int64_t part = 0; part < parts.count(); ++part) {
        const RowRange rows{begin + parts.Begin(part),
                            static_cast<int>(parts.Size(part))};
        for (int64_t j = 0; j < columns;) {
          const int64_t kept =
              plan_.block < plan_.depth ? part * plan_.panels * kWidth + j : 0;
          j += MultiplyTiles(rows, first + j, columns - j, block,
                             packed + j * block.length, sums + kept * kRows);
        }
      }
      k += plan_.block;
    } while (k < plan_.depth);
    if (epilogue_.stream) FlushStores();
  }

 private:
  struct RowRange {
    int64_t first;
    int count;
  };

  void Pack(int64_t first, int64_t columns, const Segment& block,
            IntegerGroup* to) const {
    const int64_t k = block.offset * kGroupSize;
    const int64_t pitch = args_.transpose_b ? args_.depth : args_.columns;
    const std::int8_t* const from =
        args_.b + (args_.transpose_b ? first * pitch + k : k * pitch + first);
    PackIntegers(from, pitch, args_.transpose_b,
                 Min(block.length * kGroupSize, args_.depth - k), columns,
                 block.length * kWidth, to);
  }

  // Some rows with as many panels as a call takes; returns their columns.
  int64_t MultiplyTiles(const RowRange& rows, int64_t column, int64_t columns,
                        const Segment& block, const IntegerGroup* panels,
                        Int* sums) const {
    int64_t row_offset[kRows];
    for (int i = 0; i < kRows; ++i) row_offset[i] = i * a_.pitch;
    PrefetchList prefetch;
    TileOperands<IntegerGroup> tile{a_.groups + rows.first * a_.pitch,
                                    row_offset,
                                    1,
                                    &block,
                                    1,
                                    panels,
                                    kWidth,
                                    block.offset > 0 ? sums : nullptr,
                                    kWidth,
                                    sums,
                                    kWidth,
                                    &prefetch};
    tile.JoinPanels(columns, block.length * kWidth);
    tile.c_panel = kRows * kWidth;
    RunTile<IntegerGroup, true>(rows.count,
                                static_cast<int>(Min(columns, kWidth)), tile);
    const int64_t computed = Min(columns, tile.num_panels * kWidth);
    if (block.offset + block.length < plan_.depth) return computed;
    for (int64_t j = 0; j < computed; j += kWidth, sums += tile.c_panel) {
      const int n = static_cast<int>(Min(computed - j, kWidth));
      alignas(64) float scaled[kRows * kWidth];
      Scale(rows, column + j, n, sums, scaled);
      WriteTile(epilogue_, rows.first * args_.columns, column + j, scaled,
                rows.count, n);
    }
    return computed;
  }

  // The numbers that a tile of sums stands for.
  void Scale(const RowRange& rows, int64_t column, int columns, const Int* sums,
             float* to) const {
    for (int j = 0; j < columns; j += kLanes<float>) {
      const Vec<float> b = Load(b_inverse_ + column + j);
      for (int i = 0; i < rows.count; ++i) {
        const int at = i * kWidth + j;
        const Vec<Int> sum = Load(sums + at) - a_.correction[rows.first + i];
        // The scales first, as a sum times one of them may be too large.
        Store(to + at, __builtin_convertvector(sum, Vec<float>) *
                           (a_.inverse[rows.first + i] * b));
      }
    }
  }

  const QuantizedMatMulArgs& args_;
  const QuantizedPlan& plan_;
  const QuantizedRows a_;
  const float* const b_inverse_;
  Epilogue<T> epilogue_;
};

template <class T>
bool QuantizeAndMultiply(const QuantizedMatMulArgs& args,
                         const Parallel& parallel, const Scratch& scratch) {
  const QuantizedPlan plan(args, parallel.num_workers);
  QuantizedRows a;
  // In whole vectors of elements.
  a.pitch = CeilDiv(args.depth, kLanes<float>) * kLanes<float> / kGroupSize;
  a.groups = scratch.Allocate<IntegerGroup>(args.rows * a.pitch);
  a.inverse = scratch.Allocate<float>(args.rows);
  a.correction = scratch.Allocate<Int>(args.rows);
  auto* const b_inverse =
      scratch.Allocate<float>(CeilDiv(args.columns, kWidth) * kWidth);
  OfWorkers<IntegerGroup> packed;
  OfWorkers<Int> sums;
  if (a.groups == nullptr || a.inverse == nullptr || a.correction == nullptr ||
      b_inverse == nullptr ||
      !packed.Prepare(plan.panels * plan.block * kWidth, parallel, scratch) ||
      !sums.Prepare(plan.tiles() * kRows * kWidth, parallel, scratch)) {
    return false;
  }
  for (int64_t j = 0; j < args.columns; ++j) b_inverse[j] = 1 / args.b_scale[j];

  constexpr int64_t kTogether = 16;
  auto quantize = [&](int64_t task, int /*worker*/) {
    const int64_t end = Min((task + 1) * kTogether, args.rows);
    for (int64_t i = task * kTogether; i < end; ++i) {
      QuantizeRow(static_cast<const T*>(args.a) + i * args.depth, args.depth,
                  args.epsilon, a, i);
    }
  };
  ParallelFor(parallel, CeilDiv(args.rows, kTogether),
              kTogether * args.depth / 4, quantize);

  const QuantizedProduct<T> product(args, plan, a, b_inverse);
  auto multiply = [&](int64_t task, int worker) {
    product(task, packed[worker], sums[worker]);
  };
  ParallelFor(parallel, plan.tasks(),
              plan.panels * plan.depth * (plan.rows + 8), multiply);
  return true;
}

}  // namespace

bool QuantizedMatMul(const QuantizedMatMulArgs& args, const Parallel& parallel,
                     const Scratch& scratch) {
  if (args.rows == 0 || args.columns == 0) return true;
  switch (args.dtype) {
    case DType::kHalf:
      return QuantizeAndMultiply<Half>(args, parallel, scratch);
    case DType::kBFloat16:
      return QuantizeAndMultiply<BFloat16>(args, parallel, scratch);
    default:
      return QuantizeAndMultiply<float>(args, parallel, scratch);
  }
}

}  // namespace tfo::TFO_ISA
