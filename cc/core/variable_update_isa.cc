// The formulas of optimizers, with states and factors named as in their
// signatures: x is the variable.
#include "cc/core/elementwise.h"
#include "cc/core/variable_update.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kCyclesPerElement = 8;

// As TensorFlow has it: what is no number stays so.
template <class V>
TFO_INLINE V Maximum(V a, V b) {
  const V larger = a > b ? a : b;
  return a == a ? larger : a;
}

// Of some elements: the gradient, its square and its absolute value; of rows
// that occur more than once, the sums of each.
template <class V>
struct Gradient {
  V value{}, square{}, size{};

  TFO_INLINE void Add(V v) {
    value += v;
    square += v * v;
    size += Maximum(v, -v);
  }
};

template <class V>
TFO_INLINE void Approach(V& average, V value, V rate) {
  average += rate * (value - average);
}

// Sutskever et al., "On the importance of initialization and momentum in deep
// learning", 2013.
template <bool kNesterov>
struct Momentum {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V& velocity = states[0];
    const V rate = factors[0], momentum = factors[1];
    velocity = momentum * velocity - rate * g.value;
    x += kNesterov ? momentum * velocity - rate * g.value : velocity;
  }
};

// Kingma and Ba, arXiv:1412.6980, end of section 2; with a decay of the
// variable, Loshchilov and Hutter, arXiv:1711.05101.
template <bool kDecays>
struct Adam {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V &m = states[0], &v = states[1];
    const V alpha = factors[0], epsilon = factors[3];
    Approach(m, g.value, factors[1]);
    Approach(v, g.square, factors[2]);
    if constexpr (kDecays) x -= x * factors[4] * factors[5];
    x -= alpha * m / (SquareRoot<A>(v) + epsilon);
  }
};

// Reddi et al., arXiv:1904.09237.
struct Amsgrad {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V &m = states[0], &v = states[1], &largest = states[2];
    const V alpha = factors[0], epsilon = factors[3];
    Approach(m, g.value, factors[1]);
    Approach(v, g.square, factors[2]);
    largest = Maximum(largest, v);
    x -= alpha * m / (SquareRoot<A>(largest) + epsilon);
  }
};

// Dozat, "Incorporating Nesterov momentum into Adam", 2016.
struct Nadam {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V &m = states[0], &v = states[1];
    const V rate = factors[0], epsilon = factors[3];
    const V m_share = factors[4], m_correction = factors[5];
    const V gradient_share = factors[6], gradient_correction = factors[7];
    const V v_correction = factors[8];
    Approach(m, g.value, factors[1]);
    Approach(v, g.square, factors[2]);
    const V ahead = m_share * m / m_correction +
                    gradient_share * g.value / gradient_correction;
    x -= rate * ahead / (SquareRoot<A>(v / v_correction) + epsilon);
  }
};

// Kingma and Ba, arXiv:1412.6980, section 7.1.
struct Adamax {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V &m = states[0], &norm = states[1];
    const V rate = factors[0], decay = factors[2];
    const V epsilon = factors[3], correction = factors[4];
    Approach(m, g.value, factors[1]);
    norm = Maximum(decay * norm, g.size);
    x -= rate * m / (correction * (norm + epsilon));
  }
};

// Hinton, "Neural networks for machine learning", lecture 6e, 2012; centered,
// Graves, arXiv:1308.0850, section 4.2.
template <bool kCentered, bool kMomentum>
struct Rmsprop {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V& square = states[0];
    const V rate = factors[0], decay = factors[1], gain = factors[2];
    const V epsilon = factors[3];
    square = decay * square + gain * g.square;
    V variance = square;
    if constexpr (kCentered) {
      V& mean = states[1];
      mean = decay * mean + gain * g.value;
      variance -= mean * mean;
    }
    V step = rate * g.value / SquareRoot<A>(variance + epsilon);
    if constexpr (kMomentum) {
      V& velocity = states[kCentered ? 2 : 1];
      step = velocity = factors[4] * velocity + step;
    }
    x -= step;
  }
};

// Duchi et al., "Adaptive subgradient methods", 2011.
struct Adagrad {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V& square = states[0];
    const V rate = factors[0], epsilon = factors[1];
    square += g.square;
    x -= rate * g.value / SquareRoot<A>(square + epsilon);
  }
};

// Zeiler, arXiv:1212.5701.
struct Adadelta {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V &square = states[0], &step_square = states[1];
    const V rate = factors[0], decay = factors[1], gain = factors[2];
    const V epsilon = factors[3];
    square = decay * square + gain * g.square;
    const V share = (step_square + epsilon) / (square + epsilon);
    step_square = decay * step_square + gain * (share * g.square);
    x -= rate * (SquareRoot<A>(share) * g.value);
  }
};

// Chen et al., arXiv:2302.06675.
struct Lion {
  template <class A, class V>
  static TFO_INLINE void Step(const Gradient<V>& g, V& x, V* states,
                              const V* factors) {
    V& m = states[0];
    const V rate = factors[0], m_share = factors[1];
    const V gradient_share = factors[2], decay = factors[3], gain = factors[4];
    const V step = m_share * m + gradient_share * g.value;
    const V above = step > V{} ? Splat(A(1)) : step;
    x -= rate * (step < V{} ? Splat(A(-1)) : above);
    m = decay * m + gain * g.value;
  }
};

