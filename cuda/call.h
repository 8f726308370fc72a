// What a launcher gets from its caller besides its arguments.
#ifndef TFO_CUDA_CALL_H_
#define TFO_CUDA_CALL_H_

#include <cstdint>

#include "cc/core/scratch.h"
#include "cuda/status.h"

namespace tfo::cuda {

struct Call {
  Stream stream;
  Scratch scratch;
  // Whether float32 products may round their operands to TF32.
  bool allow_tf32;
  // Told about every shape for which a library refused a fused form.
  void (*log)(const char* message);
};

constexpr std::uint32_t kMaxAlignment = 256;

// The greatest power of two up to kMaxAlignment that divides the address.
inline std::uint32_t AlignmentOf(const void* pointer) {
  const auto address =
      reinterpret_cast<std::uintptr_t>(pointer) | kMaxAlignment;
  return static_cast<std::uint32_t>(address & -address);
}

// Memory aligned as the libraries want their workspaces; null for no bytes.
Status AllocateScratch(const Call& call, std::int64_t bytes, void** memory);

Status SetZero(void* memory, std::int64_t bytes, const Call& call);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_CALL_H_
