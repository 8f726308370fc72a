// y = act(x), and x_grad = dy * act'(saved).
#include "cc/core/act.h"
#include "cc/core/elementwise.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kCyclesPerElement = 4;

template <class T, Activation kActivation>
void Forward(const ActArgs& args, const Parallel& parallel) {
  using A = Accumulator<T>;
  const T* x = static_cast<const T*>(args.x);
  const Vec<A> alpha = Splat(static_cast<A>(args.alpha));
  const Output<T> y{static_cast<T*>(args.y),
                    Streams<T>(args.size, args.y, args.x, nullptr)};
  ForElements(args.size, kCyclesPerElement, y, parallel,
              [&](int64_t at, auto partial, int n) TFO_INLINE_LAMBDA {
                FetchAhead(x + at);
                return VectorActivation<T>::template Value<kActivation>(
                    LoadColumns<decltype(partial)::value>(x + at, n), alpha);
              });
}

template <class T, Activation kActivation>
void Gradient(const ActGradientArgs& args, const Parallel& parallel) {
  using A = Accumulator<T>;
  const T* dy = static_cast<const T*>(args.dy);
  const T* saved = static_cast<const T*>(args.saved);
  const Vec<A> alpha = Splat(static_cast<A>(args.alpha));
  const Output<T> x_grad{
      static_cast<T*>(args.x_grad),
      Streams<T>(args.size, args.x_grad, args.dy, args.saved)};
  ForElements(args.size, kCyclesPerElement, x_grad, parallel,
              [&](int64_t at, auto partial, int n) TFO_INLINE_LAMBDA {
                constexpr bool kPartial = decltype(partial)::value;
                FetchAhead(dy + at);
                FetchAhead(saved + at);
                const Vec<A> slope =
                    VectorActivation<T>::template Slope<kActivation>(
                        LoadColumns<kPartial>(saved + at, n), alpha);
                return LoadColumns<kPartial>(dy + at, n) * slope;
              });
}

}  // namespace

ActForwardFunction ActForward;
ActGradientFunction ActGradient;

void ActForward(const ActArgs& args, const Parallel& parallel) {
  WithStorage(args.dtype, [&](auto storage) {
    WithActivation(args.activation, [&](auto activation) {
      Forward<typename decltype(storage)::type, decltype(activation)::value>(
          args, parallel);
    });
  });
}

void ActGradient(const ActGradientArgs& args, const Parallel& parallel) {
  WithStorage(args.dtype, [&](auto storage) {
    WithActivation(args.activation, [&](auto activation) {
      Gradient<typename decltype(storage)::type, decltype(activation)::value>(
          args, parallel);
    });
  });
}

}  // namespace tfo::TFO_ISA