// Takes a step with `size` elements from `begin` on, of which gradient(j,
// partial, n) loads n.
template <class T, Formula kFormula, class Rule, class LoadGradient>
TFO_INLINE void StepRange(const VariableUpdateArgs& args,
                          const Vec<Accumulator<T>>* factors, int64_t begin,
                          int64_t size, const LoadGradient& gradient) {
  using A = Accumulator<T>;
  constexpr int kValues = 1 + CountNames(SignatureOf(kFormula).states);
  ForColumns<A>(size, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
    constexpr bool kPartial = decltype(partial)::value;
    const int64_t at = begin + j;
    Vec<A> values[kValues];
    for (int i = 0; i < kValues; ++i) {
      const T* const from = static_cast<const T*>(args.before[i]) + at;
      FetchAhead(from);
      values[i] = LoadColumns<kPartial>(from, n);
    }
    Rule::template Step<A>(gradient(j, partial, n), values[0], values + 1,
                           factors);
    for (int i = 0; i < kValues; ++i) {
      StoreColumns<kPartial>(static_cast<T*>(args.after[i]) + at, values[i], n);
    }
  });
}

// With a gradient of all elements.
template <class T, Formula kFormula, class Rule>
void UpdateAll(const VariableUpdateArgs& args,
               const Vec<Accumulator<T>>* factors, const Parallel& parallel) {
  using A = Accumulator<T>;
  auto task = [&](int64_t index, int /*worker*/) {
    const int64_t begin = index * kTaskElements;
    const T* const gradient = static_cast<const T*>(args.gradient) + begin;
    StepRange<T, kFormula, Rule>(
        args, factors, begin, Min(kTaskElements, args.size - begin),
        [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
          FetchAhead(gradient + j);
          const Vec<A> v =
              LoadColumns<decltype(partial)::value>(gradient + j, n);
          return Gradient<Vec<A>>{v, v * v, Maximum(v, -v)};
        });
  };
  ParallelFor(parallel, CeilDiv(args.size, kTaskElements),
              kTaskElements * kCyclesPerElement, task);
}

// Whether rows without a gradient stay as they are: where nothing decays, zero
// is not divided by zero, and they need not be copied either.
template <Formula kFormula>
bool LeavesRows(const VariableUpdateArgs& args) {
  bool leaves = kFormula == Formula::kAdagrad && args.factors[1] > 0;
  for (int i = 0; i < 1 + kMostStates; ++i)
    leaves &= args.after[i] == args.before[i];
  return leaves;
}

// With one of some rows. Neighbours without any are taken together.
template <class T, Formula kFormula, class Rule>
void UpdateRows(const VariableUpdateArgs& args,
                const Vec<Accumulator<T>>* factors, const Parallel& parallel) {
  using A = Accumulator<T>;
  const GradientRows& lists = args.rows;
  const int64_t depth = lists.depth, rows = args.size / depth;
  const int64_t rows_of_task = Max(kTaskElements / depth, 1);
  const T* const gradient = static_cast<const T*>(args.gradient);
  const bool leaves = LeavesRows<kFormula>(args);
  auto task = [&](int64_t index, int /*worker*/) {
    const int64_t end = Min((index + 1) * rows_of_task, rows);
    for (int64_t row = index * rows_of_task; row < end;) {
      const int64_t begin = row;
      while (row < end && lists.first[row] < 0) ++row;
      if (!leaves) {
        StepRange<T, kFormula, Rule>(
            args, factors, begin * depth, (row - begin) * depth,
            [](int64_t, auto, int)
                TFO_INLINE_LAMBDA { return Gradient<Vec<A>>{}; });
      }
      if (row == end) return;
      StepRange<T, kFormula, Rule>(
          args, factors, row * depth, depth,
          [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
            Gradient<Vec<A>> sums;
            for (int64_t i = lists.first[row]; i >= 0; i = lists.next[i]) {
              sums.Add(LoadColumns<decltype(partial)::value>(
                  gradient + i * depth + j, n));
            }
            return sums;
          });
      ++row;
    }
  };
  ParallelFor(parallel, CeilDiv(rows, rows_of_task),
              rows_of_task * depth * kCyclesPerElement, task);
}

template <class T, Formula kFormula, class Rule>
void Update(const VariableUpdateArgs& args, const Parallel& parallel) {
  using A = Accumulator<T>;
  Vec<A> factors[kMostFactors];
  for (int i = 0; i < CountNames(SignatureOf(kFormula).factors); ++i)
    factors[i] = Splat(static_cast<A>(args.factors[i]));
  if (args.rows.first != nullptr)
    UpdateRows<T, kFormula, Rule>(args, factors, parallel);
  else
    UpdateAll<T, kFormula, Rule>(args, factors, parallel);
}

}  // namespace

VariableUpdateFunction VariableUpdate;

void VariableUpdate(const VariableUpdateArgs& args, const Parallel& parallel) {
  WithStorage(args.dtype, [&](auto storage) {
    using T = typename decltype(storage)::type;
    switch (args.formula) {
#define TFO_CASE(F, ...) \
  case Formula::F:       \
    return Update<T, Formula::F, __VA_ARGS__>(args, parallel)
      TFO_CASE(kMomentum, Momentum<false>);
      TFO_CASE(kNesterovMomentum, Momentum<true>);
      TFO_CASE(kAdam, Adam<false>);
      TFO_CASE(kAdamw, Adam<true>);
      TFO_CASE(kAmsgrad, Amsgrad);
      TFO_CASE(kNadam, Nadam);
      TFO_CASE(kAdamax, Adamax);
      TFO_CASE(kRmsprop, Rmsprop<false, false>);
      TFO_CASE(kRmspropMomentum, Rmsprop<false, true>);
      TFO_CASE(kCenteredRmsprop, Rmsprop<true, false>);
      TFO_CASE(kCenteredRmspropMomentum, Rmsprop<true, true>);
      TFO_CASE(kAdagrad, Adagrad);
      TFO_CASE(kAdadelta, Adadelta);
      TFO_CASE(kLion, Lion);
#undef TFO_CASE
    }
  });
}

}  // namespace tfo::TFO_ISA
