#include "cuda/python/array.h"

#include <cuda_runtime.h>

#include "cuda/launch.h"
#include "cuda/python/dlpack.h"

namespace tfo::cuda::python {
namespace {

[[noreturn]] void Refuse(const char* name, const std::string& what) {
  throw py::value_error(std::string(name) + " " + what);
}

void RequireDense(const char* name, const Shape& shape, const Shape& strides) {
  std::int64_t expected = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 0) return;
  }
  for (std::size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) {
      Refuse(name, "must be dense, with its last dimension contiguous");
    }
    expected *= shape[i];
  }
}

ElementType TypeOf(const char* name, std::uint8_t code, int bits) {
  if (code == kDLFloat && bits == 16) return ElementType::kFloat16;
  if (code == kDLBfloat && bits == 16) return ElementType::kBFloat16;
  if (code == kDLFloat && bits == 32) return ElementType::kFloat32;
  if (code == kDLFloat && bits == 64) return ElementType::kFloat64;
  if (code == kDLUInt && bits == 8) return ElementType::kUInt8;
  if (code == kDLUInt && bits == 64) return ElementType::kUInt64;
  if (code == kDLInt && bits == 32) return ElementType::kInt32;
  if (code == kDLInt && bits == 64) return ElementType::kInt64;
  Refuse(name,
         "must be float16, bfloat16, float32, float64, uint8, uint64, int32 or "
         "int64");
}

int Bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
    case ElementType::kInt64:
    case ElementType::kUInt64:
      return 8;
    case ElementType::kFloat32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kUInt8:
      return 1;
    default:
      return 2;
  }
}

// Lets `stream` wait for what `producer` has been given.
void WaitFor(Stream producer, Stream stream) {
  cudaEvent_t event;
  Raise(RuntimeStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                      "cudaEventCreateWithFlags"));
  cudaError_t code = cudaEventRecord(event, producer);
  if (code == cudaSuccess) code = cudaStreamWaitEvent(stream, event, 0);
  cudaEventDestroy(event);
  Raise(RuntimeStatus(code, "cudaStreamWaitEvent"));
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
Array FromCudaArrayInterface(const char* name, const py::dict& interface,
                             Stream stream) {
  Array array;
  const std::string typestr = py::str(interface["typestr"]);
  // bfloat16 has no letter of its own: libraries give it as two opaque bytes.
  const char letter = typestr.size() == 3 ? typestr[1] : '?';
  const int bits = typestr.size() == 3 ? (typestr[2] - '0') * 8 : 0;
  array.type = TypeOf(name,
                      letter == 'f'   ? kDLFloat
                      : letter == 'u' ? kDLUInt
                      : letter == 'i' ? kDLInt
                      : letter == 'V' ? kDLBfloat
                                      : std::uint8_t{255},
                      bits);
  array.shape = interface["shape"].cast<Shape>();
  array.data = reinterpret_cast<void*>(
      interface["data"].cast<py::tuple>()[0].cast<std::uintptr_t>());
  if (interface.contains("strides") && !interface["strides"].is_none()) {
    Shape strides = interface["strides"].cast<Shape>();
    for (std::int64_t& stride : strides) stride /= Bytes(array.type);
    RequireDense(name, array.shape, strides);
  }
  // Its numbers of the default streams are the runtime's handles.
  if (interface.contains("stream") && !interface["stream"].is_none()) {
    const auto producer =
        reinterpret_cast<Stream>(interface["stream"].cast<std::uintptr_t>());
    if (producer != stream) WaitFor(producer, stream);
  }
  return array;
}

