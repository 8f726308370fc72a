// What optimizers do to a variable, in one pass over it, its gradient and what
// they keep of it. Results depend on values only, never on the number of
// threads.
#ifndef TFO_CC_CORE_VARIABLE_UPDATE_H_
#define TFO_CC_CORE_VARIABLE_UPDATE_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/types.h"

namespace tfo {

enum class Formula : int {
  kMomentum,
  kNesterovMomentum,
  kAdam,
  kAdamw,
  kAmsgrad,
  kNadam,
  kAdamax,
  kRmsprop,
  kRmspropMomentum,
  kCenteredRmsprop,
  kCenteredRmspropMomentum,
  kAdagrad,
  kAdadelta,
  kLion,
};

constexpr int kMostStates = 3, kMostFactors = 9;

// What a formula is called, and what it takes beside variable and gradient;
// variable_update_isa.cc has what it computes.
struct FormulaSignature {
  const char* name;
  const char* states[kMostStates + 1];  // the first null ends it
  const char* factors[kMostFactors + 1];
};

inline constexpr FormulaSignature kFormulas[] = {
    {"momentum", {"velocity"}, {"rate", "momentum"}},
    {"nesterov_momentum", {"velocity"}, {"rate", "momentum"}},
    {"adam", {"m", "v"}, {"alpha", "m_rate", "v_rate", "epsilon"}},
    {"adamw",
     {"m", "v"},
     {"alpha", "m_rate", "v_rate", "epsilon", "decay", "rate"}},
    {"amsgrad",
     {"m", "v", "largest"},
     {"alpha", "m_rate", "v_rate", "epsilon"}},
    {"nadam",
     {"m", "v"},
     {"rate", "m_rate", "v_rate", "epsilon", "m_share", "m_correction",
      "gradient_share", "gradient_correction", "v_correction"}},
    {"adamax",
     {"m", "norm"},
     {"rate", "m_rate", "decay", "epsilon", "correction"}},
    {"rmsprop", {"square"}, {"rate", "decay", "gain", "epsilon"}},
    {"rmsprop_momentum",
     {"square", "velocity"},
     {"rate", "decay", "gain", "epsilon", "momentum"}},
    {"centered_rmsprop",
     {"square", "mean"},
     {"rate", "decay", "gain", "epsilon"}},
    {"centered_rmsprop_momentum",
     {"square", "mean", "velocity"},
     {"rate", "decay", "gain", "epsilon", "momentum"}},
    {"adagrad", {"square"}, {"rate", "epsilon"}},
    {"adadelta",
     {"square", "step_square"},
     {"rate", "decay", "gain", "epsilon"}},
    {"lion", {"m"}, {"rate", "m_share", "gradient_share", "decay", "gain"}},
};
constexpr int kNumFormulas = sizeof(kFormulas) / sizeof(kFormulas[0]);
static_assert(kNumFormulas == static_cast<int>(Formula::kLion) + 1);

constexpr const FormulaSignature& SignatureOf(Formula formula) {
  return kFormulas[static_cast<int>(formula)];
}

// How many states, or factors, a signature has.
constexpr int CountNames(const char* const* names) {
  int count = 0;
  while (names[count] != nullptr) ++count;
  return count;
}

// Which rows of a gradient, of `depth` elements each, belong to a row of the
// variable: its first one, and the next one of each of the gradient's, in
// ascending order; -1: none. Null where the gradient is of all rows.
struct GradientRows {
  std::int64_t depth;
  const std::int64_t* first;
  const std::int64_t* next;
};

struct VariableUpdateArgs {
  DType dtype;
  Formula formula;
  std::int64_t size;
  // Of the variable's size; or some rows of it. Then the gradient of a row is
  // the sum of all that belong to it, and its square, or absolute value, the
  // sum of theirs.
  const void* gradient;
  GradientRows rows;
  // The variable's values, then those of the states, before and after. Memory
  // of `after` may be that of the same `before`, not of another.
  const void* before[1 + kMostStates];
  void* after[1 + kMostStates];
  double factors[kMostFactors];  // in the order of the signature
};

using VariableUpdateFunction = void(const VariableUpdateArgs&, const Parallel&);

}  // namespace tfo

#endif  // TFO_CC_CORE_VARIABLE_UPDATE_H_
