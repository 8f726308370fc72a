// What happens to a register tile before it reaches memory: scale, bias, side
// input, pre-activation, activation, layout.
#ifndef TFO_CC_CORE_EPILOGUE_H_
#define TFO_CC_CORE_EPILOGUE_H_

#include "cc/core/address_map.h"
#include "cc/core/cache.h"
#include "cc/core/micro_kernel.h"
#include "cc/core/scratch.h"

namespace tfo::TFO_ISA {
namespace {

// A vector of `n` in the accumulator's type, null if it is. False when scratch
// memory ran out.
template <class T>
TFO_INLINE bool Widened(const T* from, std::int64_t n, const Scratch& scratch,
                        const Accumulator<T>** to) {
  *to = nullptr;
  if (from == nullptr) return true;
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    *to = from;
  } else {
    Accumulator<T>* numbers = scratch.Allocate<Accumulator<T>>(n);
    if (numbers == nullptr) return false;
    CopyRun(from, static_cast<const T*>(nullptr), n, numbers, Unchanged{});
    *to = numbers;
  }
  return true;
}

// Columns of a tile, all there are, up to which rows are put together before
// they are activated and written.
template <class A>
constexpr int kDenseColumns = kLanes<A> / 2;

// The size from which on outputs that no reader waits for bypass the caches.
constexpr std::int64_t kStreamedUnread = 16 << 20;

// Null pointers: no bias, no side input, pre-activation not wanted. y,
// side_input and pre_activation share the map.
template <class T>
struct Epilogue {
  T* y;
  T* pre_activation;
  const T* bias;
  const T* side_input;
  Activation activation;
  Accumulator<T> alpha;
  AddressMap map;
  const T* scale = nullptr;  // of the product, before the bias; null: one
  bool partial = false;      // y is added to: it is read soon
  bool stream = false;       // whole vectors bypass the caches
  // Columns that lie together, and from these to the next ones: those of a line
  // of pixels that a row of the product stands for. Zero: all do.
  std::int64_t columns_together = 0, columns_pitch = 0;
  // Scale and bias as tiles read them.
  const Accumulator<T>* tile_scale = nullptr;
  const Accumulator<T>* tile_bias = nullptr;

  // Whether `size` elements of output are better stored past the caches: they
  // are more than fit, and pixels begin at a cache line.
  TFO_INLINE bool ShouldStream(std::int64_t size) const {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    const auto address = reinterpret_cast<std::uintptr_t>(y) |
                         reinterpret_cast<std::uintptr_t>(pre_activation);
    // A pre-activation is not read before the backward pass.
    const std::int64_t least = pre_activation == nullptr
                                   ? StreamedBytes()
                                   : Min(StreamedBytes(), kStreamedUnread);
    const std::int64_t pitches =
        map.batch | map.h | map.w | columns_together | columns_pitch;
    return !partial && size * static_cast<std::int64_t>(sizeof(T)) >= least &&
           map.c == 1 && pitches % kLine == 0 && address % 64 == 0;
  }

  // Where a column lies, and how many from there on.
  TFO_INLINE std::int64_t ColumnAt(std::int64_t channel) const {
    return columns_together == 0 ? channel * map.c
                                 : channel / columns_together * columns_pitch +
                                       channel % columns_together;
  }
  TFO_INLINE std::int64_t ColumnsFrom(std::int64_t channel,
                                      std::int64_t columns) const {
    return columns_together == 0
               ? columns
               : Min(columns, columns_together - channel % columns_together);
  }

  // Whether tiles can write their own sums to y, since no more than scale,
  // bias, side input, relu and relu6 is to be done: a pass through memory less.
  TFO_INLINE bool FitsTile() const {
    return kTilesHold<T> && map.c == 1 &&
           columns_together % kTileColumns<Accumulator<T>> == 0 &&
           pre_activation == nullptr &&
           (activation == Activation::kNone ||
            activation == Activation::kRelu ||
            activation == Activation::kRelu6);
  }

  // Whether they write all of `channels`.
  TFO_INLINE bool FitsTiles(std::int64_t channels) const {
    return FitsTile() && channels % kWrittenColumns<Operand<T>> == 0;
  }

