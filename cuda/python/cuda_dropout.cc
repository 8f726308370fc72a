// Dropout.
#include <array>

#include "cuda/dropout.h"
#include "cuda/python/array.h"

namespace tfo::cuda::python {
namespace {

void Run(const py::object& x_object, const py::object& key_object,
         const py::object& counter_object, const py::object& y_object,
         double rate, double scale, std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array x = ArrayOf("x", x_object, stream);
  const DType dtype = DTypeOf("x", x);
  const Array key =
      ArrayOf("rng_key", key_object, stream, ElementType::kUInt64, {1});
  const Array counter =
      ArrayOf("rng_counter", counter_object, stream, ElementType::kUInt64, {2});
  const Array y = ArrayOf("y", y_object, stream, x.type, x.shape);
  Raise(DropOut({dtype,
                 x.size(),
                 {rate,
                  scale,
                  {static_cast<const std::uint64_t*>(key.data),
                   static_cast<const std::uint64_t*>(counter.data)}},
                 x.data,
                 y.data},
                stream));
}

void Store(std::uint64_t key, const std::array<std::uint64_t, 2>& counter,
           const py::object& key_object, const py::object& counter_object,
           std::uintptr_t stream_handle) {
  const Stream stream = StreamOf(stream_handle);
  const Array to_key =
      ArrayOf("rng_key", key_object, stream, ElementType::kUInt64, {1});
  const Array to_counter =
      ArrayOf("rng_counter", counter_object, stream, ElementType::kUInt64, {2});
  Raise(StoreRandomWords({key, {counter[0], counter[1]}},
                         static_cast<std::uint64_t*>(to_key.data),
                         static_cast<std::uint64_t*>(to_counter.data), stream));
}

}  // namespace

void BindDropout(py::module_& module) {
  module.def("dropout", &Run, py::arg("x"), py::arg("rng_key"),
             py::arg("rng_counter"), py::arg("y"), py::kw_only(),
             py::arg("rate"), py::arg("scale"), py::arg("stream"),
             "y = x * scale where the uniform number of x's type is not below "
             "the rate, otherwise 0, on `stream`. rng_key [1] and rng_counter "
             "[2] are uint64 on the device; y may be x.");
  module.def("store_random_words", &Store, py::arg("key"), py::arg("counter"),
             py::arg("rng_key"), py::arg("rng_counter"), py::kw_only(),
             py::arg("stream"),
             "Stores the numbers in the arrays of `dropout`.");
}

}  // namespace tfo::cuda::python
