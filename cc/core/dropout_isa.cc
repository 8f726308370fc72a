// y = x at random zero, otherwise scaled. That is its own gradient.
#include "cc/core/dropout_elements.h"
#include "cc/core/elementwise.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kCyclesPerElement = 4;

template <class T>
void Run(const DropoutArgs& args, const Parallel& parallel) {
  using A = Accumulator<T>;
  using Elements = DropoutElements<T>;
  const T* const x = static_cast<const T*>(args.x);
  const Output<T> y{static_cast<T*>(args.y),
                    Streams<T>(args.size, args.y, args.x, nullptr)};
  const Elements elements(args.dropout);
  auto task = [&](int64_t index, int /*worker*/) {
    const int64_t end = Min(args.size, (index + 1) * kTaskElements);
    alignas(64) typename Elements::Room room;
    for (int64_t at = index * kTaskElements; at < end; at += Elements::kMost) {
      const int64_t count = Min(Elements::kMost, end - at);
      const std::uint32_t* const words = elements.Draw(at, count, room);
      ForColumns<A>(count,
                    [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                      constexpr bool kPartial = decltype(partial)::value;
                      FetchAhead(x + at + j);
                      y.template Store<kPartial>(
                          at + j,
                          elements.Apply(words + j * kWordsPerElement<T>,
                                         LoadColumns<kPartial>(x + at + j, n)),
                          n);
                    });
    }
    if (y.stream) FlushStores();
  };
  ParallelFor(parallel, CeilDiv(args.size, kTaskElements),
              kTaskElements * kCyclesPerElement, task);
}

}  // namespace

DropoutFunction DropOut;

void DropOut(const DropoutArgs& args, const Parallel& parallel) {
  WithStorage(args.dtype, [&](auto storage) {
    Run<typename decltype(storage)::type>(args, parallel);
  });
}

}  // namespace tfo::TFO_ISA
