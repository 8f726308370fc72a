// The part of DLPack's stable ABI (version 0, https://dmlc.github.io/dlpack)
// that a reader of tensors needs.
#ifndef TFO_CUDA_PYTHON_DLPACK_H_
#define TFO_CUDA_PYTHON_DLPACK_H_

#include <cstdint>

namespace tfo::cuda::python {

constexpr std::int32_t kDLCuda = 2;
constexpr std::uint8_t kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4;

struct DLTensor {
  void* data;
  struct {
    std::int32_t type, id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: dense
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

}  // namespace tfo::cuda::python

#endif  // TFO_CUDA_PYTHON_DLPACK_H_
