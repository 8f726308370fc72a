// The gradient of attention. Weights are computed again from what the forward
// pass kept of their rows:
//
//   weights = e^(z - largest) * inverse_sum,  dweights = dy v^T
//   dbias = weights * (dweights - sum of y * dy over a row)
//   dscores = dbias * scale
//   dv = weights^T dy,  dq = dscores k,  dk = dscores^T q
//
// where dropout, and a mask that zeroes, apply to dweights and to the weights
// that dy is multiplied by.
#include "cc/core/attention_few_queries.h"

namespace tfo::TFO_SHARED_ISA {

AttentionGradientFunction AttentionGradient;

}  // namespace tfo::TFO_SHARED_ISA

namespace tfo::TFO_ISA {
namespace {

// Where there are fewer heads, the keys of each are divided among tasks.
constexpr int64_t kFewHeads = 16;

template <class T>
class AttentionGradientWork {
 public:
  explicit AttentionGradientWork(const AttentionGradientArgs& args)
      : args_(args),
        s_(args.forward.shape),
        dropout_(args.forward),
        heads_(s_.batch * s_.heads),
        queries_(s_.queries, kBlockQueries),
        keys_(s_.keys, kBlockKeys),
        parts_(Max(keys_.count(), 1),
               CeilDiv(Max(keys_.count(), 1),
                       CeilDiv(kFewHeads, Max(heads_, 1)))) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    const int64_t rows = queries_.MostRows();
    const int64_t columns = keys_.MostRows();
    score_pitch_ = WholePanels<A>(columns);
    depth_pitch_ = WholePanels<A>(s_.depth);
    value_pitch_ = WholePanels<A>(s_.value_depth);
    query_plane_ = rows * BlockPitch<E>(s_.depth);
    dy_plane_ = rows * BlockPitch<E>(s_.value_depth);
    row_plane_ = rows * score_pitch_ / kElements<E>;
    column_plane_ = WholeSteps<E>(rows) * score_pitch_;
    const auto prepare = [&](auto& memory, int64_t size) {
      return memory.Prepare(size, parallel, scratch);
    };
    const bool prepared =
        prepare(key_columns_, Panels::Size(s_.depth, columns)) &&
        prepare(value_columns_, Panels::Size(s_.value_depth, columns)) &&
        prepare(packed_keys_, Panels::Size(columns, s_.depth)) &&
        prepare(packed_queries_, Panels::Size(rows, s_.depth)) &&
        prepare(packed_dy_, Panels::Size(rows, s_.value_depth)) &&
        prepare(query_rows_, kPlanes<E> * query_plane_) &&
        prepare(dy_rows_, kPlanes<E> * dy_plane_) &&
        (!kPairs ||
         prepare(operands_, kPlanes<E> * (row_plane_ + 2 * column_plane_))) &&
        prepare(scores_, 2 * rows * score_pitch_) &&
        prepare(sums_, columns * (depth_pitch_ + value_pitch_)) &&
        prepare(dots_, s_.queries);
    if (!prepared) return false;
    if (parts_.count() == 1)
      return prepare(own_query_sums_, s_.queries * depth_pitch_);
    query_sums_ = scratch.Allocate<A>(heads_ * parts_.count() * s_.queries *
                                      depth_pitch_);
    return query_sums_ != nullptr;
  }

  void Run(const Parallel& parallel) {
    const int64_t parts = parts_.count();
    const int64_t cycles = s_.queries * s_.keys *
                           (12 + 3 * (s_.depth + s_.value_depth) / kLanes<A>);
    auto task = [&](int64_t index, int worker) {
      args_.forward.mask.keep != nullptr
          ? RunTask<true>(index / parts, index % parts, worker)
          : RunTask<false>(index / parts, index % parts, worker);
    };
    ParallelFor(parallel, heads_ * parts, cycles / parts, task);
    if (parts == 1) return;
    auto sum = [&](int64_t head, int) {
      A* const first = QuerySums(head, 0, 0);
      for (int64_t part = 1; part < parts; ++part) {
        const A* const other = QuerySums(head, part, 0);
        for (int64_t i = 0; i < s_.queries * depth_pitch_; i += kLanes<A>)
          Store(first + i, Load(first + i) + Load(other + i));
      }
      WriteRows(first, depth_pitch_, s_.queries, s_.depth,
                RowsOfHead(static_cast<T*>(args_.q_grad), s_, head, s_.queries,
                           s_.depth));
    };
    ParallelFor(parallel, heads_, parts * s_.queries * depth_pitch_, sum);
  }

 private:
  using A = Accumulator<T>;
  using E = BlockOperand<T>;
  using Panels = BlockPanels<E>;
  static constexpr bool kPairs = kElements<E> > 1;

