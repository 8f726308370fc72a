// What attention and its gradient share: where the rows of its tensors are, and
// the blocks of queries and keys whose scores a cache holds.
#ifndef TFO_CC_CORE_ATTENTION_BLOCKS_H_
#define TFO_CC_CORE_ATTENTION_BLOCKS_H_

#include "cc/core/attention.h"
#include "cc/core/block_product.h"
#include "cc/core/dropout_elements.h"
#include "cc/core/softmax_rows.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

// Scores of a block take 128 KiB in float32, and what is packed for them about
// as much.
constexpr int64_t kBlockQueries = 128, kBlockKeys = 256;

// Even parts of at most `most` queries or keys, each but the last as many as
// fill whole steps of products whose depth they are.
template <class E>
class Blocks {
 public:
  Blocks(int64_t total, int64_t most)
      : total_(total), steps_(CeilDiv(total, kStep), most / kStep) {}

  int64_t count() const { return steps_.count(); }
  int64_t Begin(int64_t block) const {
    return Min(steps_.Begin(block) * kStep, total_);
  }
  int64_t Size(int64_t block) const { return Begin(block + 1) - Begin(block); }
  int64_t MostRows() const { return count() == 0 ? 0 : steps_.Size(0) * kStep; }

 private:
  static constexpr int64_t kStep = kDepthStep<E> * kElements<E>;

  const int64_t total_;
  const EvenParts steps_;
};

// The rows of one batch entry and head, `row` elements apart.
template <class P>
struct HeadRows {
  P* data;
  int64_t row;

  P* At(int64_t i) const { return data + i * row; }
  // For a right factor whose rows are these, or whose columns are.
  FilterMap AsRows() const { return {row, 1, 0}; }
  FilterMap AsColumns() const { return {1, row, 0}; }
};

template <class P>
TFO_INLINE HeadRows<P> RowsOfHead(P* data, const AttentionShape& s,
                                  int64_t head, int64_t rows, int64_t depth) {
  const int64_t b = head / s.heads, h = head % s.heads;
  return {data + (b * rows * s.heads + h) * depth, s.heads * depth};
}

// The same of keys or values, `head` being one of the queries'.
template <class P>
TFO_INLINE HeadRows<P> RowsOfKeyHead(P* data, const AttentionShape& s,
                                     int64_t head, int64_t stride,
                                     int64_t depth) {
  const int64_t b = head / s.heads, h = head % s.heads;
  const int64_t shared = h / (s.heads / s.key_heads);
  return {data + b * stride + shared * depth, s.key_heads * depth};
}

// Scales rows of products of `n` keys from `key` on, and adds their bias, if
// there is one; `row` is the first of them among the rows of scores.
template <class T>
void ScaleAndAddBias(const AttentionArgs& args, int64_t row, int64_t rows,
                     int64_t key, int64_t n, Accumulator<T>* products,
                     int64_t pitch) {
  using A = Accumulator<T>;
  if (args.bias.data == nullptr) return;
  const Vec<A> scale = Splat(static_cast<A>(args.scale));
  for (int64_t i = 0; i < rows; ++i) {
    A* const to = products + i * pitch;
    const T* const bias =
        static_cast<const T*>(args.bias.data) + args.bias.Offset(row + i) + key;
    ForColumns<A>(n, [&](int64_t j, auto partial, int m) TFO_INLINE_LAMBDA {
      Store(to + j, Load(to + j) * scale +
                        LoadColumns<decltype(partial)::value>(bias + j, m));
    });
  }
}

// z of products after ScaleAndAddBias, which scales those with a bias: scaled,
// or `masked` where `keep`, which may be null, has none.
template <class A, bool kMask>
struct Scores {
  Vec<A> scale, masked;

  explicit Scores(const AttentionArgs& args)
      : scale(Splat(args.bias.data ? A(1) : static_cast<A>(args.scale))),
        masked(Splat(static_cast<A>(args.masked))) {}

  TFO_INLINE Vec<A> operator()(const A* product, const std::uint8_t* keep,
                               int n) const {
    const Vec<A> z = Load(product) * scale;
    return kMask ? Kept<A>(keep, n, z, masked) : z;
  }
};

// Whether a mask keeps none of `n` keys from `key` on, in `rows` rows of scores
// from `row` on.
inline bool KeepsNothing(const SoftmaxMask& mask, int64_t row, int64_t rows,
                         int64_t key, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) {
    const std::uint8_t* const keep = mask.Row(row + i) + key;
    std::uint8_t any = 0;
    for (int64_t j = 0; j < n; ++j) any |= keep[j];
    if (any != 0) return false;
  }
  return true;
}

// Whether what is masked has a weight of zero in every row of scores, given the
// largest of each.
template <class T>
bool MaskedIsNothing(const AttentionArgs& args, const Accumulator<T>* largest,
                     int64_t rows) {
  const auto masked = static_cast<Accumulator<T>>(args.masked);
  for (int64_t i = 0; i < rows; ++i)
    if (!(masked - largest[i] < MathConstants<T>::kExpMin)) return false;
  return true;
}

// The weights that dropout leaves.
template <class T>
class WeightDropout {
  using Elements = DropoutElements<T>;
  static_assert(kBlockKeys <= Elements::kMost);

 public:
  using Room = typename Elements::Room;

  explicit WeightDropout(const AttentionArgs& args)
      : drops_(args.dropout != nullptr),
        keys_(args.shape.keys),
        elements_(drops_ ? *args.dropout : Dropout{}) {}

  // What Apply needs for `n` keys from `key` on, of a row of scores.
  TFO_INLINE const std::uint32_t* Draw(int64_t row, int64_t key, int64_t n,
                                       Room& room) const {
    return drops_ ? elements_.Draw(row * keys_ + key, n, room) : nullptr;
  }

  // `v`, of keys from the `j`-th drawn on.
  TFO_INLINE Vec<Accumulator<T>> Apply(const std::uint32_t* words, int64_t j,
                                       Vec<Accumulator<T>> v) const {
    return drops_ ? elements_.Apply(words + j * kWordsPerElement<T>, v) : v;
  }

 private:
  const bool drops_;
  const int64_t keys_;
  const Elements elements_;
};

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_ATTENTION_BLOCKS_H_
