// Sums and moments that merge, and their reduction over a warp and over the
// rows of a block. The order is fixed, so the results are the same from run to
// run.
#ifndef TFO_CUDA_REDUCE_H_
#define TFO_CUDA_REDUCE_H_

#include <cuda_runtime.h>

namespace tfo::cuda {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// N sums.
template <int N, class S = float>
struct Sums {
  using Wide = Sums<N, double>;

  S value[N] = {};

  __device__ Wide Widen() const {
    Wide wide;
    for (int i = 0; i < N; ++i) wide.value[i] = value[i];
    return wide;
  }
  __device__ void Merge(const Sums& other) {
    for (int i = 0; i < N; ++i) value[i] += other.value[i];
  }
  __device__ Sums Shuffle(int offset) const {
    Sums other;
    for (int i = 0; i < N; ++i) {
      other.value[i] = __shfl_down_sync(kWholeWarp, value[i], offset);
    }
    return other;
  }
  // Of the lane whose number differs in `bit`.
  __device__ Sums Exchange(int bit) const {
    Sums other;
    for (int i = 0; i < N; ++i) {
      other.value[i] = __shfl_xor_sync(kWholeWarp, value[i], bit);
    }
    return other;
  }
};

// Count, mean and sum of squared deviations from the mean; Chan, Golub and
// LeVeque, "Updating formulae and a pairwise algorithm for computing sample
// variances", 1979.
template <class S = float>
struct Moments {
  using Wide = Moments<double>;

  S count = 0, mean = 0, squares = 0;

  __device__ Wide Widen() const { return {count, mean, squares}; }
  __device__ void Merge(const Moments& other) {
    if (other.count == 0) return;
    const S total = count + other.count;
    const S weight = other.count / total;
    const S delta = other.mean - mean;
    mean += delta * weight;
    squares += other.squares + delta * delta * (count * weight);
    count = total;
  }
  __device__ Moments Shuffle(int offset) const {
    return {__shfl_down_sync(kWholeWarp, count, offset),
            __shfl_down_sync(kWholeWarp, mean, offset),
            __shfl_down_sync(kWholeWarp, squares, offset)};
  }
};

// Merges the values of a warp's lanes into that of lane 0; the others' are
// undefined afterwards.
template <class A>
__device__ void ReduceWarp(A* value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value->Merge(value->Shuffle(offset));
  }
}

// The block's dynamic shared memory, 16-byte aligned.
__device__ inline void* SharedMemory() {
  extern __shared__ uint4 tfo_shared_memory[];
  return tfo_shared_memory;
}

// Merges the values of threads that differ in threadIdx.y into those of
// threadIdx.y == 0, N a thread. `shared` has room for RowsReductionBytes.
template <int N, class A>
__device__ void ReduceRows(A (&values)[N], A* shared) {
  const int x = threadIdx.x, y = threadIdx.y, width = blockDim.x;
  for (int rows = blockDim.y; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (y >= half && y < rows) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        shared[(i * half + y - half) * width + x] = values[i];
      }
    }
    __syncthreads();
    if (y + half < rows) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i].Merge(shared[(i * half + y) * width + x]);
      }
    }
    __syncthreads();
    rows = half;
  }
}

template <class A>
constexpr std::size_t RowsReductionBytes(dim3 block, int n) {
  return std::size_t{block.x} * ((block.y + 1) / 2) * n * sizeof(A);
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_REDUCE_H_
