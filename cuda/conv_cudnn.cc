#include "cuda/conv_cudnn.h"

#include "cuda/conv_elementwise.h"
#include "cuda/conv_layout.h"
#include "cuda/cudnn.h"

namespace tfo::cuda {
namespace {

// cuDNN pads both sides alike, by less than the filter's extent. Where that
// does not fit one spatial dimension, just what the windows cover is taken as
// an image without padding, which begins at `*offset` of the given one.
void FitPadding(std::int64_t kernel, std::int64_t stride, std::int64_t dilation,
                std::int64_t out, std::int64_t* in, std::int64_t* pad,
                std::int64_t* offset) {
  const std::int64_t extent = (kernel - 1) * dilation + 1;
  const std::int64_t padded = *in + 2 * *pad;
  if (*pad < extent && padded >= extent &&
      (padded - extent) / stride + 1 == out) {
    return;
  }
  *in = (out - 1) * stride + extent;
  *offset = -*pad;
  *pad = 0;
}

// A convolution in the form that cuDNN takes, and the copies that lead there
// and back.
class CudnnForm {
 public:
  CudnnForm(DType dtype, const ConvShape& shape)
      : dtype_(dtype), given_(shape), taken_(shape) {
    ConvShape& s = taken_;
    FitPadding(s.kernel_h, s.stride_h, s.dilation_h, s.out_h, &s.in_h,
               &s.pad_top, &top_);
    FitPadding(s.kernel_w, s.stride_w, s.dilation_w, s.out_w, &s.in_w,
               &s.pad_left, &left_);
  }

  const ConvShape& shape() const { return taken_; }

  bool takes_given_input() const {
    return top_ == 0 && left_ == 0 && taken_.in_h == given_.in_h &&
           taken_.in_w == given_.in_w;
  }

  Status AllocateInput(const Call& call, void** out) const {
    return AllocateScratch(call, InputElements(taken_) * SizeOf(dtype_), out);
  }
  Status AllocateFilters(const Call& call, void** out) const {
    return AllocateScratch(call, FilterElements(taken_) * SizeOf(dtype_), out);
  }

  Status TakeInput(const void* input, const Call& call,
                   const void** out) const {
    *out = input;
    if (takes_given_input()) return {};
    void* copy = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(AllocateInput(call, &copy));
    *out = copy;
    return CopyWindow({dtype_, given_.input_channels_first, given_.batch,
                       given_.in_c, given_.in_h, given_.in_w, taken_.in_h,
                       taken_.in_w, top_, left_, input, copy},
                      call.stream);
  }
  Status GiveInput(const void* taken, void* input, const Call& call) const {
    return CopyWindow({dtype_, given_.input_channels_first, given_.batch,
                       given_.in_c, taken_.in_h, taken_.in_w, given_.in_h,
                       given_.in_w, -top_, -left_, taken, input},
                      call.stream);
  }

  Status TakeFilters(const void* filters, const Call& call,
                     const void** out) const {
    void* copy = nullptr;
    TFO_CUDA_RETURN_IF_ERROR(AllocateFilters(call, &copy));
    *out = copy;
    return ReverseDimensions(
        {dtype_, 1, outer_taps(), inner_taps(), given_.out_c, filters, copy},
        call.stream);
  }
  Status GiveFilters(const void* taken, void* filters, const Call& call) const {
    return ReverseDimensions(
        {dtype_, 1, given_.out_c, inner_taps(), outer_taps(), taken, filters},
        call.stream);
  }

 private:
  // [taps, in_c, out_c] becomes [out_c, in_c, taps], or [out_c, taps, in_c]
  // where the images have the channels last.
  std::int64_t outer_taps() const {
    const std::int64_t taps = given_.kernel_h * given_.kernel_w;
    return given_.input_channels_first ? taps : taps * given_.in_c;
  }
  std::int64_t inner_taps() const {
    return given_.input_channels_first ? given_.in_c : 1;
  }

  const DType dtype_;
  const ConvShape given_;
  ConvShape taken_;
  std::int64_t top_ = 0, left_ = 0;
};

}  // namespace

Status CudnnForward(const ConvForwardArgs& args, const Call& call) {
  const CudnnForm form(args.dtype, args.shape);
  ConvForwardArgs taken = args;
  taken.shape = form.shape();
  TFO_CUDA_RETURN_IF_ERROR(form.TakeInput(args.input, call, &taken.input));
  TFO_CUDA_RETURN_IF_ERROR(
      form.TakeFilters(args.filters, call, &taken.filters));
  const bool fused =
      args.pre_activation == nullptr && (args.activation == Activation::kNone ||
                                         args.activation == Activation::kRelu);
  if (fused) {
    const Status status = ConvolveBiasAct(taken, call);
    if (!IsUnsupported(status)) return status;
  }
  void* const z = args.pre_activation ? args.pre_activation : args.y;
  TFO_CUDA_RETURN_IF_ERROR(
      Convolve(args.dtype, form.shape(), taken.input, taken.filters, z, call));
  return BiasAct(args, z, call);
}

Status CudnnInputGradient(const ConvGradientArgs& args, const void* dz,
                          const Call& call) {
  const CudnnForm form(args.dtype, args.shape);
  const void* filters = nullptr;
  TFO_CUDA_RETURN_IF_ERROR(form.TakeFilters(args.filters, call, &filters));
  if (form.takes_given_input()) {
    return ConvolveInputGradient(args.dtype, form.shape(), filters, dz,
                                 args.input_gradient, call);
  }
  void* taken = nullptr;
  TFO_CUDA_RETURN_IF_ERROR(form.AllocateInput(call, &taken));
  TFO_CUDA_RETURN_IF_ERROR(ConvolveInputGradient(args.dtype, form.shape(),
                                                 filters, dz, taken, call));
  return form.GiveInput(taken, args.input_gradient, call);
}

Status CudnnFiltersGradient(const ConvGradientArgs& args, const void* dz,
                            const Call& call) {
  const CudnnForm form(args.dtype, args.shape);
  const void* input = nullptr;
  void* taken = nullptr;
  TFO_CUDA_RETURN_IF_ERROR(form.TakeInput(args.input, call, &input));
  TFO_CUDA_RETURN_IF_ERROR(form.AllocateFilters(call, &taken));
  TFO_CUDA_RETURN_IF_ERROR(ConvolveFiltersGradient(args.dtype, form.shape(),
                                                   input, dz, taken, call));
  return form.GiveFilters(taken, args.filters_gradient, call);
}

}  // namespace tfo::cuda
