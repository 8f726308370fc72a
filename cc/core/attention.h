// Attention: y = dropout(softmax(q k^T * scale + bias)) v, without its scores
// in memory. Results depend on shape and values only, never on the number of
// threads.
#ifndef TFO_CC_CORE_ATTENTION_H_
#define TFO_CC_CORE_ATTENTION_H_

#include <cstdint>

#include "cc/core/dropout.h"
#include "cc/core/parallel.h"
#include "cc/core/scratch.h"
#include "cc/core/softmax.h"
#include "cc/core/types.h"

namespace tfo {

// q is [batch, queries, heads, depth], k [batch, keys, key_heads, depth], v
// [batch, keys, key_heads, value_depth] and y [batch, queries, heads,
// value_depth], dense. Heads that follow one another share one of the keys',
// whose number divides theirs. Scores, which nobody sees, are [batch, heads,
// queries, keys].
struct AttentionShape {
  DType dtype;
  std::int64_t batch, heads;
  std::int64_t key_heads;  // the gradient: as many as heads
  std::int64_t queries, keys;
  std::int64_t depth, value_depth;
  // From one sequence of keys, or of values, to the next; the gradient: dense.
  std::int64_t key_stride, value_stride;
};

// What is added to the scaled scores.
struct ScoreBias : BroadcastRows {
  const void* data;  // of the shape's dtype; null: nothing is
};

// What the gradient keeps of the scores, in accumulators: of each row of them
// the largest z, see SoftmaxArgs, and 1 / the sum of e^(z - largest).
struct AttentionArgs {
  AttentionShape shape;
  double scale;
  double masked;     // what z is where the mask does not keep it
  bool zero_masked;  // whether such keys are not counted, be there no others
  SoftmaxMask mask;  // of the scores
  ScoreBias bias;
  // Of what the softmax makes of the scores; or null.
  const Dropout* dropout;
  const void* q;
  const void* k;
  const void* v;
  void* y;
  void* largest;
  void* inverse_sum;
};

struct AttentionGradientArgs {
  AttentionArgs forward;
  const void* dy;
  void* q_grad;
  void* k_grad;
  void* v_grad;
  // [batch, heads, queries, keys], before any broadcasting is undone; or null.
  void* bias_grad;
};

// False when scratch memory ran out.
using AttentionForwardFunction = bool(const AttentionArgs&, const Parallel&,
                                      const Scratch&);
using AttentionGradientFunction = bool(const AttentionGradientArgs&,
                                       const Parallel&, const Scratch&);

}  // namespace tfo

#endif  // TFO_CC_CORE_ATTENTION_H_
