// The one place from which kernels are launched, and the facts of the device
// that launch configurations are made from.
#ifndef TFO_CUDA_LAUNCH_H_
#define TFO_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cuda/status.h"

namespace tfo::cuda {

inline Status RuntimeStatus(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return {};
  return {Status::Source::kRuntime, static_cast<int>(code), call,
          cudaGetErrorString(code)};
}

struct Device {
  int multiprocessors;
  int threads_per_multiprocessor;
  int shared_bytes_per_multiprocessor;
  int shared_bytes_per_block;  // after opting in to more than the default
  bool cooperative;            // grids that synchronise can be launched
};

// The device that is current in the calling thread; in an op, the op's.
Status CurrentDevice(Device* device);

struct LaunchConfig {
  dim3 grid, block;
  std::size_t shared_bytes = 0;  // dynamic
  bool cooperative = false;
};

constexpr std::size_t kDefaultSharedBytes = 48 * 1024;

// Lets a kernel without static shared memory have as much dynamic memory as a
// block can: the limit belongs to the kernel, and other threads launch it too.
template <class... Parameters>
Status AllowAllSharedMemory(const char* name, const Device& device,
                            void (*kernel)(Parameters...)) {
  return RuntimeStatus(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                           device.shared_bytes_per_block),
      name);
}

template <class... Parameters, class... Arguments>
Status Launch(const char* name, const LaunchConfig& config, Stream stream,
              void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (config.shared_bytes > kDefaultSharedBytes) {
    Device device;
    TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
    TFO_CUDA_RETURN_IF_ERROR(AllowAllSharedMemory(name, device, kernel));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = config.grid;
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.cooperative ? 1 : 0;
  return RuntimeStatus(
      cudaLaunchKernelEx(&launch, kernel,
                         std::forward<Arguments>(arguments)...),
      name);
}

// How many blocks of a kernel the device runs at a time.
template <class... Parameters>
Status ResidentBlocks(const char* name, const Device& device, int threads,
                      std::size_t shared_bytes, void (*kernel)(Parameters...),
                      std::int64_t* blocks) {
  if (shared_bytes > kDefaultSharedBytes)
    TFO_CUDA_RETURN_IF_ERROR(AllowAllSharedMemory(name, device, kernel));
  int per_multiprocessor = 0;
  TFO_CUDA_RETURN_IF_ERROR(
      RuntimeStatus(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                        &per_multiprocessor, kernel, threads, shared_bytes),
                    name));
  *blocks = std::int64_t{per_multiprocessor} * device.multiprocessors;
  return {};
}

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

constexpr int kBlockThreads = 256;

// One thread for each of `count` things, in blocks of kBlockThreads.
template <class... Parameters, class... Arguments>
Status LaunchForEach(const char* name, std::int64_t count, Stream stream,
                     void (*kernel)(Parameters...), Arguments&&... arguments) {
  const std::int64_t blocks = CeilDiv(count, kBlockThreads);
  return Launch(name,
                {dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads)},
                stream, kernel, std::forward<Arguments>(arguments)...);
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_LAUNCH_H_
