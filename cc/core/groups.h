// Convolutions of several groups: each group's tensors.
#ifndef TFO_CC_CORE_GROUPS_H_
#define TFO_CC_CORE_GROUPS_H_

#include "cc/core/conv.h"
#include "cc/core/shares.h"
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

// A guess, for the pool.
constexpr std::int64_t kProductsPerCycle = 16;

// Calls body(args of a group, threads, scratch memory) for all groups, as long
// as it returns true (measured in TensorFlow, two threads, eight groups of 24
// channels, each thread with groups of its own: 0.6 of the time forward, 0.8 of
// the step).
template <class T, class Args, class Body>
bool ForGroups(const Args& args, const Parallel& parallel,
               const Scratch& scratch, const Body& body) {
  const ConvShape& s = args.shape;
  const std::int64_t products =
      s.batch * s.out_h * s.out_w * s.kernel_h * s.kernel_w * s.in_c * s.out_c;
  return ForShares(
      s.groups, products / kProductsPerCycle, parallel, scratch,
      [&](std::int64_t group, const Parallel& threads, const Scratch& memory) {
        return body(OfGroup<T>(args, group), threads, memory);
      });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_GROUPS_H_
