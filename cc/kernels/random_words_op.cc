// The kernel of RandomWords: TensorFlow's own generator, asked as RandomUniform
// asks it.
#include "cc/ops/shape_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_util.h"
#include "tensorflow/core/util/guarded_philox_random.h"

namespace tf_fused_ops {
namespace {

// Samples that RandomUniform reserves for an element.
constexpr int kSamplesPerElement = 256;

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
    key->vec<tensorflow::uint64>()(0) = Word(random.key(), 0);
    for (int i = 0; i < 2; ++i)
      counter->vec<tensorflow::uint64>()(i) = Word(random.counter(), i);
  }

 private:
  // The i-th word of 64 bits in an array of words of 32.
  template <class Words>
  static tensorflow::uint64 Word(const Words& words, int i) {
    return words[2 * i] | tensorflow::uint64{words[2 * i + 1]} << 32;
  }

  tensorflow::GuardedPhiloxRandom generator_;
};

REGISTER_KERNEL_BUILDER(
    Name("TfFusedOps>RandomWords").Device(tensorflow::DEVICE_CPU),
    RandomWordsOp);

}  // namespace
}  // namespace tf_fused_ops
