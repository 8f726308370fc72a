// Products with quantized weights: some columns of these become numbers, stay
// in a cache, and meet all rows there.
#include "cc/core/conv.h"
#include "cc/core/dequantize.h"
#include "cc/core/micro_kernel.h"
#include "cc/core/shares.h"
#include "cc/core/storage.h"
#include "cc/core/weight_only_few_rows.h"

namespace tfo::TFO_SHARED_ISA {

WeightOnlyMatMulFunction WeightOnlyMatMul;

}  // namespace tfo::TFO_SHARED_ISA

namespace tfo::TFO_ISA {

ConvForwardFunction ConvForward;

namespace {

// Of the columns that a worker has as numbers at a time.
constexpr std::int64_t kColumnsBytes = 512 << 10;
// So many rows are worth having all columns, of which they read some at a time.
constexpr std::int64_t kRowsOfAllColumns = 1024;
constexpr std::int64_t kTasksOfWorker = 4;

template <class T>
std::int64_t ColumnsTogether(const WeightOnlyMatMulArgs& args, int workers) {
  constexpr std::int64_t kWidth = kTileColumns<Accumulator<T>>;
  const QuantizedWeights& w = args.weights;
  if (args.rows >= kRowsOfAllColumns) return w.columns;
  const std::int64_t size = Max(w.depth, 1) * std::int64_t{sizeof(T)};
  const std::int64_t most =
      Min(kColumnsBytes / size, w.columns / (kTasksOfWorker * workers));
  return Max(most / kWidth, 1) * kWidth;
}

template <class T>
bool MultiplyNumbers(const WeightOnlyMatMulArgs& args, const WeightRuns& runs,
                     std::int64_t first, std::int64_t count,
                     const Parallel& parallel, const Scratch& scratch) {
  const QuantizedWeights& w = args.weights;
  T* const numbers = scratch.Allocate<T>(w.depth * count);
  if (numbers == nullptr ||
      !DequantizeColumns(w, runs, first, count, numbers, parallel, scratch)) {
    return false;
  }
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

// Calls body(Storage<T>{}) for the type of numbers T.
template <class Body>
bool WithNumbers(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(Storage<Half>{});
    case DType::kBFloat16:
      return body(Storage<BFloat16>{});
    default:
      return body(Storage<float>{});
  }
}

}  // namespace

bool WeightOnlyMatMul(const WeightOnlyMatMulArgs& args,
                      const Parallel& parallel, const Scratch& scratch) {
  if (args.rows == 0 || args.weights.columns == 0) return true;
  const auto own = [&](auto storage) {
    return Multiply<typename decltype(storage)::type>(args, parallel, scratch);
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::WeightOnlyMatMul(args, parallel, scratch);
  };
  return WithNumbers(args.dtype, UnlessShared(own, shared));
}

bool Dequantize(DType dtype, const QuantizedWeights& weights, void* to,
                const Parallel& parallel, const Scratch& scratch) {
  WeightRuns runs;
  if (!runs.Find(weights, scratch)) return false;
  return WithNumbers(dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    return DequantizeColumns(weights, runs, 0, weights.columns,
                             static_cast<T*>(to), parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
