// A program that links the library whole, as TensorFlow Serving does, has the
// ops and their kernels without loading anything.
#include <cstdio>

#include "tensorflow/core/framework/node_def_builder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

int main() {
  tensorflow::NodeDef node;
  absl::Status status =
      tensorflow::NodeDefBuilder("dense", "TfFusedOps>MatMulBiasAct")
          .Input("a", 0, tensorflow::DT_FLOAT)
          .Input("b", 0, tensorflow::DT_FLOAT)
          .Input({{"bias", 0, tensorflow::DT_FLOAT}})
          .Input(std::vector<tensorflow::NodeDefBuilder::NodeOut>{})
          .Finalize(&node);
  const tensorflow::KernelDef* kernel = nullptr;
  if (status.ok()) {
    status = tensorflow::FindKernelDef(tensorflow::DEVICE_CPU, node, &kernel,
                                       /*kernel_class_name=*/nullptr);
  }
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
