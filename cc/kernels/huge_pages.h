// Huge pages for large tensors.
#ifndef TFO_CC_KERNELS_HUGE_PAGES_H_
#define TFO_CC_KERNELS_HUGE_PAGES_H_

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace tf_fused_ops {

// Asks for huge pages under the memory of a large tensor: glibc takes such
// memory from the system anew for every tensor, and one page fault for each
// 4 KiB of it can cost more than the op (measured, 51 MB: 34 ms against 5).
inline void AdviseHugePages(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::int64_t kLeastBytes = 4 << 20;
  constexpr std::uintptr_t kPage = 2 << 20;
  if (bytes < kLeastBytes) return;
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const std::uintptr_t end =
      (address + static_cast<std::uintptr_t>(bytes)) / kPage * kPage;
  // Where the system has none to give, all is as before.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_HUGE_PAGES_H_
