#include "cuda/cublaslt.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "cuda/cublaslt_abi.h"
#include "cuda/dynamic_library.h"
#include "cuda/launch.h"

namespace tfo::cuda {
namespace {

namespace lt = cublaslt;

// What NVIDIA recommends for the cards that profit from the most.
constexpr std::uint64_t kMaxWorkspaceBytes = std::uint64_t{32} << 20;

struct Api : lt::Functions {
  DynamicLibrary library{"cuBLASLt",
                         {"libcublasLt.so.12", "libcublasLt.so.13"}};

  Api() {
#define TFO_RESOLVE(RESULT, NAME, PARAMETERS) \
  library.Resolve("cublasLt" #NAME, &NAME);
    TFO_CUBLASLT_ENTRIES(TFO_RESOLVE)
#undef TFO_RESOLVE
  }
};

const Api& GetApi() {
  static const Api* api = new Api;
  return *api;
}

Status ToStatus(lt::Status code, const char* call) {
  if (code == lt::kSuccess) return {};
  const char* text = GetApi().GetStatusString(code);
  const bool refused = code == lt::kInvalidValue || code == lt::kArchMismatch ||
                       code == lt::kNotSupported;
  if (refused) return Unsupported(call, text);
  return {Status::Source::kCublas, code, call, text};
}

#define TFO_LT_STATUS(NAME, ...) \
  ToStatus(GetApi().NAME(__VA_ARGS__), "cublasLt" #NAME)
#define TFO_LT(...) TFO_CUDA_RETURN_IF_ERROR(TFO_LT_STATUS(__VA_ARGS__))

lt::DataType TypeOf(DType dtype) {
  return dtype == DType::kHalf       ? lt::kR16F
         : dtype == DType::kBFloat16 ? lt::kR16BF
                                     : lt::kR32F;
}

// cuBLASLt's matrices are column-major, so it computes the transpose of d: its
// A is op(b) transposed, its B op(a) transposed.
std::uint32_t EpilogueOf(const Product& p) {
  if (p.b_sums != nullptr) return lt::kBiasGradientA;
  if (p.a_sums != nullptr) return lt::kBiasGradientB;
  std::uint32_t epilogue = 0;
  if (p.bias != nullptr) epilogue |= lt::kBias;
  if (p.activation == Activation::kRelu) epilogue |= lt::kRelu;
  if (p.activation == Activation::kGeluTanh) epilogue |= lt::kGelu;
  if (p.pre_activation != nullptr) epilogue |= lt::kAux;
  return epilogue == 0 ? lt::kDefault : epilogue;
}

const void* EpilogueVector(const Product& p) {
  return p.b_sums != nullptr   ? p.b_sums
         : p.a_sums != nullptr ? p.a_sums
                               : p.bias;
}

// Where there is no addend the library still wants a valid address.
const void* AddendOrOutput(const Product& p) {
  return p.addend != nullptr ? p.addend : p.d;
}

template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, lt::Status (*)(T)>;

// A product in cuBLASLt's terms.
struct Descriptors {
  Owned<lt::Desc> desc{nullptr, GetApi().MatmulDescDestroy};
  Owned<lt::Layout> a{nullptr, GetApi().MatrixLayoutDestroy};
  Owned<lt::Layout> b{nullptr, GetApi().MatrixLayoutDestroy};
  Owned<lt::Layout> d{nullptr, GetApi().MatrixLayoutDestroy};

  Status Make(const Product& p, bool allow_tf32) {
    const bool tf32 = p.dtype == DType::kFloat && allow_tf32;
    lt::Desc made;
    TFO_LT(MatmulDescCreate, &made,
           tf32 ? lt::kCompute32FFastTF32 : lt::kCompute32F, lt::kR32F);
    desc.reset(made);
    const lt::Operation trans_a = p.b.transposed ? lt::kT : lt::kN;
    const lt::Operation trans_b = p.a.transposed ? lt::kT : lt::kN;
    TFO_CUDA_RETURN_IF_ERROR(Set(lt::kTransA, trans_a));
    TFO_CUDA_RETURN_IF_ERROR(Set(lt::kTransB, trans_b));
    TFO_CUDA_RETURN_IF_ERROR(Set(lt::kEpilogue, EpilogueOf(p)));
    if (const void* vector = EpilogueVector(p)) {
      TFO_CUDA_RETURN_IF_ERROR(Set(lt::kBiasPointer, vector));
    }
    if (p.pre_activation != nullptr) {
      TFO_CUDA_RETURN_IF_ERROR(Set(lt::kAuxPointer, p.pre_activation));
      TFO_CUDA_RETURN_IF_ERROR(Set(lt::kAuxLd, p.n));
    }
    TFO_CUDA_RETURN_IF_ERROR(MakeLayout(p.dtype, p.n, p.k, p.b, &a));
    TFO_CUDA_RETURN_IF_ERROR(MakeLayout(p.dtype, p.k, p.m, p.a, &b));
    return MakeLayout(p.dtype, p.n, p.m, {p.d, false}, &d);
  }

 private:
  template <class Value>
  Status Set(lt::DescAttribute attribute, const Value& value) {
    TFO_LT(MatmulDescSetAttribute, desc.get(), attribute, &value,
           sizeof(value));
    return {};
  }

  // A rows x cols matrix, column-major unless it is transposed.
  static Status MakeLayout(DType dtype, std::int64_t rows, std::int64_t cols,
                           const Operand& operand, Owned<lt::Layout>* out) {
    if (operand.transposed) std::swap(rows, cols);
    lt::Layout made;
    TFO_LT(MatrixLayoutCreate, &made, TypeOf(dtype), rows, cols, rows);
    out->reset(made);
    return {};
  }
};

// How the library computes products of one kind on one device, or why not.
struct Plan {
  Status status;
  lt::Algo algo;
  std::size_t workspace_size;
};

Status AskForPlan(lt::Handle handle, const Product& p, const Descriptors& d,
                  Plan* plan) {
  lt::Preference made;
  TFO_LT(MatmulPreferenceCreate, &made);
  const Owned<lt::Preference> preference(made,
                                         GetApi().MatmulPreferenceDestroy);
  TFO_LT(MatmulPreferenceSetAttribute, made, lt::kMaxWorkspaceBytes,
         &kMaxWorkspaceBytes, sizeof(kMaxWorkspaceBytes));
  TFO_LT(MatmulPreferenceSetAttribute, made, lt::kReductionSchemeMask,
         &lt::kReduceInComputeType, sizeof(lt::kReduceInComputeType));
  const struct {
    lt::PreferenceAttribute attribute;
    const void* data;
  } operands[] = {{lt::kMinAlignmentA, p.b.data},
                  {lt::kMinAlignmentB, p.a.data},
                  {lt::kMinAlignmentC, AddendOrOutput(p)},
                  {lt::kMinAlignmentD, p.d}};
  for (const auto& operand : operands) {
    const std::uint32_t alignment = AlignmentOf(operand.data);
    TFO_LT(MatmulPreferenceSetAttribute, made, operand.attribute, &alignment,
           sizeof(alignment));
  }
  lt::HeuristicResult result;
  int returned = 0;
  TFO_LT(MatmulAlgoGetHeuristic, handle, d.desc.get(), d.a.get(), d.b.get(),
         d.d.get(), d.d.get(), made, 1, &result, &returned);
  if (returned == 0) {
    return Unsupported("cublasLtMatmulAlgoGetHeuristic", "no algorithm");
  }
  plan->algo = result.algo;
  plan->workspace_size = result.workspace_size;
  return ToStatus(result.state, "cublasLtMatmulAlgoGetHeuristic");
}

void LogRefusal(const Status& status, const Product& p, const Call& call) {
  if (status.ok()) return;
  char message[256];
  std::snprintf(message, sizeof(message),
                "cuBLASLt refuses m = %lld, n = %lld, k = %lld with epilogue "
                "%u: %s: %s",
                static_cast<long long>(p.m), static_cast<long long>(p.n),
                static_cast<long long>(p.k), EpilogueOf(p), status.call,
                status.text);
  call.log(message);
}

// Handles and plans of all devices. A plan depends on pointers only through
// their alignment. Refusals are kept, errors are not.
class Plans {
 public:
  Status Find(const Product& p, const Descriptors& descriptors,
              const Call& call, lt::Handle* handle, Plan* plan) {
    int device = 0;
    TFO_CUDA_RETURN_IF_ERROR(
        RuntimeStatus(cudaGetDevice(&device), "cudaGetDevice"));
    const Key key = {device,
                     static_cast<int>(p.dtype),
                     call.allow_tf32,
                     p.m,
                     p.n,
                     p.k,
                     p.a.transposed,
                     p.b.transposed,
                     EpilogueOf(p),
                     p.addend != nullptr,
                     AlignmentOf(p.a.data),
                     AlignmentOf(p.b.data),
                     AlignmentOf(AddendOrOutput(p)),
                     AlignmentOf(p.d),
                     AlignmentOf(EpilogueVector(p)),
                     AlignmentOf(p.pre_activation)};
    const std::lock_guard<std::mutex> lock(mutex_);
    lt::Handle& made = handles_[device];
    if (made == nullptr) TFO_LT(Create, &made);
    *handle = made;
    const auto [entry, inserted] = plans_.try_emplace(key);
    if (inserted) {
      const Status status = AskForPlan(made, p, descriptors, &entry->second);
      if (!status.ok() && !IsUnsupported(status)) {
        plans_.erase(entry);
        return status;
      }
      entry->second.status = status;
      LogRefusal(status, p, call);
    }
    *plan = entry->second;
    return {};
  }

 private:
  using Key = std::array<std::int64_t, 16>;

  std::mutex mutex_;
  std::map<int, lt::Handle> handles_;
  std::map<Key, Plan> plans_;
};

Plans& GetPlans() {
  static Plans* plans = new Plans;
  return *plans;
}

}  // namespace

Status CublasLtStatus() { return GetApi().library.status(); }

Status Multiply(const Product& p, const Call& call) {
  Descriptors descriptors;
  TFO_CUDA_RETURN_IF_ERROR(descriptors.Make(p, call.allow_tf32));
  lt::Handle handle = nullptr;
  Plan plan;
  TFO_CUDA_RETURN_IF_ERROR(
      GetPlans().Find(p, descriptors, call, &handle, &plan));
  TFO_CUDA_RETURN_IF_ERROR(plan.status);
  void* workspace = nullptr;
  TFO_CUDA_RETURN_IF_ERROR(
      AllocateScratch(call, plan.workspace_size, &workspace));
  const float one = 1, zero = 0;
  const lt::Layout d = descriptors.d.get();
  const Status status = TFO_LT_STATUS(
      Matmul, handle, descriptors.desc.get(), &one, p.b.data,
      descriptors.a.get(), p.a.data, descriptors.b.get(),
      p.addend != nullptr ? &one : &zero, AddendOrOutput(p), d, p.d, d,
      &plan.algo, workspace, plan.workspace_size, call.stream);
  LogRefusal(status, p, call);
  return status;
}

}  // namespace tfo::cuda
