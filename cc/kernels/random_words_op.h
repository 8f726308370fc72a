// The kernel of RandomWords: TensorFlow's own generator, asked as RandomUniform
// asks it. An Engine stores what it says on a device.
#ifndef TFO_CC_KERNELS_RANDOM_WORDS_OP_H_
#define TFO_CC_KERNELS_RANDOM_WORDS_OP_H_

#include "cc/core/dropout.h"
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/util/guarded_philox_random.h"

namespace tf_fused_ops {

// Samples that RandomUniform reserves for an element.
constexpr int kSamplesPerElement = 256;

template <class Engine>
class RandomWordsOp : public tensorflow::OpKernel {
 public:
  explicit RandomWordsOp(tensorflow::OpKernelConstruction* ctx)
      : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, generator_.Init(ctx));
  }

  void Compute(tensorflow::OpKernelContext* ctx) override {
    tensorflow::TensorShape shape;
    const absl::Status read =
        tensorflow::tensor::MakeShape(ctx->input(0), &shape);
    OP_REQUIRES(ctx, read.ok(), Invalid("shape is none: ", read.message()));
    const auto random = generator_.ReserveRandomOutputs(shape.num_elements(),
                                                        kSamplesPerElement);
    tensorflow::Tensor* key = nullptr;
    tensorflow::Tensor* counter = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {1}, &key));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {2}, &counter));
    const tfo::PhiloxStart start{
        Word(random.key(), 0),
        {Word(random.counter(), 0), Word(random.counter(), 1)}};
    OP_REQUIRES_OK(
        ctx, Engine::Store(ctx, start, static_cast<std::uint64_t*>(key->data()),
                           static_cast<std::uint64_t*>(counter->data())));
  }

 private:
  // The i-th word of 64 bits in an array of words of 32.
  template <class Words>
  static std::uint64_t Word(const Words& words, int i) {
    return words[2 * i] | std::uint64_t{words[2 * i + 1]} << 32;
  }

  tensorflow::GuardedPhiloxRandom generator_;
};

#define TFO_REGISTER_RANDOM_WORDS(device, Engine)         \
  REGISTER_KERNEL_BUILDER(Name("TfFusedOps>RandomWords")  \
                              .Device(tensorflow::device) \
                              .HostMemory("shape"),       \
                          RandomWordsOp<Engine>)

}  // namespace tf_fused_ops

#endif  // TFO_CC_KERNELS_RANDOM_WORDS_OP_H_
