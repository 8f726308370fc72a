// Convolutions whose groups fit a vector, among them those whose channels are
// groups of their own. The output channels of as many groups as fit share a
// vector; what they see of the image is gathered, zero beyond the edge, or read
// where it is, and every tap is a multiply-add of a vector of it for each of a
// group's channels.
#ifndef TFO_CC_CORE_SMALL_GROUPS_H_
#define TFO_CC_CORE_SMALL_GROUPS_H_

#include "cc/core/small_groups_sums.h"

namespace tfo::TFO_ISA {
namespace {

// One of the correlations that read the same planes.
template <class T>
struct SmallGroupsPass {
  const Correlation<T>* c;
  Epilogue<T> epilogue;
  std::int64_t* offsets;  // of its taps in a plane
  std::int64_t run;       // of taps that are summed up together
  SpreadFilters<T> filters;
  // Of a row of windows, those that the taps of a row see in the image, and
  // those that see nothing else. Only of planes that are read in place.
  Range* inside;
  Range whole;

  // False when scratch memory ran out.
  bool FindEdges(const Scratch& scratch) {
    const Windows<T>& x = c->x;
    const std::int64_t per_row = x.taps.PerRow();
    inside = scratch.Allocate<Range>(per_row);
    if (inside == nullptr) return false;
    whole = {0, x.grid_w};
    for (std::int64_t t = 0; t < per_row; ++t) {
      // Taps that are summed up together are loaded as windows of the first.
      inside[t] =
          Inside(x.taps.taps[t].w, x.stride_w, x.grid_w + per_row, x.width);
      whole = {Max(whole.begin, inside[t].begin),
               Min(whole.end, inside[t].end)};
    }
    return true;
  }
};

// Where the second-level cache does not hold the images, or the output, that of
// a tile is asked for while it is summed up, since vectors that lie a pixel
// apart are not foreseen; and of images that are read in place, what the next
// row of windows is the first to see (measured with AVX-512, images of 6 to 50
// MB: 0.52 to 0.98 of the time; of 2 to 5 MB 0.97 to 1.1).
constexpr std::int64_t kUncachedImagesBytes = 5 << 20;

// Of `pixels` neighbouring ones of an output that is about to be written, the
// vectors that begin at `at`.
template <class T>
TFO_INLINE void FetchOutput(const Epilogue<T>& epilogue, std::int64_t at,
                            std::int64_t pixels) {
  if (epilogue.stream || epilogue.map.c != 1) return;
  const auto fetch = [&](const T* to) {
    for (std::int64_t i = 0; i < pixels; ++i)
      __builtin_prefetch(to + at + i * epilogue.map.w, 1, 3);
  };
  fetch(epilogue.y);
  if (epilogue.pre_activation != nullptr) fetch(epilogue.pre_activation);
}

// `columns` neighbouring pixels of some rows, a vector of each.
template <class S>
TFO_INLINE void FetchPixels(const S* row, std::int64_t rows,
                            std::int64_t columns, const PlanePlan& p) {
  for (; rows > 0; --rows, row += p.row_pitch) {
    for (std::int64_t j = 0; j < columns; ++j)
      __builtin_prefetch(row + j * p.pitch, 0, 2);
  }
}

// The windows of all correlations: as many as the first has, over the reach of
// all taps.
template <class T>
Windows<T> JoinedWindows(const Correlation<T>* correlations,
                         std::int64_t count) {
  Windows<T> x = correlations[0].x;
  x.taps = {nullptr};
  for (std::int64_t i = 0; i < count; ++i) {
    const TapList& taps = correlations[i].x.taps;
    if (taps.count == 0) continue;
    TapList& all = x.taps;
    const bool first = all.count == 0;
    all.min_h = first ? taps.min_h : Min(all.min_h, taps.min_h);
    all.max_h = first ? taps.max_h : Max(all.max_h, taps.max_h);
    all.min_w = first ? taps.min_w : Min(all.min_w, taps.min_w);
    all.max_w = first ? taps.max_w : Max(all.max_w, taps.max_w);
    all.count += taps.count;
  }
  return x;
}

// The taps that are summed up together, since what is loaded serves all of
// them: those of a row, if each lies a window behind the one before, and if
// there is a function of as many. Otherwise one. (Measured on a Zen 4 with 3x3
// and 5x5 taps of float32: 0.74 to 0.95 of the time with AVX-512, 0.79 to 1.07
// with AVX2.)
template <class T>
std::int64_t RunOf(const Windows<T>& x) {
  const std::int64_t in_row = x.taps.PerRow();
  const bool counted = in_row == 3 || in_row == 5 || in_row == 7;
  return counted && x.taps.taps[1].w - x.taps.taps[0].w == x.stride_w ? in_row
                                                                      : 1;
}

// Whether reading pixels where they are pays. Colliding ones are gathered
// (measured with AVX-512, 1024 channels: 0.5 to 0.9 of the time). So are those
// that would be widened more often than once for a run and in gathering (in
// place, 3x3 taps at every other pixel take 0.6 to 1.02 of the time, 4x4 taps
// 1.05 to 1.5); and half a page apart, those of two parts of a run (1.2
// to 1.7).
template <class T>
bool MayReadInPlace(const Windows<T>& x) {
  if (!kReadsInPlace<T> || x.PixelsCollide()) return false;
  if (std::is_same_v<T, Accumulator<T>>) return true;
  const std::int64_t run = RunOf(x);
  return run == 1 ? x.taps.count <= 9 * x.stride_h * x.stride_w
                  : run <= kTapsInARow || !x.PixelsCollide(2048);
}

// As `Correlate` does for one group, for `count` correlations of one source,
// of which none has a larger grid than the first; `s` is the shape of the
// convolution of which this is the forward direction or the input gradient.
template <class T>
bool CorrelateSmallGroups(const Correlation<T>* correlations,
                          std::int64_t count, const ConvShape& s,
                          const Parallel& parallel, const Scratch& scratch) {
  using A = Accumulator<T>;
  const Windows<T> x = JoinedWindows(correlations, count);
  const Groups g{s.groups, x.channels, correlations[0].out_channels};
  const std::int64_t per_vector = g.PerVector<A>();
  if (x.batch * x.grid_h * x.grid_w == 0) return true;
  PlanePlan p = PlanPlanes(x, g);
  const bool in_place =
      MayReadInPlace(correlations[0].x) && ReadInPlace(x.source, x.map, g, p);
  const std::int64_t per_tile = in_place ? per_vector : g.PerTile<A>();
  if (in_place) p.ReadFrom(x.map);
  auto* const passes = scratch.Allocate<SmallGroupsPass<T>>(count);
  auto* offsets = scratch.Allocate<std::int64_t>(x.taps.count);
  WorkerPlanes<A> planes;
  if (passes == nullptr || offsets == nullptr ||
      !planes.Allocate(in_place ? 0 : p.Size<A>(), g.FillVectors<A>(),
                       parallel.num_workers, scratch)) {
    return false;
  }
  // Of whole lines, so that every vector of any pixel begins at its own size.
  constexpr std::int64_t kLine = 64 / sizeof(T);
  const std::int64_t vectors_of_line = Max(kLine / kLanes<A>, 1);
  const std::int64_t size = count * x.batch * x.grid_h * x.grid_w * g.Outputs();
  const bool stream = per_vector == kLanes<A> && g.Outputs() % kLine == 0 &&
                      correlations[0].epilogue.ShouldStream(size);
  for (std::int64_t i = 0; i < count; ++i) {
    const TapList& taps = correlations[i].x.taps;
    SmallGroupsPass<T>& pass = passes[i];
    pass.c = &correlations[i];
    pass.epilogue = correlations[i].epilogue;
    pass.epilogue.stream = stream;
    pass.offsets = offsets;
    if (!pass.filters.Pack(correlations[i], g, s.out_c, in_place, scratch) ||
        !pass.epilogue.PrepareForTile(g.Outputs(), scratch) ||
        (in_place && !pass.FindEdges(scratch))) {
      return false;
    }
    for (std::int64_t t = 0; t < taps.count; ++t)
      *offsets++ = PlaneOffset(x.taps, taps.taps[t], p);
    pass.run = RunOf(correlations[i].x);
  }
  IntVec<A> indices[kLanes<A>];
  for (std::int64_t k = 0; k < g.in; ++k) indices[k] = SpreadIndices<A>(g, k);
  // Vectors that fill half a line each are better written together.
  const bool in_tiles =
      per_vector == kLanes<A> && !(stream && sizeof(T) < sizeof(A));
  const bool uncached =
      Max(size, x.batch * x.map.batch) * std::int64_t{sizeof(T)} >=
      kUncachedImagesBytes;

  // Row i of a band, of which `plane` is what its windows see.
  auto add_row = [&](const SmallGroupsPass<T>& pass, const Band& band,
                     std::int64_t i, const Range& outputs, const auto* plane) {
    using S = std::decay_t<decltype(*plane)>;
    const Correlation<T>& c = *pass.c;
    const TapList& taps = c.x.taps;
    if (band.i + i >= c.x.grid_h || band.j >= c.x.grid_w) return;
    A sums[kPixelsTogether * kTileColumns<A>];
    const EvenParts parts(Min(band.columns, c.x.grid_w - band.j),
                          kPixelsTogether);
    const Range inside = Inside((band.i + i) * x.stride_h + taps.min_h,
                                taps.RowStep(), taps.rows, x.height);
    const std::int64_t first = inside.begin * taps.PerRow();
    const S* const row = plane + i * x.stride_h * p.row_pitch;
    const std::int64_t unseen = (band.i + i) * x.stride_h + x.taps.max_h + 1;
    const std::int64_t num_unseen = in_place && uncached && &pass == passes
                                        ? Min(x.height - unseen, x.stride_h)
                                        : 0;
    const std::int64_t to_unseen =
        (x.taps.max_h - x.taps.min_h + 1) * p.row_pitch;
    GroupOperands<S> operands{nullptr,
                              x.stride_w * p.pitch,
                              pass.offsets + first,
                              (inside.end - inside.begin) * taps.PerRow(),
                              nullptr,
                              g.in,
                              indices,
                              in_place ? pass.inside : nullptr,
                              taps.PerRow(),
                              0};
    for (std::int64_t part = 0; part < parts.count(); ++part) {
      const std::int64_t j = parts.Begin(part), pixels = parts.Size(part);
      operands.first = band.j + j;
      const bool edge = in_place && (operands.first < pass.whole.begin ||
                                     operands.first + pixels > pass.whole.end);
      const std::int64_t at =
          pass.epilogue.map.Offset(band.n, band.i + i, band.j + j);
      for (std::int64_t next = outputs.begin; next < outputs.end;
           next += per_tile) {
        const std::int64_t k = in_place ? g.VectorInside<A>(next) : next;
        const std::int64_t columns =
            in_place ? per_tile : Min(outputs.end - k, per_tile);
        const bool in_tile =
            in_tiles && columns % kLanes<A> == 0 && pass.epilogue.FitsTile();
        // The next vector covers what this one has too much.
        for (std::int64_t l = 0; l < columns; l += per_vector) {
          operands.from =
              row + j * operands.distance + g.Source(k + l - outputs.begin);
          if ((next + l) / per_vector % vectors_of_line == 0)
            FetchPixels(operands.from + to_unseen, num_unseen,
                        pixels * x.stride_w, p);
          operands.filters =
              pass.filters.data +
              (next + l) / per_vector * pass.filters.vector_pitch +
              first * pass.filters.tap_pitch;
          TileOperands<Operand<T>> tile{};
          tile.c = sums + l;
          tile.c_stride = kTileColumns<A>;
          if (in_tile) pass.epilogue.LeaveToTile(at, k + l, kLanes<A>, &tile);
          if (uncached) FetchOutput(pass.epilogue, at + k + l, pixels);
          SumTapsOf<T>(pixels, pass.run, g.AreDepthwise(), edge, operands,
                       tile);
        }
        if (!in_tile)
          WriteTile(pass.epilogue, at, k, sums, static_cast<int>(pixels),
                    static_cast<int>(columns));
      }
    }
  };
  auto task = [&](std::int64_t index, int worker) {
    const Range outputs = p.PortionAt(index, g.Outputs());
    const Band band(x, p.bands, index / p.portions);
    const auto add_rows = [&](const auto* from) {
      for (std::int64_t i = 0; i < band.rows; ++i) {
        for (std::int64_t pass = 0; pass < count; ++pass)
          add_row(passes[pass], band, i, outputs, from);
      }
    };
    if constexpr (kReadsInPlace<T>) {
      if (in_place)
        add_rows(x.source.data + x.WindowAt(band.n, band.i, band.j) +
                 outputs.begin);
    }
    if (!in_place) {
      A* const plane = planes.Of(worker);
      GatherPlane(x, band, g, outputs, p, plane);
      add_rows(plane);
    }
    if (stream) FlushStores();
  };
  ParallelFor(parallel, p.num_bands * p.portions,
              p.bands.rows * p.bands.columns * CeilDiv(p.portion, per_vector) *
                  (x.taps.count * g.in + 2 * count),
              task);
  return true;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SMALL_GROUPS_H_
