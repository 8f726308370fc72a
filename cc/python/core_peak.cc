// What the processor can do at best, measured.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "cc/core/dispatch.h"
#include "cc/core/peak.h"
#include "cc/python/core_util.h"

namespace tfo::python {
namespace {

constexpr int kRepetitions = 5;

// The least seconds that one call of body(index, worker) on each thread took.
template <class Body>
double LeastSeconds(int num_threads, Body body) {
  using Clock = std::chrono::steady_clock;
  Threads threads(num_threads);
  double least = 1e30;
  for (int i = 0; i < kRepetitions; ++i) {
    const Clock::time_point start = Clock::now();
    ParallelFor(threads.parallel(), num_threads, 0, body);
    const std::chrono::duration<double> seconds = Clock::now() - start;
    least = std::min(least, seconds.count());
  }
  return least;
}

double MultiplyAddRate(const std::string& dtype, int num_threads,
                       std::int64_t rounds) {
  if (rounds < 1) throw py::value_error("rounds must be at least 1");
  const DType type = DTypeOf("dtype", dtype);
  py::gil_scoped_release release;
  std::atomic<std::int64_t> operations{0};
  const double seconds = LeastSeconds(num_threads, [&](std::int64_t, int) {
    operations += ActiveKernels().multiply_add(type, rounds);
  });
  return static_cast<double>(operations) / kRepetitions / seconds;
}

double CopyRate(int num_threads, std::int64_t bytes) {
  if (bytes < 64) throw py::value_error("bytes must be at least 64");
  bytes -= bytes % 64;
  Memory memory;
  const Scratch scratch = memory.scratch();
  std::vector<std::pair<char*, char*>> blocks;
  for (int i = 0; i < num_threads; ++i) {
    blocks.emplace_back(scratch.Allocate<char>(bytes),
                        scratch.Allocate<char>(bytes));
    std::memset(blocks.back().first, 1, static_cast<std::size_t>(bytes));
    std::memset(blocks.back().second, 2, static_cast<std::size_t>(bytes));
  }
  py::gil_scoped_release release;
  const double seconds = LeastSeconds(num_threads, [&](std::int64_t i, int) {
    ActiveKernels().copy(blocks[i].first, blocks[i].second, bytes);
  });
  return 2.0 * static_cast<double>(bytes) * num_threads / seconds;
}

}  // namespace

void BindPeak(py::module_& m) {
  m.def("multiply_add_rate", &MultiplyAddRate,
        "Multiplications and additions a second in registers, at best.\n\n"
        "dtype is the elements' type by name, rounds the length of one "
        "measurement. Raises ValueError.",
        py::arg("dtype"), py::arg("num_threads"),
        py::arg("rounds") = 20'000'000);
  m.def("copy_rate", &CopyRate,
        "Bytes read plus bytes written a second, at best.\n\n"
        "Every thread copies `bytes` of its own. Raises ValueError.",
        py::arg("num_threads"), py::arg("bytes") = std::int64_t{128} << 20);
}

}  // namespace tfo::python
