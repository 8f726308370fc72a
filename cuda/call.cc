#include "cuda/call.h"

#include <cuda_runtime.h>

#include "cuda/launch.h"

namespace tfo::cuda {

constexpr std::uintptr_t kAlignment = 256;

Status AllocateScratch(const Call& call, std::int64_t bytes, void** memory) {
  *memory = nullptr;
  if (bytes == 0) return {};
  auto* raw = call.scratch.Allocate<char>(bytes + kAlignment);
  if (raw == nullptr) {
    return RuntimeStatus(cudaErrorMemoryAllocation, "allocating scratch");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  *memory = raw + -address % kAlignment;
  return {};
}

Status SetZero(void* memory, std::int64_t bytes, const Call& call) {
  if (bytes == 0) return {};
  return RuntimeStatus(cudaMemsetAsync(memory, 0, bytes, call.stream),
                       "cudaMemsetAsync");
}

}  // namespace tfo::cuda
