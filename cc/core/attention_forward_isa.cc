// Attention, block by block of keys: what has been summed up of a row's values
// is scaled down whenever a larger score is found. Blocks that a mask keeps
// nothing of are not read.
#include "cc/core/attention_few_queries.h"

namespace tfo::TFO_SHARED_ISA {

AttentionForwardFunction AttentionForward;

}  // namespace tfo::TFO_SHARED_ISA

namespace tfo::TFO_ISA {
namespace {

// Blocks of queries that share packed keys and values.
constexpr int64_t kMostBlocks = 8;

template <class T>
class AttentionForwardWork {
 public:
  explicit AttentionForwardWork(const AttentionArgs& args)
      : args_(args),
        s_(args.shape),
        dropout_(args),
        queries_(s_.queries, kBlockQueries),
        keys_(s_.keys, kBlockKeys) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    // A task takes fewer blocks where there are few heads.
    const int64_t heads = s_.batch * s_.heads;
    const int64_t parts = CeilDiv(2 * parallel.num_workers, Max(heads, 1));
    blocks_ = Min(CeilDiv(queries_.count(), parts), kMostBlocks);
    const int64_t rows = queries_.MostRows();
    const int64_t columns = keys_.MostRows();
    score_pitch_ = WholePanels<A>(columns);
    value_pitch_ = WholePanels<A>(s_.value_depth);
    query_plane_ = rows * BlockPitch<E>(s_.depth);
    weight_plane_ = rows * score_pitch_ / kElements<E>;
    const auto prepare = [&](auto& memory, int64_t size) {
      return memory.Prepare(size, parallel, scratch);
    };
    if (!prepare(scores_, rows * score_pitch_) ||
        !prepare(sums_, blocks_ * rows * (value_pitch_ + 2))) {
      return false;
    }
    return few() ||
           (prepare(packed_keys_, Panels::Size(s_.depth, columns)) &&
            prepare(packed_values_, Panels::Size(columns, s_.value_depth)) &&
            prepare(query_rows_, kPlanes<E> * query_plane_) &&
            (!kApart || prepare(weights_, kPlanes<E> * weight_plane_)));
  }

  void Run(const Parallel& parallel) {
    const int64_t parts = CeilDiv(queries_.count(), Max(blocks_, 1));
    if (parts == 0) return;
    auto task = [&](int64_t index, int worker) {
      const int64_t part = index % parts;
      args_.mask.keep != nullptr ? RunTask<true>(index / parts, part, worker)
                                 : RunTask<false>(index / parts, part, worker);
    };
    ParallelFor(parallel, s_.batch * s_.heads * parts,
                CeilDiv(s_.queries, parts) * s_.keys *
                    (4 + (s_.depth + s_.value_depth) / kLanes<A>),
                task);
  }

 private:
  using A = Accumulator<T>;
  using E = BlockOperand<T>;
  using Panels = BlockPanels<E>;
  // Whether weights cannot take the place of their scores.
  static constexpr bool kApart = !std::is_same_v<E, A>;

  // What is known of a task's rows so far.
  struct Rows {
    A* largest;
    A* sum;
    A* values;  // times sum
  };

  bool few() const { return s_.queries <= kFewQueries; }

  template <bool kMask>
  void RunTask(int64_t head, int64_t part, int worker) {
    const auto k = RowsOfKeyHead(static_cast<const T*>(args_.k), s_, head,
                                 s_.key_stride, s_.depth);
    const auto v = RowsOfKeyHead(static_cast<const T*>(args_.v), s_, head,
                                 s_.value_stride, s_.value_depth);
    const int64_t first = part * blocks_;
    const int64_t last = Min(queries_.count(), first + blocks_);
    const int64_t begin = queries_.Begin(first);
    const int64_t rows = queries_.Begin(last) - begin;
    A* const memory = sums_[worker];
    const Rows sums{memory, memory + rows, memory + 2 * rows};
    for (int64_t i = 0; i < rows; ++i)
      sums.largest[i] = -A(__builtin_inf()), sums.sum[i] = 0;
    Zero(sums.values, rows * value_pitch_);
    if (s_.keys == 0)
      for (int64_t i = 0; i < rows; ++i) sums.largest[i] = 0, sums.sum[i] = 1;
    // What a mask keeps comes first: beside it the rest is nothing in all but
    // odd rows.
    if (AddBlocks<kMask, true>(head, first, last, k, v, worker, sums))
      AddBlocks<kMask, false>(head, first, last, k, v, worker, sums);
    Finish(head, begin, rows, sums);
  }

