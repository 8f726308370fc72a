// Fetches the source of the next band while this one is computed.
#ifndef TFO_CC_CORE_LOOKAHEAD_H_
#define TFO_CC_CORE_LOOKAHEAD_H_

#include "cc/core/address_map.h"
#include "cc/core/micro_kernel.h"

namespace tfo::TFO_ISA {
namespace {

// A worker's next band most likely follows this one in memory. It is asked for
// in `steps` parts, so that the requests spread over the time that the tiles
// take.
template <class T>
class Lookahead {
 public:
  Lookahead(const Source<T>& source, std::int64_t begin, std::int64_t size,
            std::int64_t end, std::int64_t steps)
      : source_(source),
        next_(begin),
        end_(begin + size < end ? begin + size : end),
        lines_(size / steps / kLine + 1) {}

  TFO_INLINE void Advance(int steps, PrefetchList* list) {
    if (next_ >= end_) return;
    const std::int64_t rest = (end_ - next_ + kLine - 1) / kLine;
    const std::int64_t lines = steps * lines_ < rest ? steps * lines_ : rest;
    list->Add(source_.data + next_, lines, 64);
    if (source_.saved != nullptr) list->Add(source_.saved + next_, lines, 64);
    next_ += lines * kLine;
  }

 private:
  static constexpr std::int64_t kLine = 64 / sizeof(T);

  const Source<T>& source_;
  std::int64_t next_, end_, lines_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_LOOKAHEAD_H_