  // Brings scale and bias of `channels` into the accumulator's type. False when
  // scratch memory ran out.
  TFO_INLINE bool PrepareForTile(std::int64_t channels,
                                 const Scratch& scratch) {
    return !FitsTile() || (Widened(scale, channels, scratch, &tile_scale) &&
                           Widened(bias, channels, scratch, &tile_bias));
  }

  // Lets the tile do that, if it has been prepared and can write `columns`.
  TFO_INLINE bool LeaveToTile(std::int64_t at, std::int64_t channel,
                              int columns,
                              TileOperands<Operand<T>>* tile) const {
    if constexpr (kTilesHold<T>) {
      if (FitsTiles(columns)) {
        at += ColumnAt(channel);
        tile->y = y + at;
        tile->y_stride = map.w;
        tile->scale = tile_scale == nullptr ? nullptr : tile_scale + channel;
        tile->bias = tile_bias == nullptr ? nullptr : tile_bias + channel;
        tile->side_input = side_input == nullptr ? nullptr : side_input + at;
        tile->activation = activation;
        tile->stream = stream;
        return true;
      }
    }
    return false;
  }

  // Adds the memory that a tile will be written to, and what is added to it.
  TFO_INLINE void Prefetch(std::int64_t at, std::int64_t channel, int rows,
                           std::int64_t columns, PrefetchList* list) const {
    if (map.c != 1) return;
    constexpr int kLine = 64 / sizeof(T);
    at += ColumnAt(channel);
    for (const std::int64_t end = at + ColumnsFrom(channel, columns); at < end;
         at += kLine) {
      if (!stream) {
        list->Add(y + at, rows, map.w * sizeof(T));
        if (pre_activation != nullptr)
          list->Add(pre_activation + at, rows, map.w * sizeof(T));
      }
      if (side_input != nullptr)
        list->Add(side_input + at, rows, map.w * sizeof(T));
    }
  }
};

template <class T, Activation kActivation>
struct EpilogueWriter {
  using A = Accumulator<T>;
  using V = Vec<A>;
  static constexpr int kLanesA = kLanes<A>;

  const Epilogue<T>& e;
  V alpha;

  TFO_INLINE V Activate(V z) const {
    return VectorActivation<T>::template Value<kActivation>(z, alpha);
  }

  TFO_INLINE void Write(T* to, V v, int n) const {
    if (n < kLanesA) {
      StoreAsPartial(to, v, n);
    } else if (e.stream) {
      StoreStreaming(to, v);
    } else {
      StoreAs(to, v);
    }
  }

  // n <= lanes elements that lie together in memory, from `at` on.
  TFO_INLINE void Run(std::int64_t at, V z, int n) const {
    if (e.side_input != nullptr) {
      const T* side = e.side_input + at;
      z += n == kLanesA ? LoadAs(side) : LoadAsPartial(side, n);
    }
    if (e.pre_activation != nullptr) Write(e.pre_activation + at, z, n);
    Write(e.y + at, Activate(z), n);
  }

  TFO_INLINE void WriteOne(std::int64_t at, A z) const {
    if (e.side_input != nullptr) z += LoadOne(e.side_input + at);
    if (e.pre_activation != nullptr) StoreOne(e.pre_activation + at, z);
    StoreOne(e.y + at, static_cast<A>(Activate(Splat(z))[0]));
  }

  static TFO_INLINE int Lanes(int n) { return n < kLanesA ? n : kLanesA; }

  // n <= lanes channels of a vector from `channel` on; `missing` where there is
  // none.
  TFO_INLINE V Channels(const T* vector, A missing, std::int64_t channel,
                        int n) const {
    return vector == nullptr ? Splat(missing)
           : n == kLanesA    ? LoadAs(vector + channel)
                             : LoadAsPartial(vector + channel, n);
  }

  // The same of one channel.
  static TFO_INLINE A One(const T* vector, A missing, std::int64_t channel) {
    return vector == nullptr ? missing : LoadOne(vector + channel);
  }

  // Channels lie together: a row of the tile is a run. It is written as a
  // whole: of stores past the caches, those that fill a line should meet
  // (measured in bfloat16, 1x1 convolution of 64 to 256 channels: 0.2 of the
  // time).
  void Rows(std::int64_t at, std::int64_t channel, const A* tile, int rows,
            int columns) const {
    V scale[kTileVectors], bias[kTileVectors];
    for (int j = 0, k = 0; k < columns; ++j, k += kLanesA) {
      scale[j] = Channels(e.scale, 1, channel + k, Lanes(columns - k));
      bias[j] = Channels(e.bias, 0, channel + k, Lanes(columns - k));
    }
    for (int i = 0; i < rows; ++i) {
      for (int j = 0, k = 0; k < columns; ++j, k += kLanesA) {
        Run(at + i * e.map.w + k,
            Load(tile + i * kTileColumns<A> + k) * scale[j] + bias[j],
            Lanes(columns - k));
      }
    }
  }

