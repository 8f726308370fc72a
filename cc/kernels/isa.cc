// Instruction set control of the op library, for tests and `python -m
// tf_fused_ops info`.
#include "cc/core/dispatch.h"

#define TFO_EXPORT extern "C" __attribute__((visibility("default")))

TFO_EXPORT const char* tfo_isa() { return tfo::ActiveKernels().isa; }

TFO_EXPORT int tfo_set_isa(const char* name) { return tfo::SetIsa(name); }

TFO_EXPORT const char* tfo_available_isa(int i) { return tfo::AvailableIsa(i); }
