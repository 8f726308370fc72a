// A stand-in for libcudnn: its convolutions, on the host, by the letter of its
// documentation. What breaks a rule of the library is refused.
#include <cstdio>
#include <vector>

#include "cuda/cudnn_abi.h"
#include "library.h"

namespace tfo::cudnn {

struct OpaqueHandle {
  Stream stream = nullptr;
};

struct OpaqueTensor {
  Format format;
  DataType type;
  std::int64_t n, c, h, w;

  std::int64_t At(std::int64_t i, std::int64_t j, std::int64_t y,
                  std::int64_t x) const {
    return format == kNchw ? ((i * c + j) * h + y) * w + x
                           : ((i * h + y) * w + x) * c + j;
  }
  std::int64_t size() const { return n * c * h * w; }
};

struct OpaqueFilter : OpaqueTensor {};

struct OpaqueConvolution {
  std::int64_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  MathType math_type = kDefaultMath;
};

struct OpaqueActivation {
  ActivationMode mode;
  NanPropagation nan;
};

namespace {

constexpr std::size_t kWorkspaceBytes = 1000;
// Answers to a request for an algorithm, fastest first. Only the last is to be
// taken: the first is not the same from run to run, the second wants too much
// memory, the third rounds float32 to float16, the fourth is refused in the
// end.
constexpr Algorithm kUnwilling = 4;
constexpr Algorithm kAlgorithms[] = {5, 6, 7, kUnwilling,
                                     kForwardImplicitPrecompGemm};

emulation::Type TypeOf(DataType type) {
  return type == kHalf       ? emulation::Type::kHalf
         : type == kBFloat16 ? emulation::Type::kBFloat16
                             : emulation::Type::kFloat;
}

std::string Describe(const char* what, const OpaqueTensor& x,
                     const OpaqueFilter& w, const OpaqueConvolution& conv) {
  char line[256];
  std::snprintf(line, sizeof(line),
                "%s x=%ldx%ldx%ldx%ld w=%ldx%ldx%ldx%ld pad=%ldx%ld type=%d "
                "format=%s",
                what, long(x.n), long(x.c), long(x.h), long(x.w), long(w.n),
                long(w.c), long(w.h), long(w.w), long(conv.pad_h),
                long(conv.pad_w), x.type, x.format == kNchw ? "NCHW" : "NHWC");
  return line;
}

bool Valid(const OpaqueTensor& x, const OpaqueFilter& w,
           const OpaqueConvolution& conv, const OpaqueTensor& y) {
  const auto output = [](std::int64_t in, std::int64_t kernel, std::int64_t pad,
                         std::int64_t stride, std::int64_t dilation) {
    return (in + 2 * pad - ((kernel - 1) * dilation + 1)) / stride + 1;
  };
  for (const OpaqueTensor* tensor :
       {&x, static_cast<const OpaqueTensor*>(&w), &y}) {
    if (tensor->format != x.format || tensor->type != x.type) return false;
    if (tensor->n < 1 || tensor->c < 1 || tensor->h < 1 || tensor->w < 1) {
      return false;
    }
  }
  return x.n == y.n && x.c == w.c && y.c == w.n &&
         y.h == output(x.h, w.h, conv.pad_h, conv.stride_h, conv.dilation_h) &&
         y.w == output(x.w, w.w, conv.pad_w, conv.stride_w, conv.dilation_w);
}

// Calls body(index into x, into w, into y) for every product of the sum.
template <class Body>
void ForEachTerm(const OpaqueTensor& x, const OpaqueFilter& w,
                 const OpaqueConvolution& conv, const OpaqueTensor& y,
                 const Body& body) {
  for (std::int64_t n = 0; n < y.n; ++n)
    for (std::int64_t k = 0; k < y.c; ++k)
      for (std::int64_t i = 0; i < y.h; ++i)
        for (std::int64_t j = 0; j < y.w; ++j)
          for (std::int64_t r = 0; r < w.h; ++r)
            for (std::int64_t s = 0; s < w.w; ++s) {
              const std::int64_t in_i =
                  i * conv.stride_h + r * conv.dilation_h - conv.pad_h;
              const std::int64_t in_j =
                  j * conv.stride_w + s * conv.dilation_w - conv.pad_w;
              if (in_i < 0 || in_i >= x.h || in_j < 0 || in_j >= x.w) continue;
              for (std::int64_t c = 0; c < x.c; ++c) {
                body(x.At(n, c, in_i, in_j), w.At(k, c, r, s),
                     y.At(n, k, i, j));
              }
            }
}

// One answer of the heuristics; the calls are checked against it.
Status Answer(const std::string& line, bool valid, int requested, int* returned,
              AlgorithmPerf* results) {
  emulation::Record() += "heuristic " + line + "\n";
  *returned = 0;
  if (!valid) return kBadParam;
  if (emulation::IsIn(emulation::Refused(), line)) return kNotSupported;
  if (emulation::IsIn(emulation::Failing(), line)) return kInternalError;
  for (int i = 0; i < 5 && i < requested; ++i) {
    results[i] = {kAlgorithms[i],
                  kSuccess,
                  1.0f + i,
                  i == 1 ? std::size_t{1} << 40 : kWorkspaceBytes,
                  i == 0 ? kNonDeterministic : kDeterministic,
                  i == 2 ? kTensorOpMathAllowConversion : kTensorOpMath,
                  {}};
    *returned = i + 1;
  }
  return kSuccess;
}

// What every computation checks before it begins.
Status Begin(const std::string& line, const OpaqueConvolution& conv,
             const void* alpha, Algorithm algorithm, void* workspace,
             std::size_t workspace_size, bool valid) {
  if (algorithm == kUnwilling) {
    emulation::Record() += "refusal " + line + "\n";
    return kNotSupported;
  }
  emulation::Record() +=
      line + " math=" + std::to_string(conv.math_type) + "\n";
  if (!valid || algorithm != kForwardImplicitPrecompGemm ||
      workspace_size < kWorkspaceBytes ||
      !emulation::AlignedTo(workspace, 256) ||
      *static_cast<const float*>(alpha) != 1) {
    return kBadParam;
  }
  std::memset(workspace, 0xff, workspace_size);
  return kSuccess;
}

std::vector<double> Sums(const OpaqueTensor& x, const void* x_data,
                         const OpaqueFilter& w, const void* w_data,
                         const OpaqueConvolution& conv, const OpaqueTensor& y) {
  const emulation::Type type = TypeOf(x.type);
  std::vector<double> sums(y.size());
  ForEachTerm(x, w, conv, y, [&](auto at_x, auto at_w, auto at_y) {
    sums[at_y] += emulation::Load(type, x_data, at_x) *
                  emulation::Load(type, w_data, at_w);
  });
  return sums;
}

// data = sums + beta * data
void Write(const std::vector<double>& sums, const OpaqueTensor& tensor,
           const void* beta, void* data) {
  const emulation::Type type = TypeOf(tensor.type);
  const float scale = *static_cast<const float*>(beta);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const double old = scale == 0 ? 0 : scale * emulation::Load(type, data, i);
    emulation::Store(type, data, i, sums[i] + old);
  }
}

}  // namespace

