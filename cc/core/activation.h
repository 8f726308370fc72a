// The activations: value and slope, once, for scalars, for vectors and for the
// device.
//
// A new activation is one entry of Activation and kActivationNames and one case
// in each function below.
#ifndef TFO_CC_CORE_ACTIVATION_H_
#define TFO_CC_CORE_ACTIVATION_H_

// TFO_DEVICE: what may use the device's own mathematics. TFO_ANY_CALLEE: the
// function's argument may be callable on one side alone.
#if defined(__CUDACC__)
#define TFO_HOST_DEVICE __host__ __device__ __forceinline__
#define TFO_DEVICE __device__ __forceinline__
#else
#define TFO_HOST_DEVICE inline __attribute__((always_inline))
#define TFO_DEVICE TFO_HOST_DEVICE
#endif
#if defined(__NVCC__)
#define TFO_ANY_CALLEE _Pragma("nv_exec_check_disable")
#else
#define TFO_ANY_CALLEE
#endif

namespace tfo {

enum class Activation : int {
  kNone,
  kRelu,
  kRelu6,
  kElu,
  kSelu,
  kLeakyRelu,
  kSigmoid,
  kTanh,
  kSoftplus,
  kHardSigmoid,
  kSilu,
  kHardSwish,
  kMish,
  kGeluTanh,
  kGeluErf,
};

constexpr int kNumActivations = 15;

// In the order of Activation; these are the values of the ops' `activation`
// attribute.
constexpr const char* kActivationNames[kNumActivations] = {
    "none",       "relu",       "relu6", "elu",       "selu",
    "leaky_relu", "sigmoid",    "tanh",  "softplus",  "hard_sigmoid",
    "silu",       "hard_swish", "mish",  "gelu_tanh", "gelu_erf"};

// Whether the slope can be read off the activation's value. The others need the
// pre-activation; so does a leaky relu whose alpha is negative, because its
// value no longer tells the sign of its argument, and hard sigmoid, whose value
// rounds to a limit before its slope is zero. Softplus takes it as stock does,
// which saves the rounding of the value.
constexpr TFO_HOST_DEVICE bool SlopeFromValue(Activation activation,
                                              double alpha) {
  return activation == Activation::kLeakyRelu ? alpha >= 0
                                              : activation <= Activation::kTanh;
}

// The standard normal distribution at x: P(Z > x), and e^(-x^2 / 2).
template <class V>
struct NormalTail {
  V tail, exp;
};

// `Math` supplies Exp, which stays finite where e^x would not, Expm1, Log1p of
// [0, 1], Tanh, Reciprocal, Larger and Smaller, which are the second of two
// where one is no number, the NormalTail of a Magnitude, which is as large as
// its tail is a normal number, for V, and Scalar: float or double. V is Scalar
// or a vector of it. Comparisons are written so that a NaN argument stays NaN.
template <class Math, class V>
struct ActivationFunctions {
  using Scalar = typename Math::Scalar;

  static TFO_DEVICE V Constant(double c) {
    return V{} + static_cast<Scalar>(c);
  }

  // z as far as activations change with it: farther out they are their limits
  // in any type, but z times what is left of a cut-off exponential is not
  // small.
  static constexpr double kFar = 1000;

  static TFO_DEVICE V CutBelow(V z) { return Math::Larger(Constant(-kFar), z); }
  static TFO_DEVICE V Cut(V z) {
    return Math::Smaller(Constant(kFar), CutBelow(z));
  }

  static TFO_DEVICE V Logistic(V z) {
    return Math::Reciprocal(Constant(1) + Math::Exp(-z));
  }

  // Self-normalizing networks' lambda and alpha, which keep mean 0 and variance
  // 1 (Klambauer et al., 2017).
  static constexpr double kSeluScale = 1.0507009873554804934193349852946;
  static constexpr double kSeluLimit =
      kSeluScale * 1.6732632423543772848170429916717;

  static TFO_DEVICE V HardLogistic(V z) {
    const V positive = Math::Larger(V{}, z + Constant(3));
    return Math::Smaller(Constant(6), positive) * Constant(1.0 / 6);
  }

  // tanh(softplus(z)) = n / (n + 2) with n = e^z (e^z + 2); e^z is cut off
  // where the quotient has reached 1.
  static TFO_DEVICE V TanhSoftplus(V z) {
    const V e = Math::Exp(Math::Smaller(Constant(20), z));
    const V n = e * (e + Constant(2));
    return n / (n + Constant(2));
  }

  // 2u with u = sqrt(2/pi) (z + 0.044715 z^3): gelu(z) = z logistic(2u), as (1
  // + tanh u) / 2 = logistic(2u).
  static constexpr double kTwoSqrt2OverPi = 1.5957691216057307117597842397375;
  static constexpr double kGeluCubic = 0.044715;

  static TFO_DEVICE V GeluArgument(V z) {
    return z * (Constant(kTwoSqrt2OverPi) +
                Constant(kTwoSqrt2OverPi * kGeluCubic) * z * z);
  }

