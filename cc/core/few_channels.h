// Convolutions to few channels: neighbouring pixels fill the vectors, and the
// filters are broadcast.
#ifndef TFO_CC_CORE_FEW_CHANNELS_H_
#define TFO_CC_CORE_FEW_CHANNELS_H_

#include "cc/core/correlation_plan.h"
#include "cc/core/pixel_block.h"
#include "cc/core/tile.h"

namespace tfo::TFO_ISA {
namespace {

// More read the pixels once for each tile (measured with AVX-512, 3x3
// convolutions to 24 channels: 0.9 of the time from 16, but 1.15 from 512).
template <class A>
constexpr int kFewChannels =
    kTileRows<A> < kTileColumns<A> ? kTileRows<A> : kTileColumns<A>;

// What is multiplied. Numbers that are cut into several bfloat16 are better
// left whole: few channels fill too little of the registers.
template <class T>
using PixelOperand =
    std::conditional_t<(kPlanes<Operand<T>> > 1), Accumulator<T>, Operand<T>>;

// Whether pixels of lines of `width` fill so much more of the vectors than the
// output's channels do that they may be transposed for it (measured with
// AVX-512, 3x3 convolutions on 112x112: 0.3 of the time from 64 to 3 channels,
// 0.5 to 8, 0.7 to 12; but up to 1.2 from 512 to 12 on 38x38, which fill 0.95
// as many).
template <class A>
TFO_INLINE bool PixelsFillVectors(std::int64_t channels, std::int64_t width) {
  constexpr int lanes = kLanes<A>;
  return channels <= kFewChannels<A> &&
         5 * channels * CeilDiv(width, lanes) <=
             4 * width * CeilDiv(channels, lanes);
}

// Whether they do, and are used often enough to be transposed for it.
template <class T>
bool HasFewChannels(const Correlation<T>& c) {
  return c.x.stride_w == 1 && c.x.taps.count > 1 &&
         PixelsFillVectors<Accumulator<T>>(c.out_channels, c.x.grid_w);
}

// Operands between those of a pixel, in lines of `columns` pixels of which the
// last tile reads whole vectors: an odd number of vectors, so that they do not
// fall into the same few sets of the first-level cache.
template <class A>
TFO_INLINE std::int64_t PlanePitch(std::int64_t columns) {
  return (CeilDiv(columns + kLanes<A> - 1, kLanes<A>) | 1) * kLanes<A>;
}

// A part of the source as the tiles read it: [rows, operands, columns].
template <class T>
class Planes {
 public:
  using A = Accumulator<T>;
  using E = PixelOperand<T>;

  Planes(const Windows<T>& x, const Bands& bands)
      : depth_(NumOperands<E>(x.channels)),
        pitch_(PlanePitch<A>(bands.source_columns)),
        rows_(bands.source_rows) {}

  std::int64_t Pitch() const { return pitch_; }
  std::int64_t RowPitch() const { return depth_ * pitch_; }
  std::int64_t Size() const { return rows_ * RowPitch() + GatheredSize(); }

  // Brings `rows` rows of image n from pixel (h, w) on into `to`.
  void Gather(const Windows<T>& x, std::int64_t n, std::int64_t h,
              std::int64_t w, std::int64_t rows, E* to) const {
    E* const gathered = to + rows_ * RowPitch();
    for (std::int64_t i = 0; i < rows; ++i, to += RowPitch()) {
      TFO_ISA::Gather(
          x.source, x.map, n, x.height, x.width,
          {h + i, w, 0, 1, pitch_, x.channels}, Elements<E>({gathered, 0}),
          PixelOperands() * kElements<E>, GatheredSize() * kElements<E>);
      Transpose(gathered, to);
    }
  }

 private:
  std::int64_t PixelOperands() const {
    return CeilDiv(depth_, kLanes<A>) * kLanes<A>;
  }
  std::int64_t GatheredSize() const { return pitch_ * PixelOperands(); }

  void Transpose(const E* from, E* to) const {
    constexpr int lanes = kLanes<A>;
    for (std::int64_t j = 0; j < pitch_; j += lanes) {
      for (std::int64_t k = 0; k < depth_; k += lanes) {
        Vec<A> v[lanes];
        for (int l = 0; l < lanes; ++l)
          v[l] = Load(from + (j + l) * PixelOperands() + k);
        TFO_ISA::Transpose<A>(v);
        const int count = static_cast<int>(Min(depth_ - k, lanes));
        for (int l = 0; l < count; ++l) Store(to + (k + l) * pitch_ + j, v[l]);
      }
    }
  }

  std::int64_t depth_, pitch_, rows_;
};

// An element of a column of filters and, if there is one, the next.
template <class E, class T>
TFO_INLINE E LoadOperand(const T* from, std::int64_t next, bool has_next) {
  if constexpr (kElements<E> == 1) {
    return LoadOne(from);
  } else {
    return {from->bits | (has_next ? std::uint32_t{from[next].bits} << 16 : 0)};
  }
}

// The filters, [groups, taps, operands, rows of a tile].
template <class T>
struct BroadcastFilters {
  using E = PixelOperand<T>;

