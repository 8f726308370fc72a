// tf_fused_ops._cuda: the GPU launchers on device arrays, without TensorFlow.
#include "cuda/python/array.h"

PYBIND11_MODULE(_cuda, module) {
  module.doc() =
      "The GPU kernels on arrays of any library (DLPack or "
      "__cuda_array_interface__). Outputs are given by the caller; work is "
      "queued on `stream`, a cudaStream_t as an integer.";
  tfo::cuda::python::BindBiasAct(module);
  tfo::cuda::python::BindConv(module);
  tfo::cuda::python::BindBatchNorm(module);
  tfo::cuda::python::BindLayerNorm(module);
  tfo::cuda::python::BindSoftmax(module);
  tfo::cuda::python::BindCrossEntropy(module);
  tfo::cuda::python::BindDropout(module);
}
