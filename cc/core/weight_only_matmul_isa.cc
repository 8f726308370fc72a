// Products with quantized weights: some columns of these become numbers, stay
// in a cache, and meet all rows there.
#include "cc/core/conv.h"
#include "cc/core/dequantize.h"
#include "cc/core/micro_kernel.h"
#include "cc/core/shares.h"
#include "cc/core/weight_only_few_rows.h"

namespace tfo::TFO_ISA {

ConvForwardFunction ConvForward;

namespace {

// Of the columns that a worker has as numbers at a time.
constexpr std::int64_t kColumnsBytes = 512 << 10;
// Rows of so many read what they meet in parts of this.
constexpr std::int64_t kWhole = 1024;
constexpr std::int64_t kTasksOfWorker = 4;

template <class T>
std::int64_t ColumnsTogether(const WeightOnlyMatMulArgs& args, int workers) {
  constexpr std::int64_t kWidth = kTileColumns<Accumulator<T>>;
  const QuantizedWeights& w = args.weights;
  const std::int64_t size = Max(w.depth, 1) * std::int64_t{sizeof(T)};
  const std::int64_t most =
      args.rows >= kWhole
          ? w.columns
          : Min(kColumnsBytes / size, w.columns / (kTasksOfWorker * workers));
  return Max(most / kWidth, 1) * kWidth;
}

template <class T>
bool MultiplyNumbers(const WeightOnlyMatMulArgs& args, const WeightRuns& runs,
                     std::int64_t first, std::int64_t count,
                     const Parallel& parallel, const Scratch& scratch) {
  const QuantizedWeights& w = args.weights;
  const ColumnsOfWeights<T> columns(w, runs, first, count);
  T* const numbers = scratch.Allocate<T>(w.depth * count);
  float* const own =
      scratch.Allocate<float>(columns.own_size() * parallel.num_workers);
  if (numbers == nullptr || own == nullptr) return false;
  const std::int64_t n = w.transposed ? w.depth : count;
  constexpr std::int64_t kRowsTogether = 16;
  auto dequantize = [&](std::int64_t task, int worker) {
    const std::int64_t end = Min((task + 1) * kRowsTogether, columns.rows());
    for (std::int64_t i = task * kRowsTogether; i < end; ++i)
      columns.Row(i, own + worker * columns.own_size(), numbers + i * n);
  };
  ParallelFor(parallel, CeilDiv(columns.rows(), kRowsTogether),
              kRowsTogether * n / 4, dequantize);
  const auto behind = [&](const void* p) {
    return p == nullptr ? nullptr : static_cast<const T*>(p) + first;
  };
  ConvForwardArgs product{
      args.dtype,
      MatMulShape(1, args.rows, w.depth, count, false, w.transposed),
      args.activation,
      args.alpha,
      args.a,
      numbers,
      nullptr,
      behind(args.bias),
      nullptr,
      static_cast<T*>(args.y) + first,
      nullptr,
      nullptr};
  product.pixel_pitch = w.columns;
  return ConvForward(product, parallel, scratch);
}

template <class T>
bool Multiply(const WeightOnlyMatMulArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  WeightRuns runs;
  if (!runs.Find(args.weights, scratch)) return false;
  if (args.rows <= kFewWeightRows && runs.AreWholeVectors())
    return MultiplyFewRows<T>(args, runs, parallel, scratch);
  const std::int64_t columns = args.weights.columns;
  const std::int64_t together = ColumnsTogether<T>(args, parallel.num_workers);
  const std::int64_t cycles =
      args.weights.depth * Min(together, columns) * (args.rows + 16) / 32;
  return ForShares(
      CeilDiv(columns, together), cycles, parallel, scratch,
      [&](std::int64_t share, const Parallel& threads, const Scratch& memory) {
        const std::int64_t first = share * together;
        return MultiplyNumbers<T>(
            args, runs, first, Min(together, columns - first), threads, memory);
      });
}

}  // namespace

bool WeightOnlyMatMul(const WeightOnlyMatMulArgs& args,
                      const Parallel& parallel, const Scratch& scratch) {
  if (args.rows == 0 || args.weights.columns == 0) return true;
  switch (args.dtype) {
    case DType::kHalf:
      return Multiply<Half>(args, parallel, scratch);
    case DType::kBFloat16:
      return Multiply<BFloat16>(args, parallel, scratch);
    default:
      return Multiply<float>(args, parallel, scratch);
  }
}

}  // namespace tfo::TFO_ISA
