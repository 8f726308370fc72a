// An image is a batch to the phases of batch normalization: in between, the
// moments and sums of its channels become those of their groups.
//
// With dz = dy * act'(z), g = dz * scale and n = (x - mean) * inv_std,
//
//   x_grad = inv_std * (g - mean of g - n * mean of g * n), means over a group,
//   scale_grad = sum over images and pixels of dz * n,  offset_grad = of dz.
#include "cc/core/group_norm.h"
#include "cc/core/shares.h"
#include "cc/core/storage.h"

namespace tfo::TFO_ISA {

using std::int64_t;

BatchNormMomentsFunction BatchNormMoments;
BatchNormApplyFunction BatchNormApply;
BatchNormGradientSumsFunction BatchNormGradientSums;
BatchNormGradientApplyFunction BatchNormGradientApply;

namespace {

constexpr int64_t kCyclesPerElement = 2;

struct Groups {
  explicit Groups(const GroupNormShape& s)
      : count(s.groups),
        channels(s.image.channels / s.groups),
        pixels(s.image.outer * s.image.inner),
        elements(static_cast<double>(channels * pixels)) {}

  int64_t count;
  int64_t channels;  // of a group
  int64_t pixels;
  double elements;  // of a group
};

BatchNormShape ImageOf(const GroupNormShape& s) {
  BatchNormShape image = s.image;
  image.batches = s.images;
  return image;
}

// Calls body(index, elements before, threads, scratch memory) for all images,
// as long as it returns true.
template <class Body>
bool ForImages(const GroupNormShape& s, const Parallel& parallel,
               const Scratch& scratch, const Body& body) {
  const int64_t elements = s.image.outer * s.image.channels * s.image.inner;
  return ForShares(
      s.images, elements * kCyclesPerElement, parallel, scratch,
      [&](int64_t image, const Parallel& threads, const Scratch& memory) {
        return body(image, image * elements, threads, memory);
      });
}

// The statistics of an image's groups, and a value of them for each channel.
template <class A>
void GroupStatistics(const GroupNormArgs& args, int64_t image,
                     const double* channel_mean, const double* channel_squares,
                     A* mean, A* inv_std) {
  const Groups groups(args.shape);
  A* const means = static_cast<A*>(args.mean) + image * groups.count;
  A* const inv_stds = static_cast<A*>(args.inv_std) + image * groups.count;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t begin = g * groups.channels, end = begin + groups.channels;
    double center = 0, squares = 0, between = 0;
    for (int64_t c = begin; c < end; ++c) {
      center += channel_mean[c];
      squares += channel_squares[c];
    }
    center /= static_cast<double>(Max(groups.channels, 1));
    for (int64_t c = begin; c < end; ++c) {
      const double delta = channel_mean[c] - center;
      between += delta * delta;
    }
    squares += between * static_cast<double>(groups.pixels);
    const double variance = groups.elements > 0 ? squares / groups.elements : 0;
    means[g] = static_cast<A>(center);
    inv_stds[g] = static_cast<A>(1 / __builtin_sqrt(variance + args.epsilon));
    for (int64_t c = begin; c < end; ++c) {
      mean[c] = means[g];
      inv_std[c] = inv_stds[g];
    }
  }
}

template <class T>
bool Forward(const GroupNormArgs& args, const Parallel& parallel,
             const Scratch& scratch) {
  using A = Accumulator<T>;
  const BatchNormShape s = ImageOf(args.shape);
  return ForImages(
      args.shape, parallel, scratch,
      [&](int64_t image, int64_t at, const Parallel& threads,
          const Scratch& memory) {
        double* const moments = memory.Allocate<double>(2 * s.channels);
        A* const mean = memory.Allocate<A>(2 * s.channels);
        if (moments == nullptr || mean == nullptr) return false;
        const T* const x = static_cast<const T*>(args.x) + at;
        double* const squares = moments + s.channels;
        A* const inv_std = mean + s.channels;
        if (!BatchNormMoments(s, x, threads, memory, moments, squares))
          return false;
        GroupStatistics(args, image, moments, squares, mean, inv_std);
        return BatchNormApply({s,
                               {mean, inv_std, args.scale, args.offset},
                               args.activation,
                               args.alpha,
                               x,
                               nullptr,
                               static_cast<T*>(args.y) + at,
                               nullptr},
                              threads, memory);
      });
}

// What comes through the statistics of an image's groups (see
// BatchNormGradientApply).
template <class A>
void GroupPull(const GroupNormShape& shape, const A* scale, const A* inv_std,
               const double* sum_dz, const double* sum_dz_x, double* pull) {
  const Groups groups(shape);
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t begin = g * groups.channels, end = begin + groups.channels;
    double sum_g = 0, sum_g_x = 0;
    for (int64_t c = begin; c < end; ++c) {
      sum_g += scale[c] * sum_dz[c];
      sum_g_x += scale[c] * sum_dz_x[c];
    }
    const double r = inv_std[begin], factor = r / groups.elements;
    for (int64_t c = begin; c < end; ++c) {
      pull[c] = factor * sum_g;
      pull[shape.image.channels + c] = factor * r * r * sum_g_x;
    }
  }
}

