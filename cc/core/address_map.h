// How the elements of an image tensor lie in memory, and how they are brought
// into the engine's own layout.
#ifndef TFO_CC_CORE_ADDRESS_MAP_H_
#define TFO_CC_CORE_ADDRESS_MAP_H_

#include "cc/core/integers.h"
#include "cc/core/operand.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

// Element strides of a batch of images, whatever the layout.
struct AddressMap {
  std::int64_t batch, h, w, c;

  static TFO_INLINE AddressMap Of(std::int64_t height, std::int64_t width,
                                  std::int64_t channels, bool channels_first) {
    if (channels_first)
      return {channels * height * width, width, 1, height * width};
    return {height * width * channels, width * channels, channels, 1};
  }
  TFO_INLINE std::int64_t Offset(std::int64_t n, std::int64_t i,
                                 std::int64_t j) const {
    return n * batch + i * h + j * w;
  }
};

// A box of an image, which may reach over its edge: rows [h, h + rows), columns
// [w, w + columns), channels [c, c + channels).
struct Box {
  std::int64_t h, w, c;
  std::int64_t rows, columns, channels;
};

// The product's operand, as loaded: x itself, or with the activation's slope
// folded in, dz = dy * act'(saved).
template <class T>
struct Source {
  const T* data;
  const T* saved;  // null: take `data` as it is
  Activation activation;
  Accumulator<T> alpha;
};

template <class A>
TFO_INLINE void Zero(A* to, std::int64_t n) {
  __builtin_memset(to, 0, static_cast<std::size_t>(n) * sizeof(A));
}

template <class P, int kCount>
TFO_INLINE void Zero(InPlanes<P, kCount> to, std::int64_t n) {
  for (int i = 0; i < kCount; ++i) Zero(to[i], n);
}

// Takes a vector as it is.
struct Unchanged {
  template <class V, class T>
  TFO_INLINE V operator()(V v, const T*, std::int64_t, int) const {
    return v;
  }
};

// Multiplies by the activation's slope.
template <class T, Activation kActivation>
struct TimesSlope {
  using A = Accumulator<T>;

  TFO_INLINE Vec<A> operator()(Vec<A> v, const T* saved, std::int64_t i,
                               int count) const {
    const Vec<A> s = count == kLanes<A> ? LoadAs(saved + i)
                                        : LoadAsPartial(saved + i, count);
    return v * VectorActivation<T>::template Slope<kActivation>(s, alpha);
  }

  Vec<A> alpha;
};

// Calls body(transform) for what makes a source's operands of what is loaded.
template <class T, class Body>
TFO_INLINE void WithTransform(const Source<T>& source, const Body& body) {
  if (source.saved == nullptr) return body(Unchanged{});
  WithActivation(source.activation, [&](auto activation) {
    body(TimesSlope<T, decltype(activation)::value>{Splat(source.alpha)});
  });
}

// Whether what is written are elements of pairs.
template <class To>
constexpr bool kMakesPairs = std::is_same_v<To, BFloat16*> ||
                             std::is_same_v<To, InPlanes<BFloat16, 2>> ||
                             std::is_same_v<To, InPlanes<BFloat16, 3>>;

template <class T, class To, class Transform>
TFO_INLINE void CopyRun(const T* from, const T* saved, std::int64_t n, To to,
                        Transform transform) {
  constexpr int lanes = kLanes<Accumulator<T>>;
  std::int64_t i = 0;
  if constexpr (std::is_same_v<To, T*> && kIs16Bit<T> &&
                std::is_same_v<Transform, Unchanged>) {
    for (; i + lanes <= n; i += lanes)
      __builtin_memcpy(to + i, from + i, lanes * sizeof(T));
    if (i < n) __builtin_memcpy(to + i, from + i, (n - i) * sizeof(T));
    return;
  }
  for (; i + lanes <= n; i += lanes)
    StoreAs(to + i, transform(LoadAs(from + i), saved, i, lanes));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    StoreAsPartial(
        to + i, transform(LoadAsPartial(from + i, rest), saved, i, rest), rest);
  }
}

// How many elements ahead columns are fetched; none: they are not. The hardware
// does not foresee those of few channels that lie apart, and where a transform
// is long, or products are fast, the processor does not get to them by itself
// (measured with GELU, 32 channels of 3072: 0.3 of the time; with relu and AMX,
// 256 channels of bfloat16: 0.8 to 0.85, of float32 0.85 to 1.1).
template <class Transform>
constexpr std::int64_t kAhead = 0;
template <class T, Activation kActivation>
constexpr std::int64_t kAhead<TimesSlope<T, kActivation>> =
    !SlopeFromValue(kActivation, 1) ? 512
    : kHasAmx && kIs16Bit<T>        ? 1024
                                    : 0;

template <class T>
TFO_INLINE void FetchRun(const T* from, std::int64_t n) {
  constexpr int kLine = 64 / sizeof(T);
  for (std::int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i);
}

