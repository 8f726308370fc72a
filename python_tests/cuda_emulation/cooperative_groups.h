// A stand-in for CUDA's cooperative groups: the grid.
#ifndef TFO_CUDA_EMULATION_COOPERATIVE_GROUPS_H_
#define TFO_CUDA_EMULATION_COOPERATIVE_GROUPS_H_

#include <cuda_runtime.h>

namespace cooperative_groups {

struct grid_group {
  void sync() const { cuda_emulation::SyncGrid(); }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups

#endif  // TFO_CUDA_EMULATION_COOPERATIVE_GROUPS_H_
