// Groups of a convolution that fit a vector, and what they see of an image:
// planes that are gathered, zero beyond the edge, or read where they are.
#ifndef TFO_CC_CORE_SMALL_GROUPS_PLANES_H_
#define TFO_CC_CORE_SMALL_GROUPS_PLANES_H_

#include "cc/core/correlation_plan.h"

namespace tfo::TFO_ISA {
namespace {

// What is gathered at a time.
constexpr std::int64_t kPlaneBytes = 384 << 10;

// So many groups of `in` channels of the source and `out` of the output.
struct Groups {
  std::int64_t count, in, out;

  std::int64_t Outputs() const { return count * out; }
  // The source's channels begin here for an output channel that begins a group.
  std::int64_t Source(std::int64_t output) const { return output / out * in; }

  // Whether both sides of a group fit a vector.
  template <class A>
  bool AreSmall() const {
    return count > 1 && Min(in, out) >= 1 && Max(in, out) <= kLanes<A>;
  }
  // The output channels that share a vector, and a tile.
  template <class A>
  std::int64_t PerVector() const {
    return kLanes<A> / Max(in, out) * out;
  }
  template <class A>
  std::int64_t PerTile() const {
    return kTileColumns<A> / kLanes<A> * PerVector<A>();
  }
  template <class A>
  std::int64_t Vectors() const {
    return CeilDiv(Outputs(), PerVector<A>());
  }
  // Where the vector begins that is to begin at this output channel, but may
  // not reach beyond the last.
  template <class A>
  std::int64_t VectorInside(std::int64_t output) const {
    return Min(output, Outputs() - PerVector<A>());
  }
  // Whether all vectors are full.
  template <class A>
  bool FillVectors() const {
    return in == out && PerVector<A>() == kLanes<A> &&
           Outputs() % kLanes<A> == 0;
  }
  // Whether a vector of the source meets the filters as it is.
  bool AreDepthwise() const { return in == 1 && out == 1; }
};

// Whether all groups are computed together: the output and the filter gradient,
// and the input gradient.
template <class T>
bool HasSmallGroups(const ConvShape& s) {
  return Groups{s.groups, s.in_c, s.out_c}.AreSmall<Accumulator<T>>();
}
template <class T>
bool HasSmallGroupsBackwards(const ConvShape& s) {
  return Groups{s.groups, s.out_c, s.in_c}.AreSmall<Accumulator<T>>();
}

// How an image is cut: into portions of output channels, each in bands.
struct PlanePlan {
  std::int64_t portion, portions;  // output channels, whole tiles
  std::int64_t pitch, row_pitch;   // of what is gathered, in elements
  Bands bands;
  std::int64_t num_bands;  // of all images
  std::int64_t wanted;     // tasks that are worth it