  template <Activation A>
  static TFO_DEVICE V Value(V z, V alpha) {
    if constexpr (A == Activation::kRelu) {
      return z <= V{} ? V{} : z;
    } else if constexpr (A == Activation::kRelu6) {
      const V positive = z <= V{} ? V{} : z;
      return positive >= Constant(6) ? Constant(6) : positive;
    } else if constexpr (A == Activation::kElu) {
      return z >= V{} ? z : Math::Expm1(z);
    } else if constexpr (A == Activation::kSelu) {
      return z >= V{} ? Constant(kSeluScale) * z
                      : Constant(kSeluLimit) * Math::Expm1(z);
    } else if constexpr (A == Activation::kLeakyRelu) {
      return z > V{} ? z : alpha * z;
    } else if constexpr (A == Activation::kSigmoid) {
      return Logistic(z);
    } else if constexpr (A == Activation::kTanh) {
      return Math::Tanh(z);
    } else if constexpr (A == Activation::kSoftplus) {
      const V e = Math::Exp(z < V{} ? z : -z);
      return Math::Larger(V{}, z) + Math::Log1p(e);
    } else if constexpr (A == Activation::kHardSigmoid) {
      return HardLogistic(z);
    } else if constexpr (A == Activation::kSilu) {
      return CutBelow(z) * Logistic(z);
    } else if constexpr (A == Activation::kHardSwish) {
      return CutBelow(z) * HardLogistic(z);
    } else if constexpr (A == Activation::kMish) {
      return CutBelow(z) * TanhSoftplus(z);
    } else if constexpr (A == Activation::kGeluTanh) {
      return CutBelow(z) * Logistic(GeluArgument(z));
    } else if constexpr (A == Activation::kGeluErf) {
      // z P(Z <= z) = max(z, 0) - |z| P(Z > |z|)
      const V magnitude = Math::Magnitude(z);
      return Math::Larger(z, V{}) - magnitude * Math::Tail(magnitude).tail;
    } else {
      return z;
    }
  }

  // The slope; `saved` is the activation's value where SlopeFromValue,
  // otherwise the pre-activation. For the leaky relu both do: their signs agree
  // wherever SlopeFromValue holds.
  template <Activation A>
  static TFO_DEVICE V Slope(V saved, V alpha) {
    const V one = Constant(1);
    if constexpr (A == Activation::kRelu) {
      return saved > V{} ? one : V{};
    } else if constexpr (A == Activation::kRelu6) {
      return saved > V{} ? (saved < Constant(6) ? one : V{}) : V{};
    } else if constexpr (A == Activation::kElu) {
      return saved < V{} ? saved + one : one;
    } else if constexpr (A == Activation::kSelu) {
      return saved < V{} ? saved + Constant(kSeluLimit) : Constant(kSeluScale);
    } else if constexpr (A == Activation::kLeakyRelu) {
      return saved > V{} ? one : alpha;
    } else if constexpr (A == Activation::kSigmoid) {
      return saved * (one - saved);
    } else if constexpr (A == Activation::kTanh) {
      return one - saved * saved;
    } else if constexpr (A == Activation::kSoftplus) {
      return Logistic(saved);
    } else if constexpr (A == Activation::kHardSigmoid) {
      const V below = saved < Constant(3) ? Constant(1.0 / 6) : V{};
      return saved > Constant(-3) ? below : V{};
    } else if constexpr (A == Activation::kSilu) {
      const V z = Cut(saved), e = Math::Exp(-z);
      const V s = Math::Reciprocal(one + e);
      return s * (one + z * (s * e));  // s e = 1 - s, without cancellation
    } else if constexpr (A == Activation::kHardSwish) {
      const V inner = saved * Constant(1.0 / 3) + Constant(0.5);
      return saved <= Constant(-3) ? V{} : (saved >= Constant(3) ? one : inner);
    } else if constexpr (A == Activation::kMish) {
      const V z = Cut(saved), t = TanhSoftplus(z);
      return t + z * (one - t * t) * Logistic(z);
    } else if constexpr (A == Activation::kGeluTanh) {
      const V z = Cut(saved), e = Math::Exp(-GeluArgument(z));
      const V s = Math::Reciprocal(one + e);
      const V du = Constant(kTwoSqrt2OverPi) +
                   Constant(3 * kTwoSqrt2OverPi * kGeluCubic) * z * z;
      return s + z * s * (s * e) * du;
    } else if constexpr (A == Activation::kGeluErf) {
      // P(Z <= z) + z phi(z), from the side that stays finite.
      const V magnitude = Math::Magnitude(saved);
      const NormalTail<V> n = Math::Tail(magnitude);
      constexpr double kDensity = 0.39894228040143267793994605993438;
      const V slope = n.tail - magnitude * (Constant(kDensity) * n.exp);
      return saved > V{} ? one - slope : slope;
    } else {
      return one;
    }
  }
};

// The activation as a type, for generic lambdas.
template <Activation A>
struct ActivationConstant {
  static constexpr Activation value = A;
};

// Calls body(ActivationConstant<A>{}) for the activation given at run time.
TFO_ANY_CALLEE
template <class Body>
TFO_HOST_DEVICE void WithActivation(Activation activation, const Body& body) {
  switch (activation) {
#define TFO_CASE(A)   \
  case Activation::A: \
    return body(ActivationConstant<Activation::A>{})
    TFO_CASE(kNone);
    TFO_CASE(kRelu);
    TFO_CASE(kRelu6);
    TFO_CASE(kElu);
    TFO_CASE(kSelu);
    TFO_CASE(kLeakyRelu);
    TFO_CASE(kSigmoid);
    TFO_CASE(kTanh);
    TFO_CASE(kSoftplus);
    TFO_CASE(kHardSigmoid);
    TFO_CASE(kSilu);
    TFO_CASE(kHardSwish);
    TFO_CASE(kMish);
    TFO_CASE(kGeluTanh);
    TFO_CASE(kGeluErf);
#undef TFO_CASE
  }
}

}  // namespace tfo

#endif  // TFO_CC_CORE_ACTIVATION_H_
