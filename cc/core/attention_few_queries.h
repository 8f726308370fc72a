// Products of so few queries that keys and values are read once, as they lie.
#ifndef TFO_CC_CORE_ATTENTION_FEW_QUERIES_H_
#define TFO_CC_CORE_ATTENTION_FEW_QUERIES_H_

#include <type_traits>

#include "cc/core/attention_blocks.h"

namespace tfo::TFO_ISA {
namespace {

constexpr int64_t kFewQueries = 4;
// Rows asked for ahead of their use: they lie as far apart as heads are many.
constexpr int64_t kHeadRowsAhead = 8;

// Calls body(std::integral_constant) of a number from 1 to kFewQueries.
template <class Body>
TFO_INLINE void WithFew(int64_t queries, const Body& body) {
  switch (queries) {
    case 1:
      return body(std::integral_constant<int, 1>{});
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    default:
      return body(std::integral_constant<int, 4>{});
  }
}

// Calls body(j, row) for `n` rows from `first` on.
template <class T, class Body>
TFO_INLINE void ForHeadRows(const HeadRows<const T>& x, int64_t first,
                            int64_t n, int64_t depth, const Body& body) {
  for (int64_t j = 0; j < n; ++j) {
    const T* const row = x.At(first + j);
    if (j + kHeadRowsAhead < n) FetchRun(row + kHeadRowsAhead * x.row, depth);
    body(j, row);
  }
}

// scores[i, j] = q[i] * k[first + j] for `n` keys.
template <class T>
void MultiplyByKeys(const HeadRows<const T>& q, int64_t queries,
                    const HeadRows<const T>& k, int64_t first, int64_t n,
                    int64_t depth, Accumulator<T>* scores, int64_t pitch) {
  using A = Accumulator<T>;
  WithFew(queries, [&](auto count) TFO_INLINE_LAMBDA {
    constexpr int kRows = decltype(count)::value;
    ForHeadRows(
        k, first, n, depth, [&](int64_t j, const T* row) TFO_INLINE_LAMBDA {
          Vec<A> sum[kRows]{};
          ForColumns<A>(depth,
                        [&](int64_t c, auto partial, int m) TFO_INLINE_LAMBDA {
                          constexpr bool kPartial = decltype(partial)::value;
                          const Vec<A> v = LoadColumns<kPartial>(row + c, m);
#pragma GCC unroll 4
                          for (int i = 0; i < kRows; ++i)
                            sum[i] += v * LoadColumns<kPartial>(q.At(i) + c, m);
                        });
#pragma GCC unroll 4
          for (int i = 0; i < kRows; ++i) {
            scores[i * pitch + j] = SumOverLanes<A>(sum[i])[0];
          }
        });
  });
}

// values[i] += the sum of weights[i, j] * v[first + j] over `n` keys.
template <class T>
void AddValues(const Accumulator<T>* weights, int64_t pitch, int64_t queries,
               const HeadRows<const T>& v, int64_t first, int64_t n,
               int64_t depth, Accumulator<T>* values, int64_t value_pitch) {
  using A = Accumulator<T>;
  WithFew(queries, [&](auto count) TFO_INLINE_LAMBDA {
    constexpr int kRows = decltype(count)::value;
    ForHeadRows(
        v, first, n, depth, [&](int64_t j, const T* row) TFO_INLINE_LAMBDA {
          ForColumns<A>(
              depth, [&](int64_t c, auto partial, int m) TFO_INLINE_LAMBDA {
                const Vec<A> value =
                    LoadColumns<decltype(partial)::value>(row + c, m);
#pragma GCC unroll 4
                for (int i = 0; i < kRows; ++i) {
                  A* const to = values + i * value_pitch + c;
                  Store(to, Load(to) + value * weights[i * pitch + j]);
                }
              });
        });
  });
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_ATTENTION_FEW_QUERIES_H_