Array FromDlpack(const char* name, const py::object& object, Stream stream) {
  const auto device = object.attr("__dlpack_device__")().cast<py::tuple>();
  if (device[0].cast<std::int32_t>() != kDLCuda)
    Refuse(name, "must be in the memory of a CUDA device");
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess &&
      device[1].cast<int>() != current) {
    Refuse(name, "must be in the memory of the current device, " +
                     std::to_string(current));
  }
  // In DLPack the handle 0 is ambiguous and 1 stands for the default stream.
  const auto handle = reinterpret_cast<std::uintptr_t>(stream);
  py::capsule capsule = object.attr("__dlpack__")(
      py::arg("stream") = handle == 0 ? std::uintptr_t{1} : handle);
  auto* managed = capsule.get_pointer<DLManagedTensor>();
  const DLTensor& tensor = managed->dl_tensor;
  Array array;
  array.type = TypeOf(
      name, tensor.dtype.lanes == 1 ? tensor.dtype.code : std::uint8_t{255},
      tensor.dtype.bits);
  array.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  array.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  if (tensor.strides != nullptr) {
    RequireDense(name, array.shape,
                 Shape(tensor.strides, tensor.strides + tensor.ndim));
  }
  return array;  // an unconsumed capsule frees what it holds
}

}  // namespace

std::int64_t Array::size() const {
  std::int64_t size = 1;
  for (std::int64_t n : shape) size *= n;
  return size;
}

Array ArrayOf(const char* name, const py::object& object, Stream stream,
              bool optional) {
  Array array;
  if (object.is_none()) {
    if (!optional) Refuse(name, "must be given");
    return array;
  }
  if (py::hasattr(object, "__dlpack__")) {
    array = FromDlpack(name, object, stream);
  } else if (py::hasattr(object, "__cuda_array_interface__")) {
    array = FromCudaArrayInterface(
        name, object.attr("__cuda_array_interface__"), stream);
  } else {
    Refuse(name,
           "must be an array on the device: __dlpack__ or "
           "__cuda_array_interface__ is needed");
  }
  array.owner = object;
  return array;
}

Array ArrayOf(const char* name, const py::object& object, Stream stream,
              ElementType type, const Shape& shape, bool optional) {
  Array array = ArrayOf(name, object, stream, optional);
  if (!array.owner) return array;
  if (array.type != type || array.shape != shape) {
    Refuse(name, "must have the expected dtype and shape");
  }
  return array;
}

ChannelShape::ChannelShape(const char* name, const Array& array,
                           bool channels_first) {
  const std::size_t rank = array.shape.size();
  if (rank < 2) Refuse(name, "must have rank 2 or more");
  const std::size_t dim = channels_first ? 1 : rank - 1;
  for (std::size_t i = 0; i < dim; ++i) outer *= array.shape[i];
  channels = array.shape[dim];
  for (std::size_t i = dim + 1; i < rank; ++i) inner *= array.shape[i];
}

DType DTypeOf(const char* name, const Array& array) {
  switch (array.type) {
    case ElementType::kFloat16:
      return DType::kHalf;
    case ElementType::kBFloat16:
      return DType::kBFloat16;
    case ElementType::kFloat32:
      return DType::kFloat;
    default:
      Refuse(name, "must be float16, bfloat16 or float32");
  }
}

Activation ActivationOf(const std::string& name) {
  for (int i = 0; i < kNumActivations; ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  throw py::value_error("activation '" + name + "' is not known");
}

void Raise(const Status& status) {
  if (status.ok()) return;
  std::string message = std::string(status.call) + ": ";
  if (status.source == Status::Source::kUnsupported) {
    message += status.text;
  } else {
    message += std::string(SourceName(status.source)) + " error " +
               std::to_string(status.code) + " (" + status.text + ")";
  }
  throw std::runtime_error(message);
}

Memory::~Memory() {
  for (void* block : blocks_) cudaFreeAsync(block, stream_);
}

Scratch Memory::scratch() {
  return {[](void* self, std::int64_t bytes) {
            return static_cast<Memory*>(self)->Allocate(bytes);
          },
          this};
}

void* Memory::Allocate(std::int64_t bytes) {
  void* block = nullptr;
  if (cudaMallocAsync(&block, static_cast<std::size_t>(bytes), stream_) !=
      cudaSuccess) {
    return nullptr;
  }
  blocks_.push_back(block);
  return block;
}

}  // namespace tfo::cuda::python
