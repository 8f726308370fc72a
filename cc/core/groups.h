// Convolutions of several groups: each group's tensors, and one memory for all.
#ifndef TFO_CC_CORE_GROUPS_H_
#define TFO_CC_CORE_GROUPS_H_

#include "cc/core/conv.h"
#include "cc/core/integers.h"
#include "cc/core/parallel.h"
#include "cc/core/shared_scratch.h"
#include "cc/core/spin.h"
#include "cc/core/taps.h"

namespace tfo::TFO_ISA {
namespace {

// The first elements of a group, relative to those of the tensors.
struct GroupOffsets {
  std::int64_t input, output, channel;

  GroupOffsets(const ConvShape& s, std::int64_t group)
      : input(group * s.in_c * (s.input_channels_first ? s.in_h * s.in_w : 1)),
        output(group * s.out_c *
               (s.output_channels_first ? s.out_h * s.out_w : 1)),
        channel(group * s.out_c) {}
};

// What lies `offset` elements behind; null stays null.
template <class T, class Void>
TFO_INLINE Void* Behind(Void* tensor, std::int64_t offset) {
  return tensor == nullptr ? nullptr
                           : const_cast<Void*>(static_cast<const void*>(
                                 static_cast<const T*>(tensor) + offset));
}

template <class T>
ConvForwardArgs OfGroup(ConvForwardArgs args, std::int64_t group) {
  const GroupOffsets at(args.shape, group);
  args.input = Behind<T>(args.input, at.input);
  args.filters = Behind<T>(args.filters, at.channel);
  args.scale = Behind<T>(args.scale, at.channel);
  args.bias = Behind<T>(args.bias, at.channel);
  args.side_input = Behind<T>(args.side_input, at.output);
  args.y = Behind<T>(args.y, at.output);
  args.pre_activation = Behind<T>(args.pre_activation, at.output);
  args.winograd = false;
  return args;
}

template <class T>
ConvGradientArgs OfGroup(ConvGradientArgs args, std::int64_t group) {
  const GroupOffsets at(args.shape, group);
  args.dy = Behind<T>(args.dy, at.output);
  args.saved = Behind<T>(args.saved, at.output);
  args.input = Behind<T>(args.input, at.input);
  args.filters = Behind<T>(args.filters, at.channel);
  args.input_gradient = Behind<T>(args.input_gradient, at.input);
  args.filters_gradient = Behind<T>(args.filters_gradient, at.channel);
  args.bias_gradient = Behind<T>(args.bias_gradient, at.channel);
  args.side_input_gradient = Behind<T>(args.side_input_gradient, at.output);
  args.winograd = false;
  return args;
}

// The calling thread alone.
inline Parallel ThisThread() {
  return {[](void*, std::int64_t num_tasks, std::int64_t, Parallel::Task task,
             void* context) {
            for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i, 0);
          },
          nullptr, 1};
}

// Scratch memory that several workers may ask for.
class LockedScratch {
 public:
  explicit LockedScratch(const Scratch& scratch) : scratch_(scratch) {}

  Scratch scratch() {
    return {[](void* owner, std::int64_t bytes) {
              return static_cast<LockedScratch*>(owner)->Allocate(bytes);
            },
            this};
  }

 private:
  void* Allocate(std::int64_t bytes) {
    Spin spin;
    while (__atomic_test_and_set(&locked_, __ATOMIC_ACQUIRE)) spin.Wait();
    void* const data = scratch_.Allocate<char>(bytes);
    __atomic_clear(&locked_, __ATOMIC_RELEASE);
    return data;
  }

  const Scratch& scratch_;
  bool locked_ = false;
};

// Shares of fewer products are not worth a thread, nor memory of their own.
constexpr std::int64_t kLeastShare = 1 << 20;
// A guess, for the pool.
constexpr std::int64_t kProductsPerCycle = 16;

// Calls body(args of a group, threads, scratch memory) for all groups, as long
// as it returns true. Where workers can share them evenly, each does whole
// groups, which saves waiting for each other in each of them (measured in
// TensorFlow, two threads, eight groups of 24 channels: 0.6 of the time
// forward, 0.8 of the step).
template <class T, class Args, class Body>
bool ForGroups(const Args& args, const Parallel& parallel,
               const Scratch& scratch, const Body& body) {
  const ConvShape& s = args.shape;
  const std::int64_t groups = s.groups;
  const auto run = [&](const Range& range, const Parallel& threads,
                       const Scratch& memory) {
    SharedScratch shared(memory);
    for (std::int64_t group = range.begin; group < range.end; ++group)
      if (!body(OfGroup<T>(args, group), threads, shared.Next())) return false;
    return true;
  };
  const std::int64_t workers = parallel.num_workers;
  const std::int64_t even = EvenTasks(groups, 1, workers);
  const std::int64_t products = groups / workers * s.batch * s.out_h * s.out_w *
                                s.kernel_h * s.kernel_w * s.in_c * s.out_c;
  if (even - groups > groups / 8 || products < kLeastShare)
    return run({0, groups}, parallel, scratch);
  LockedScratch locked(scratch);
  bool failed = false;
  auto task = [&](std::int64_t index, int) {
    const Range share{groups * index / workers, groups * (index + 1) / workers};
    if (!run(share, ThisThread(), locked.scratch()))
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  };
  ParallelFor(parallel, workers, products / kProductsPerCycle, task);
  return !failed;
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_GROUPS_H_
