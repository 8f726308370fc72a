#include "cuda/dynamic_library.h"

#include <dlfcn.h>

namespace tfo::cuda {

DynamicLibrary::DynamicLibrary(const char* name,
                               std::initializer_list<const char*> sonames)
    : name_(name) {
  // What the framework uses comes first, so that there are not two of them.
  for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* soname : sonames) {
      handle_ = dlopen(soname, flags);
      if (handle_ == nullptr) continue;
      soname_ = soname;
      return;
    }
  }
  error_ = "not found: the loader knows none of";
  for (const char* soname : sonames) error_ += std::string(" ") + soname;
  error_ +=
      "; `pip install tensorflow[and-cuda]` brings it, or LD_LIBRARY_PATH "
      "names its folder";
}

void* DynamicLibrary::Symbol(const char* symbol) {
  if (handle_ == nullptr) return nullptr;
  void* address = dlsym(handle_, symbol);
  if (address == nullptr && error_.empty()) {
    error_ = std::string(soname_) + " lacks " + symbol +
             ": it is too old or not the library that it is named after";
  }
  return address;
}

}  // namespace tfo::cuda