  // Adds the values of blocks of which a mask keeps something, or of those of
  // which it keeps nothing where they count all the same. Returns whether there
  // are others.
  template <bool kMask, bool kSome>
  bool AddBlocks(int64_t head, int64_t first, int64_t last,
                 const HeadRows<const T>& k, const HeadRows<const T>& v,
                 int worker, const Rows& sums) {
    bool others = false;
    for (int64_t block = 0; block < keys_.count(); ++block) {
      const int64_t key = keys_.Begin(block), n = keys_.Size(block);
      Panels keys(packed_keys_[worker]), values(packed_values_[worker]);
      bool packed = false;
      for (int64_t i = first; i < last; ++i) {
        const int64_t at = queries_.Begin(i) - queries_.Begin(first);
        const int64_t rows = queries_.Size(i);
        const Rows of_block{sums.largest + at, sums.sum + at,
                            sums.values + at * value_pitch_};
        if constexpr (kMask) {
          const int64_t row = head * s_.queries + queries_.Begin(i);
          if (!kSome && MaskedIsNothing<T>(args_, of_block.largest, rows))
            continue;
          if (KeepsNothing(args_.mask, row, rows, key, n) == kSome) {
            others = true;
            continue;
          }
        }
        if (few()) {
          AddFewQueries<kMask>(head, key, n, k, v, worker, of_block);
          continue;
        }
        if (!packed) {
          keys.Pack(k.At(key), k.AsColumns(), s_.depth, n);
          values.Pack(v.At(key), v.AsRows(), n, s_.value_depth);
          packed = true;
        }
        AddBlock<kMask>(head, i, key, keys, values, worker, of_block);
      }
    }
    return others;
  }

  // Adds the values of a block of keys, the first of which is `key`.
  template <bool kMask>
  void AddBlock(int64_t head, int64_t block, int64_t key, const Panels& keys,
                const Panels& values, int worker, const Rows& sums) {
    const auto q = RowsOfHead(static_cast<const T*>(args_.q), s_, head,
                              s_.queries, s_.depth);
    const int64_t rows = queries_.Size(block), first = queries_.Begin(block);
    const BlockRows<E> query_rows{{query_rows_[worker], query_plane_},
                                  BlockPitch<E>(s_.depth)};
    GatherRows(q.At(first), q.row, rows, s_.depth, query_rows);
    A* const scores = scores_[worker];
    MultiplyBlock<true>(query_rows, rows, keys, false, scores, score_pitch_);
    ScaleAndAddBias<T>(args_, head * s_.queries + first, rows, key,
                       keys.columns(), scores, score_pitch_);
    BlockRows<E> weights{{nullptr, weight_plane_}, score_pitch_ / kElements<E>};
    if constexpr (kApart) {
      weights.data.first = weights_[worker];
    } else {
      weights.data.first = scores;
    }
    WeighRows<kMask>(head, first, rows, key, keys.columns(), scores, weights,
                     sums);
    MultiplyBlock<true>(weights, rows, values, true, sums.values, value_pitch_);
  }

  // The same, of `n` keys, for all queries there are.
  template <bool kMask>
  void AddFewQueries(int64_t head, int64_t key, int64_t n,
                     const HeadRows<const T>& k, const HeadRows<const T>& v,
                     int worker, const Rows& sums) {
    const auto q = RowsOfHead(static_cast<const T*>(args_.q), s_, head,
                              s_.queries, s_.depth);
    A* const scores = scores_[worker];
    MultiplyByKeys(q, s_.queries, k, key, n, s_.depth, scores, score_pitch_);
    ScaleAndAddBias<T>(args_, head * s_.queries, s_.queries, key, n, scores,
                       score_pitch_);
    WeighRows<kMask>(head, 0, s_.queries, key, n, scores,
                     BlockRows<A>{{scores, 0}, score_pitch_}, sums);
    AddValues(scores, score_pitch_, s_.queries, v, key, n, s_.value_depth,
              sums.values, value_pitch_);
  }

  // Turns products of queries from `first` on into the weights of `n` keys.
  template <bool kMask, class W>
  void WeighRows(int64_t head, int64_t first, int64_t rows, int64_t key,
                 int64_t n, A* scores, const BlockRows<W>& weights,
                 const Rows& sums) const {
    alignas(64) typename WeightDropout<T>::Room room;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = head * s_.queries + first + i;
      const std::uint8_t* const keep =
          kMask ? args_.mask.Row(row) + key : nullptr;
      const std::uint32_t* const words = dropout_.Draw(row, key, n, room);
      WeighRow<kMask>(scores + i * score_pitch_, keep, words, n,
                      sums.largest + i, sums.sum + i,
                      sums.values + i * value_pitch_,
                      weights.data + i * weights.pitch);
    }
  }

