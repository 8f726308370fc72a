// Products of AMX's registers: up to 2 x 2 of sums, each of 16 rows and a
// vector of columns.
//
// Numbers that are sums of bfloat16, a = a0 + a1 + a2 with parts of 8 digits
// each, are multiplied part by part:
//
//   a * b = a0 * b0 + (a0 * b1 + a1 * b0) + (a0 * b2 + a1 * b1 + a2 * b0) + ...
//
// What is left out is less than 2^-22 of a product, without bias, and 2^-26 of
// it in the mean square: less than what rounding to float32 adds. The small
// products are summed up before the large ones, so that the sum is rounded as
// often as one of multiply-adds is.
#ifndef TFO_CC_CORE_AMX_PRODUCTS_H_
#define TFO_CC_CORE_AMX_PRODUCTS_H_

#include "cc/core/amx.h"
#include "cc/core/micro_kernel.h"

#if defined(__AMX_BF16__)

namespace tfo::TFO_ISA {
namespace {

// Cache lines to ask for in a step, which takes as long as 16 or more vectors'
// multiply-adds.
constexpr int kAmxLinesPerStep = 4;
// Steps between two stores of a register.
constexpr unsigned kStepsPerStore = 4;

// Those of kHalves registers of rows and kVectors of columns.
template <class E, int kHalves, int kVectors>
class AmxProducts {
 public:
  using In = InPlanes<const E, kPlanes<E>>;

  // What a step multiplies: `depth` columns of a and rows of b, and beside
  // them, up to the registers' width, zeros and numbers. Rows of a are equally
  // far apart, and the lower ones anywhere.
  struct Operands {
    In a;
    std::int64_t a_pitch, a_lower;
    In b;
    std::int64_t b_pitch, depth;
  };

  // What sums begin from; null: zero.
  struct Sums {
    const float* data;
    std::int64_t stride;
  };

  // Asks for what `prefetch` lists; `upper` rows are in the first registers.
  AmxProducts(int upper, const PrefetchList& prefetch)
      : upper_(upper),
        line_(prefetch.lines),
        last_line_(line_ + prefetch.count) {}

  // The sums of products of a panel, in registers. `between` steps something
  // else may be done.
  template <class Steps, class Between>
  TFO_INLINE void Multiply(const Steps& steps, int panel, const Sums& from,
                           Between between) {
    Start(from);
    if constexpr (kPlanes<E> > 1) {
      steps(panel, [&](const Operands& o) TFO_INLINE_LAMBDA {
        Fetch();
        LoadUpperA(o, 0);
        LoadLowerA(o, 0);
        if constexpr (kPlanes<E> > 2) StepOfB(o, 2);
        StepOfB(o, 1);
        Fetch();
        StepOfA(o, 1);
        StepOfB(o, 0);
        if constexpr (kPlanes<E> > 2) StepOfA(o, 2);
        KeepStoring();
        between();
      });
    }
    steps(panel, [&](const Operands& o) TFO_INLINE_LAMBDA {
      Step(o);
      if (++num_steps_ % kStepsPerStore == 0) KeepStoring();
      between();
    });
  }

  // Writes the sums to rows `stride` apart.
  TFO_INLINE void Write(float* to, std::int64_t stride) const {
    const std::int64_t bytes = stride * sizeof(float);
    float* const lower = to + upper_ * stride;
    StoreAmx<kUpperLeft>(to, bytes);
    if constexpr (kVectors > 1) StoreAmx<kUpperRight>(to + kAmxColumns, bytes);
    if constexpr (kHalves > 1) StoreAmx<kLowerLeft>(lower, bytes);
    if constexpr (kHalves * kVectors > 2)
      StoreAmx<kLowerRight>(lower + kAmxColumns, bytes);
  }

