// A dense matrix [rows, depth] whose rows are reduced: whole warps of one block
// share a row, each thread holds its first vectors of it in registers, and only
// rows too long for that are read again.
#ifndef TFO_CUDA_ROWS_H_
#define TFO_CUDA_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/vector.h"

namespace tfo::cuda {

struct Rows {
  std::int64_t rows, depth;
  bool arrays_aligned;  // every array begins at a multiple of 16 bytes
  bool aligned;         // and so does every row of it
};

// Launches a kernel whose threads hold `held` vectors of `vector` elements of a
// row, and whose totals are As. `aligned`: so is every array.
template <class A, class Terms>
Status LaunchRows(const char* name, std::int64_t rows, std::int64_t depth,
                  int vector, int held, bool aligned, Stream stream,
                  void (*kernel)(Rows, Terms), const Terms& terms) {
  if (rows == 0) return {};
  Device device;
  TFO_CUDA_RETURN_IF_ERROR(CurrentDevice(&device));
  int threads = kWarp;  // of a row
  while (threads < kBlockThreads &&
         depth > std::int64_t{threads} * held * vector)
    threads *= 2;
  const dim3 block(threads, kBlockThreads / threads);
  const std::int64_t most = std::int64_t{device.multiprocessors} *
                            device.threads_per_multiprocessor / kBlockThreads;
  const std::int64_t blocks =
      std::clamp<std::int64_t>(CeilDiv(rows, block.y), 1, most);
  return Launch(name,
                {dim3(static_cast<unsigned>(blocks)), block,
                 sizeof(A) * kBlockThreads / kWarp},
                stream, kernel,
                Rows{rows, depth, aligned, aligned && depth % vector == 0},
                terms);
}

// Calls body(row) for the rows of this thread, the last first where
// `backwards`. Threads of a block are called equally often, as they wait for
// each other: those without a row get one past the end.
template <class Body>
__device__ void ForRows(const Rows& rows, bool backwards, const Body& body) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.y;
  for (std::int64_t first = std::int64_t{blockIdx.x} * blockDim.y;
       first < rows.rows; first += step) {
    const std::int64_t row = first + threadIdx.y;
    body(backwards && row < rows.rows ? rows.rows - 1 - row : row);
  }
}

// A thread's vectors of a row of `size` elements, kHeld of them in registers.
// load(at) reads what there is at element `at`.
template <class T, int kHeld, class Load>
class RowVectors {
 public:
  using Held = decltype(std::declval<Load>()(std::int64_t{}));

  __device__ RowVectors(std::int64_t size, const Load& load)
      : size_(size), load_(load) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (At(k) < size_) held_[k] = load_(At(k));
    }
  }

  // Calls body(vector, at).
  template <class Body>
  __device__ void ForEach(const Body& body) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (At(k) < size_) body(held_[k], At(k));
    }
    for (int k = kHeld; At(k) < size_; ++k) body(load_(At(k)), At(k));
  }

 private:
  __device__ static std::int64_t At(int k) {
    return (std::int64_t{k} * blockDim.x + threadIdx.x) * kVector<T>;
  }

  std::int64_t size_;
  const Load& load_;
  Held held_[kHeld];
};

// The total over the threads of a row, the same in each. `shared` has one for
// each warp of the block.
template <class A>
__device__ A TotalOfRow(A value, A* shared) {
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) value.Merge(value.Exchange(bit));
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  A* const own = shared + threadIdx.y * warps;
  if (threadIdx.x % kWarp == 0) own[threadIdx.x / kWarp] = value;
  __syncthreads();
  A total = own[0];
  for (int warp = 1; warp < warps; ++warp) total.Merge(own[warp]);
  __syncthreads();
  return total;
}

// to[i] = from[at + i], zero past the end of `array`.
template <int N>
__device__ void LoadFloats(const VectorArray& array, const float* from,
                           std::int64_t at, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += kVector<float>) {
    const Vector<float> vector = array.Load(from, at + i);
#pragma unroll
    for (int j = 0; j < kVector<float>; ++j) to[i + j] = vector[j];
  }
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_ROWS_H_
