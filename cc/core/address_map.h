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

// Vectors that are best written together.
template <class To>
constexpr int kVectorsStored = 1;
template <int kCount>
constexpr int kVectorsStored<InPlanes<BFloat16, kCount>> = 2;

// How far ahead is fetched: elements of runs that follow each other, and runs
// that are transposed. Where the hardware foresees them too, that does no harm
// (measured with AMX: columns of 64 of 512 channels 5 to 20 GB/s, relu's slope
// along 256 channels 15 to 26, 64 of 512 channels transposed 8 to 14).
constexpr std::int64_t kAhead = 512;
constexpr std::int64_t kRunsAhead = 32;

template <class T>
TFO_INLINE void FetchRun(const T* from, std::int64_t n) {
  constexpr int kLine = 64 / sizeof(T);
  for (std::int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i);
}

template <bool kFetch = false, class T, class To, class Transform>
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
  if constexpr (kVectorsStored<To> == 2) {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const std::int64_t second = i + lanes;
      if constexpr (kFetch) {
        FetchRun(from + i + kAhead, 2 * lanes);
        FetchRun(saved + i + kAhead, 2 * lanes);
      }
      StoreAs(to + i, transform(LoadAs(from + i), saved, i, lanes),
              transform(LoadAs(from + second), saved, second, lanes));
    }
  }
  for (; i + lanes <= n; i += lanes)
    StoreAs(to + i, transform(LoadAs(from + i), saved, i, lanes));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    StoreAsPartial(
        to + i, transform(LoadAsPartial(from + i, rest), saved, i, rest), rest);
  }
}

