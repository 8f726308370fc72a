// What elementwise passes over tensors share: vectors and what remains of them,
// outputs past the caches, tasks.
#ifndef TFO_CC_CORE_ELEMENTWISE_H_
#define TFO_CC_CORE_ELEMENTWISE_H_

#include <cstdint>

#include "cc/core/integers.h"
#include "cc/core/parallel.h"
#include "cc/core/simd.h"
#include "cc/core/storage.h"
#include "cc/core/streaming.h"

namespace tfo::TFO_ISA {
namespace {

using std::int64_t;

template <bool P>
struct Partial {
  static constexpr bool value = P;
};

// How far ahead of a load its tensor is fetched: the hardware's own prefetchers
// stop at the end of a small page.
constexpr int64_t kAheadBytes = 8192;

template <class T>
TFO_INLINE void FetchAhead(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + kAheadBytes);
}

// Calls step(column, Partial<P>, n): whole vectors, then the n columns that
// remain.
template <class A, class Step>
TFO_INLINE void ForColumns(int64_t width, const Step& step) {
  int64_t j = 0;
  for (; j + kLanes<A> <= width; j += kLanes<A>)
    step(j, Partial<false>{}, kLanes<A>);
  if (j < width) step(j, Partial<true>{}, static_cast<int>(width - j));
}

template <bool P, class T>
TFO_INLINE Vec<Accumulator<T>> LoadColumns(const T* from, int n) {
  if constexpr (P) {
    return LoadAsPartial(from, n);
  } else {
    return LoadAs(from);
  }
}

template <bool P, class T>
TFO_INLINE void StoreColumns(T* to, Vec<Accumulator<T>> v, int n) {
  if constexpr (P) {
    StoreAsPartial(to, v, n);
  } else {
    StoreAs(to, v);
  }
}

// v in the first n lanes, `rest` in the others.
template <class A>
TFO_INLINE Vec<A> FirstLanes(Vec<A> v, int n, Vec<A> rest = Vec<A>{}) {
  IntVec<A> lane;
  for (int l = 0; l < kLanes<A>; ++l) lane[l] = l;
  return lane < IntVec<A>{} + n ? v : rest;
}

// An output tensor. `stream`: its whole vectors bypass the caches.
template <class T>
struct Output {
  T* data;
  bool stream;

  Output At(int64_t element) const { return {data + element, stream}; }

  template <bool kPartial>
  TFO_INLINE void Store(int64_t element, Vec<Accumulator<T>> v, int n) const {
    if (!kPartial && stream) {
      StoreStreaming(data + element, v);
    } else {
      StoreColumns<kPartial>(data + element, v, n);
    }
  }
};

// Outputs from this size on are stored past the caches. It is less than for
// products, as there is no arithmetic to hide the stores behind (measured at 13
// MB beside a cache of 32 MiB: 0.7 of the time, 0.85 together with a reader
// right after; at 6 MB the reader loses as much as the writer gains; with 260
// MiB: 0.7 from 13 MB on).
constexpr int64_t kStreamedElementwise = 8 << 20;

// Whether to store an output past the caches: it is too large for them, not in
// them already as one of the inputs, and aligned.
template <class T>
bool Streams(int64_t size, const void* output, const void* input,
             const void* other) {
  return size * static_cast<int64_t>(sizeof(T)) >= kStreamedElementwise &&
         output != input && output != other &&
         reinterpret_cast<std::uintptr_t>(output) % 64 == 0;
}

// An output of [rows, depth]. Rows of a depth that is no multiple of a vector
// do not all begin at aligned addresses.
template <class T>
Output<T> OutputOfRows(int64_t rows, int64_t depth, void* output,
                       const void* input, const void* other = nullptr) {
  const bool streams =
      depth % 16 == 0 && Streams<T>(rows * depth, output, input, other);
  return {static_cast<T*>(output), streams};
}

// Elements of a task: whole cache lines, far less than the caches.
constexpr int64_t kTaskElements = 4096;

// Stores value(at, Partial<P>, n), n elements from `at` on, for all of `size`.
// An element costs about `cycles`.
template <class T, class Value>
void ForElements(int64_t size, int64_t cycles, Output<T> output,
                 const Parallel& parallel, const Value& value) {
  auto run = [&](int64_t task, int /*worker*/) {
    const int64_t begin = task * kTaskElements;
    ForColumns<Accumulator<T>>(
        Min(kTaskElements, size - begin), [&](int64_t j, auto partial, int n) {
          constexpr bool kPartial = decltype(partial)::value;
          output.template Store<kPartial>(begin + j,
                                          value(begin + j, partial, n), n);
        });
    if (output.stream) FlushStores();
  };
  ParallelFor(parallel, CeilDiv(size, kTaskElements), kTaskElements * cycles,
              run);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_ELEMENTWISE_H_