  // Weights and gradients of scores, as the products read them: rows of
  // queries, and operands of queries that follow each other.
  struct Factors {
    BlockRows<E> weight_columns, dscore_columns, dscore_rows;
  };

  A* QuerySums(int64_t head, int64_t part, int worker) const {
    return parts_.count() == 1 ? own_query_sums_[worker]
                               : query_sums_ + (head * parts_.count() + part) *
                                                   s_.queries * depth_pitch_;
  }

  Factors FactorsOf(int worker) const {
    if constexpr (kPairs) {
      E* const columns = operands_[worker] + kPlanes<E> * row_plane_;
      return {
          {{columns, column_plane_}, score_pitch_},
          {{columns + kPlanes<E> * column_plane_, column_plane_}, score_pitch_},
          {{operands_[worker], row_plane_}, score_pitch_ / kElements<E>}};
    } else {
      // They take the place of what they are computed from.
      E* const scores = scores_[worker];
      const BlockRows<E> dscores{{scores + scores_.size / 2, 0}, score_pitch_};
      return {{{scores, 0}, score_pitch_}, dscores, dscores};
    }
  }

  template <bool kMask>
  void RunTask(int64_t head, int64_t part, int worker) {
    const AttentionArgs& f = args_.forward;
    const auto rows_of = [&](const void* x, int64_t rows, int64_t depth) {
      return RowsOfHead(static_cast<const T*>(x), s_, head, rows, depth);
    };
    const auto k = rows_of(f.k, s_.keys, s_.depth);
    const auto v = rows_of(f.v, s_.keys, s_.value_depth);
    const auto q = rows_of(f.q, s_.queries, s_.depth);
    const auto dy = rows_of(args_.dy, s_.queries, s_.value_depth);
    const auto y = rows_of(f.y, s_.queries, s_.value_depth);
    A* const query_sums = QuerySums(head, part, worker);
    Zero(query_sums, s_.queries * depth_pitch_);
    for (int64_t i = 0; i < s_.queries; ++i)
      dots_[worker][i] = Dot(y.At(i), dy.At(i));
    const int64_t first = parts_.Begin(part);
    const int64_t last = s_.keys == 0 ? first : first + parts_.Size(part);
    A* const key_sums = sums_[worker];
    for (int64_t block = first; block < last; ++block) {
      const int64_t key = keys_.Begin(block), count = keys_.Size(block);
      A* const value_sums = key_sums + count * depth_pitch_;
      Panels key_columns(key_columns_[worker]), keys(packed_keys_[worker]);
      Panels value_columns(value_columns_[worker]);
      bool begun = false;
      for (int64_t i = 0; i < queries_.count(); ++i) {
        const int64_t query = queries_.Begin(i), rows = queries_.Size(i);
        const int64_t row = head * s_.queries + query;
        if (kMask && IsNothing(row, rows, key, count)) {
          for (int64_t j = 0; j < rows && args_.bias_grad != nullptr; ++j)
            Zero(BiasGradient(row + j, key), count);
          continue;
        }
        if (!begun) {
          if (s_.queries > kFewQueries)
            key_columns.Pack(k.At(key), k.AsColumns(), s_.depth, count);
          value_columns.Pack(v.At(key), v.AsColumns(), s_.value_depth, count);
          keys.Pack(k.At(key), k.AsRows(), count, s_.depth);
        }
        const Factors factors = FactorsOf(worker);
        ScoreBlock<kMask>(head, i, key, count, q, k, dy, key_columns,
                          value_columns, factors, worker);
        Panels queries(packed_queries_[worker]), dys(packed_dy_[worker]);
        queries.Pack(q.At(query), q.AsRows(), rows, s_.depth);
        dys.Pack(dy.At(query), dy.AsRows(), rows, s_.value_depth);
        MultiplyBlock<false>(factors.weight_columns, count, dys, begun,
                             value_sums, value_pitch_);
        MultiplyBlock<false>(factors.dscore_columns, count, queries, begun,
                             key_sums, depth_pitch_);
        MultiplyBlock<true>(factors.dscore_rows, rows, keys, true,
                            query_sums + query * depth_pitch_, depth_pitch_);
        begun = true;
      }
      if (!begun) Zero(key_sums, count * (depth_pitch_ + value_pitch_));
      const auto write = [&](const A* sums, int64_t pitch, int64_t depth,
                             void* to) {
        auto grad = RowsOfHead(static_cast<T*>(to), s_, head, s_.keys, depth);
        grad.data = grad.At(key);
        WriteRows(sums, pitch, count, depth, grad);
      };
      write(key_sums, depth_pitch_, s_.depth, args_.k_grad);
      write(value_sums, value_pitch_, s_.value_depth, args_.v_grad);
    }
    if (parts_.count() > 1) return;
    WriteRows(query_sums, depth_pitch_, s_.queries, s_.depth,
              RowsOfHead(static_cast<T*>(args_.q_grad), s_, head, s_.queries,
                         s_.depth));
  }

