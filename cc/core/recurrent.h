// Recurrent layers: what of every step depends on the step before. The share of
// the inputs in the gates, x, is a product of its own.
//
// With p = h kernel + bias, h being the state before the step, cut into gates:
//   rnn:  h' = act(x + p)
//   gru:  z = s(x_z + p_z), r = s(x_r + p_r), n = act(x_h + r p_h),
//         h' = z h + (1 - z) n
//   lstm: i = s(x_i + p_i), f = s(x_f + p_f), g = act(x_c + p_c),
//         o = s(x_o + p_o), c' = f c + i g, h' = o act(c')
// where s is the logistic function (Hochreiter and Schmidhuber 1997, with
// forget gates; Cho et al., arXiv:1406.1078, the reset applied after the
// product). Results depend on shape and values only, never on the number of
// threads.
#ifndef TFO_CC_CORE_RECURRENT_H_
#define TFO_CC_CORE_RECURRENT_H_

#include <cstdint>

#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/types.h"

namespace tfo {

enum class RecurrentCell : int { kRnn, kGru, kLstm };

constexpr int kNumRecurrentCells = 3;

// In the order of RecurrentCell; these are the values of the ops' `cell`
// attribute.
constexpr const char* kRecurrentCellNames[kNumRecurrentCells] = {"rnn", "gru",
                                                                 "lstm"};

constexpr int NumGates(RecurrentCell cell) {
  return cell == RecurrentCell::kRnn ? 1 : cell == RecurrentCell::kGru ? 3 : 4;
}
// h and, of an LSTM, c.
constexpr int NumStates(RecurrentCell cell) {
  return cell == RecurrentCell::kLstm ? 2 : 1;
}
// What a gradient reads besides y: z, r, n and p_h of a GRU, i, f, g, o and c'
// of an LSTM.
constexpr int NumSaved(RecurrentCell cell) {
  return cell == RecurrentCell::kRnn ? 0 : cell == RecurrentCell::kGru ? 4 : 5;
}

struct RecurrentShape {
  DType dtype;
  RecurrentCell cell;
  bool relu;       // act: otherwise tanh
  bool backwards;  // whether the last step comes first
  std::int64_t batch, steps, units;

  std::int64_t gates() const { return NumGates(cell) * units; }
};

// States are [batch, units], kernel is [units, gates], bias [gates] and x
// [batch, steps, gates]; all are dense.
struct RecurrentInputs {
  RecurrentShape shape;
  const void* kernel;
  const void* states[2];
  // [batch, steps]: where false, the states stay as they are, and y is that of
  // the step before, or zero where there is none. Or null.
  const std::uint8_t* mask;
};

struct RecurrentArgs {
  RecurrentInputs inputs;
  const void* x;
  const void* bias;  // or null
  void* y;           // [batch, steps, units]
  void* last[2];     // the states behind the last step
  void* saved;       // [batch, steps, NumSaved * units]; or null
};

struct RecurrentGradientArgs {
  RecurrentInputs inputs;
  const void* y;
  const void* saved;
  const void* dy;
  const void* dlast[2];
  void* x_grad;
  // Of a GRU, whose products do not have the gradients of x; otherwise null.
  void* product_grad;
  void* state_grads[2];
};

// False when scratch memory ran out.
using RecurrentForwardFunction = bool(const RecurrentArgs&, const Parallel&,
                                      const Scratch&);
using RecurrentGradientFunction = bool(const RecurrentGradientArgs&,
                                       const Parallel&, const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_RECURRENT_H_
