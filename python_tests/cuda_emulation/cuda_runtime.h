// A stand-in for CUDA's runtime that executes kernels on the processor, for
// tests where there is no GPU. It proves indexing, arithmetic and barriers, not
// that a GPU runs the code: there is no memory model, no timing, no limit of
// registers.
//
// Every CUDA thread is a fiber that runs until it waits at a barrier, a warp
// primitive or its end. The order of the threads between barriers can be
// reversed, which brings forgotten barriers to light; shared memory begins as
// NaN. The blocks of a grid run one after another, those of a cooperative grid
// together.
#ifndef TFO_CUDA_EMULATION_CUDA_RUNTIME_H_
#define TFO_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}
};

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorCooperativeLaunchTooLarge = 720,
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxThreadsPerMultiProcessor,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrCooperativeLaunch,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative = 2 };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace cuda_emulation {

struct Device {
  int multiprocessors = 4;
  int blocks_per_multiprocessor = 2;
  int shared_bytes = 64 * 1024;  // of a multiprocessor
  bool cooperative = true;
  bool reverse = false;  // run the threads of a block backwards
};
extern Device device;
extern long launches, cooperative_launches, waits;
// Kernels that may have more than 48 KiB of dynamic shared memory.
extern std::set<const void*> large_kernels;

// Runs body as every thread of the grid.
cudaError_t RunGrid(const cudaLaunchConfig_t& config,
                    const std::function<void()>& body);

void SyncThreads();
void SyncGrid();
// The value that thread `source` of the warp gives, once all of `mask` have
// given theirs.
std::uint64_t Exchange(unsigned mask, std::uint64_t value, int source);
int LaneId();

}  // namespace cuda_emulation

// Of the running thread.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// e^(x^2) erfc(x), in double; where that would overflow, its first term.
inline float erfcxf(float x) {
  const double wide = x;
  return static_cast<float>(wide < 20 ? std::exp(wide * wide) * std::erfc(wide)
                                      : 0.5641895835477563 / wide);
}

inline void __stwb(uint4* to, uint4 value) {
  std::memcpy(to, &value, sizeof(value));
}

// The device's own are less exact, and its quotients by more than 2^126 zero.
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

inline void __syncthreads() { cuda_emulation::SyncThreads(); }

template <class T>
T cuda_emulation_shuffle(unsigned mask, T value, int source) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  bits = cuda_emulation::Exchange(mask, bits, source);
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int offset) {
  const int lane = cuda_emulation::LaneId();
  const int source = lane + offset;
  return cuda_emulation_shuffle(mask, value, source < 32 ? source : lane);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return cuda_emulation_shuffle(mask, value, cuda_emulation::LaneId() ^ bits);
}

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* ordinal);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int ordinal);
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t);
cudaError_t cudaFreeAsync(void* memory, cudaStream_t);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes,
                            cudaStream_t);

// Streams run in the order of the calls; that one waits is counted.
using cudaEvent_t = int;
constexpr unsigned cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) {
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  ++cuda_emulation::waits;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

// A lower limit than the device's would also be that of other threads.
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute,
                                        int bytes) {
  if (bytes != cuda_emulation::device.shared_bytes)
    return cudaErrorInvalidValue;
  cuda_emulation::large_kernels.insert(kernel);
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, Kernel, int, std::size_t shared_bytes) {
  const int fitting = shared_bytes == 0
                          ? cuda_emulation::device.blocks_per_multiprocessor
                          : cuda_emulation::device.shared_bytes /
                                static_cast<int>(shared_bytes);
  *blocks = fitting < cuda_emulation::device.blocks_per_multiprocessor
                ? fitting
                : cuda_emulation::device.blocks_per_multiprocessor;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (config->dynamicSmemBytes > 48 * 1024 &&
      cuda_emulation::large_kernels.count(
          reinterpret_cast<const void*>(kernel)) == 0) {
    return cudaErrorInvalidValue;
  }
  return cuda_emulation::RunGrid(*config, [&] { kernel(arguments...); });
}

#endif  // TFO_CUDA_EMULATION_CUDA_RUNTIME_H_