  // Whether no weight of `n` keys from `key` on is other than zero, in `rows`
  // rows of scores from `row` on.
  bool IsNothing(int64_t row, int64_t rows, int64_t key, int64_t n) const {
    const AttentionArgs& f = args_.forward;
    if (!KeepsNothing(f.mask, row, rows, key, n)) return false;
    // No weight of what is no number is zero.
    for (int64_t i = row; i < row + rows; ++i) {
      const A inverse = static_cast<const A*>(f.inverse_sum)[i];
      if (inverse != inverse) return false;
    }
    return MaskedIsNothing<T>(f, static_cast<const A*>(f.largest) + row, rows);
  }

  // The factors of a block of queries and of `n` keys from `key` on.
  template <bool kMask>
  void ScoreBlock(int64_t head, int64_t block, int64_t key, int64_t n,
                  const HeadRows<const T>& q, const HeadRows<const T>& k,
                  const HeadRows<const T>& dy, const Panels& key_columns,
                  const Panels& value_columns, const Factors& to,
                  int worker) const {
    const int64_t rows = queries_.Size(block), first = queries_.Begin(block);
    const BlockRows<E> query_rows{{query_rows_[worker], query_plane_},
                                  BlockPitch<E>(s_.depth)};
    const BlockRows<E> dy_rows{{dy_rows_[worker], dy_plane_},
                               BlockPitch<E>(s_.value_depth)};
    GatherRows(dy.At(first), dy.row, rows, s_.value_depth, dy_rows);
    A* const products = scores_[worker];
    A* const dweights = products + scores_.size / 2;
    // Rounded as in the forward pass, which `largest` is from.
    if (s_.queries <= kFewQueries) {
      MultiplyByKeys(q, s_.queries, k, key, n, s_.depth, products,
                     score_pitch_);
    } else {
      GatherRows(q.At(first), q.row, rows, s_.depth, query_rows);
      MultiplyBlock<true>(query_rows, rows, key_columns, false, products,
                          score_pitch_);
    }
    ScaleAndAddBias<T>(args_.forward, head * s_.queries + first, rows, key, n,
                       products, score_pitch_);
    MultiplyBlock<true>(dy_rows, rows, value_columns, false, dweights,
                        score_pitch_);
    for (int64_t i = 0; i < rows; i += kElements<E>)
      WeighRows<kMask>(head, first, i, Min(rows - i, kElements<E>), key, n,
                       products, dweights, to, worker);
    FillUpColumns(to.weight_columns, rows);
    FillUpColumns(to.dscore_columns, rows);
  }

  // Of `count` rows from `row` on, as many as an operand has elements, unless
  // there are no more.
  template <bool kMask>
  TFO_INLINE void WeighRows(int64_t head, int64_t first, int64_t row,
                            int64_t count, int64_t key, int64_t n,
                            const A* products, const A* dweights,
                            const Factors& to, int worker) const {
    constexpr int kRows = kElements<E>;
    const AttentionArgs& f = args_.forward;
    const Scores<A, kMask> z_of(f);
    const Vec<A> scale = Splat(static_cast<A>(f.scale));
    const std::uint8_t* keep[kRows]{};
    const std::uint32_t* words[kRows]{};
    alignas(64) typename WeightDropout<T>::Room rooms[kRows];
    Vec<A> largest[kRows]{}, inverse[kRows]{}, dot[kRows]{};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = first + row + i;
      const int64_t of_scores = head * s_.queries + query;
      if (kMask) keep[i] = f.mask.Row(of_scores) + key;
      words[i] = dropout_.Draw(of_scores, key, n, rooms[i]);
      const A top = static_cast<const A*>(f.largest)[of_scores];
      largest[i] = Splat(top == -A(__builtin_inf()) ? A(0) : top);
      inverse[i] = Splat(static_cast<const A*>(f.inverse_sum)[of_scores]);
      dot[i] = Splat(dots_[worker][query]);
    }
    // As many vectors as rows.
    for (int64_t begin = 0; begin < n; begin += kVectorElements<E>) {
      Vec<A> weights[kRows][kRows]{}, dscores[kRows][kRows]{};
      for (int c = 0; c < kRows; ++c) {
        const int64_t j = begin + c * kLanes<A>;
        const int m = static_cast<int>(Min(n - j, kLanes<A>));
        for (int i = 0; i < count && m > 0; ++i) {
          const std::uint8_t* const some = kMask ? keep[i] + j : nullptr;
          const int64_t at = (row + i) * score_pitch_ + j;
          const Vec<A> z = z_of(products + at, some, m);
          const Vec<A> weight = ExpOfNegative<T>(z - largest[i]) * inverse[i];
          Vec<A> dweight = dropout_.Apply(words[i], j, Load(dweights + at));
          Vec<A> kept = dropout_.Apply(words[i], j, weight);
          if (kMask && f.zero_masked) {
            dweight = Kept<A>(some, m, dweight, Vec<A>{});
            kept = Kept<A>(some, m, kept, Vec<A>{});
          }
          Vec<A> dz = weight * (dweight - dot[i]);
          if constexpr (kMask) dz = Kept<A>(some, m, dz, Vec<A>{});
          if (args_.bias_grad != nullptr) {
            const int64_t of_scores = head * s_.queries + first + row + i;
            T* const to = BiasGradient(of_scores, key + j);
            m == kLanes<A> ? StoreColumns<false>(to, dz, m)
                           : StoreColumns<true>(to, dz, m);
          }
          weights[c][i] = FirstLanes<A>(kept, m);
          dscores[i][c] = FirstLanes<A>(dz * scale, m);
        }
        Vec<A> column[kRows];
        for (int i = 0; i < kRows; ++i) column[i] = dscores[i][c];
        StoreColumn(to.weight_columns, row / kRows, j, weights[c]);
        StoreColumn(to.dscore_columns, row / kRows, j, column);
      }
      if constexpr (kPairs) {
        const BlockRows<E>& rows = to.dscore_rows;
        for (int i = 0; i < count; ++i) {
          StoreOperands<E>(rows.data + (row + i) * rows.pitch + begin / kRows,
                           dscores[i]);
        }
      }
    }
  }

