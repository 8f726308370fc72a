// Python module `_logging`: TensorFlow's own log, so that messages of the
// Python remapper obey TF_CPP_VMODULE and look like those of the C++ one.

#include <pybind11/pybind11.h>

#include <string_view>

#include "absl/log/globals.h"
#include "absl/log/log.h"
#include "absl/log/vlog_is_on.h"

namespace {

// The public ABSL_VLOG_IS_ON asks the same function for the current file.
int VlogLevel(std::string_view file) {
  return absl::log_internal::VLogLevel(file);
}

bool Vlog(std::string_view file, int line, int level,
          std::string_view message) {
  if (VlogLevel(file) < level) return false;
  pybind11::gil_scoped_release release;
  LOG(INFO).WithVerbosity(level).AtLocation(file, line) << message;
  return true;
}

}  // namespace

PYBIND11_MODULE(_logging, m) {
  m.doc() = "Writes to TensorFlow's log.";
  m.def("vlog_level", &VlogLevel, pybind11::arg("file"),
        "Returns the verbosity that TF_CPP_VMODULE and TF_CPP_MAX_VLOG_LEVEL "
        "ask of a source file.");
  m.def("vlog", &Vlog, pybind11::arg("file"), pybind11::arg("line"),
        pybind11::arg("level"), pybind11::arg("message"),
        "Logs one line if the verbosity of the file reaches `level`; returns "
        "whether it did.");
  m.def("set_vlog_level", &absl::SetVLogLevel, pybind11::arg("module"),
        pybind11::arg("level"),
        "Sets the verbosity of a module pattern; returns the previous one.");
}
