// MatMulBiasAct and MatMulBiasActGrad on the CPU.
#include "cc/kernels/contraction_cpu.h"
#include "cc/kernels/matmul_geometry.h"

namespace tf_fused_ops {
namespace {

TFO_REGISTER_CPU_CONTRACTION("TfFusedOps>MatMulBiasAct", MatMulGeometry,
                             CpuEngine);

}  // namespace
}  // namespace tf_fused_ops