TFO_LIBRARY_ENTRY const char* cudnnGetErrorString(Status status) {
  return status == kNotSupported ? "CUDNN_STATUS_NOT_SUPPORTED"
                                 : "CUDNN_STATUS_BAD_PARAM";
}

TFO_LIBRARY_ENTRY Status cudnnCreate(Handle* handle) {
  *handle = new OpaqueHandle;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnSetStream(Handle handle, Stream stream) {
  handle->stream = stream;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnCreateTensorDescriptor(TensorDesc* desc) {
  *desc = new OpaqueTensor;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnSetTensor4dDescriptor(TensorDesc desc,
                                                    Format format,
                                                    DataType type, int n, int c,
                                                    int h, int w) {
  *desc = {format, type, n, c, h, w};
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnDestroyTensorDescriptor(TensorDesc desc) {
  delete desc;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnCreateFilterDescriptor(FilterDesc* desc) {
  *desc = new OpaqueFilter;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnSetFilter4dDescriptor(FilterDesc desc,
                                                    DataType type,
                                                    Format format, int k, int c,
                                                    int h, int w) {
  *desc = {{format, type, k, c, h, w}};
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnDestroyFilterDescriptor(FilterDesc desc) {
  delete desc;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status
cudnnCreateConvolutionDescriptor(ConvolutionDesc* desc) {
  *desc = new OpaqueConvolution;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnSetConvolution2dDescriptor(
    ConvolutionDesc desc, int pad_h, int pad_w, int stride_h, int stride_w,
    int dilation_h, int dilation_w, ConvolutionMode mode, DataType type) {
  *desc = {pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w};
  return mode == kCrossCorrelation && type == kFloat ? kSuccess : kBadParam;
}

TFO_LIBRARY_ENTRY Status cudnnSetConvolutionMathType(ConvolutionDesc desc,
                                                     MathType math_type) {
  desc->math_type = math_type;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status
cudnnDestroyConvolutionDescriptor(ConvolutionDesc desc) {
  delete desc;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnCreateActivationDescriptor(ActivationDesc* desc) {
  *desc = new OpaqueActivation;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnSetActivationDescriptor(ActivationDesc desc,
                                                      ActivationMode mode,
                                                      NanPropagation nan,
                                                      double) {
  *desc = {mode, nan};
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnDestroyActivationDescriptor(ActivationDesc desc) {
  delete desc;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnGetConvolutionForwardAlgorithm_v7(
    Handle, TensorDesc x, FilterDesc w, ConvolutionDesc conv, TensorDesc y,
    int requested, int* returned, AlgorithmPerf* results) {
  return Answer(Describe("forward", *x, *w, *conv), Valid(*x, *w, *conv, *y),
                requested, returned, results);
}

TFO_LIBRARY_ENTRY Status cudnnGetConvolutionBackwardDataAlgorithm_v7(
    Handle, FilterDesc w, TensorDesc dy, ConvolutionDesc conv, TensorDesc dx,
    int requested, int* returned, AlgorithmPerf* results) {
  return Answer(Describe("input gradient", *dx, *w, *conv),
                Valid(*dx, *w, *conv, *dy), requested, returned, results);
}

TFO_LIBRARY_ENTRY Status cudnnGetConvolutionBackwardFilterAlgorithm_v7(
    Handle, TensorDesc x, TensorDesc dy, ConvolutionDesc conv, FilterDesc dw,
    int requested, int* returned, AlgorithmPerf* results) {
  return Answer(Describe("filters gradient", *x, *dw, *conv),
                Valid(*x, *dw, *conv, *dy), requested, returned, results);
}

TFO_LIBRARY_ENTRY Status cudnnConvolutionForward(
    Handle, const void* alpha, TensorDesc x, const void* x_data, FilterDesc w,
    const void* w_data, ConvolutionDesc conv, Algorithm algorithm,
    void* workspace, std::size_t workspace_size, const void* beta, TensorDesc y,
    void* y_data) {
  const Status status =
      Begin(Describe("forward", *x, *w, *conv), *conv, alpha, algorithm,
            workspace, workspace_size, Valid(*x, *w, *conv, *y));
  if (status != kSuccess) return status;
  Write(Sums(*x, x_data, *w, w_data, *conv, *y), *y, beta, y_data);
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnConvolutionBiasActivationForward(
    Handle, const void* alpha1, TensorDesc x, const void* x_data, FilterDesc w,
    const void* w_data, ConvolutionDesc conv, Algorithm algorithm,
    void* workspace, std::size_t workspace_size, const void* alpha2,
    TensorDesc z, const void* z_data, TensorDesc bias, const void* bias_data,
    ActivationDesc activation, TensorDesc y, void* y_data) {
  const std::string line = Describe("fused", *x, *w, *conv) +
                           (activation->mode == kRelu ? " relu" : " identity");
  const bool valid = Valid(*x, *w, *conv, *y) && z->size() == y->size() &&
                     bias->n == 1 && bias->c == y->c && bias->h == 1 &&
                     bias->w == 1 && bias_data != nullptr &&
                     z_data != nullptr && activation->nan == kNotPropagateNan;
  const Status status =
      Begin(line, *conv, alpha1, algorithm, workspace, workspace_size, valid);
  if (status != kSuccess) return status;
  if (emulation::IsIn(emulation::Refused(), line)) return kNotSupported;
  const emulation::Type type = TypeOf(y->type);
  std::vector<double> sums = Sums(*x, x_data, *w, w_data, *conv, *y);
  const float side = *static_cast<const float*>(alpha2);
  for (std::int64_t n = 0; n < y->n; ++n)
    for (std::int64_t k = 0; k < y->c; ++k)
      for (std::int64_t i = 0; i < y->h; ++i)
        for (std::int64_t j = 0; j < y->w; ++j) {
          const std::int64_t at = y->At(n, k, i, j);
          double& sum = sums[at];
          sum += emulation::Load(type, bias_data, k);
          if (side != 0) sum += side * emulation::Load(type, z_data, at);
          if (activation->mode == kRelu && sum < 0) sum = 0;
        }
  const float zero = 0;
  Write(sums, *y, &zero, y_data);
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnConvolutionBackwardData(
    Handle, const void* alpha, FilterDesc w, const void* w_data, TensorDesc dy,
    const void* dy_data, ConvolutionDesc conv, Algorithm algorithm,
    void* workspace, std::size_t workspace_size, const void* beta,
    TensorDesc dx, void* dx_data) {
  const Status status =
      Begin(Describe("input gradient", *dx, *w, *conv), *conv, alpha, algorithm,
            workspace, workspace_size, Valid(*dx, *w, *conv, *dy));
  if (status != kSuccess) return status;
  const emulation::Type type = TypeOf(dx->type);
  std::vector<double> sums(dx->size());
  ForEachTerm(*dx, *w, *conv, *dy, [&](auto at_x, auto at_w, auto at_y) {
    sums[at_x] += emulation::Load(type, dy_data, at_y) *
                  emulation::Load(type, w_data, at_w);
  });
  Write(sums, *dx, beta, dx_data);
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cudnnConvolutionBackwardFilter(
    Handle, const void* alpha, TensorDesc x, const void* x_data, TensorDesc dy,
    const void* dy_data, ConvolutionDesc conv, Algorithm algorithm,
    void* workspace, std::size_t workspace_size, const void* beta,
    FilterDesc dw, void* dw_data) {
  const Status status =
      Begin(Describe("filters gradient", *x, *dw, *conv), *conv, alpha,
            algorithm, workspace, workspace_size, Valid(*x, *dw, *conv, *dy));
  if (status != kSuccess) return status;
  const emulation::Type type = TypeOf(x->type);
  std::vector<double> sums(dw->size());
  ForEachTerm(*x, *dw, *conv, *dy, [&](auto at_x, auto at_w, auto at_y) {
    sums[at_w] += emulation::Load(type, x_data, at_x) *
                  emulation::Load(type, dy_data, at_y);
  });
  Write(sums, *dw, beta, dw_data);
  return kSuccess;
}

}  // namespace tfo::cudnn
