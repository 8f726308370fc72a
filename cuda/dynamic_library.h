// Libraries that are looked for at run time, when they are first needed.
#ifndef TFO_CUDA_DYNAMIC_LIBRARY_H_
#define TFO_CUDA_DYNAMIC_LIBRARY_H_

#include <initializer_list>
#include <string>

#include "cuda/status.h"

namespace tfo::cuda {

class DynamicLibrary {
 public:
  // The first of `sonames` that the process has already loaded, else the first
  // that the loader finds. `name` is what people call the library. Never
  // unloaded.
  DynamicLibrary(const char* name, std::initializer_list<const char*> sonames);

  // Sets `*function` to the library's `symbol`, or to null.
  template <class Function>
  void Resolve(const char* symbol, Function** function) {
    *function = reinterpret_cast<Function*>(Symbol(symbol));
  }

  // Whether the library and every symbol asked for so far were found; the text
  // lives as long as this object.
  Status status() const {
    return error_.empty() ? Status{} : Unsupported(name_, error_.c_str());
  }

 private:
  void* Symbol(const char* symbol);

  const char* const name_;
  const char* soname_ = nullptr;
  void* handle_ = nullptr;
  std::string error_;
};

}  // namespace tfo::cuda

#endif  // TFO_CUDA_DYNAMIC_LIBRARY_H_
