// The rows of a quantized product as integers, and the numbers that sums of
// their products stand for.
#ifndef TFO_CC_CORE_QUANTIZED_ROWS_H_
#define TFO_CC_CORE_QUANTIZED_ROWS_H_

#include "cc/core/elementwise.h"
#include "cc/core/epilogue.h"
#include "cc/core/integer_operand.h"
#include "cc/core/quantized_matmul.h"

namespace tfo::TFO_ISA {
namespace {

using Int = std::int32_t;

constexpr int kSumColumns = kTileColumns<Int>;

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
  // Beyond the last element there is room for zeros.
  ForColumns<float>(depth, [&](int64_t j, auto partial, int n) {
    Vec<float> scaled = LoadColumns<decltype(partial)::value>(x + j, n) * scale;
    KeepLoaded(scaled);  // is rounded before the addition
    const Vec<Int> q = BitCast<Vec<Int>>(scaled + kRound) - kRoundBits;
    sums += (UintVec)q;
    StoreElements(to + j, q);
  });
  const int64_t stored = CeilDiv(depth, kLanes<float>) * kLanes<float>;
  Zero(to + stored, rows.pitch * kGroupSize - stored);
  std::uint32_t sum = 0;
  for (int l = 0; l < kLanes<float>; ++l) sum += sums[l];
  // Not a number where there is none in the row, or an infinite one.
  rows.inverse[row] = range / 127.f + (range - range);
  rows.correction[row] = static_cast<Int>(sum * kGroupOffset);
}

// Makes y's elements of sums.
template <class T>
class QuantizedOutput {
 public:
  // `b_inverse` are 1 / scale of the columns, in whole panels.
  QuantizedOutput(const QuantizedMatMulArgs& args, const QuantizedRows& a,
                  const float* b_inverse)
      : a_(a),
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

  // Of a tile: some rows of a panel from `column` on, of which `columns` are
  // wanted.
  void Write(int64_t row, int rows, int64_t column, int columns,
             const Int* sums) const {
    alignas(64) float scaled[kTileRows<IntegerGroup> * kSumColumns];
    for (int j = 0; j < columns; j += kLanes<float>) {
      const Vec<float> b = Load(b_inverse_ + column + j);
      for (int i = 0; i < rows; ++i) {
        const int at = i * kSumColumns + j;
        const Vec<Int> sum = Load(sums + at) - a_.correction[row + i];
        // The scales first, as a sum times one of them may be too large.
        Store(scaled + at, __builtin_convertvector(sum, Vec<float>) *
                               (a_.inverse[row + i] * b));
      }
    }
    WriteTile(epilogue_, row * epilogue_.map.w, column, scaled, rows, columns);
  }

  void Finish() const {
    if (epilogue_.stream) FlushStores();
  }

 private:
  const QuantizedRows a_;
  const float* const b_inverse_;
  Epilogue<T> epilogue_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_QUANTIZED_ROWS_H_
