// y = max over windows of x, with relu; x_grad = sum of dy over the windows
// that found their largest here.
#include "cc/core/elementwise.h"
#include "cc/core/max_pool.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kCyclesPerVector = 8;

// As many elements as a vector of A has lanes.
template <class A, class E>
struct LanesOf {
  typedef E type __attribute__((vector_size(kLanes<A> * sizeof(E))));
};
template <class A, class E>
using Lanes = typename LanesOf<A, E>::type;
template <class A>
using Bytes = Lanes<A, std::uint8_t>;

// In steps that double the size, for which there are instructions: GCC converts
// more at once element by element.
template <class A>
TFO_INLINE IntVec<A> Widen(Bytes<A> bytes) {
  using Words = Lanes<A, std::uint16_t>;
  using Ints = Lanes<A, std::int32_t>;
  const Words words = __builtin_convertvector(bytes, Words);
  const Ints ints = __builtin_convertvector(words, Ints);
  return __builtin_convertvector(ints, IntVec<A>);
}

template <class A>
TFO_INLINE IntVec<A> SplatIndex(int64_t index) {
  return IntVec<A>{} + static_cast<typename IntegerOf<A>::type>(index);
}

// The part [begin, end) of a window that lies inside the image, along one axis.
struct Overlap {
  int64_t begin, end;

  Overlap(int64_t start, int64_t window, int64_t size)
      : begin(Max(-start, 0)), end(Min(window, size - start)) {}
};

// The windows [begin, end) that a pixel lies in, along one axis.
struct Covering {
  int64_t begin, end;

  // `pixel` counts from the first window's start, which may lie outside.
  Covering(int64_t pixel, int64_t window, int64_t stride, int64_t count)
      : begin(pixel < window ? 0 : (pixel - window) / stride + 1),
        end(Min(pixel / stride + 1, count)) {}
};

template <class T, bool kIndices>
void Forward(const MaxPoolArgs& args, const Parallel& parallel) {
  using A = Accumulator<T>;
  const MaxPoolShape& s = args.shape;
  const int64_t channels = s.channels;
  auto run = [&](int64_t row, int /*worker*/) {
    const int64_t n = row / s.out_h, i = row % s.out_h;
    const int64_t h = i * s.stride_h - s.pad_top;
    const Overlap down(h, s.window_h, s.in_h);
    const T* const image =
        static_cast<const T*>(args.x) + n * s.in_h * s.in_w * channels;
    for (int64_t j = 0; j < s.out_w; ++j) {
      const int64_t w = j * s.stride_w - s.pad_left;
      const Overlap across(w, s.window_w, s.in_w);
      const int64_t at = (row * s.out_w + j) * channels;
      T* const y = static_cast<T*>(args.y) + at;
      ForColumns<A>(channels, [&](int64_t c, auto partial,
                                  int count) TFO_INLINE_LAMBDA {
        constexpr bool kPartial = decltype(partial)::value;
        const auto load = [&](int64_t r, int64_t q) TFO_INLINE_LAMBDA {
          const T* from = image + ((h + r) * s.in_w + w + q) * channels + c;
          FetchAhead(from);
          return LoadColumns<kPartial>(from, count);
        };
        Vec<A> best = load(down.begin, across.begin);
        IntVec<A> index = SplatIndex<A>(down.begin * s.window_w + across.begin);
        for (int64_t r = down.begin; r < down.end; ++r) {
          for (int64_t q = across.begin; q < across.end; ++q) {
            const Vec<A> v = load(r, q);
            // A NaN is the largest.
            const IntVec<A> better = (v > best) | (v != v);
            best = better ? v : best;
            index = better ? SplatIndex<A>(r * s.window_w + q) : index;
          }
        }
        if (args.relu) {
          const IntVec<A> positive = best > Vec<A>{};
          index = positive ? index : SplatIndex<A>(kNoMaxPoolIndex);
          best = best <= Vec<A>{} ? Vec<A>{} : best;
        }
        StoreColumns<kPartial>(y + c, best, count);
        if (kIndices) {
          const Bytes<A> bytes = __builtin_convertvector(index, Bytes<A>);
          __builtin_memcpy(args.indices + at + c, &bytes,
                           static_cast<unsigned>(count));
        }
      });
    }
  };
  ParallelFor(parallel, s.batch * s.out_h,
              s.out_w * CeilDiv(channels, kLanes<A>) * s.window_h * s.window_w *
                  kCyclesPerVector,
              run);
}

template <class T>
void Gradient(const MaxPoolGradientArgs& args, const Parallel& parallel) {
  using A = Accumulator<T>;
  const MaxPoolShape& s = args.shape;
  const int64_t channels = s.channels;
  const int64_t size = s.batch * s.in_h * s.in_w * channels;
  // Pixels of other channels do not begin at whole vectors.
  const bool streams =
      channels % 16 == 0 && Streams<T>(size, args.x_grad, args.dy, nullptr);
  const Output<T> x_grad{static_cast<T*>(args.x_grad), streams};
  auto run = [&](int64_t row, int /*worker*/) {
    const int64_t n = row / s.in_h, h = row % s.in_h + s.pad_top;
    const Covering down(h, s.window_h, s.stride_h, s.out_h);
    for (int64_t j = 0; j < s.in_w; ++j) {
      const int64_t w = j + s.pad_left;
      const Covering across(w, s.window_w, s.stride_w, s.out_w);
      const int64_t at = (row * s.in_w + j) * channels;
      ForColumns<A>(
          channels, [&](int64_t c, auto partial, int count) TFO_INLINE_LAMBDA {
            constexpr bool kPartial = decltype(partial)::value;
            Vec<A> sum{};
            for (int64_t oh = down.begin; oh < down.end; ++oh) {
              for (int64_t ow = across.begin; ow < across.end; ++ow) {
                const int64_t from =
                    ((n * s.out_h + oh) * s.out_w + ow) * channels + c;
                const int64_t index =
                    (h - oh * s.stride_h) * s.window_w + w - ow * s.stride_w;
                Bytes<A> bytes{};
                __builtin_memcpy(&bytes, args.indices + from,
                                 static_cast<unsigned>(count));
                const IntVec<A> here = Widen<A>(bytes) == SplatIndex<A>(index);
                const Vec<A> dy = LoadColumns<kPartial>(
                    static_cast<const T*>(args.dy) + from, count);
                sum += here ? dy : Vec<A>{};
              }
            }
            x_grad.template Store<kPartial>(at + c, sum, count);
          });
    }
    if (x_grad.stream) FlushStores();
  };
  ParallelFor(parallel, s.batch * s.in_h,
              s.in_w * CeilDiv(channels, kLanes<A>) * kCyclesPerVector, run);
}

}  // namespace

MaxPoolForwardFunction MaxPoolForward;
MaxPoolGradientFunction MaxPoolGradient;

void MaxPoolForward(const MaxPoolArgs& args, const Parallel& parallel) {
  WithStorage(args.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    if (args.indices == nullptr) {
      Forward<T, false>(args, parallel);
    } else {
      Forward<T, true>(args, parallel);
    }
  });
}

void MaxPoolGradient(const MaxPoolGradientArgs& args,
                     const Parallel& parallel) {
  WithStorage(args.dtype, [&](auto storage) {
    Gradient<typename decltype(storage)::type>(args, parallel);
  });
}

}  // namespace tfo::TFO_ISA
