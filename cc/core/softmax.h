// Softmax of rows, as attention takes it: y = e^(z - max) / sum, where z is x *
// scale, or a number as good as minus infinity where a mask says so. Results
// depend on shape and values only, never on the number of threads.
#ifndef TFO_CC_CORE_SOFTMAX_H_
#define TFO_CC_CORE_SOFTMAX_H_

#include <cstdint>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

// Which elements are kept: one byte each, 1 or 0, broadcast over dimensions of
// the rows.
struct SoftmaxMask {
  static constexpr int kMaxRank = 8;

  const std::uint8_t* keep;  // null: all are
  // The rows' dimensions, innermost first; those that are alike are one.
  int rank;
  std::int64_t size[kMaxRank];
  std::int64_t stride[kMaxRank];  // in elements; 0 where the mask is broadcast

  TFO_HOST_DEVICE const std::uint8_t* Row(std::int64_t row) const {
    std::int64_t at = 0;
    for (int i = 0; i < rank; ++i) {
      const std::int64_t outer = row / size[i];
      at += (row - outer * size[i]) * stride[i];
      row = outer;
    }
    return keep + at;
  }
};

// For x of `rank` sizes, its last one included, and a mask of sizes that end
// with x's last one and are otherwise x's or 1; those that it lacks are 1.
inline SoftmaxMask BroadcastMask(const std::uint8_t* keep, int mask_rank,
                                 const std::int64_t* mask_sizes, int rank,
                                 const std::int64_t* sizes) {
  SoftmaxMask mask{keep, 0, {}, {}};
  std::int64_t elements = sizes[rank - 1];  // of the mask so far
  for (int i = rank - 2; i >= 0; --i) {
    const int own = i - (rank - mask_rank);
    const bool broadcast = own < 0 || mask_sizes[own] != sizes[i];
    const std::int64_t stride = broadcast ? 0 : elements;
    if (!broadcast) elements *= sizes[i];
    if (sizes[i] == 1) continue;
    const int last = mask.rank - 1;
    if (last >= 0 && stride == mask.stride[last] * mask.size[last]) {
      mask.size[last] *= sizes[i];
      continue;
    }
    mask.size[mask.rank] = sizes[i];
    mask.stride[mask.rank++] = stride;
  }
  return mask;
}

// x is [rows, depth], dense.
struct SoftmaxShape {
  DType dtype;
  std::int64_t rows, depth;
};

struct SoftmaxArgs {
  SoftmaxShape shape;
  double scale;
  double masked;     // what z is where it is not kept
  bool zero_masked;  // whether y is zero there, also in rows without others
  SoftmaxMask mask;
  const void* x;
  void* y;  // may be x
};

// x_grad = (dy - sum of dy * y over a row) * y * scale, zero where not kept.
struct SoftmaxGradientArgs {
  SoftmaxShape shape;
  double scale;
  bool zero_masked;  // whether dy there does not count, be it a NaN
  SoftmaxMask mask;
  const void* dy;
  const void* y;
  void* x_grad;  // may be dy or y
};

// False when scratch memory ran out.
using SoftmaxForwardFunction = bool(const SoftmaxArgs&, const Parallel&,
                                    const Scratch&);
using SoftmaxGradientFunction = void(const SoftmaxGradientArgs&,
                                     const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_SOFTMAX_H_
