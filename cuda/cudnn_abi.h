// The part of cuDNN 9's binary interface that is used here, so that building
// needs none of its headers
// (https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/).
#ifndef TFO_CUDA_CUDNN_ABI_H_
#define TFO_CUDA_CUDNN_ABI_H_

#include <cstddef>
#include <cstdint>

namespace tfo::cudnn {

enum Status : int {
  kSuccess = 0,
  kBadParam = 2000,      // 2000 to 2999
  kNotSupported = 3000,  // 3000 to 3999
  kInternalError = 4000,
};

// cudnnDataType_t
enum DataType : int { kFloat = 0, kHalf = 2, kBFloat16 = 9 };

// cudnnTensorFormat_t
enum Format : int { kNchw = 0, kNhwc = 1 };

// cudnnMathType_t
enum MathType : int {
  kDefaultMath = 0,  // of float32: TF32 allowed
  kTensorOpMath = 1,
  kTensorOpMathAllowConversion = 2,
  kFmaMath = 3,
};

// cudnnDeterminism_t
enum Determinism : int { kNonDeterministic = 0, kDeterministic = 1 };

// cudnnConvolutionMode_t
enum ConvolutionMode : int { kConvolution = 0, kCrossCorrelation = 1 };

// cudnnActivationMode_t
enum ActivationMode : int { kRelu = 1, kIdentity = 5 };

// cudnnNanPropagation_t
enum NanPropagation : int { kNotPropagateNan = 0, kPropagateNan = 1 };

// cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t,
// cudnnConvolutionBwdFilterAlgo_t: taken from the library's own choice.
using Algorithm = int;
// The only one that takes kIdentity for an activation.
constexpr Algorithm kForwardImplicitPrecompGemm = 1;

using Handle = struct OpaqueHandle*;
using TensorDesc = struct OpaqueTensor*;
using FilterDesc = struct OpaqueFilter*;
using ConvolutionDesc = struct OpaqueConvolution*;
using ActivationDesc = struct OpaqueActivation*;
using Stream = void*;  // cudaStream_t

// cudnnConvolutionFwdAlgoPerf_t; those of the gradients are the same.
struct AlgorithmPerf {
  Algorithm algorithm;
  Status status;
  float time;
  std::size_t memory;
  Determinism determinism;
  MathType math_type;
  int reserved[3];
};

// Every entry that is used: X(result, name without "cudnn", parameters).
#define TFO_CUDNN_ENTRIES(X)                                                  \
  X(const char*, GetErrorString, (Status))                                    \
  X(Status, Create, (Handle*))                                                \
  X(Status, SetStream, (Handle, Stream))                                      \
  X(Status, CreateTensorDescriptor, (TensorDesc*))                            \
  X(Status, SetTensor4dDescriptor,                                            \
    (TensorDesc, Format, DataType, int n, int c, int h, int w))               \
  X(Status, DestroyTensorDescriptor, (TensorDesc))                            \
  X(Status, CreateFilterDescriptor, (FilterDesc*))                            \
  X(Status, SetFilter4dDescriptor,                                            \
    (FilterDesc, DataType, Format, int k, int c, int h, int w))               \
  X(Status, DestroyFilterDescriptor, (FilterDesc))                            \
  X(Status, CreateConvolutionDescriptor, (ConvolutionDesc*))                  \
  X(Status, SetConvolution2dDescriptor,                                       \
    (ConvolutionDesc, int pad_h, int pad_w, int stride_h, int stride_w,       \
     int dilation_h, int dilation_w, ConvolutionMode, DataType compute_type)) \
  X(Status, SetConvolutionMathType, (ConvolutionDesc, MathType))              \
  X(Status, DestroyConvolutionDescriptor, (ConvolutionDesc))                  \
  X(Status, CreateActivationDescriptor, (ActivationDesc*))                    \
  X(Status, SetActivationDescriptor,                                          \
    (ActivationDesc, ActivationMode, NanPropagation, double coefficient))     \
  X(Status, DestroyActivationDescriptor, (ActivationDesc))                    \
  X(Status, GetConvolutionForwardAlgorithm_v7,                                \
    (Handle, TensorDesc x, FilterDesc, ConvolutionDesc, TensorDesc y,         \
     int requested, int* returned, AlgorithmPerf*))                           \
  X(Status, GetConvolutionBackwardDataAlgorithm_v7,                           \
    (Handle, FilterDesc, TensorDesc dy, ConvolutionDesc, TensorDesc dx,       \
     int requested, int* returned, AlgorithmPerf*))                           \
  X(Status, GetConvolutionBackwardFilterAlgorithm_v7,                         \
    (Handle, TensorDesc x, TensorDesc dy, ConvolutionDesc, FilterDesc,        \
     int requested, int* returned, AlgorithmPerf*))                           \
  X(Status, ConvolutionForward,                                               \
    (Handle, const void* alpha, TensorDesc, const void* x, FilterDesc,        \
     const void* w, ConvolutionDesc, Algorithm, void* workspace,              \
     std::size_t workspace_size, const void* beta, TensorDesc, void* y))      \
  X(Status, ConvolutionBiasActivationForward,                                 \
    (Handle, const void* alpha1, TensorDesc, const void* x, FilterDesc,       \
     const void* w, ConvolutionDesc, Algorithm, void* workspace,              \
     std::size_t workspace_size, const void* alpha2, TensorDesc,              \
     const void* z, TensorDesc, const void* bias, ActivationDesc, TensorDesc, \
     void* y))                                                                \
  X(Status, ConvolutionBackwardData,                                          \
    (Handle, const void* alpha, FilterDesc, const void* w, TensorDesc,        \
     const void* dy, ConvolutionDesc, Algorithm, void* workspace,             \
     std::size_t workspace_size, const void* beta, TensorDesc, void* dx))     \
  X(Status, ConvolutionBackwardFilter,                                        \
    (Handle, const void* alpha, TensorDesc, const void* x, TensorDesc,        \
     const void* dy, ConvolutionDesc, Algorithm, void* workspace,             \
     std::size_t workspace_size, const void* beta, FilterDesc, void* dw))

struct Functions {
#define TFO_MEMBER(RESULT, NAME, PARAMETERS) RESULT(*NAME) PARAMETERS;
  TFO_CUDNN_ENTRIES(TFO_MEMBER)
#undef TFO_MEMBER
};

}  // namespace tfo::cudnn

#endif  // TFO_CUDA_CUDNN_ABI_H_