  // Where the gradient of a score's bias is.
  T* BiasGradient(int64_t row, int64_t key) const {
    return static_cast<T*>(args_.bias_grad) + row * s_.keys + key;
  }

  static void FillUpColumns(const BlockRows<E>& to, int64_t rows) {
    for (int64_t i = NumOperands<E>(rows); i < WholeSteps<E>(rows); ++i)
      Zero(to.data + i * to.pitch, to.pitch);
  }

  // Operands of the elements of neighbouring queries.
  static TFO_INLINE void StoreColumn(const BlockRows<E>& to, int64_t operand,
                                     int64_t j, const Vec<A>* v) {
    const OperandsIn<E> at = to.data + operand * to.pitch + j;
    if constexpr (!kPairs) {
      StoreAs<E>(at, {v[0]});
    } else if constexpr (kPlanes<E> > 1) {
      StoreAs<E>(at, MakePairs<E>(v[0], v[1]));
    } else {
      using Element = ElementOf<E>;
      StoreAs<E>(
          at, MakePairs<E>(AsStored<Element>(v[0]), AsStored<Element>(v[1])));
    }
  }

  A Dot(const T* y, const T* dy) const {
    return SumOver<A>(s_.value_depth, [&](int64_t j, auto partial,
                                          int n) TFO_INLINE_LAMBDA {
      constexpr bool kPartial = decltype(partial)::value;
      return LoadColumns<kPartial>(y + j, n) * LoadColumns<kPartial>(dy + j, n);
    })[0];
  }

  static void WriteRows(const A* from, int64_t pitch, int64_t rows,
                        int64_t depth, const HeadRows<T>& to) {
    for (int64_t i = 0; i < rows; ++i) {
      ForColumns<A>(depth,
                    [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                      StoreColumns<decltype(partial)::value>(
                          to.At(i) + j, Load(from + i * pitch + j), n);
                    });
    }
  }

  const AttentionGradientArgs& args_;
  const AttentionShape& s_;
  const WeightDropout<T> dropout_;
  const int64_t heads_;
  const Blocks<E> queries_, keys_;
  const EvenParts parts_;  // of blocks of keys, in tasks
  // From one row to the next, of scores and of gradients.
  int64_t score_pitch_ = 0, depth_pitch_ = 0, value_pitch_ = 0;
  int64_t query_plane_ = 0, dy_plane_ = 0, row_plane_ = 0, column_plane_ = 0;
  OfWorkers<E> key_columns_, value_columns_, packed_keys_;
  OfWorkers<E> packed_queries_, packed_dy_, query_rows_, dy_rows_, operands_;
  OfWorkers<A> scores_, sums_, dots_, own_query_sums_;
  A* query_sums_ = nullptr;  // of parts
};

}  // namespace

AttentionGradientFunction AttentionGradient;

bool AttentionGradient(const AttentionGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch) {
  const auto own = [&](auto storage) {
    AttentionGradientWork<typename decltype(storage)::type> work(args);
    if (!work.Prepare(parallel, scratch)) return false;
    work.Run(parallel);
    return true;
  };
  const auto shared = [&] {
    return TFO_SHARED_ISA::AttentionGradient(args, parallel, scratch);
  };
  return WithStorage(args.forward.shape.dtype, UnlessShared(own, shared));
}

}  // namespace tfo::TFO_ISA
