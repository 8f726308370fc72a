// 16 bytes of elements at a time.
#ifndef TFO_CUDA_VECTOR_H_
#define TFO_CUDA_VECTOR_H_

#include <cstdint>
#include <cstring>

#include "cuda/element.h"

namespace tfo::cuda {

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// In whole registers: elements of 16 bits would be taken apart wherever a
// vector may come from two places.
template <class T>
struct alignas(16) Vector {
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

  std::uint32_t words[4];

  __device__ float operator[](int i) const {
    return ToFloat(FromBits<T>(words[i / kPerWord] >> Shift(i)));
  }
  // Of a vector that is zero there.
  __device__ void Set(int i, T value) {
    words[i / kPerWord] |= ToBits(value) << Shift(i);
  }

 private:
  static __device__ int Shift(int i) {
    return i % kPerWord * 8 * static_cast<int>(sizeof(T));
  }
};

// Elements [begin, end) of a dense array, read or written in vectors beginning
// at any multiple of kVector<T>.
struct VectorSpan {
  std::int64_t begin, end;
  bool aligned;  // every pointer used with it is a multiple of 16 bytes

  // Elements outside read as `outside`.
  template <class T>
  __device__ Vector<T> Load(const T* data, std::int64_t at,
                            float outside = 0) const {
    if (IsWhole<T>(at)) return *reinterpret_cast<const Vector<T>*>(data + at);
    Vector<T> vector{};
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      vector.Set(i, Has(at + i) ? data[at + i] : FromFloat<T>(outside));
    }
    return vector;
  }

  // Elements outside are not written.
  template <class T>
  __device__ void Store(const float (&from)[kVector<T>], T* data,
                        std::int64_t at) const {
    alignas(16) T values[kVector<T>];
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) values[i] = FromFloat<T>(from[i]);
    if (IsWhole<T>(at)) {
      // An assignment would become four or eight stores, as below.
      uint4 bits;
      std::memcpy(&bits, values, sizeof(bits));
      __stwb(reinterpret_cast<uint4*>(data + at), bits);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (Has(at + i)) data[at + i] = values[i];
    }
  }

 private:
  __device__ bool Has(std::int64_t at) const { return at >= begin && at < end; }
  template <class T>
  __device__ bool IsWhole(std::int64_t at) const {
    return aligned && at >= begin && at + kVector<T> <= end;
  }
};

// All of a dense array, in the same way.
struct VectorArray {
  std::int64_t size;  // elements
  bool aligned;       // every pointer used with it is a multiple of 16 bytes

  // Elements past the end read as zero.
  template <class T>
  __device__ Vector<T> Load(const T* data, std::int64_t at) const {
    return VectorSpan{0, size, aligned}.Load(data, at);
  }

  // Elements past the end are not written.
  template <class T>
  __device__ void Store(const float (&from)[kVector<T>], T* data,
                        std::int64_t at) const {
    VectorSpan{0, size, aligned}.Store(from, data, at);
  }
};

// Whether all of these, null or not, are multiples of 16 bytes.
template <class... Pointers>
bool Aligned(const Pointers*... pointers) {
  return (... && (reinterpret_cast<std::uintptr_t>(pointers) % 16 == 0));
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_VECTOR_H_
