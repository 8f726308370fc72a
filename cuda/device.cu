#include "cuda/launch.h"

namespace tfo::cuda {

Status CurrentDevice(Device* device) {
  int ordinal = 0;
  TFO_CUDA_RETURN_IF_ERROR(
      RuntimeStatus(cudaGetDevice(&ordinal), "cudaGetDevice"));
  int cooperative = 0;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } facts[] = {
      {cudaDevAttrMultiProcessorCount, &device->multiprocessors},
      {cudaDevAttrMaxThreadsPerMultiProcessor,
       &device->threads_per_multiprocessor},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor,
       &device->shared_bytes_per_multiprocessor},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin,
       &device->shared_bytes_per_block},
      {cudaDevAttrCooperativeLaunch, &cooperative},
  };
  for (const auto& fact : facts) {
    TFO_CUDA_RETURN_IF_ERROR(RuntimeStatus(
        cudaDeviceGetAttribute(fact.value, fact.attribute, ordinal),
        "cudaDeviceGetAttribute"));
  }
  device->cooperative = cooperative != 0;
  return {};
}

}  // namespace tfo::cuda
