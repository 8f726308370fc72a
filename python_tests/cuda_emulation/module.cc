// _cuda_emulation: the functions of tf_fused_ops._cuda on arrays in the
// processor's memory, and the emulated device.
#include "cuda/python/array.h"
#include "cuda_runtime.h"

PYBIND11_MODULE(_cuda_emulation, module) {
  using cuda_emulation::device;
  tfo::cuda::python::BindBiasAct(module);
  tfo::cuda::python::BindConv(module);
  tfo::cuda::python::BindBatchNorm(module);
  tfo::cuda::python::BindLayerNorm(module);
  tfo::cuda::python::BindSoftmax(module);
  tfo::cuda::python::BindCrossEntropy(module);
  tfo::cuda::python::BindDropout(module);
  module.def(
      "set_device",
      [](int multiprocessors, int blocks, int shared_bytes, bool cooperative,
         bool reverse) {
        device = {multiprocessors, blocks, shared_bytes, cooperative, reverse};
      },
      pybind11::kw_only(), pybind11::arg("multiprocessors") = 4,
      pybind11::arg("blocks_per_multiprocessor") = 2,
      pybind11::arg("shared_bytes") = 228 * 1024,
      pybind11::arg("cooperative") = true, pybind11::arg("reverse") = false);
  module.def("launches", [] { return cuda_emulation::launches; });
  module.def("cooperative_launches",
             [] { return cuda_emulation::cooperative_launches; });
  module.def("waits", [] { return cuda_emulation::waits; });
}
