// What the kernels of batch normalisation compute at a vector of positions;
// batch_norm_*.cu run it in several kernels, batch_norm_fused.cu in one.
#ifndef TFO_CUDA_BATCH_NORM_KERNELS_H_
#define TFO_CUDA_BATCH_NORM_KERNELS_H_

#include "cuda/activation.h"
#include "cuda/batch_norm.h"
#include "cuda/batch_norm_mask.h"
#include "cuda/channel_reduce.h"

namespace tfo::cuda {

inline VectorArray ArrayOf(const BatchNormShape& shape, bool aligned) {
  return {shape.outer * shape.channels * shape.inner, aligned};
}

// Elements of a channel.
inline double Count(const BatchNormShape& shape) {
  return static_cast<double>(shape.outer) * static_cast<double>(shape.inner);
}

// The moments of x.
template <class T>
struct MomentsSource {
  using Element = T;
  using Accumulator = Moments<>;
  static constexpr int kBlocks = 3;
  static constexpr int kLanes = kVector<T>;

  const T* x;

  struct Row {
    Vector<T> x;
  };
  using Kept = Row;

  __device__ Row Load(const VectorArray& array, std::int64_t at,
                      std::int64_t /*row*/) const {
    return {array.Load(x, at)};
  }
  __device__ static Kept Keep(const Row& row) { return row; }

  // Rows that are loaded together are reduced exactly before they are merged
  // into the running moments.
  class Thread {
   public:
    template <class Lanes>
    __device__ Thread(const MomentsSource&, const Lanes&) {}

    template <int N>
    __device__ void Add(const MomentsSource&, const VectorArray&,
                        const std::int64_t (&)[N], const Row (&rows)[N]) {
      const float weight = N / (count_ + N), cross = count_ * weight;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        float sum = 0;
#pragma unroll
        for (int u = 0; u < N; ++u) sum += rows[u].x[i];
        const float mean = sum * (1.0f / N), delta = mean - mean_[i];
        float squares = delta * delta * cross;
#pragma unroll
        for (int u = 0; u < N; ++u) {
          const float deviation = rows[u].x[i] - mean;
          squares += deviation * deviation;
        }
        mean_[i] += delta * weight;
        squares_[i] += squares;
      }
      count_ += N;
    }

    __device__ void AddTail(const MomentsSource&, const VectorArray&,
                            std::int64_t, const Row& row, int n) {
      tail_ = row;
      tail_lanes_ = n;
    }

    __device__ Moments<> Lane(int i) const {
      Moments<> lane{count_, mean_[i], squares_[i]};
      if (i < tail_lanes_) lane.Merge({1, tail_.x[i], 0});
      return lane;
    }

   private:
    float count_ = 0, mean_[kLanes] = {}, squares_[kLanes] = {};
    Row tail_ = {};
    int tail_lanes_ = 0;
  };
};

// A channel's statistics from its moments, as cc/core/batch_norm.cc makes them.
struct StatisticsFinish {
  const float *moving_mean, *moving_variance;
  double epsilon, momentum;
  bool unbiased;
  float *new_mean, *new_variance, *saved_mean, *saved_inv_std;

  // What is not to be read may be anything, a NaN too.
  __device__ float Average(float moving, double batch) const {
    return static_cast<float>(
        momentum == 0 ? batch : moving * momentum + batch * (1 - momentum));
  }

  __device__ void operator()(std::int64_t c,
                             const Moments<double>& moments) const {
    const double count = moments.count;
    double mean = 0, variance = 0;
    if (count > 0) {
      mean = moments.mean;
      variance = moments.squares / count;
      const double correction = unbiased && count > 1 ? count / (count - 1) : 1;
      new_mean[c] = Average(moving_mean[c], mean);
      new_variance[c] = Average(moving_variance[c], variance * correction);
    } else {
      new_mean[c] = moving_mean[c];
      new_variance[c] = moving_variance[c];
    }
    saved_mean[c] = static_cast<float>(mean);
    saved_inv_std[c] = static_cast<float>(1 / sqrt(variance + epsilon));
  }
};

// z = (x - mean) * inv_std * scale + offset (+ side), for a vector of lanes.
template <int N>
struct Normalizer {
  float mean[N], factor[N], offset[N];

  template <class Lanes>
  __device__ Normalizer(const BatchNormParameters& p, const Lanes& lanes) {
    lanes.Load(static_cast<const float*>(p.mean), mean);
    lanes.Load(static_cast<const float*>(p.inv_std), factor);
    float scale[N];
    lanes.Load(static_cast<const float*>(p.scale), scale);
    lanes.Load(static_cast<const float*>(p.offset), offset);
#pragma unroll
    for (int i = 0; i < N; ++i) factor[i] *= scale[i];
  }

