// Rows of a tensor that is broadcast to others of as many columns.
#ifndef TFO_CC_CORE_BROADCAST_ROWS_H_
#define TFO_CC_CORE_BROADCAST_ROWS_H_

#include <cstdint>

#include "cc/core/activation.h"

namespace tfo {

struct BroadcastRows {
  static constexpr int kMaxRank = 8;

  // The others' dimensions, innermost first, without the columns; those that
  // are alike are one.
  int rank;
  std::int64_t size[kMaxRank];
  std::int64_t stride[kMaxRank];  // in elements; 0 where it is broadcast

  // Where a row of the others begins in the tensor.
  TFO_HOST_DEVICE std::int64_t Offset(std::int64_t row) const {
    std::int64_t at = 0;
    for (int i = 0; i < rank; ++i) {
      const std::int64_t outer = row / size[i];
      at += (row - outer * size[i]) * stride[i];
      row = outer;
    }
    return at;
  }
};

// For others of `rank` sizes, their columns included, and a tensor of sizes
// that end with theirs and are otherwise theirs or 1; those that it lacks
// are 1.
inline BroadcastRows BroadcastTo(int own_rank, const std::int64_t* own_sizes,
                                 int rank, const std::int64_t* sizes) {
  BroadcastRows rows{};
  std::int64_t elements = sizes[rank - 1];  // of the tensor so far
  for (int i = rank - 2; i >= 0; --i) {
    const int own = i - (rank - own_rank);
    const bool broadcast = own < 0 || own_sizes[own] != sizes[i];
    const std::int64_t stride = broadcast ? 0 : elements;
    if (!broadcast) elements *= sizes[i];
    if (sizes[i] == 1) continue;
    const int last = rows.rank - 1;
    if (last >= 0 && stride == rows.stride[last] * rows.size[last]) {
      rows.size[last] *= sizes[i];
      continue;
    }
    rows.size[rows.rank] = sizes[i];
    rows.stride[rows.rank++] = stride;
  }
  return rows;
}

}  // namespace tfo

#endif  // TFO_CC_CORE_BROADCAST_ROWS_H_