  // Planes are not gathered.
  void ReadFrom(const AddressMap& map) {
    pitch = map.w;
    row_pitch = map.h;
  }
  // The last vector may reach beyond the last pixel.
  template <class A>
  std::int64_t Size() const {
    return bands.source_rows * row_pitch + kLanes<A>;
  }
  Range PortionAt(std::int64_t index, std::int64_t outputs) const {
    const std::int64_t begin = index % portions * portion;
    return {begin, Min(begin + portion, outputs)};
  }
};

// A function of the shape alone.
template <class T>
PlanePlan PlanPlanes(const Windows<T>& x, const Groups& g) {
  using A = Accumulator<T>;
  constexpr int lanes = kLanes<A>;
  PlanePlan p;
  const std::int64_t image = x.grid_h * x.grid_w;
  const std::int64_t work = x.taps.count * g.in * g.Outputs();
  p.wanted = Max(Min(x.batch * image * work / kTaskWork, kWantedTasks), 1);
  const std::int64_t reach_h = x.taps.max_h - x.taps.min_h,
                     reach_w = x.taps.max_w - x.taps.min_w;
  // Neighbouring bands gather the rows that both read anew, so that there
  // should be as many others.
  const std::int64_t pixels =
      (2 * reach_h + x.stride_h) * ((x.grid_w - 1) * x.stride_w + reach_w + 1);
  const std::int64_t fitting = static_cast<std::int64_t>(
      kPlaneBytes / sizeof(A) / Max(pixels, 1) / lanes * lanes);
  const std::int64_t per_tile = g.PerTile<A>();
  p.portion = EvenPart(CeilDiv(g.Outputs(), per_tile),
                       Max(fitting / g.in * g.out / per_tile, 1)) *
              per_tile;
  p.portions = CeilDiv(g.Outputs(), p.portion);
  // An odd number of vectors, so that pixels do not fall into the same few sets
  // of the first-level cache.
  p.pitch =
      (CeilDiv(Min(g.Source(p.portion), g.count * g.in), lanes) | 1) * lanes;
  const std::int64_t per_image = CeilDiv(p.wanted, x.batch * p.portions);
  p.bands = CutIntoBands(x, p.pitch,
                         Max(CeilDiv(image, per_image), 2 * reach_h * x.grid_w),
                         kPlaneBytes / sizeof(A) * kOperandBytes<Operand<T>>);
  p.row_pitch = p.bands.source_columns * p.pitch;
  p.num_bands = x.batch * p.bands.down * p.bands.across;
  return p;
}

// Whether pixels of T may be read where they are: those of 16 bits are widened
// then, once for the taps of a row (measured with AVX-512: 0.6 to 0.9 of the
// time of gathered ones; with AVX2 up to 1.4).
#if defined(__AVX512F__)
template <class T>
constexpr bool kReadsInPlace = true;
#else
template <class T>
constexpr bool kReadsInPlace = std::is_same_v<T, Accumulator<T>>;
#endif

// Whether pixels of groups of one channel are read where they are. The last
// vector of a pixel overlaps the one before, which no other task may write.
template <class T>
bool ReadInPlace(const Source<T>& source, const AddressMap& map,
                 const Groups& g, const PlanePlan& p) {
  using A = Accumulator<T>;
  return source.saved == nullptr && map.c == 1 && g.AreDepthwise() &&
         g.count >= kLanes<A> && (p.portions == 1 || g.FillVectors<A>());
}

// Memory for a plane of each worker, in which nothing is a subnormal number
// that only fills vectors up.
template <class A>
class WorkerPlanes {
 public:
  // False when scratch memory ran out. `whole`: nothing fills vectors up.
  bool Allocate(std::int64_t size, bool whole, int workers,
                const Scratch& scratch) {
    size_ = size;
    data_ = scratch.Allocate<A>(size * workers);
    ready_ = scratch.Allocate<bool>(workers);
    if (data_ == nullptr || ready_ == nullptr) return false;
    for (int i = 0; i < workers; ++i) ready_[i] = whole;
    return true;
  }

  A* Of(int worker) const {
    A* const plane = data_ + worker * size_;
    if (!ready_[worker]) Zero(plane, size_);
    ready_[worker] = true;
    return plane;
  }

 private:
  std::int64_t size_;
  A* data_;
  bool* ready_;
};

// Brings what the windows of a band see of the channels of `outputs` into `to`.
template <class T>
void GatherPlane(const Windows<T>& x, const Band& band, const Groups& g,
                 const Range& outputs, const PlanePlan& plan,
                 Accumulator<T>* to) {
  const std::int64_t first = g.Source(outputs.begin);
  const Box box{band.h,
                band.w,
                first,
                plan.bands.source_rows,
                plan.bands.source_columns,
                g.Source(outputs.end) - first};
  Gather(x.source, x.map, band.n, x.height, x.width, box, to, plan.pitch,
         plan.row_pitch);
}

// Where a tap lies, from pixel (min_h, min_w) on.
TFO_INLINE std::int64_t PlaneOffset(const TapList& taps, const Tap& tap,
                                    const PlanePlan& plan) {
  return (tap.h - taps.min_h) * plan.row_pitch +
         (tap.w - taps.min_w) * plan.pitch;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_SMALL_GROUPS_PLANES_H_
