// Products of rows, quantized one by one, with 8-bit weights: panels of the
// weights are packed by the task that multiplies all rows with them.
#include "cc/core/block_product.h"
#include "cc/core/quantized_few_rows.h"
#include "cc/core/quantized_rows.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int kRows = kTileRows<IntegerGroup>;

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
  static constexpr int64_t kFewRows = 32, kBroad = 16;
  static constexpr int64_t kTasksPerWorker = 4;

  QuantizedPlan(const QuantizedMatMulArgs& args, int workers) {
    constexpr int64_t kGroupRow = kSumColumns * sizeof(IntegerGroup);
    depth = CeilDiv(args.depth, kGroupSize);
    const int64_t all = CeilDiv(args.columns, kSumColumns);
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
                   const QuantizedRows& a, const QuantizedOutput<T>& output)
      : args_(args), plan_(plan), a_(a), output_(output) {}

  // Packs the panels of a task to `packed` and multiplies its rows with them;
  // `sums` has room for the plan's tiles.
  void operator()(int64_t task, IntegerGroup* packed, Int* sums) const {
    const int64_t first = task % plan_.panel_parts * plan_.panels * kSumColumns;
    const int64_t columns =
        Min(plan_.panels * kSumColumns, args_.columns - first);
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
          const int64_t kept = plan_.block < plan_.depth
                                   ? part * plan_.panels * kSumColumns + j
                                   : 0;
          j += MultiplyTiles(rows, first + j, columns - j, block,
                             packed + j * block.length, sums + kept * kRows);
        }
      }
      k += plan_.block;
    } while (k < plan_.depth);
    output_.Finish();
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
                 block.length * kSumColumns, to);
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
                                    kSumColumns,
                                    block.offset > 0 ? sums : nullptr,
                                    kSumColumns,
                                    sums,
                                    kSumColumns,
                                    &prefetch};
    tile.JoinPanels(columns, block.length * kSumColumns);
    tile.c_panel = kRows * kSumColumns;
    RunTile<IntegerGroup, true>(
        rows.count, static_cast<int>(Min(columns, kSumColumns)), tile);
    const int64_t computed = Min(columns, tile.num_panels * kSumColumns);
    if (block.offset + block.length < plan_.depth) return computed;
    for (int64_t j = 0; j < computed; j += kSumColumns, sums += tile.c_panel) {
      const int n = static_cast<int>(Min(computed - j, kSumColumns));
      output_.Write(rows.first, rows.count, column + j, n, sums);
    }
    return computed;
  }

  const QuantizedMatMulArgs& args_;
  const QuantizedPlan& plan_;
  const QuantizedRows a_;
  const QuantizedOutput<T>& output_;
};

// Quantizes the rows of args. False when scratch memory ran out.
template <class T>
bool Quantize(const QuantizedMatMulArgs& args, const Parallel& parallel,
              const Scratch& scratch, QuantizedRows* a) {
  // In whole vectors of groups.
  a->pitch = CeilDiv(args.depth, kMixedColumns) * kLanes<Int>;
  a->groups = scratch.Allocate<IntegerGroup>(args.rows * a->pitch);
  a->inverse = scratch.Allocate<float>(args.rows);
  a->correction = scratch.Allocate<Int>(args.rows);
  if (a->groups == nullptr || a->inverse == nullptr || a->correction == nullptr)
    return false;
  constexpr int64_t kTogether = 16;
  auto quantize = [&](int64_t task, int /*worker*/) {
    const int64_t end = Min((task + 1) * kTogether, args.rows);
    for (int64_t i = task * kTogether; i < end; ++i) {
      QuantizeRow(static_cast<const T*>(args.a) + i * args.depth, args.depth,
                  args.epsilon, *a, i);
    }
  };
  ParallelFor(parallel, CeilDiv(args.rows, kTogether),
              kTogether * args.depth / 4, quantize);
  return true;
}

template <class T>
bool QuantizeAndMultiply(const QuantizedMatMulArgs& args,
                         const Parallel& parallel, const Scratch& scratch) {
  QuantizedRows a;
  auto* const b_inverse =
      scratch.Allocate<float>(CeilDiv(args.columns, kSumColumns) * kSumColumns);
  if (b_inverse == nullptr || !Quantize<T>(args, parallel, scratch, &a))
    return false;
  for (int64_t j = 0; j < args.columns; ++j) b_inverse[j] = 1 / args.b_scale[j];
  const QuantizedOutput<T> output(args, a, b_inverse);
  OfWorkers<Int> sums;
  if (args.rows <= kFewQuantizedRows) {
    const FewQuantizedRows<T> product(args, a, output, parallel.num_workers);
    if (!sums.Prepare(product.sums(), parallel, scratch)) return false;
    auto multiply = [&](int64_t task, int worker) {
      product(task, sums[worker]);
    };
    ParallelFor(parallel, product.tasks(),
                product.columns() * args.depth / 8 * args.rows, multiply);
    return true;
  }
  const QuantizedPlan plan(args, parallel.num_workers);
  OfWorkers<IntegerGroup> packed;
  if (!packed.Prepare(plan.panels * plan.block * kSumColumns, parallel,
                      scratch) ||
      !sums.Prepare(plan.tiles() * kRows * kSumColumns, parallel, scratch)) {
    return false;
  }
  const QuantizedProduct<T> product(args, plan, a, output);
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