// Copies one row of a box that lies inside the image. Channels are the fast
// axis of `to`; columns are `pitch` apart. The last operand of a column is
// filled up with zero.
template <class T, class To, class Transform>
void CopyRow(const T* from, const T* saved, const AddressMap& map,
             std::int64_t columns, std::int64_t channels, To to,
             std::int64_t pitch, Transform transform) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
#if defined(__AVX512F__)
  // Some pixels of an odd number of channels, to which a zero each is added.
  if constexpr (kMakesPairs<To>) {
    if (map.c == 1 && map.w == channels && pitch == channels + 1 &&
        lanes % pitch == 0) {
      const std::int64_t pixels = lanes / pitch;
      unsigned taken = 0;
      for (int l = 0; l < lanes; ++l)
        taken |= (l % pitch < channels ? 1u : 0u) << l;
      for (std::int64_t j = 0; j < columns; j += pixels) {
        const int n = static_cast<int>(Min(pixels, columns - j));
        const std::int64_t at = j * channels;
        const int count = static_cast<int>(n * channels);
        const auto v = (__m512)transform(LoadAsPartial(from + at, count), saved,
                                         at, count);
        StoreAsPartial(to + j * pitch,
                       (Vec<float>)_mm512_maskz_expand_ps(
                           static_cast<__mmask16>(taken), v),
                       static_cast<int>(n * pitch));
      }
      return;
    }
  }
#endif
  if (kMakesPairs<To> && channels % 2 != 0) {
    for (std::int64_t j = 0; j < columns; ++j)
      Zero(to + j * pitch + channels, 1);
  }
  if (map.c == 1) {
    if (map.w == channels && pitch == channels) {
      return CopyRun(from, saved, columns * channels, to, transform);
    }
    const bool fetch = kAhead<Transform> > 0 && channels <= kAhead<Transform>;
    const std::int64_t ahead = kAhead<Transform> / Max(channels, 1) * map.w;
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t at = j * map.w;
      if (fetch) {
        FetchRun(from + at + ahead, channels);
        FetchRun(saved + at + ahead, channels);
      }
      CopyRun(from + at, saved == nullptr ? nullptr : saved + at, channels,
              to + j * pitch, transform);
    }
    return;
  }
  // Pixels lie together (map.w == 1): blocks of them and of channels are
  // transposed.
  for (std::int64_t j = 0; j < columns; j += lanes) {
    const int n = static_cast<int>(Min(columns - j, lanes));
    for (std::int64_t c = 0; c < channels; c += lanes) {
      const int m = static_cast<int>(Min(channels - c, lanes));
      decltype(transform(Vec<A>{}, saved, 0, n)) v[lanes]{};
      for (int i = 0; i < m; ++i) {
        const std::int64_t at = (c + i) * map.c + j;
        const T* p = from + at;
        v[i] = transform(n == lanes ? LoadAs(p) : LoadAsPartial(p, n), saved,
                         at, n);
      }
      Transpose<A>(v);
      const To block = to + j * pitch + c;
      for (int i = 0; i < n; ++i) {
        if (m == lanes) {
          StoreAs(block + i * pitch, v[i]);
        } else {
          StoreAsPartial(block + i * pitch, v[i], m);
        }
      }
    }
  }
}

template <class T, class To, class Transform>
TFO_INLINE void GatherRows(const Source<T>& source, const AddressMap& map,
                           std::int64_t n, std::int64_t height,
                           std::int64_t width, const Box& box, To to,
                           std::int64_t pitch, std::int64_t row_pitch,
                           Transform transform) {
  const std::int64_t first = box.w < 0 ? -box.w : 0;
  std::int64_t last = width - box.w < box.columns ? width - box.w : box.columns;
  if (last < first) last = first;
  for (std::int64_t i = 0; i < box.rows; ++i, to = to + row_pitch) {
    const std::int64_t row = box.h + i;
    if (row < 0 || row >= height || last == first) {
      Zero(to, box.columns * pitch);
      continue;
    }
    Zero(to, first * pitch);
    const std::int64_t at = map.Offset(n, row, box.w + first) + box.c * map.c;
    CopyRow(source.data + at,
            source.saved == nullptr ? nullptr : source.saved + at, map,
            last - first, box.channels, to + first * pitch, pitch, transform);
    Zero(to + last * pitch, (box.columns - last) * pitch);
  }
}

// Brings a box of image n into `to` as accumulators or elements of operands,
// zero beyond the image: columns `pitch` >= channels apart, rows `row_pitch` >=
// columns * pitch. What lies between the last operand of a column and pitch is
// left as it is inside the image.
template <class T, class To>
void Gather(const Source<T>& source, const AddressMap& map, std::int64_t n,
            std::int64_t height, std::int64_t width, const Box& box, To to,
            std::int64_t pitch, std::int64_t row_pitch) {
  WithTransform(source, [&](auto transform) {
    GatherRows(source, map, n, height, width, box, to, pitch, row_pitch,
               transform);
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_ADDRESS_MAP_H_
