// Conv2DBiasAct and Conv2DBiasActGrad on the CPU.
#include "cc/kernels/contraction_cpu.h"
#include "cc/kernels/conv_geometry.h"

namespace tf_fused_ops {
namespace {

TFO_REGISTER_CPU_CONTRACTION("TfFusedOps>Conv2DBiasAct", ConvGeometry,
                             CpuEngine);

}  // namespace
}  // namespace tf_fused_ops