// Transposes `runs` runs of bfloat16, `run` elements apart, two at a time.
TFO_INLINE void TransposePairs(const BFloat16* from, std::int64_t run,
                               std::int64_t runs, std::int64_t columns,
                               BFloat16* to, std::int64_t pitch) {
  constexpr int lanes = kLanes<float>;
  for (std::int64_t c = 0; c < runs; c += 2 * lanes) {
    const int m = static_cast<int>(Min(runs - c, 2 * lanes));
    for (std::int64_t j = 0; j < columns; j += lanes) {
      const int n = static_cast<int>(Min(columns - j, lanes));
      Vec<float> pairs[lanes]{};
      for (int i = 0; i < m; ++i) {
        const BFloat16* const p = from + (c + i) * run + j;
        __builtin_prefetch(p + kRunsAhead * run);
        const UintVec bits = BitCast<UintVec>(
            Widen(p, n == lanes ? Load16(p) : Load16Partial(p, n)));
        UintVec both = BitCast<UintVec>(pairs[i / 2]);
        both |= i % 2 == 0 ? bits >> 16 : bits;
        pairs[i / 2] = BitCast<Vec<float>>(both);
      }
      Transpose<float>(pairs);
      for (int i = 0; i < n; ++i) {
        BFloat16* const row = to + (j + i) * pitch + c;
        struct {
          Vec16 first, second;
        } halves;
        __builtin_memcpy(&halves, &pairs[i], sizeof(halves));
        if (m >= lanes) {
          __builtin_memcpy(row, &halves.first, sizeof(halves.first));
          Store16Partial(row + lanes, halves.second, m - lanes);
        } else {
          Store16Partial(row, halves.first, m);
        }
      }
    }
  }
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
      return CopyRun<!std::is_same_v<Transform, Unchanged>>(
          from, saved, columns * channels, to, transform);
    }
    const bool fetch = channels <= kAhead;
    const std::int64_t ahead = kAhead / Max(channels, 1) * map.w;
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t at = j * map.w;
      if (fetch) {
        FetchRun(from + at + ahead, channels);
        if (saved != nullptr) FetchRun(saved + at + ahead, channels);
      }
      CopyRun(from + at, saved == nullptr ? nullptr : saved + at, channels,
              to + j * pitch, transform);
    }
    return;
  }
  // Pixels lie together (map.w == 1): blocks of them and of channels are
  // transposed.
  if constexpr (std::is_same_v<T, BFloat16> && std::is_same_v<To, T*> &&
                std::is_same_v<Transform, Unchanged>) {
    return TransposePairs(from, map.c, channels, columns, to, pitch);
  }
  constexpr int kVectors = kVectorsStored<To>;
  for (std::int64_t c = 0; c < channels; c += kVectors * lanes) {
    for (std::int64_t j = 0; j < columns; j += lanes) {
      const int n = static_cast<int>(Min(columns - j, lanes));
      decltype(transform(Vec<A>{}, saved, 0, n)) v[kVectors][lanes]{};
      for (int part = 0; part < kVectors; ++part) {
        const std::int64_t first = c + part * lanes;
        const int m = static_cast<int>(Min(channels - first, lanes));
        for (int i = 0; i < m; ++i) {
          const std::int64_t at = (first + i) * map.c + j;
          const T* p = from + at;
          __builtin_prefetch(p + kRunsAhead * map.c);
          if (saved != nullptr)
            __builtin_prefetch(saved + at + kRunsAhead * map.c);
          v[part][i] = transform(n == lanes ? LoadAs(p) : LoadAsPartial(p, n),
                                 saved, at, n);
        }
        Transpose<A>(v[part]);
      }
      const To block = to + j * pitch + c;
      if constexpr (kVectors == 2) {
        if (channels - c >= 2 * lanes) {
          for (int i = 0; i < n; ++i)
            StoreAs(block + i * pitch, v[0][i], v[1][i]);
          continue;
        }
      }
      for (int part = 0; part < kVectors; ++part) {
        const std::int64_t first = part * lanes;
        const int m = static_cast<int>(Min(channels - c - first, lanes));
        for (int i = 0; i < n && m > 0; ++i) {
          const To at = block + i * pitch + first;
          m == lanes ? StoreAs(at, v[part][i])
                     : StoreAsPartial(at, v[part][i], m);
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

// Brings a box inside image n into `to` as panels of kWidth channels, `panel`
// elements apart: columns follow each other, rows are `row_pitch` apart.
template <int kWidth, class T>
void GatherPanels(const Source<T>& source, const AddressMap& map,
                  std::int64_t n, const Box& box, Accumulator<T>* to,
                  std::int64_t row_pitch, std::int64_t panel) {
  const std::int64_t panels = CeilDiv(box.channels, kWidth);
  const auto channels = [&](std::int64_t p) TFO_INLINE_LAMBDA {
    return Min(box.channels - p * kWidth, kWidth);
  };
  WithTransform(source, [&](auto transform) {
    for (std::int64_t i = 0; i < box.rows; ++i, to += row_pitch) {
      const std::int64_t first =
          map.Offset(n, box.h + i, box.w) + box.c * map.c;
      const auto saved = [&](std::int64_t at) TFO_INLINE_LAMBDA {
        return source.saved == nullptr ? nullptr : source.saved + at;
      };
      if (map.c != 1) {
        for (std::int64_t p = 0; p < panels; ++p) {
          const std::int64_t at = first + p * kWidth * map.c;
          CopyRow(source.data + at, saved(at), map, box.columns, channels(p),
                  to + p * panel, kWidth, transform);
        }
        continue;
      }
      // Channels that lie together are read together, which the hardware
      // foresees (measured with relu, 256 channels: 26 beside 14 GB/s).
      const std::int64_t ahead = kAhead / box.channels * map.w;
      for (std::int64_t j = 0; j < box.columns; ++j) {
        const std::int64_t column = first + j * map.w;
        if (box.channels <= kAhead) {
          FetchRun(source.data + column + ahead, box.channels);
          if (source.saved != nullptr)
            FetchRun(source.saved + column + ahead, box.channels);
        }
        for (std::int64_t p = 0; p < panels; ++p) {
          const std::int64_t at = column + p * kWidth;
          CopyRun(source.data + at, saved(at), channels(p),
                  to + p * panel + j * kWidth, transform);
        }
      }
    }
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_ADDRESS_MAP_H_
