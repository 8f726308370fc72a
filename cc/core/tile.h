// The register tile that a type of operand calls for.
#ifndef TFO_CC_CORE_TILE_H_
#define TFO_CC_CORE_TILE_H_

#include "cc/core/amx_tile.h"
#include "cc/core/micro_kernel.h"

namespace tfo::TFO_ISA {
namespace {

// Computes a tile of `rows` rows and `columns` columns; c must have room for
// whole vectors. `k_stride` counts only where not kContiguousK, and
// `row_offset` only where kContiguousK.
template <class E, bool kContiguousK>
TFO_INLINE void RunTile(int rows, int columns, const TileOperands<E>& t) {
#if defined(__AMX_BF16__)
  if constexpr (kElements<E> > 1)
    RunAmxTile<E, kContiguousK>(rows, columns, t);
  else
#endif
    SelectTile<E, kContiguousK>(rows, columns)(t);
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_TILE_H_
