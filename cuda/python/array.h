// Arrays on the device, of any Python library that speaks DLPack or the CUDA
// array interface, and memory for a launcher's intermediate results.
#ifndef TFO_CUDA_PYTHON_ARRAY_H_
#define TFO_CUDA_PYTHON_ARRAY_H_

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cc/core/activation.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"
#include "cuda/status.h"

namespace tfo::cuda::python {

namespace py = pybind11;

using Shape = std::vector<std::int64_t>;

enum class ElementType {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kUInt8,
  kUInt64,
  kInt32,
  kInt64
};

struct Array {
  void* data = nullptr;
  ElementType type = ElementType::kFloat32;
  Shape shape;
  py::object owner;  // keeps the memory alive

  explicit operator bool() const { return data != nullptr; }
  std::int64_t size() const;
};

// The dense array behind `object`; ValueError naming the argument where there
// is none. None is an array without data where `optional`.
Array ArrayOf(const char* name, const py::object& object, Stream stream,
              bool optional = false);

// `object` as an array of just this type and shape.
Array ArrayOf(const char* name, const py::object& object, Stream stream,
              ElementType type, const Shape& shape, bool optional = false);

// An array as [outer, channels, inner]: the channels are dimension 1 or the
// last.
struct ChannelShape {
  std::int64_t outer = 1, channels, inner = 1;

  ChannelShape(const char* name, const Array& array, bool channels_first);
};

DType DTypeOf(const char* name, const Array& array);
Activation ActivationOf(const std::string& name);

// The launcher's status as a RuntimeError.
void Raise(const Status& status);

// Device memory in stream order, freed in stream order.
class Memory {
 public:
  explicit Memory(Stream stream) : stream_(stream) {}
  ~Memory();

  Scratch scratch();

 private:
  void* Allocate(std::int64_t bytes);

  Stream stream_;
  std::vector<void*> blocks_;
};

// A stream's handle as Python libraries give it, an integer.
inline Stream StreamOf(std::uintptr_t handle) {
  return reinterpret_cast<Stream>(handle);
}

void BindBiasAct(py::module_& module);
void BindConv(py::module_& module);
void BindBatchNorm(py::module_& module);
void BindLayerNorm(py::module_& module);
void BindSoftmax(py::module_& module);
void BindCrossEntropy(py::module_& module);
void BindDropout(py::module_& module);

}  // namespace tfo::cuda::python

#endif  // TFO_CUDA_PYTHON_ARRAY_H_
