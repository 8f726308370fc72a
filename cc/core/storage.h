// From the type that a call names to the type that a template takes.
#ifndef TFO_CC_CORE_STORAGE_H_
#define TFO_CC_CORE_STORAGE_H_

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

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_STORAGE_H_