 private:
  TFO_INLINE void LoadUpperA(const Operands& o, int plane) {
    LoadAmx<kUpperA>(o.a[plane], o.a_pitch * sizeof(E));
  }
  TFO_INLINE void LoadLowerA(const Operands& o, int plane) {
    if constexpr (kHalves > 1)
      LoadAmx<kLowerA>(o.a[plane] + o.a_lower, o.a_pitch * sizeof(E));
  }
  TFO_INLINE void LoadLeftB(const Operands& o, int plane) {
    LoadAmx<kLeftB>(o.b[plane], o.b_pitch * sizeof(E));
  }
  TFO_INLINE void LoadRightB(const Operands& o, int plane) {
    if constexpr (kVectors > 1)
      LoadAmx<kRightB>(o.b[plane] + kAmxColumns, o.b_pitch * sizeof(E));
  }
  TFO_INLINE void MultiplyUpperRight() {
    if constexpr (kVectors > 1) MultiplyAmx<kUpperRight, kUpperA, kRightB>();
  }
  TFO_INLINE void MultiplyLowerLeft() {
    if constexpr (kHalves > 1) MultiplyAmx<kLowerLeft, kLowerA, kLeftB>();
  }
  TFO_INLINE void MultiplyLowerRight() {
    if constexpr (kHalves * kVectors > 2)
      MultiplyAmx<kLowerRight, kLowerA, kRightB>();
  }

  TFO_INLINE void Fetch() {
    for (int i = 0; i < kAmxLinesPerStep && line_ < last_line_; ++i)
      __builtin_prefetch(*line_++, 0, 2);
  }

  // Adds the products of as many operands as the registers of a are wide; of
  // their first parts.
  TFO_INLINE void Step(const Operands& o) {
    Fetch();
    LoadLeftB(o, 0);
    LoadUpperA(o, 0);
    MultiplyAmx<kUpperLeft, kUpperA, kLeftB>();
    LoadRightB(o, 0);
    MultiplyUpperRight();
    LoadLowerA(o, 0);
    MultiplyLowerLeft();
    MultiplyLowerRight();
  }
  // The same, with other parts of b, or of a, than in the registers.
  TFO_INLINE void StepOfB(const Operands& o, int plane) {
    LoadLeftB(o, plane);
    MultiplyAmx<kUpperLeft, kUpperA, kLeftB>();
    MultiplyLowerLeft();
    LoadRightB(o, plane);
    MultiplyUpperRight();
    MultiplyLowerRight();
  }
  TFO_INLINE void StepOfA(const Operands& o, int plane) {
    LoadUpperA(o, plane);
    MultiplyAmx<kUpperLeft, kUpperA, kLeftB>();
    MultiplyUpperRight();
    LoadLowerA(o, plane);
    MultiplyLowerLeft();
    MultiplyLowerRight();
  }

  // The processor takes 250 ns longer to store a register when it has stored
  // none for some 200 instructions on them, so this stores any (measured: 0.8
  // to 0.97 of the time of convolutions and products).
  TFO_INLINE void KeepStoring() { StoreAmx<kUpperA>(stored_, 0); }

  TFO_INLINE void Start(const Sums& from) {
    if (from.data == nullptr) {
      ZeroAmx<kUpperLeft>();
      if constexpr (kVectors > 1) ZeroAmx<kUpperRight>();
      if constexpr (kHalves > 1) ZeroAmx<kLowerLeft>();
      if constexpr (kHalves * kVectors > 2) ZeroAmx<kLowerRight>();
      return;
    }
    const std::int64_t bytes = from.stride * sizeof(float);
    const float* const lower = from.data + upper_ * from.stride;
    LoadAmx<kUpperLeft>(from.data, bytes);
    if constexpr (kVectors > 1)
      LoadAmx<kUpperRight>(from.data + kAmxColumns, bytes);
    if constexpr (kHalves > 1) LoadAmx<kLowerLeft>(lower, bytes);
    if constexpr (kHalves * kVectors > 2)
      LoadAmx<kLowerRight>(lower + kAmxColumns, bytes);
  }

  const int upper_;  // rows
  const void* const* line_;
  const void* const* const last_line_;
  unsigned num_steps_ = 0;
  alignas(64) E stored_[kAmxDepth];  // what nobody reads
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif

#endif  // TFO_CC_CORE_AMX_PRODUCTS_H_
