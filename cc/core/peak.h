// What the processor can do at best: the roofs that kernels are measured
// against.
#ifndef TFO_CC_CORE_PEAK_H_
#define TFO_CC_CORE_PEAK_H_

#include <cstdint>

#include "cc/core/types.h"

namespace tfo {

// Multiplies and adds in registers, `rounds` times over, with the instruction
// that products of dtype are made with: bfloat16's own where the processor has
// it, else that of the accumulator. Returns the number of multiplications and
// additions.
using MultiplyAddFunction = std::int64_t(DType dtype, std::int64_t rounds);

// Copies past the caches; both pointers are aligned to 64 bytes, and bytes is a
// multiple of 64.
using CopyFunction = void(const void* from, void* to, std::int64_t bytes);

}  // namespace tfo

#endif  // TFO_CC_CORE_PEAK_H_