  std::int64_t channels, groups, rows;
  std::int64_t tap_pitch, group_pitch;
  E* data = nullptr;

  BroadcastFilters(const Windows<T>& x, std::int64_t out_channels)
      : channels(out_channels),
        groups(CeilDiv(channels, kTileRows<E>)),
        rows(CeilDiv(channels, groups)),
        tap_pitch(NumOperands<E>(x.channels) * rows),
        group_pitch(x.taps.count * tap_pitch) {}

  int GroupSize(std::int64_t group) const {
    return static_cast<int>(Min(rows, channels - group * rows));
  }

  // False when scratch memory ran out.
  bool Pack(const Correlation<T>& c, const PixelBlock& block,
            const Parallel& parallel, const Scratch& scratch) {
    constexpr int depth = kElements<E>;
    const Windows<T>& x = c.x;
    const FilterMap& map = c.filter_map;
    data = scratch.Allocate<E>(groups * group_pitch);
    if (data == nullptr) return false;
    auto task = [&](std::int64_t tap, int) {
      for (std::int64_t i = 0; i < channels; ++i) {
        const std::int64_t pixel = block.Pixel(i), channel = block.Channel(i);
        const std::int64_t matrix =
            block.filters == nullptr
                ? x.taps.taps[tap].filter
                : block.filters[tap * block.Pixels() + pixel];
        const T* from =
            c.filters + Max(matrix, 0) * map.matrix + channel * map.column;
        E* to = data + i / rows * group_pitch + tap * tap_pitch + i % rows;
        for (std::int64_t k = 0; k < x.channels; k += depth, to += rows) {
          *to = matrix < 0 ? E{}
                           : LoadOperand<E>(from + k * map.row, map.row,
                                            k + 1 < x.channels);
        }
      }
    };
    ParallelFor(parallel, x.taps.count, tap_pitch * groups, task);
    return true;
  }
};

// Sums of a tile, [channels, kTileColumns pixels], on their way to the output.
template <class T>
class PixelWriter {
 public:
  using A = Accumulator<T>;

  PixelWriter(const Epilogue<T>& epilogue, const PixelBlock& block)
      : e_(epilogue), block_(block), in_lines_(e_.map.w == block.LineSize()) {}

  // Writes the blocks of `pixels` grid pixels from (i, j) of image n on. There
  // must be room for whole vectors of channels.
  void Write(std::int64_t n, std::int64_t i, std::int64_t j, int pixels,
             A* sums) const {
    const std::int64_t at = e_.map.Offset(n, i, j);
    A line[kColumns * kColumns + kLanes<A>];
    if (!in_lines_) {
      Interleave(sums, block_.channels, pixels, kColumns, line);
      WriteTile(e_, at, 0, line, pixels, static_cast<int>(block_.channels));
      return;
    }
    if (e_.scale != nullptr || e_.bias != nullptr) Scale(sums);
    const bool channels_first = block_.ChannelsFirst();
    const std::int64_t line_size = block_.LineSize();
    const std::int64_t lines_per_row = block_.w * block_.channels / line_size;
    const std::int64_t lines =
        Min(block_.h, block_.height - i * block_.h) * lines_per_row;
    const std::int64_t size =
        Min(pixels * block_.w, block_.width - j * block_.w) *
        (channels_first ? 1 : block_.channels);
    WithActivation(e_.activation, [&](auto activation) {
      const EpilogueWriter<T, decltype(activation)::value> writer{
          e_, Splat(e_.alpha)};
      for (std::int64_t l = 0; l < lines; ++l) {
        const A* from = sums + l * line_size * kColumns;
        if (line_size > 1) {
          Interleave(from, line_size, pixels, line_size, line);
          from = line;
        }
        const std::int64_t to = at + l / lines_per_row * block_.row_pitch +
                                l % lines_per_row * block_.channel_pitch;
        for (std::int64_t k = 0; k < size; k += kLanes<A>) {
          writer.Run(to + k, Load(from + k),
                     static_cast<int>(Min(size - k, kLanes<A>)));
        }
      }
    });
  }

 private:
  static constexpr int kColumns = kTileColumns<A>;

  void Scale(A* sums) const {
    const std::int64_t count = block_.Pixels() * block_.channels;
    for (std::int64_t i = 0; i < count; ++i, sums += kColumns) {
      const std::int64_t c = block_.Channel(i);
      const A scale = e_.scale == nullptr ? A(1) : LoadOne(e_.scale + c);
      const A bias = e_.bias == nullptr ? A(0) : LoadOne(e_.bias + c);
      for (int j = 0; j < kColumns; j += kLanes<A>)
        Store(sums + j, Load(sums + j) * scale + bias);
    }
  }

