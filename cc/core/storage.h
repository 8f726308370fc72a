// From the type that a call names to the type that a template takes.
#ifndef TFO_CC_CORE_STORAGE_H_
#define TFO_CC_CORE_STORAGE_H_

#include <type_traits>

#include "cc/core/simd.h"
#include "cc/core/types.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
struct Storage {
  using type = T;
};

// Calls body(Storage<T>{}) for the storage type T.
template <class Body>
TFO_INLINE auto WithStorage(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kHalf:
      return body(Storage<Half>{});
    case DType::kBFloat16:
      return body(Storage<BFloat16>{});
    case DType::kFloat:
      return body(Storage<float>{});
    default:
      return body(Storage<double>{});
  }
}

// What this instruction set adds to AVX-512 concerns some types only. The
// others are left to the functions of TFO_SHARED_ISA: theirs would be the like
// (6 MB of a library of 42).
#if defined(__AVX512BF16__)
#define TFO_SHARED_ISA avx512
#else
#define TFO_SHARED_ISA TFO_ISA
#endif
template <class T>
constexpr bool kHasOwnCode =
#if defined(__AMX_BF16__)
    !std::is_same_v<T, double>;
#elif defined(__AVX512BF16__)
    std::is_same_v<T, BFloat16>;
#else
    true;
#endif

// Of a storage type: body if there is code of its own for it, otherwise
// shared().
template <class Body, class Shared>
TFO_INLINE auto UnlessShared(const Body& body, const Shared& shared) {
  return [&](auto storage) {
    if constexpr (kHasOwnCode<typename decltype(storage)::type>) {
      return body(storage);
    } else {
      return shared();
    }
  };
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_STORAGE_H_
