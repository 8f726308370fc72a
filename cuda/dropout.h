// Dropout on the GPU, for float16, bfloat16 and float32, with the arguments and
// the bits of the CPU's (cc/core/dropout.h).
#ifndef TFO_CUDA_DROPOUT_H_
#define TFO_CUDA_DROPOUT_H_

#include "cc/core/dropout.h"
#include "cuda/status.h"

namespace tfo::cuda {

Status DropOut(const DropoutArgs& args, Stream stream);

// Stores in the device's memory where random words begin.
Status StoreRandomWords(const PhiloxStart& start, std::uint64_t* key,
                        std::uint64_t* counter, Stream stream);

}  // namespace tfo::cuda

#endif  // TFO_CUDA_DROPOUT_H_
