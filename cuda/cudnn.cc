#include "cuda/cudnn.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/core/types.h"
#include "cuda/cudnn_abi.h"
#include "cuda/dynamic_library.h"
#include "cuda/launch.h"

namespace tfo::cuda {
namespace {

namespace dnn = cudnn;

constexpr std::size_t kMaxWorkspaceBytes = std::size_t{1} << 30;
constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();

// The most elements of a tensor that cuDNN indexes; tests set a lower limit.
#ifndef TFO_CUDNN_MAX_ELEMENTS
#define TFO_CUDNN_MAX_ELEMENTS kMaxInt
#endif

struct Api : dnn::Functions {
  DynamicLibrary library{"cuDNN", {"libcudnn.so.9"}};

  Api() {
#define TFO_RESOLVE(RESULT, NAME, PARAMETERS) \
  library.Resolve("cudnn" #NAME, &NAME);
    TFO_CUDNN_ENTRIES(TFO_RESOLVE)
#undef TFO_RESOLVE
  }
};

const Api& GetApi() {
  static const Api* api = new Api;
  return *api;
}

Status ToStatus(dnn::Status code, const char* call) {
  if (code == dnn::kSuccess) return {};
  const char* text = GetApi().GetErrorString(code);
  const bool refused = code >= dnn::kBadParam && code < dnn::kInternalError;
  if (refused) return Unsupported(call, text);
  return {Status::Source::kCudnn, code, call, text};
}

#define TFO_DNN_STATUS(NAME, ...) \
  ToStatus(GetApi().NAME(__VA_ARGS__), "cudnn" #NAME)
#define TFO_DNN(...) TFO_CUDA_RETURN_IF_ERROR(TFO_DNN_STATUS(__VA_ARGS__))

dnn::DataType TypeOf(DType dtype) {
  return dtype == DType::kHalf       ? dnn::kHalf
         : dtype == DType::kBFloat16 ? dnn::kBFloat16
                                     : dnn::kFloat;
}

enum class Kind { kForward, kBiasAct, kInputGradient, kFiltersGradient };

constexpr const char* kKindNames[] = {"convolution", "fused convolution",
                                      "input gradient", "filters gradient"};

// `result` takes the place of the one of input, filters and output that is
// null.
struct Problem {
  Kind kind;
  DType dtype;
  ConvShape shape;
  const void *input, *filters, *output;
  void* result;
  bool accumulate = false;
  const void* bias = nullptr;
  const void* side_input = nullptr;
  Activation activation = Activation::kNone;
};

template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, dnn::Status (*)(T)>;

// A convolution in cuDNN's terms.
struct Descriptors {
  Owned<dnn::TensorDesc> input{nullptr, GetApi().DestroyTensorDescriptor};
  Owned<dnn::TensorDesc> output{nullptr, GetApi().DestroyTensorDescriptor};
  Owned<dnn::TensorDesc> bias{nullptr, GetApi().DestroyTensorDescriptor};
  Owned<dnn::FilterDesc> filters{nullptr, GetApi().DestroyFilterDescriptor};
  Owned<dnn::ConvolutionDesc> convolution{
      nullptr, GetApi().DestroyConvolutionDescriptor};
  Owned<dnn::ActivationDesc> activation{nullptr,
                                        GetApi().DestroyActivationDescriptor};

  Status Make(const Problem& p) {
    const ConvShape& s = p.shape;
    TFO_CUDA_RETURN_IF_ERROR(
        MakeTensor(p, s.batch, s.in_c, s.in_h, s.in_w, &input));
    TFO_CUDA_RETURN_IF_ERROR(
        MakeTensor(p, s.batch, s.out_c, s.out_h, s.out_w, &output));
    TFO_CUDA_RETURN_IF_ERROR(MakeTensor(p, 1, s.out_c, 1, 1, &bias));
    dnn::FilterDesc made_filters;
    TFO_DNN(CreateFilterDescriptor, &made_filters);
    filters.reset(made_filters);
    TFO_DNN(SetFilter4dDescriptor, made_filters, TypeOf(p.dtype), FormatOf(p),
            s.out_c, s.in_c, s.kernel_h, s.kernel_w);
    dnn::ConvolutionDesc made_convolution;
    TFO_DNN(CreateConvolutionDescriptor, &made_convolution);
    convolution.reset(made_convolution);
    TFO_DNN(SetConvolution2dDescriptor, made_convolution, s.pad_top, s.pad_left,
            s.stride_h, s.stride_w, s.dilation_h, s.dilation_w,
            dnn::kCrossCorrelation, dnn::kFloat);
    dnn::ActivationDesc made_activation;
    TFO_DNN(CreateActivationDescriptor, &made_activation);
    activation.reset(made_activation);
    TFO_DNN(SetActivationDescriptor, made_activation,
            p.activation == Activation::kRelu ? dnn::kRelu : dnn::kIdentity,
            dnn::kNotPropagateNan, 0.0);
    return {};
  }

 private:
  static dnn::Format FormatOf(const Problem& p) {
    return p.shape.input_channels_first ? dnn::kNchw : dnn::kNhwc;
  }

  static Status MakeTensor(const Problem& p, std::int64_t n, std::int64_t c,
                           std::int64_t h, std::int64_t w,
                           Owned<dnn::TensorDesc>* out) {
    dnn::TensorDesc made;
    TFO_DNN(CreateTensorDescriptor, &made);
    out->reset(made);
    TFO_DNN(SetTensor4dDescriptor, made, FormatOf(p), TypeOf(p.dtype), n, c, h,
            w);
    return {};
  }
};

struct Choice {
  dnn::Algorithm algorithm;
  dnn::MathType math_type;
  std::size_t workspace_size;
};

// How the library computes convolutions of one kind, the first choice first, or
// why not.
struct Plan {
  Status status;
  std::vector<Choice> choices;
};

// Those of the library's algorithms, fastest first, that are the same from run
// to run and keep the precision asked for.
Status AskForPlan(dnn::Handle handle, const Problem& p, const Descriptors& d,
                  bool allow_tf32, Plan* plan) {
  const bool exact = p.dtype == DType::kFloat && !allow_tf32;
  TFO_DNN(SetConvolutionMathType, d.convolution.get(),
          exact                      ? dnn::kFmaMath
          : p.dtype == DType::kFloat ? dnn::kDefaultMath
                                     : dnn::kTensorOpMath);
  constexpr int kMaxResults = 16;
  dnn::AlgorithmPerf results[kMaxResults];
  int count = 0;
  switch (p.kind) {
    case Kind::kForward:
    case Kind::kBiasAct:
      TFO_DNN(GetConvolutionForwardAlgorithm_v7, handle, d.input.get(),
              d.filters.get(), d.convolution.get(), d.output.get(), kMaxResults,
              &count, results);
      break;
    case Kind::kInputGradient:
      TFO_DNN(GetConvolutionBackwardDataAlgorithm_v7, handle, d.filters.get(),
              d.output.get(), d.convolution.get(), d.input.get(), kMaxResults,
              &count, results);
      break;
    case Kind::kFiltersGradient:
      TFO_DNN(GetConvolutionBackwardFilterAlgorithm_v7, handle, d.input.get(),
              d.output.get(), d.convolution.get(), d.filters.get(), kMaxResults,
              &count, results);
      break;
  }
  const bool any_algorithm =
      p.kind != Kind::kBiasAct || p.activation != Activation::kNone;
  for (int i = 0; i < count; ++i) {
    const dnn::AlgorithmPerf& result = results[i];
    if (result.status == dnn::kSuccess &&
        result.determinism == dnn::kDeterministic &&
        result.math_type != dnn::kTensorOpMathAllowConversion &&
        result.memory <= kMaxWorkspaceBytes &&
        (any_algorithm ||
         result.algorithm == dnn::kForwardImplicitPrecompGemm)) {
      plan->choices.push_back({result.algorithm,
                               exact ? dnn::kFmaMath : result.math_type,
                               result.memory});
    }
  }
  return plan->choices.empty()
             ? Unsupported("cuDNN", "no deterministic algorithm for this shape")
             : Status{};
}

void LogRefusal(const Status& status, const Problem& p, const Call& call) {
  if (status.ok()) return;
  const ConvShape& s = p.shape;
  char message[320];
  std::snprintf(message, sizeof(message),
                "cuDNN refuses the %s of images %lld x %lld x %lld x %lld with "
                "filters %lld x %lld x %lld: %s: %s",
                kKindNames[static_cast<int>(p.kind)],
                static_cast<long long>(s.batch), static_cast<long long>(s.in_h),
                static_cast<long long>(s.in_w), static_cast<long long>(s.in_c),
                static_cast<long long>(s.kernel_h),
                static_cast<long long>(s.kernel_w),
                static_cast<long long>(s.out_c), status.call, status.text);
  call.log(message);
}

// A handle, which one thread at a time may use, with the plans of its device.
class Session {
 public:
  // That of the current device and `stream`; lives forever.
  static Status Get(Stream stream, Session** session) {
    static auto* mutex = new std::mutex;
    static auto* sessions =
        new std::map<std::pair<int, Stream>, std::unique_ptr<Session>>;
    int device = 0;
    TFO_CUDA_RETURN_IF_ERROR(
        RuntimeStatus(cudaGetDevice(&device), "cudaGetDevice"));
    const std::lock_guard<std::mutex> lock(*mutex);
    std::unique_ptr<Session>& entry = (*sessions)[{device, stream}];
    if (entry == nullptr) {
      dnn::Handle handle;
      TFO_DNN(Create, &handle);
      TFO_DNN(SetStream, handle, stream);
      entry.reset(new Session(handle));
    }
    *session = entry.get();
    return {};
  }

  Status Run(const Problem& p, const Call& call) {
    Descriptors d;
    TFO_CUDA_RETURN_IF_ERROR(d.Make(p));
    const std::lock_guard<std::mutex> lock(mutex_);
    Plan* plan = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(FindPlan(p, d, call, &plan));
    TFO_CUDA_RETURN_IF_ERROR(plan->status);
    while (true) {
      const Status status = Execute(p, d, plan->choices.front(), call);
      if (!IsUnsupported(status)) return status;
      // What the library refuses after all is not tried again.
      plan->choices.erase(plan->choices.begin());
      if (plan->choices.empty()) {
        plan->status = status;
        LogRefusal(status, p, call);
        return status;
      }
    }
  }

 private:
  using Key = std::array<std::int64_t, 26>;

  explicit Session(dnn::Handle handle) : handle_(handle) {}

  Status Execute(const Problem& p, const Descriptors& d, const Choice& choice,
                 const Call& call) {
    TFO_DNN(SetConvolutionMathType, d.convolution.get(), choice.math_type);
    void* workspace = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(
        AllocateScratch(call, choice.workspace_size, &workspace));
    const float one = 1, zero = 0;
    switch (p.kind) {
      case Kind::kForward:
        TFO_DNN(ConvolutionForward, handle_, &one, d.input.get(), p.input,
                d.filters.get(), p.filters, d.convolution.get(),
                choice.algorithm, workspace, choice.workspace_size, &zero,
                d.output.get(), p.result);
        break;
      case Kind::kBiasAct: {
        const void* bias;
        TFO_CUDA_RETURN_IF_ERROR(BiasOrZero(p, call, &bias));
        TFO_DNN(ConvolutionBiasActivationForward, handle_, &one, d.input.get(),
                p.input, d.filters.get(), p.filters, d.convolution.get(),
                choice.algorithm, workspace, choice.workspace_size,
                p.side_input ? &one : &zero, d.output.get(),
                p.side_input ? p.side_input : p.result, d.bias.get(), bias,
                d.activation.get(), d.output.get(), p.result);
        break;
      }
      case Kind::kInputGradient:
        TFO_DNN(ConvolutionBackwardData, handle_, &one, d.filters.get(),
                p.filters, d.output.get(), p.output, d.convolution.get(),
                choice.algorithm, workspace, choice.workspace_size, &zero,
                d.input.get(), p.result);
        break;
      case Kind::kFiltersGradient:
        TFO_DNN(ConvolutionBackwardFilter, handle_, &one, d.input.get(),
                p.input, d.output.get(), p.output, d.convolution.get(),
                choice.algorithm, workspace, choice.workspace_size,
                p.accumulate ? &one : &zero, d.filters.get(), p.result);
        break;
    }
    return {};
  }

  // Refusals are kept, errors are not.
  Status FindPlan(const Problem& p, const Descriptors& d, const Call& call,
                  Plan** plan) {
    const ConvShape& s = p.shape;
    const Key key = {static_cast<int>(p.kind),
                     static_cast<int>(p.dtype),
                     static_cast<int>(p.activation),
                     call.allow_tf32,
                     s.batch,
                     s.in_h,
                     s.in_w,
                     s.in_c,
                     s.out_h,
                     s.out_w,
                     s.out_c,
                     s.kernel_h,
                     s.kernel_w,
                     s.stride_h,
                     s.stride_w,
                     s.dilation_h,
                     s.dilation_w,
                     s.pad_top,
                     s.pad_left,
                     s.input_channels_first,
                     AlignmentOf(p.input),
                     AlignmentOf(p.filters),
                     AlignmentOf(p.output),
                     AlignmentOf(p.result),
                     AlignmentOf(p.bias),
                     p.side_input ? AlignmentOf(p.side_input) : 0};
    const auto [entry, inserted] = plans_.try_emplace(key);
    *plan = &entry->second;
    if (!inserted) return {};
    const Status status =
        AskForPlan(handle_, p, d, call.allow_tf32, &entry->second);
    if (!status.ok() && !IsUnsupported(status)) {
      plans_.erase(entry);
      return status;
    }
    entry->second.status = status;
    LogRefusal(status, p, call);
    return {};
  }

  // The fused kernel wants a bias.
  static Status BiasOrZero(const Problem& p, const Call& call,
                           const void** bias) {
    *bias = p.bias;
    if (p.bias != nullptr) return {};
    const std::int64_t bytes = p.shape.out_c * SizeOf(p.dtype);
    void* zeros = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(AllocateScratch(call, bytes, &zeros));
    *bias = zeros;
    return SetZero(zeros, bytes, call);
  }

  const dnn::Handle handle_;
  std::mutex mutex_;
  std::map<Key, Plan> plans_;
};

Status CheckSizes(const ConvShape& s) {
  for (std::int64_t size : {s.in_h, s.in_w, s.in_c, s.out_h, s.out_w, s.out_c,
                            s.kernel_h, s.kernel_w, s.pad_top, s.pad_left}) {
    if (size > kMaxInt) {
      return Unsupported("cuDNN", "takes sizes up to 2^31 - 1 only");
    }
  }
  return {};
}

template <class Pointer>
Pointer Advance(Pointer pointer, std::int64_t bytes) {
  using Byte =
      std::conditional_t<std::is_same_v<Pointer, void*>, char, const char>;
  return pointer == nullptr ? nullptr : static_cast<Byte*>(pointer) + bytes;
}

// Batches too large for cuDNN go in parts.
Status Run(const Problem& p, const Call& call) {
  const ConvShape& s = p.shape;
  TFO_CUDA_RETURN_IF_ERROR(CheckSizes(s));
  Session* session = nullptr;
  TFO_CUDA_RETURN_IF_ERROR(Session::Get(call.stream, &session));
  const std::int64_t input_image = s.in_h * s.in_w * s.in_c;
  const std::int64_t output_image = s.out_h * s.out_w * s.out_c;
  const std::int64_t step = std::max<std::int64_t>(
      1, TFO_CUDNN_MAX_ELEMENTS / std::max(input_image, output_image));
  for (std::int64_t begin = 0; begin < s.batch; begin += step) {
    const std::int64_t input_bytes = begin * input_image * SizeOf(p.dtype);
    const std::int64_t output_bytes = begin * output_image * SizeOf(p.dtype);
    Problem part = p;
    part.shape.batch = std::min(step, s.batch - begin);
    part.input = Advance(p.input, input_bytes);
    part.output = Advance(p.output, output_bytes);
    part.side_input = Advance(p.side_input, output_bytes);
    part.accumulate = begin > 0;
    if (p.kind == Kind::kInputGradient) {
      part.result = Advance(p.result, input_bytes);
    } else if (p.kind != Kind::kFiltersGradient) {
      part.result = Advance(p.result, output_bytes);
    }
    TFO_CUDA_RETURN_IF_ERROR(session->Run(part, call));
  }
  return {};
}

}  // namespace

Status CudnnStatus() { return GetApi().library.status(); }

Status Convolve(DType dtype, const ConvShape& shape, const void* input,
                const void* filters, void* output, const Call& call) {
  return Run({Kind::kForward, dtype, shape, input, filters, nullptr, output},
             call);
}

Status ConvolveBiasAct(const ConvForwardArgs& args, const Call& call) {
  Problem problem = {Kind::kBiasAct, args.dtype, args.shape, args.input,
                     args.filters,   nullptr,    args.y};
  problem.bias = args.bias;
  problem.side_input = args.side_input;
  problem.activation = args.activation;
  return Run(problem, call);
}

Status ConvolveInputGradient(DType dtype, const ConvShape& shape,
                             const void* filters, const void* dz,
                             void* input_gradient, const Call& call) {
  return Run({Kind::kInputGradient, dtype, shape, nullptr, filters, dz,
              input_gradient},
             call);
}

Status ConvolveFiltersGradient(DType dtype, const ConvShape& shape,
                               const void* input, const void* dz,
                               void* filters_gradient, const Call& call) {
  return Run({Kind::kFiltersGradient, dtype, shape, input, nullptr, dz,
              filters_gradient},
             call);
}

}  // namespace tfo::cuda
