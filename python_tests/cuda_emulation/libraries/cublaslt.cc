// A stand-in for libcublasLt: its products, on the host, by the letter of its
// documentation. What breaks a rule of the library is refused.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/cublaslt_abi.h"
#include "library.h"

namespace tfo::cublaslt {

struct OpaqueHandle {};

struct OpaqueLayout {
  DataType type;
  std::int64_t rows, cols, ld;
};

struct OpaqueDesc {
  ComputeType compute_type;
  Operation trans_a = kN, trans_b = kN;
  std::uint32_t epilogue = kDefault;
  void* bias = nullptr;
  void* aux = nullptr;
  std::int64_t aux_ld = 0;
};

struct OpaquePreference {
  std::uint64_t max_workspace = 0;
  std::uint32_t reduction_mask = 7;
  std::uint32_t alignment[4] = {256, 256, 256, 256};
};

namespace {

constexpr std::size_t kWorkspaceBytes = 1000;
constexpr auto kInternalError = static_cast<Status>(14);

emulation::Type TypeOf(DataType type) {
  return type == kR16F    ? emulation::Type::kHalf
         : type == kR16BF ? emulation::Type::kBFloat16
                          : emulation::Type::kFloat;
}

// The problem in one line; the algorithm that is chosen for it fits no other.
std::string Describe(const OpaqueDesc& desc, const OpaqueLayout& a,
                     const OpaqueLayout& d) {
  const bool ta = desc.trans_a == kT, tb = desc.trans_b == kT;
  char line[256];
  std::snprintf(line, sizeof(line),
                "matmul m=%ld n=%ld k=%ld transa=%d transb=%d epilogue=%u "
                "type=%d compute=%d",
                static_cast<long>(d.rows), static_cast<long>(d.cols),
                static_cast<long>(ta ? a.rows : a.cols), ta, tb, desc.epilogue,
                d.type, desc.compute_type);
  return line;
}

std::uint64_t Hash(const std::string& text) {
  std::uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ std::uint8_t(c)) * 1099511628211u;
  return hash;
}

bool Valid(const OpaqueDesc& desc, const OpaqueLayout& a, const OpaqueLayout& b,
           const OpaqueLayout& c, const OpaqueLayout& d) {
  const bool ta = desc.trans_a == kT, tb = desc.trans_b == kT;
  const bool bias_gradient =
      desc.epilogue == kBiasGradientA || desc.epilogue == kBiasGradientB;
  for (const OpaqueLayout* layout : {&a, &b, &c, &d}) {
    if (layout->rows < 1 || layout->cols < 1) return false;
    if (layout->ld < layout->rows || layout->type != d.type) return false;
  }
  if ((ta ? a.cols : a.rows) != d.rows || (tb ? b.rows : b.cols) != d.cols ||
      (ta ? a.rows : a.cols) != (tb ? b.cols : b.rows) || c.rows != d.rows ||
      c.cols != d.cols || c.ld != d.ld) {
    return false;
  }
  if ((desc.epilogue & kBias || bias_gradient) && desc.bias == nullptr) {
    return false;
  }
  if (desc.epilogue & kAux &&
      (desc.aux == nullptr || desc.aux_ld % 8 != 0 || desc.aux_ld < d.rows)) {
    return false;
  }
  return desc.compute_type == kCompute32F ||
         (desc.compute_type == kCompute32FFastTF32 && d.type == kR32F);
}

std::uint64_t AlignmentOf(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 256;
  return address & -address;
}

double Gelu(double z) {
  return 0.5 * z *
         (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
}

}  // namespace

TFO_LIBRARY_ENTRY const char* cublasLtGetStatusString(Status status) {
  return status == kNotSupported
             ? "the requested functionality is not supported"
             : "an invalid value was given";
}

TFO_LIBRARY_ENTRY Status cublasLtCreate(Handle* handle) {
  *handle = new OpaqueHandle;
  emulation::Record() += "create\n";
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cublasLtMatrixLayoutCreate(Layout* layout,
                                                    DataType type,
                                                    std::uint64_t rows,
                                                    std::uint64_t cols,
                                                    std::int64_t ld) {
  *layout = new OpaqueLayout{type, static_cast<std::int64_t>(rows),
                             static_cast<std::int64_t>(cols), ld};
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cublasLtMatrixLayoutDestroy(Layout layout) {
  delete layout;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cublasLtMatmulDescCreate(Desc* desc,
                                                  ComputeType compute_type,
                                                  DataType scale_type) {
  *desc = new OpaqueDesc{compute_type};
  return scale_type == kR32F ? kSuccess : kInvalidValue;
}

TFO_LIBRARY_ENTRY Status cublasLtMatmulDescSetAttribute(Desc desc,
                                                        DescAttribute attribute,
                                                        const void* value,
                                                        std::size_t size) {
  const auto set = [&](auto* field) {
    if (size != sizeof(*field)) return kInvalidValue;
    std::memcpy(field, value, size);
    return kSuccess;
  };
  switch (attribute) {
    case kTransA:
      return set(&desc->trans_a);
    case kTransB:
      return set(&desc->trans_b);
    case kEpilogue:
      return set(&desc->epilogue);
    case kBiasPointer:
      return set(&desc->bias);
    case kAuxPointer:
      return set(&desc->aux);
    case kAuxLd:
      return set(&desc->aux_ld);
  }
  return kInvalidValue;
}

TFO_LIBRARY_ENTRY Status cublasLtMatmulDescDestroy(Desc desc) {
  delete desc;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status
cublasLtMatmulPreferenceCreate(Preference* preference) {
  *preference = new OpaquePreference;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cublasLtMatmulPreferenceSetAttribute(
    Preference preference, PreferenceAttribute attribute, const void* value,
    std::size_t size) {
  const auto set = [&](auto* field) {
    if (size != sizeof(*field)) return kInvalidValue;
    std::memcpy(field, value, size);
    return kSuccess;
  };
  switch (attribute) {
    case kMaxWorkspaceBytes:
      return set(&preference->max_workspace);
    case kReductionSchemeMask:
      return set(&preference->reduction_mask);
    case kMinAlignmentA:
    case kMinAlignmentB:
    case kMinAlignmentC:
    case kMinAlignmentD:
      return set(&preference->alignment[attribute - kMinAlignmentA]);
  }
  return kInvalidValue;
}

TFO_LIBRARY_ENTRY Status
cublasLtMatmulPreferenceDestroy(Preference preference) {
  delete preference;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status
cublasLtMatmulAlgoGetHeuristic(Handle, Desc desc, Layout a, Layout b, Layout c,
                               Layout d, Preference preference, int requested,
                               HeuristicResult* results, int* returned) {
  const std::string line = Describe(*desc, *a, *d);
  emulation::Record() += "heuristic " + line + "\n";
  *returned = 0;
  if (requested < 1 || !Valid(*desc, *a, *b, *c, *d)) return kInvalidValue;
  if (emulation::IsIn(emulation::Refused(), line)) return kNotSupported;
  if (emulation::IsIn(emulation::Failing(), line)) return kInternalError;
  if (preference->max_workspace < kWorkspaceBytes ||
      preference->reduction_mask != kReduceInComputeType) {
    return kNotSupported;
  }
  *results = {};
  results->algo.data[0] = Hash(line);
  for (int i = 0; i < 4; ++i) {
    results->algo.data[1 + i] = preference->alignment[i];
  }
  results->algo.data[5] = AlignmentOf(desc->bias);
  results->algo.data[6] = AlignmentOf(desc->aux);
  results->workspace_size = kWorkspaceBytes;
  results->state = kSuccess;
  *returned = 1;
  return kSuccess;
}

TFO_LIBRARY_ENTRY Status cublasLtMatmul(
    Handle, Desc desc, const void* alpha, const void* a, Layout a_layout,
    const void* b, Layout b_layout, const void* beta, const void* c,
    Layout c_layout, void* d, Layout d_layout, const Algo* algo,
    void* workspace, std::size_t workspace_size, Stream) {
  const std::string line = Describe(*desc, *a_layout, *d_layout);
  const float beta_value = *static_cast<const float*>(beta);
  emulation::Record() += line + (beta_value == 0 ? "\n" : " beta=1\n");
  if (!Valid(*desc, *a_layout, *b_layout, *c_layout, *d_layout) ||
      *static_cast<const float*>(alpha) != 1 || algo->data[0] != Hash(line) ||
      !emulation::AlignedTo(a, algo->data[1]) ||
      !emulation::AlignedTo(b, algo->data[2]) ||
      !emulation::AlignedTo(c, algo->data[3]) ||
      !emulation::AlignedTo(d, algo->data[4]) ||
      !emulation::AlignedTo(desc->bias, algo->data[5]) ||
      !emulation::AlignedTo(desc->aux, algo->data[6]) ||
      workspace_size < kWorkspaceBytes ||
      !emulation::AlignedTo(workspace, 256)) {
    return kInvalidValue;
  }
  std::memset(workspace, 0xff, workspace_size);
  const emulation::Type type = TypeOf(d_layout->type);
  const bool ta = desc->trans_a == kT, tb = desc->trans_b == kT;
  const std::int64_t rows = d_layout->rows, cols = d_layout->cols;
  const std::int64_t inner = ta ? a_layout->rows : a_layout->cols;
  const auto at_a = [&](std::int64_t i, std::int64_t l) {
    return emulation::Load(type, a,
                           ta ? l + i * a_layout->ld : i + l * a_layout->ld);
  };
  const auto at_b = [&](std::int64_t l, std::int64_t j) {
    return emulation::Load(type, b,
                           tb ? j + l * b_layout->ld : l + j * b_layout->ld);
  };
  const std::uint32_t epilogue = desc->epilogue;
  std::vector<double> z(rows * cols);
  for (std::int64_t j = 0; j < cols; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (std::int64_t l = 0; l < inner; ++l) sum += at_a(i, l) * at_b(l, j);
      if (beta_value != 0) {
        sum += beta_value * emulation::Load(type, c, i + j * c_layout->ld);
      }
      if (epilogue & kBias) sum += emulation::Load(type, desc->bias, i);
      z[i + j * rows] = sum;
    }
  }
  for (std::int64_t j = 0; j < cols; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      double value = z[i + j * rows];
      if (epilogue & kAux) {
        emulation::Store(type, desc->aux, i + j * desc->aux_ld, value);
      }
      if (epilogue & kRelu) value = value > 0 ? value : 0;
      if (epilogue & kGelu) value = Gelu(value);
      emulation::Store(type, d, i + j * d_layout->ld, value);
    }
  }
  if (epilogue == kBiasGradientA) {
    for (std::int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (std::int64_t l = 0; l < inner; ++l) sum += at_a(i, l);
      emulation::Store(type, desc->bias, i, sum);
    }
  }
  if (epilogue == kBiasGradientB) {
    for (std::int64_t j = 0; j < cols; ++j) {
      double sum = 0;
      for (std::int64_t l = 0; l < inner; ++l) sum += at_b(l, j);
      emulation::Store(type, desc->bias, j, sum);
    }
  }
  return kSuccess;
}

}  // namespace tfo::cublaslt
