// The kernels of the instruction set in use, as a table of functions.
#ifndef TFO_CC_CORE_DISPATCH_H_
#define TFO_CC_CORE_DISPATCH_H_

#include "cc/core/act.h"
#include "cc/core/attention.h"
#include "cc/core/batch_norm.h"
#include "cc/core/conv.h"
#include "cc/core/cross_entropy.h"
#include "cc/core/dropout.h"
#include "cc/core/group_norm.h"
#include "cc/core/layer_norm.h"
#include "cc/core/max_pool.h"
#include "cc/core/peak.h"
#include "cc/core/prelu.h"
#include "cc/core/quantized_matmul.h"
#include "cc/core/recurrent.h"
#include "cc/core/softmax.h"
#include "cc/core/variable_update.h"
#include "cc/core/weight_only_matmul.h"

namespace tfo {

struct Kernels {
  const char* isa;
  ConvForwardFunction* conv_forward;
  ConvGradientFunction* conv_gradient;
  ConvPackedBytesFunction* conv_packed_bytes;
  ConvPackFiltersFunction* conv_pack_filters;
  BatchNormMomentsFunction* batch_norm_moments;
  BatchNormApplyFunction* batch_norm_apply;
  BatchNormGradientSumsFunction* batch_norm_gradient_sums;
  BatchNormGradientApplyFunction* batch_norm_gradient_apply;
  ActForwardFunction* act_forward;
  ActGradientFunction* act_gradient;
  PreluForwardFunction* prelu_forward;
  PreluGradientFunction* prelu_gradient;
  MaxPoolForwardFunction* max_pool_forward;
  MaxPoolGradientFunction* max_pool_gradient;
  LayerNormForwardFunction* layer_norm_forward;
  LayerNormGradientFunction* layer_norm_gradient;
  GroupNormForwardFunction* group_norm_forward;
  GroupNormGradientFunction* group_norm_gradient;
  SoftmaxForwardFunction* softmax_forward;
  SoftmaxGradientFunction* softmax_gradient;
  AttentionForwardFunction* attention_forward;
  AttentionGradientFunction* attention_gradient;
  CrossEntropyForwardFunction* cross_entropy_forward;
  CrossEntropyGradientFunction* cross_entropy_gradient;
  DropoutFunction* drop_out;
  MultiplyAddFunction* multiply_add;
  CopyFunction* copy;
  RecurrentForwardFunction* recurrent_forward;
  RecurrentGradientFunction* recurrent_gradient;
  QuantizedMatMulFunction* quantized_matmul;
  ConvForwardFunction* conv_transpose;
  WeightOnlyMatMulFunction* weight_only_matmul;
  DequantizeFunction* dequantize;
  VariableUpdateFunction* variable_update;
};

// The table of the fastest instruction set that the CPU has, unless
// TF_FUSED_OPS_ISA or SetIsa says otherwise.
const Kernels& ActiveKernels();

// The same for a convolution: where that table is AMX's, those whose numbers
// meet few others are better left to AVX-512.
const Kernels& ForwardKernels(DType dtype, const ConvShape& shape);
// The same for an input gradient, or a transposed convolution.
const Kernels& InputGradientKernels(DType dtype, const ConvShape& shape);
// Its gradients, each by the table that is best for it. False when scratch
// memory ran out.
bool ComputeConvGradient(const ConvGradientArgs& args, const Parallel& parallel,
                         const Scratch& scratch);

// Selects "portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16" or "amx"
// for the calls that follow. False, and nothing changes, if the name is unknown
// or the CPU lacks it.
bool SetIsa(const char* name);

// The i-th instruction set that this CPU can run, from the portable one up;
// null past the end. "avx512_vnni" only where none that it is part of is best.
const char* AvailableIsa(int i);

}  // namespace tfo

#endif  // TFO_CC_CORE_DISPATCH_H_
