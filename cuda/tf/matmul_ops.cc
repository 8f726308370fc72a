// MatMulBiasAct and MatMulBiasActGrad on the GPU.
#include "cc/kernels/matmul_geometry.h"
#include "cuda/tf/contraction_cuda.h"

namespace tf_fused_ops {
namespace {

TFO_REGISTER_CUDA_CONTRACTION("TfFusedOps>MatMulBiasAct", MatMulGeometry);

}  // namespace
}  // namespace tf_fused_ops