template <class T>
bool Gradient(const GroupNormGradientArgs& args, const Parallel& parallel,
              const Scratch& scratch) {
  using A = Accumulator<T>;
  const BatchNormShape s = ImageOf(args.shape);
  const Groups groups(args.shape);
  const int64_t pair = 2 * s.channels;
  // The sums of every image: of dz, and of dz * n.
  double* const sums = scratch.Allocate<double>(args.shape.images * pair);
  if (sums == nullptr) return false;
  const auto gradient = [&](int64_t image, int64_t at, const Parallel& threads,
                            const Scratch& memory) {
    double* const pull = memory.Allocate<double>(pair);
    A* const mean = memory.Allocate<A>(pair);
    if (pull == nullptr || mean == nullptr) return false;
    A* const inv_std = mean + s.channels;
    for (int64_t c = 0; c < s.channels; ++c) {
      const int64_t group = image * groups.count + c / groups.channels;
      mean[c] = static_cast<const A*>(args.mean)[group];
      inv_std[c] = static_cast<const A*>(args.inv_std)[group];
    }
    BatchNormGradientArgs of_image{};
    of_image.shape = s;
    of_image.parameters = {mean, inv_std, args.scale, args.offset};
    of_image.activation = args.activation;
    of_image.alpha = args.alpha;
    of_image.training = true;
    of_image.dy = static_cast<const T*>(args.dy) + at;
    of_image.x = static_cast<const T*>(args.x) + at;
    of_image.x_grad = static_cast<T*>(args.x_grad) + at;
    double* const sum_dz = sums + image * pair;
    double* const sum_dz_x = sum_dz + s.channels;
    void* const dz = BatchNormPlaceOfDz(of_image);
    if (!BatchNormGradientSums(of_image, dz, threads, memory, sum_dz, sum_dz_x))
      return false;
    GroupPull(args.shape, static_cast<const A*>(args.scale), inv_std, sum_dz,
              sum_dz_x, pull);
    for (int64_t c = 0; c < s.channels; ++c) sum_dz_x[c] *= inv_std[c];
    return BatchNormGradientApply(BatchNormFromDz(of_image, dz), pull, threads,
                                  memory);
  };
  if (!ForImages(args.shape, parallel, scratch, gradient)) return false;
  for (int64_t c = 0; c < s.channels; ++c) {
    double sum_dz = 0, sum_dz_n = 0;
    for (int64_t image = 0; image < args.shape.images; ++image) {
      sum_dz += sums[image * pair + c];
      sum_dz_n += sums[image * pair + s.channels + c];
    }
    static_cast<A*>(args.offset_grad)[c] = static_cast<A>(sum_dz);
    static_cast<A*>(args.scale_grad)[c] = static_cast<A>(sum_dz_n);
  }
  return true;
}

}  // namespace

GroupNormForwardFunction GroupNormForward;
GroupNormGradientFunction GroupNormGradient;

bool GroupNormForward(const GroupNormArgs& args, const Parallel& parallel,
                      const Scratch& scratch) {
  return WithStorage(args.shape.image.dtype, [&](auto storage) {
    return Forward<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

bool GroupNormGradient(const GroupNormGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch) {
  return WithStorage(args.shape.image.dtype, [&](auto storage) {
    return Gradient<typename decltype(storage)::type>(args, parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