  // Transposes `channels` to pixels that are `pitch` apart. What is written
  // behind the last channel of one is overwritten by the next.
  static void Interleave(const A* sums, std::int64_t channels, int pixels,
                         std::int64_t pitch, A* to) {
    constexpr int lanes = kLanes<A>;
    for (std::int64_t c = (channels - 1) / lanes * lanes; c >= 0; c -= lanes) {
      for (std::int64_t j = 0; j < pixels; j += lanes) {
        Vec<A> v[lanes];
        for (int l = 0; l < lanes; ++l)
          v[l] = Load(sums + (c + l) * kColumns + j);
        Transpose<A>(v);
        for (int l = 0; l < lanes; ++l) Store(to + (j + l) * pitch + c, v[l]);
      }
    }
  }

  const Epilogue<T>& e_;
  const PixelBlock& block_;
  bool in_lines_;  // whether the blocks beside each other are runs
};

template <class T>
bool CorrelateFewChannels(const Correlation<T>& c, const PixelBlock& block,
                          const Parallel& parallel, const Scratch& scratch) {
  using A = Accumulator<T>;
  using E = PixelOperand<T>;
  constexpr int lanes = kLanes<A>;
  constexpr int kColumns = kTileColumns<A>;
  const Windows<T>& x = c.x;
  const std::int64_t grid = x.batch * x.grid_h * x.grid_w;
  if (grid * c.out_channels == 0) return true;
  const std::int64_t depth = NumOperands<E>(x.channels);
  const std::int64_t work = x.taps.count * depth * c.out_channels;
  const std::int64_t wanted =
      Max(Min(grid * work / kTaskWork, kWantedTasks), 1);
  const std::int64_t width = x.grid_w + x.taps.max_w - x.taps.min_w;
  // Neighbouring bands gather the rows that both read anew: no more than half
  // as many as they have.
  const std::int64_t shared = x.taps.max_h - x.taps.min_h;
  const std::int64_t pixels =
      Max(Max(CeilDiv(grid, wanted), kColumns), 2 * shared * x.grid_w);
  const Bands bands =
      CutIntoBands(x, depth, pixels, kBandBytes * width / PlanePitch<A>(width));
  const Planes<T> planes(x, bands);
  BroadcastFilters<T> filters(x, c.out_channels);
  if (!filters.Pack(c, block, parallel, scratch)) return false;

  const PixelWriter<T> writer(c.epilogue, block);
  // A segment is a tap.
  const std::int64_t num_taps = x.taps.count;
  auto* const segments = scratch.Allocate<Segment>(num_taps);
  auto* const offsets = scratch.Allocate<std::int64_t>(num_taps);
  const std::int64_t sums_size = (c.out_channels + lanes) * kColumns;
  E* const own = scratch.Allocate<E>(planes.Size() * parallel.num_workers);
  A* const own_sums = scratch.Allocate<A>(sums_size * parallel.num_workers);
  if (segments == nullptr || offsets == nullptr || own == nullptr ||
      own_sums == nullptr) {
    return false;
  }
  for (std::int64_t t = 0; t < num_taps; ++t) {
    const Tap& tap = x.taps.taps[t];
    segments[t] = {t * filters.tap_pitch, depth};
    offsets[t] =
        (tap.h - x.taps.min_h) * planes.RowPitch() + tap.w - x.taps.min_w;
  }

  auto task = [&](std::int64_t index, int worker) {
    const Band band(x, bands, index);
    E* const from = own + worker * planes.Size();
    A* const sums = own_sums + worker * sums_size;
    planes.Gather(
        x, band.n, band.h, band.w,
        (band.rows - 1) * x.stride_h + x.taps.max_h - x.taps.min_h + 1, from);
    Lookahead<T> lookahead =
        x.After(bands, band.n, band.h, band.w,
                band.rows * CeilDiv(band.columns, kColumns));
    PrefetchList prefetch;
    for (std::int64_t i = 0; i < band.rows; ++i) {
      for (std::int64_t j = 0; j < band.columns; j += kColumns) {
        const int pixels = static_cast<int>(Min(band.columns - j, kColumns));
        prefetch.Clear();
        lookahead.Advance(1, &prefetch);
        for (std::int64_t group = 0; group < filters.groups; ++group) {
          TileOperands<E> tile{filters.data + group * filters.group_pitch,
                               nullptr,
                               filters.rows,
                               segments,
                               num_taps,
                               from + i * x.stride_h * planes.RowPitch() + j,
                               planes.Pitch(),
                               nullptr,
                               0,
                               sums + group * filters.rows * kColumns,
                               kColumns,
                               &prefetch};
          tile.b_offset = offsets;
          RunTile<E, false>(filters.GroupSize(group), pixels, tile);
          prefetch.Clear();
        }
        writer.Write(band.n, band.i + i, band.j + j, pixels, sums);
      }
    }
  };
  ParallelFor(parallel, bands.Count(x.batch),
              work * bands.rows * bands.columns / lanes, task);
  return true;
}

// The same, where a grid pixel is one of the output.
template <class T>
bool CorrelateFewChannels(const Correlation<T>& c, const Parallel& parallel,
                          const Scratch& scratch) {
  const PixelBlock pixel{1,          1, c.out_channels,  c.x.grid_h,
                         c.x.grid_w, 0, c.epilogue.map.c};
  return CorrelateFewChannels(c, pixel, parallel, scratch);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_FEW_CHANNELS_H_
