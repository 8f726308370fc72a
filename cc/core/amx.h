// AMX's registers, and what is done with them.
#ifndef TFO_CC_CORE_AMX_H_
#define TFO_CC_CORE_AMX_H_

#include "cc/core/operand.h"
#include "cc/core/parallel.h"

#if defined(__AMX_BF16__)

namespace tfo::TFO_ISA {
namespace {

constexpr int kAmxRows = 16;   // of a register
constexpr int kAmxDepth = 16;  // operands in a row of one
constexpr int kAmxColumns = kLanes<float>;

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

}  // namespace
}  // namespace tfo::TFO_ISA

#endif

#endif  // TFO_CC_CORE_AMX_H_
