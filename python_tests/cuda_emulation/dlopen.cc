// The libraries of the emulated device. The launchers are compiled with
// -Ddlopen=emulated_dlopen, so that they find the stand-ins beside this module
// even where the process has NVIDIA's own.
#undef dlopen
#include <dlfcn.h>

#include <string>

extern "C" void* emulated_dlopen(const char* soname, int flags) noexcept {
  Dl_info module;
  if (dladdr(reinterpret_cast<void*>(&emulated_dlopen), &module) == 0) {
    return nullptr;
  }
  const std::string path = module.dli_fname;
  return dlopen((path.substr(0, path.rfind('/') + 1) + soname).c_str(), flags);
}