  // Forward and backward must round alike: the relu's slope is read off z.
  template <class T>
  __device__ void operator()(const Vector<T>& x, bool has_side,
                             const Vector<T>& side, float (&z)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      z[i] = fmaf(x[i] - mean[i], factor[i], offset[i]);
      if (has_side) z[i] += side[i];
    }
  }
};

inline bool IsReluOrNone(Activation activation) {
  return activation == Activation::kRelu || activation == Activation::kNone;
}

// y = act(z), and the mask; the activation is relu or none unless kAny.
template <class T, bool kAny>
struct ApplyTerms {
  static constexpr int kLanes = kVector<T>;

  BatchNormParameters parameters;
  const T *x, *side;
  T* y;
  std::uint8_t* mask;
  Activation activation;
  float alpha;

  __device__ void operator()(const VectorArray& array, std::int64_t at,
                             const Normalizer<kLanes>& normalizer,
                             const Vector<T>& x_row,
                             const Vector<T>& side_row) const {
    float z[kLanes];
    normalizer(x_row, side != nullptr, side_row, z);
    if (mask != nullptr) StoreMask<T>(array, z, mask, at);
    if constexpr (kAny) {
      ActivationValues<T>(activation, alpha, z);
    } else {
      ReluOrNone(activation, z);
    }
    array.Store(z, y, at);
  }
};

template <class T, bool kAny>
ApplyTerms<T, kAny> ApplyTermsOf(const BatchNormApplyArgs& args) {
  return {args.parameters,
          static_cast<const T*>(args.x),
          static_cast<const T*>(args.side),
          static_cast<T*>(args.y),
          args.mask,
          args.activation,
          static_cast<float>(args.alpha)};
}

// dz = dy * act'(z), its sum and that of dz * (x - mean). kDirect: dz is dy, or
// zero where the mask says so.
template <class T, bool kDirect>
struct GradientSource {
  using Element = T;
  using Accumulator = Sums<2>;
  static constexpr int kBlocks = 3;
  static constexpr int kLanes = kVector<T>;

  BatchNormParameters parameters;
  const T *dy, *x, *side;
  const std::uint8_t* mask;
  Activation activation;
  float alpha;

  struct Kept {
    Vector<T> dy, x;
  };
  struct Row : Kept {
    Vector<T> side;
    unsigned bits;
  };

  __device__ Row Load(const VectorArray& array, std::int64_t at,
                      std::int64_t /*row*/) const {
    return Restore(array, at, {array.Load(dy, at), array.Load(x, at)});
  }
  __device__ static Kept Keep(const Row& row) { return row; }
  __device__ Row Restore(const VectorArray& array, std::int64_t at,
                         const Kept& kept) const {
    Row row;
    row.dy = kept.dy;
    row.x = kept.x;
    if constexpr (kDirect) {
      row.bits = mask != nullptr ? LoadMask<T>(array, mask, at) : ~0u;
    } else {
      if (side != nullptr) row.side = array.Load(side, at);
    }
    return row;
  }

  __device__ void Dz(const Row& row, const Normalizer<kLanes>& normalizer,
                     float (&dz)[kLanes]) const {
    if constexpr (kDirect) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        dz[i] = (row.bits >> i & 1) != 0 ? row.dy[i] : 0.0f;
      }
    } else {
      normalizer(row.x, side != nullptr, row.side, dz);
      SlopesOfArguments<T>(activation, alpha, dz);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) dz[i] *= row.dy[i];
    }
  }

  class Thread {
   public:
    template <class Lanes>
    __device__ Thread(const GradientSource& source, const Lanes& lanes)
        : normalizer_(source.parameters, lanes) {}

    template <int N>
    __device__ void Add(const GradientSource& source, const VectorArray& array,
                        const std::int64_t (&at)[N], const Row (&rows)[N]) {
#pragma unroll
      for (int u = 0; u < N; ++u)
        AddTail(source, array, at[u], rows[u], kLanes);
    }

    __device__ void AddTail(const GradientSource& source, const VectorArray&,
                            std::int64_t, const Row& row, int n) {
      float dz[kLanes];
      source.Dz(row, normalizer_, dz);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (i >= n) continue;
        sum_[i] += dz[i];
        sum_x_[i] = fmaf(dz[i], row.x[i] - normalizer_.mean[i], sum_x_[i]);
      }
    }

    __device__ Sums<2> Lane(int i) const {
      Sums<2> sums;
      sums.value[0] = sum_[i];
      sums.value[1] = sum_x_[i];
      return sums;
    }

   private:
    Normalizer<kLanes> normalizer_;
    float sum_[kLanes] = {}, sum_x_[kLanes] = {};
  };
};