  // All channels are few, and lie together with those of the next pixel: they
  // fill vectors together (measured with AVX-512, 1x1 convolutions of 12 to 64
  // channels to 1 to 8: 0.7 to 0.95 of the time).
  void Dense(std::int64_t at, const A* tile, int rows, int columns) const {
    constexpr int kRows = 16;  // of which no vector but the last is partial
    static_assert(kRows % kLanesA == 0);
    const V scale = Channels(e.scale, 1, 0, columns);
    const V bias = Channels(e.bias, 0, 0, columns);
    A line[kRows * kLanesA];
    for (; rows > 0; rows -= kRows) {
      const int count = rows < kRows ? rows : kRows, size = count * columns;
      // What is stored behind the last channel is the next pixel's place.
      for (int i = 0; i < count; ++i, tile += kTileColumns<A>)
        Store(line + i * columns, Load(tile) * scale + bias);
      for (int k = 0; k < size; k += kLanesA)
        Run(at + k, Load(line + k), Lanes(size - k));
      at += size;
    }
  }

  // Channels lie apart, and pixels do.
  void Single(std::int64_t at, std::int64_t channel, const A* tile, int rows,
              int columns) const {
    for (int k = 0; k < columns; ++k) {
      const A scale = One(e.scale, 1, channel + k);
      const A bias = One(e.bias, 0, channel + k);
      const std::int64_t column = at + k * e.map.c;
      for (int i = 0; i < rows; ++i) {
        WriteOne(column + i * e.map.w,
                 tile[i * kTileColumns<A> + k] * scale + bias);
      }
    }
  }

  // Channels lie apart, and pixels together: a column of the tile is a run.
  // Blocks of them are transposed (measured, input gradients of dense layers:
  // 0.83 to 0.94 of the time, beside gathering each run).
  void Columns(std::int64_t at, std::int64_t channel, const A* tile, int rows,
               int columns) const {
    for (int k = 0; k < columns; k += kLanesA) {
      for (int i = 0; i < rows; i += kLanesA) {
        const int n = Lanes(rows - i);
        V block[kLanesA]{};
        for (int l = 0; l < n; ++l)
          block[l] = Load(tile + (i + l) * kTileColumns<A> + k);
        Transpose<A>(block);
        for (int j = 0; j < Lanes(columns - k); ++j) {
          Run(at + (k + j) * e.map.c + i,
              block[j] * One(e.scale, 1, channel + k + j) +
                  One(e.bias, 0, channel + k + j),
              n);
        }
      }
    }
  }
};

// Writes a tile of `rows` pixels from element `at` of image memory (channel 0)
// and `columns` channels from `channel`.
template <class T>
void WriteTile(const Epilogue<T>& epilogue, std::int64_t at,
               std::int64_t channel, const Accumulator<T>* tile, int rows,
               int columns) {
  WithActivation(epilogue.activation, [&](auto activation) {
    const EpilogueWriter<T, decltype(activation)::value> writer{
        epilogue, Splat(epilogue.alpha)};
    if (epilogue.map.c != 1) {
      const std::int64_t first = at + epilogue.ColumnAt(channel);
      return epilogue.map.w == 1
                 ? writer.Columns(first, channel, tile, rows, columns)
                 : writer.Single(first, channel, tile, rows, columns);
    }
    if (channel == 0 && columns == epilogue.map.w &&
        epilogue.columns_together == 0 &&
        columns <= kDenseColumns<Accumulator<T>>) {
      return writer.Dense(at, tile, rows, columns);
    }
    for (std::int64_t k = 0; k < columns;) {
      const std::int64_t count = epilogue.ColumnsFrom(channel + k, columns - k);
      writer.Rows(at + epilogue.ColumnAt(channel + k), channel + k, tile + k,
                  rows, static_cast<int>(count));
      k += count;
    }
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_EPILOGUE_H_
