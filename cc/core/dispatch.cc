#include "cc/core/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cc/core/block_taps.h"

namespace tfo {

namespace portable {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_vnni {
QuantizedMatMulFunction QuantizedMatMul;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
namespace amx {
extern const Kernels kKernels;
}
#endif

namespace {

constexpr int kMaxIsas = 6;

#if defined(__x86_64__)
// Whether the processor multiplies tiles of bfloat16, and the system lets this
// process use their registers, for which Linux wants to be asked.
bool HasAmx() {
  unsigned a, b, c, d;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) ||
      !(d & kAmxTile)) {
    return false;
  }
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct Available {
  const Kernels* tables[kMaxIsas];
  int count = 0;
  // AVX-512's, but for what multiplies integers of 8 bits.
  Kernels vnni;
  bool has_vnni = false;
  // Intel's processors run the multiplication of pairs of bfloat16 at a fourth
  // of the rate of multiply-adds, and widened numbers beat it (measured on an
  // Emerald Rapids: 108 beside 216 GFLOP/s a core).
  bool slow_pairs = false;

  Available() {
    tables[count++] = &portable::kKernels;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
      return;
    }
    tables[count++] = &avx2::kKernels;
    if (!__builtin_cpu_supports("avx512f") ||
        !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq")) {
      return;
    }
    tables[count++] = &avx512::kKernels;
    vnni = avx512::kKernels;
    vnni.isa = "avx512_vnni";
    vnni.quantized_matmul = &avx512_vnni::QuantizedMatMul;
    has_vnni = __builtin_cpu_supports("avx512vnni");
    const bool pairs = has_vnni && __builtin_cpu_supports("avx512bf16");
    const bool tiles = pairs && HasAmx();
    slow_pairs = pairs && !tiles && __builtin_cpu_is("intel");
    if (has_vnni && (!pairs || slow_pairs)) tables[count++] = &vnni;
    if (pairs) tables[count++] = &avx512_bf16::kKernels;
    if (tiles) tables[count++] = &amx::kKernels;
#endif
  }

  const Kernels* Best() const { return slow_pairs ? &vnni : tables[count - 1]; }

  const Kernels* Find(const char* name) const {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(tables[i]->isa, name) == 0) return tables[i];
    }
    return has_vnni && std::strcmp(vnni.isa, name) == 0 ? &vnni : nullptr;
  }
};

const Available& Isas() {
  static const Available available;
  return available;
}

// TF_FUSED_OPS_ISA overrides the choice: a name that this CPU lacks, or that is
// unknown, leaves the best one in force.
const Kernels* Initial() {
  const Available& isas = Isas();
  const char* name = std::getenv("TF_FUSED_OPS_ISA");
  const Kernels* named = name == nullptr ? nullptr : isas.Find(name);
  return named != nullptr ? named : isas.Best();
}

std::atomic<const Kernels*>& Active() {
  static std::atomic<const Kernels*> active{Initial()};
  return active;
}

// Products with each number of the input, or of input and output together, that
// make up for cutting it into parts (measured with AMX, 1x1 convolutions of 16
// to 256 channels and 3x3 ones of 3 to 64, beside multiply-adds: 0.85 of the
// speed forward with 64, 1.2 with 128; gradients 0.6 to 0.9 with 13 to 43, 1.2
// with 48 and 51). Few input channels fill too little of a pair or a register
// (7x7 with 3: 0.9), and strides take what is cut apart (filter gradients with
// 32 to 256: 0.5 to 1.05).
constexpr std::int64_t kLeastForward = 96, kLeastBackward = 48;
constexpr std::int64_t kFewChannels = 4;
// Products with each number of dz, where pixels between the strides are columns
// of one product (measured with 27 to 147: 1.1 to 1.5 of the speed).
constexpr std::int64_t kLeastOfBlocks = 24;
constexpr std::int64_t kAmxLanes = 16;

const Kernels& UnlessFew(DType dtype, bool few) {
  const Kernels& active = ActiveKernels();
#if defined(__x86_64__)
  const bool in_parts = dtype == DType::kFloat || dtype == DType::kHalf;
  if (&active == &amx::kKernels && in_parts && few) return avx512::kKernels;
#endif
  return active;
}

}  // namespace

const Kernels& ActiveKernels() {
  return *Active().load(std::memory_order_relaxed);
}

const Kernels& ForwardKernels(DType dtype, const ConvShape& shape) {
  const ConvShape s = JoinLinesOfWindows(shape);
  const std::int64_t products = s.kernel_h * s.kernel_w * s.out_c;
  return UnlessFew(dtype, products < kLeastForward * s.stride_h * s.stride_w);
}

namespace {

bool MeetFewGradients(const ConvShape& s) {
  const std::int64_t numbers = s.stride_h * s.stride_w * s.in_c + s.out_c;
  const std::int64_t products = s.kernel_h * s.kernel_w * s.in_c * s.out_c;
  return s.in_c <= kFewChannels || products < kLeastBackward * numbers;
}

// A 1x1 convolution does not see what its strides pass over.
bool IsStrided(const ConvShape& s) {
  return s.stride_h * s.stride_w > 1 && s.kernel_h * s.kernel_w > 1;
}

// For filter, bias and side input gradients.
const Kernels& GradientKernels(DType dtype, const ConvShape& s) {
  return UnlessFew(dtype, MeetFewGradients(s) || IsStrided(s));
}

}  // namespace

const Kernels& InputGradientKernels(DType dtype, const ConvShape& shape) {
  const ConvShape s = JoinLinesOfWindows(shape);
  if (!IsStrided(s)) return GradientKernels(dtype, s);
  // dz alone is cut; stride by stride, if not once.
  const std::int64_t products = s.kernel_h * s.kernel_w * s.in_c;
  return UnlessFew(dtype,
                   BlocksFillVectors(s, kAmxLanes)
                       ? products < kLeastOfBlocks
                       : products < kLeastForward * s.stride_h * s.stride_w);
}

bool ComputeConvGradient(const ConvGradientArgs& args, const Parallel& parallel,
                         const Scratch& scratch) {
  const ConvShape s = JoinLinesOfWindows(args.shape);
  const Kernels& sums = GradientKernels(args.dtype, s);
  const Kernels& input = InputGradientKernels(args.dtype, args.shape);
  ConvGradientArgs of_sums = args, of_input = args;
  of_sums.input_gradient = nullptr;
  of_input.filters_gradient = of_input.bias_gradient = nullptr;
  of_input.side_input_gradient = nullptr;
  if (&sums == &input || args.input_gradient == nullptr)
    return sums.conv_gradient(args, parallel, scratch);
  return sums.conv_gradient(of_sums, parallel, scratch) &&
         input.conv_gradient(of_input, parallel, scratch);
}

bool SetIsa(const char* name) {
  const Kernels* kernels = Isas().Find(name);
  if (kernels != nullptr) Active().store(kernels, std::memory_order_relaxed);
  return kernels != nullptr;
}

const char* AvailableIsa(int i) {
  return i >= 0 && i < Isas().count ? Isas().tables[i]->isa : nullptr;
}

}  // namespace tfo