template <class T, bool kDirect>
GradientSource<T, kDirect> GradientSourceOf(const BatchNormGradientArgs& args) {
  return {args.parameters,
          static_cast<const T*>(args.dy),
          static_cast<const T*>(args.x),
          static_cast<const T*>(args.side),
          args.mask,
          args.activation,
          static_cast<float>(args.alpha)};
}

inline bool IsDirect(const BatchNormGradientArgs& args) {
  return args.mask != nullptr || args.activation == Activation::kNone;
}

// Calls body(source) for the kind of source that fits.
template <class T, class Body>
Status WithGradientSource(const BatchNormGradientArgs& args, const Body& body) {
  return IsDirect(args) ? body(GradientSourceOf<T, true>(args))
                        : body(GradientSourceOf<T, false>(args));
}

inline bool GradientAligned(const BatchNormGradientArgs& args) {
  return Aligned(args.dy, args.x, args.side, args.x_grad, args.side_grad);
}

// The means over a channel that x_grad in training takes: of dz, and of
// dz * (x - mean) * inv_std^2.
struct GradientMeans {
  float *dz, *dz_x;

  __device__ void Set(std::int64_t c, double count, double sum_dz,
                      double sum_dz_x, double inv_std) const {
    dz[c] = static_cast<float>(count > 0 ? sum_dz / count : 0);
    dz_x[c] = static_cast<float>(
        count > 0 ? sum_dz_x * inv_std * inv_std / count : 0);
  }
};

struct GradientFinish {
  std::int64_t channels;
  double count;
  const float* inv_std;
  float *scale_grad, *offset_grad;
  GradientMeans means;  // null: not wanted
  double* sums;         // null: not wanted

  __device__ void operator()(std::int64_t c,
                             const Sums<2, double>& total) const {
    const double sum_dz = total.value[0], sum_dz_x = total.value[1];
    offset_grad[c] = static_cast<float>(sum_dz);
    scale_grad[c] = static_cast<float>(sum_dz_x * inv_std[c]);
    if (means.dz != nullptr) means.Set(c, count, sum_dz, sum_dz_x, inv_std[c]);
    if (sums != nullptr) {
      sums[c] = count;
      sums[channels + c] = sum_dz;
      sums[2 * channels + c] = sum_dz_x;
    }
  }
};

// x_grad = (dz - mean of dz - (x - mean) * mean of dz_x * inv_std^2) * factor
// in training, dz * factor otherwise; side_grad = dz.
template <class T>
struct GradientApplyTerms {
  static constexpr int kLanes = kVector<T>;

  bool training;
  GradientMeans means;
  T *x_grad, *side_grad;  // side_grad null: not wanted

  struct Lanes {
    Normalizer<kLanes> normalizer;
    float dz_mean[kLanes], dz_x_mean[kLanes];

    template <class From>
    __device__ Lanes(const GradientApplyTerms& terms,
                     const BatchNormParameters& p, const From& from)
        : normalizer(p, from) {
      if (!terms.training) return;
      from.Load(static_cast<const float*>(terms.means.dz), dz_mean);
      from.Load(static_cast<const float*>(terms.means.dz_x), dz_x_mean);
    }
  };

  template <class Source>
  __device__ void operator()(const Source& source, const VectorArray& array,
                             std::int64_t at, const Lanes& lanes,
                             const typename Source::Row& row) const {
    float dz[kLanes];
    source.Dz(row, lanes.normalizer, dz);
    if (side_grad != nullptr) array.Store(dz, side_grad, at);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (training) {
        dz[i] -= fmaf(row.x[i] - lanes.normalizer.mean[i], lanes.dz_x_mean[i],
                      lanes.dz_mean[i]);
      }
      dz[i] *= lanes.normalizer.factor[i];
    }
    array.Store(dz, x_grad, at);
  }
};

template <class T>
GradientApplyTerms<T> GradientApplyTermsOf(const BatchNormGradientArgs& args,
                                           const GradientMeans& means) {
  return {args.training, means, static_cast<T*>(args.x_grad),
          static_cast<T*>(args.side_grad)};
}

}  // namespace tfo::cuda

#endif  // TFO_CUDA_BATCH_NORM_KERNELS_H_
