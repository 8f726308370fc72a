// What the stand-ins for NVIDIA's libraries share: element types on the host, a
// record of the calls, and a switch for what is to be refused.
#ifndef TFO_CUDA_EMULATION_LIBRARIES_LIBRARY_H_
#define TFO_CUDA_EMULATION_LIBRARIES_LIBRARY_H_

#include <cstdint>
#include <cstring>
#include <string>

#define TFO_LIBRARY_ENTRY extern "C" __attribute__((visibility("default")))

namespace emulation {

// One line a call; read and cleared by the test.
inline std::string& Record() {
  static auto* record = new std::string;
  return *record;
}

// Calls whose line contains this are refused, or fail; empty: none.
inline std::string& Refused() {
  static auto* refused = new std::string;
  return *refused;
}
inline std::string& Failing() {
  static auto* failing = new std::string;
  return *failing;
}

inline bool IsIn(const std::string& what, const std::string& line) {
  return !what.empty() && line.find(what) != std::string::npos;
}

inline bool AlignedTo(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

enum class Type { kFloat, kHalf, kBFloat16 };

inline double Load(Type type, const void* data, std::int64_t i) {
  if (type == Type::kFloat) return static_cast<const float*>(data)[i];
  if (type == Type::kHalf) return static_cast<const _Float16*>(data)[i];
  const std::uint32_t bits =
      std::uint32_t{static_cast<const std::uint16_t*>(data)[i]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void Store(Type type, void* data, std::int64_t i, double wide) {
  const float value = static_cast<float>(wide);
  if (type == Type::kFloat) {
    static_cast<float*>(data)[i] = value;
  } else if (type == Type::kHalf) {
    static_cast<_Float16*>(data)[i] = static_cast<_Float16>(value);
  } else {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits += 0x7fff + (bits >> 16 & 1);  // to nearest, ties to even
    static_cast<std::uint16_t*>(data)[i] =
        static_cast<std::uint16_t>(bits >> 16);
  }
}

}  // namespace emulation

TFO_LIBRARY_ENTRY const char* emulation_record() {
  static auto* copy = new std::string;
  copy->swap(emulation::Record());
  emulation::Record().clear();
  return copy->c_str();
}

TFO_LIBRARY_ENTRY void emulation_refuse(const char* what) {
  emulation::Refused() = what;
}

TFO_LIBRARY_ENTRY void emulation_fail(const char* what) {
  emulation::Failing() = what;
}

#endif  // TFO_CUDA_EMULATION_LIBRARIES_LIBRARY_H_
