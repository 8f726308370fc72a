// Conv2DBiasAct and Conv2DBiasActGrad on the GPU.
#include "cc/kernels/conv_geometry.h"
#include "cuda/tf/contraction_cuda.h"

namespace tf_fused_ops {
namespace {

TFO_REGISTER_CUDA_CONTRACTION("TfFusedOps>Conv2DBiasAct", ConvGeometry);

}  // namespace
}  // namespace tf_fused_ops