  // Turns `n` products into the weights of their keys.
  template <bool kMask, class W>
  TFO_INLINE void WeighRow(A* scores, const std::uint8_t* keep,
                           const std::uint32_t* words, int64_t n, A* largest,
                           A* sum, A* values, OperandsIn<W> weights) const {
    const Scores<A, kMask> z_of(args_);
    const A before = *largest;
    Vec<A> most = Splat(before);
    ForColumns<A>(n, [&](int64_t j, auto partial, int m) TFO_INLINE_LAMBDA {
      Vec<A> z = z_of(scores + j, kMask ? keep + j : nullptr, m);
      if constexpr (decltype(partial)::value)
        z = FirstLanes<A>(z, m, MinusInfinity<A>());
      Store(scores + j, z);
      most = Larger<A>(z, most);
    });
    const Vec<A> top = LargestOverLanes<A>(most);
    // From nothing but minus infinity itself nothing can be subtracted.
    const Vec<A> from = top == MinusInfinity<A>() ? Vec<A>{} : top;
    Vec<A> total{};
    for (int64_t j = 0; j < n; j += kVectorElements<W>) {
      Vec<A> e[kElements<W>];
#pragma GCC unroll 2
      for (int i = 0; i < kElements<W>; ++i) {
        const int64_t at = j + i * kLanes<A>;
        e[i] = Vec<A>{};
        if (at >= n) continue;
        e[i] = ExpOfNegative<T>(Load(scores + at) - from);
        total += e[i];
        if (kMask && args_.zero_masked) {
          const int m = static_cast<int>(Min(n - at, kLanes<A>));
          e[i] = Kept<A>(keep + at, m, e[i], Vec<A>{});
        }
        e[i] = dropout_.Apply(words, at, e[i]);
      }
      StoreOperands<W>(weights + j / kElements<W>, e);
    }
    total = SumOverLanes<A>(total);
    *largest = top[0];
    if (before == top[0] || *sum == 0) {
      *sum += total[0];
      return;
    }
    const Vec<A> smaller = ExpOfNegative<T>(Splat(before) - from);
    *sum = *sum * smaller[0] + total[0];
    for (int64_t j = 0; j < value_pitch_; j += kLanes<A>)
      Store(values + j, Load(values + j) * smaller);
  }

  void Finish(int64_t head, int64_t begin, int64_t rows, const Rows& sums) {
    const auto y = RowsOfHead(static_cast<T*>(args_.y), s_, head, s_.queries,
                              s_.value_depth);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = head * s_.queries + begin + i;
      // Only minus infinity in the place of all scores leaves nothing.
      const bool zeros = args_.zero_masked && args_.mask.keep != nullptr &&
                         sums.sum[i] == 0 &&
                         KeepsNothing(args_.mask, row, 1, 0, s_.keys);
      const A inverse = zeros ? A(0) : A(1) / sums.sum[i];
      T* const to = y.At(begin + i);
      const A* const values = sums.values + i * value_pitch_;
      ForColumns<A>(s_.value_depth,
                    [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                      StoreColumns<decltype(partial)::value>(
                          to + j, Load(values + j) * inverse, n);
                    });
      static_cast<A*>(args_.largest)[row] = sums.largest[i];
      static_cast<A*>(args_.inverse_sum)[row] = inverse;
    }
  }

  const AttentionArgs& args_;
  const AttentionShape& s_;
  const WeightDropout<T> dropout_;
  const Blocks<E> queries_, keys_;
  int64_t blocks_ = 1;  // of queries, in a task
  int64_t score_pitch_ = 0, value_pitch_ = 0;
  int64_t query_plane_ = 0, weight_plane_ = 0;
  OfWorkers<E> packed_keys_, packed_values_, query_rows_, weights_;
  OfWorkers<A> scores_, sums_;
};

}  // namespace

AttentionForwardFunction AttentionForward;

bool AttentionForward(const AttentionArgs& args, const Parallel& parallel,
                      const Scratch& scratch) {
  const auto own = [&](auto storage) {
    AttentionForwardWork<typename decltype(storage)::type> work(args);
    if (!work.Prepare(parallel, scratch)) return false;
    work.Run(parallel);
    return true;
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::AttentionForward(args, parallel, scratch);
  };
  return WithStorage(args.shape.dtype, UnlessShared(own, shared));
}

}  // namespace tfo::TFO_ISA
