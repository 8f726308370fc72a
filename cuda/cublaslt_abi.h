// The part of cuBLASLt's binary interface that is used here, so that building
// needs none of its headers. The values are those of CUDA 12 and 13
// (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api).
#ifndef TFO_CUDA_CUBLASLT_ABI_H_
#define TFO_CUDA_CUBLASLT_ABI_H_

#include <cstddef>
#include <cstdint>

namespace tfo::cublaslt {

enum Status : int {
  kSuccess = 0,
  kInvalidValue = 7,
  kArchMismatch = 8,
  kNotSupported = 15,
};

// cudaDataType_t
enum DataType : int { kR32F = 0, kR16F = 2, kR16BF = 14 };

// cublasComputeType_t
enum ComputeType : int { kCompute32F = 68, kCompute32FFastTF32 = 77 };

// cublasOperation_t
enum Operation : std::int32_t { kN = 0, kT = 1 };

// cublasLtMatmulDescAttributes_t
enum DescAttribute : int {
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAuxPointer = 11,
  kAuxLd = 12,
};

// cublasLtEpilogue_t
enum Epilogue : std::uint32_t {
  kDefault = 1,
  kRelu = 2,
  kBias = 4,
  kGelu = 32,
  kAux = 128,  // of kGelu: stores its argument
  kBiasGradientA = 256,
  kBiasGradientB = 512,
};

// cublasLtMatmulPreferenceAttributes_t
enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kReductionSchemeMask = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

// cublasLtReductionScheme_t: partial sums of split products are kept in the
// compute type.
constexpr std::uint32_t kReduceInComputeType = 2;

using Handle = struct OpaqueHandle*;
using Layout = struct OpaqueLayout*;
using Desc = struct OpaqueDesc*;
using Preference = struct OpaquePreference*;
using Stream = void*;  // cudaStream_t

struct Algo {
  std::uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  std::size_t workspace_size;
  Status state;
  float waves_count;
  int reserved[4];
};

// Every entry that is used: X(result, name without "cublasLt", parameters).
#define TFO_CUBLASLT_ENTRIES(X)                                             \
  X(const char*, GetStatusString, (Status))                                 \
  X(Status, Create, (Handle*))                                              \
  X(Status, MatrixLayoutCreate,                                             \
    (Layout*, DataType, std::uint64_t rows, std::uint64_t cols,             \
     std::int64_t ld))                                                      \
  X(Status, MatrixLayoutDestroy, (Layout))                                  \
  X(Status, MatmulDescCreate, (Desc*, ComputeType, DataType scale_type))    \
  X(Status, MatmulDescSetAttribute,                                         \
    (Desc, DescAttribute, const void*, std::size_t))                        \
  X(Status, MatmulDescDestroy, (Desc))                                      \
  X(Status, MatmulPreferenceCreate, (Preference*))                          \
  X(Status, MatmulPreferenceSetAttribute,                                   \
    (Preference, PreferenceAttribute, const void*, std::size_t))            \
  X(Status, MatmulPreferenceDestroy, (Preference))                          \
  X(Status, MatmulAlgoGetHeuristic,                                         \
    (Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference,      \
     int requested, HeuristicResult*, int* returned))                       \
  X(Status, Matmul,                                                         \
    (Handle, Desc, const void* alpha, const void* a, Layout, const void* b, \
     Layout, const void* beta, const void* c, Layout, void* d, Layout,      \
     const Algo*, void* workspace, std::size_t workspace_size, Stream))

struct Functions {
#define TFO_MEMBER(RESULT, NAME, PARAMETERS) RESULT(*NAME) PARAMETERS;
  TFO_CUBLASLT_ENTRIES(TFO_MEMBER)
#undef TFO_MEMBER
};

}  // namespace tfo::cublaslt

#endif  // TFO_CUDA_CUBLASLT_ABI_H_
