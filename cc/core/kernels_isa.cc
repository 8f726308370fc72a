// This instruction set's row of the dispatch table.
#include "cc/core/dispatch.h"

#define TFO_STRING_(x) #x
#define TFO_STRING(x) TFO_STRING_(x)

namespace tfo::TFO_ISA {

ConvForwardFunction ConvForward;
ConvGradientFunction ConvGradient;
ConvForwardFunction ConvTranspose;
ConvPackedBytesFunction ConvPackedBytes;
ConvPackFiltersFunction ConvPackFilters;
BatchNormMomentsFunction BatchNormMoments;
BatchNormApplyFunction BatchNormApply;
BatchNormGradientSumsFunction BatchNormGradientSums;
BatchNormGradientApplyFunction BatchNormGradientApply;
ActForwardFunction ActForward;
ActGradientFunction ActGradient;
PreluForwardFunction PreluForward;
PreluGradientFunction PreluGradient;
MaxPoolForwardFunction MaxPoolForward;
MaxPoolGradientFunction MaxPoolGradient;
LayerNormForwardFunction LayerNormForward;
LayerNormGradientFunction LayerNormGradient;
GroupNormForwardFunction GroupNormForward;
GroupNormGradientFunction GroupNormGradient;
SoftmaxForwardFunction SoftmaxForward;
SoftmaxGradientFunction SoftmaxGradient;
AttentionForwardFunction AttentionForward;
AttentionGradientFunction AttentionGradient;
CrossEntropyForwardFunction CrossEntropyForward;
CrossEntropyGradientFunction CrossEntropyGradient;
DropoutFunction DropOut;
MultiplyAddFunction MultiplyAdd;
CopyFunction Copy;
RecurrentForwardFunction RecurrentForward;
RecurrentGradientFunction RecurrentGradient;
QuantizedMatMulFunction QuantizedMatMul;
WeightOnlyMatMulFunction WeightOnlyMatMul;
DequantizeFunction Dequantize;
VariableUpdateFunction VariableUpdate;

extern const Kernels kKernels;
const Kernels kKernels = {TFO_STRING(TFO_ISA),
                          &ConvForward,
                          &ConvGradient,
                          &ConvPackedBytes,
                          &ConvPackFilters,
                          &BatchNormMoments,
                          &BatchNormApply,
                          &BatchNormGradientSums,
                          &BatchNormGradientApply,
                          &ActForward,
                          &ActGradient,
                          &PreluForward,
                          &PreluGradient,
                          &MaxPoolForward,
                          &MaxPoolGradient,
                          &LayerNormForward,
                          &LayerNormGradient,
                          &GroupNormForward,
                          &GroupNormGradient,
                          &SoftmaxForward,
                          &SoftmaxGradient,
                          &AttentionForward,
                          &AttentionGradient,
                          &CrossEntropyForward,
                          &CrossEntropyGradient,
                          &DropOut,
                          &MultiplyAdd,
                          &Copy,
                          &RecurrentForward,
                          &RecurrentGradient,
                          &QuantizedMatMul,
                          &ConvTranspose,
                          &WeightOnlyMatMul,
                          &Dequantize,
                          &VariableUpdate};

}  // namespace tfo::TFO_ISA
