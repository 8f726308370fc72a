// What the core needs from Python: threads, scratch memory, element types.
#ifndef TFO_CC_PYTHON_CORE_UTIL_H_
#define TFO_CC_PYTHON_CORE_UTIL_H_

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "cc/core/activation.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo::python {

namespace py = pybind11;

// Threads of one call; which of them runs a task is left to chance, as in a
// pool.
class Threads {
 public:
  explicit Threads(int count) : count_(count) {
    if (count < 1) throw py::value_error("num_threads must be at least 1");
  }

  Parallel parallel() { return {&Threads::Run, this, count_}; }

 private:
  static void Run(void* self, std::int64_t num_tasks, std::int64_t /*cost*/,
                  Parallel::Task task, void* context) {
    std::atomic<std::int64_t> next{0};
    const auto work = [&](int worker) {
      for (std::int64_t i; (i = next++) < num_tasks;) task(context, i, worker);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < static_cast<Threads*>(self)->count_; ++i) {
      others.emplace_back(work, i);
    }
    work(0);
    for (std::thread& thread : others) thread.join();
  }

  int count_;
};

// Scratch memory that lives as long as this object.
class Memory {
 public:
  ~Memory() {
    for (void* block : blocks_) ::operator delete(block, kAlignment);
  }

  Scratch scratch() {
    return {[](void* self, std::int64_t bytes) {
              return static_cast<Memory*>(self)->Allocate(bytes);
            },
            this};
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void* Allocate(std::int64_t bytes) {
    blocks_.push_back(
        ::operator new(static_cast<std::size_t>(bytes), kAlignment));
    bytes_ += bytes;
    return blocks_.back();
  }

  std::vector<void*> blocks_;
  std::int64_t bytes_ = 0;
};

inline DType DTypeOf(const char* name, const std::string& dtype) {
  if (dtype == "float16") return DType::kHalf;
  if (dtype == "bfloat16") return DType::kBFloat16;
  if (dtype == "float32") return DType::kFloat;
  if (dtype == "float64") return DType::kDouble;
  throw py::value_error(std::string(name) + " has the unsupported dtype " +
                        dtype);
}

// float16, bfloat16 (the dtype of that name), float32 or float64.
inline DType DTypeOf(const char* name, const py::array& array) {
  return DTypeOf(name, std::string(py::str(array.dtype())));
}

inline Activation ActivationOf(const std::string& name) {
  for (int i = 0; i < kNumActivations; ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  throw py::value_error("activation '" + name + "' is not known");
}

// `array` as it must be: dense, of the given dtype and shape.
inline void Require(const char* name, const py::array& array,
                    const py::dtype& dtype,
                    const std::vector<py::ssize_t>& shape) {
  const bool fits =
      (array.flags() & py::array::c_style) != 0 && array.dtype().equal(dtype) &&
      std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()) ==
          shape;
  if (!fits) {
    throw py::value_error(std::string(name) +
                          " must be a dense array of the expected dtype and "
                          "shape");
  }
}

inline std::vector<py::ssize_t> ShapeOf(const py::array& array) {
  return {array.shape(), array.shape() + array.ndim()};
}

// An array whose memory begins at a cache line, as TensorFlow's tensors do.
inline py::array AlignedArray(const py::dtype& dtype,
                              const std::vector<py::ssize_t>& shape) {
  constexpr std::uintptr_t kLine = 64;
  py::ssize_t bytes = dtype.itemsize();
  for (const py::ssize_t size : shape) bytes *= size;
  py::array_t<char> memory(bytes + static_cast<py::ssize_t>(kLine));
  char* const data = memory.mutable_data();
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return py::array(dtype, shape, data + (kLine - address % kLine) % kLine,
                   memory);
}

}  // namespace tfo::python

#endif  // TFO_CC_PYTHON_CORE_UTIL_H_
