// The TensorFlow-free core as a Python module, for tests and for those who want
// to see its numbers without TensorFlow.
#include "cc/core/cache.h"
#include "cc/core/dispatch.h"
#include "cc/python/core_util.h"

namespace tfo::python {

void BindAct(py::module_& m);
void BindBatchNorm(py::module_& m);
void BindConv(py::module_& m);
void BindPeak(py::module_& m);

}  // namespace tfo::python

PYBIND11_MODULE(_core, m) {
  namespace py = pybind11;
  m.doc() = "The kernels of tf_fused_ops on NumPy arrays.";
  m.def(
      "isa", [] { return tfo::ActiveKernels().isa; },
      "The instruction set in use.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (!tfo::SetIsa(name.c_str())) {
          throw py::value_error("instruction set '" + name +
                                "' is unknown, or this processor lacks it");
        }
      },
      "Selects an instruction set by name. Raises ValueError.",
      py::arg("name"));
  m.def(
      "available_isas",
      [] {
        py::list names;
        for (int i = 0; tfo::AvailableIsa(i) != nullptr; ++i) {
          names.append(tfo::AvailableIsa(i));
        }
        return names;
      },
      "The instruction sets that this processor can run, oldest first.");
  m.def("set_streamed_bytes", &tfo::SetStreamedBytes,
        "Sets the size from which on outputs are stored past the caches; 0 "
        "restores that of this processor.",
        py::arg("bytes"));
  tfo::python::BindAct(m);
  tfo::python::BindBatchNorm(m);
  tfo::python::BindConv(m);
  tfo::python::BindPeak(m);
}
