// Fetches what the next work reads while this one is computed.
#ifndef TFO_CC_CORE_LOOKAHEAD_H_
#define TFO_CC_CORE_LOOKAHEAD_H_

#include "cc/core/address_map.h"
#include "cc/core/integers.h"
#include "cc/core/micro_kernel.h"

namespace tfo::TFO_ISA {
namespace {

// A worker's next band most likely follows this one in memory, and its next
// filters these. They are asked for in `steps` parts, so that the requests
// spread over the time that the tiles take.
template <class T>
class Lookahead {
 public:
  // `rows` rows of `length` elements, `pitch` apart, as far as they lie before
  // `end`.
  Lookahead(const Source<T>& source, std::int64_t begin, std::int64_t rows,
            std::int64_t length, std::int64_t pitch, std::int64_t end,
            std::int64_t steps)
      : source_(source),
        begin_(begin),
        lines_per_row_(CeilDiv(length, kLine)),
        pitch_(pitch),
        rows_(begin < end ? Min(rows, CeilDiv(end - begin, pitch)) : 0),
        lines_(rows * lines_per_row_ / Max(steps, 1) + 1) {}

  // A run of elements.
  Lookahead(const Source<T>& source, std::int64_t begin, std::int64_t size,
            std::int64_t end, std::int64_t steps)
      : Lookahead(source, begin, 1, Max(Min(size, end - begin), 0), 1, end,
                  steps) {}

  TFO_INLINE void Advance(int steps, PrefetchList* list) {
    for (std::int64_t n = steps * lines_; n > 0 && row_ < rows_;) {
      const std::int64_t count = Min(n, lines_per_row_ - line_);
      const std::int64_t at = begin_ + row_ * pitch_ + line_ * kLine;
      list->Add(source_.data + at, count, 64);
      if (source_.saved != nullptr) list->Add(source_.saved + at, count, 64);
      n -= count;
      line_ += count;
      if (line_ == lines_per_row_) {
        line_ = 0;
        ++row_;
      }
    }
  }

 private:
  static constexpr std::int64_t kLine = 64 / sizeof(T);

  Source<T> source_;
  std::int64_t begin_, lines_per_row_, pitch_, rows_, lines_;
  std::int64_t row_ = 0, line_ = 0;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_LOOKAHEAD_H_
