// What a launcher answers: success, or which library refused and why. No
// exceptions, no allocation.
#ifndef TFO_CUDA_STATUS_H_
#define TFO_CUDA_STATUS_H_

struct CUstream_st;  // cudaStream_t points at it

namespace tfo::cuda {

using Stream = CUstream_st*;

struct Status {
  enum class Source : int {
    kNone,         // success
    kRuntime,      // a cudaError_t
    kCublas,       // a cublasStatus_t
    kCudnn,        // a cudnnStatus_t
    kUnsupported,  // no library or kernel takes these arguments
  };

  Source source = Source::kNone;
  int code = 0;           // in the terms of `source`
  const char* call = "";  // what failed
  const char* text = "";  // the library's own words; lives forever

  bool ok() const { return source == Source::kNone; }
};

inline Status Unsupported(const char* call, const char* text) {
  return {Status::Source::kUnsupported, 0, call, text};
}

inline bool IsUnsupported(const Status& status) {
  return status.source == Status::Source::kUnsupported;
}

constexpr const char* SourceName(Status::Source source) {
  switch (source) {
    case Status::Source::kRuntime:
      return "CUDA";
    case Status::Source::kCublas:
      return "cuBLASLt";
    case Status::Source::kCudnn:
      return "cuDNN";
    default:
      return "tf_fused_ops";
  }
}

}  // namespace tfo::cuda

#define TFO_CUDA_RETURN_IF_ERROR(expression)             \
  do {                                                   \
    const ::tfo::cuda::Status tfo_status = (expression); \
    if (!tfo_status.ok()) return tfo_status;             \
  } while (false)

#endif  // TFO_CUDA_STATUS_H_
