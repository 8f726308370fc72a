// Recurrent layers: each task takes some rows of the batch through all steps,
// so that none waits for another; the kernel is packed once.
#include "cc/core/block_product.h"
#include "cc/core/recurrent_cells.h"

namespace tfo::TFO_ISA {
namespace {

// Rows of a task, whose products and operands a cache should hold.
constexpr int64_t kMostRows = 64;
// Panels that all rows of a task are multiplied by before the next, as a kernel
// may be larger than the caches.
constexpr int64_t kPanelsTogether = 4;

// n elements, converted.
template <class From, class To>
TFO_INLINE void Convert(const From* from, int64_t n, To* to) {
  ForColumns<Accumulator<To>>(
      n, [&](int64_t j, auto partial, int m) TFO_INLINE_LAMBDA {
        constexpr bool kPartial = decltype(partial)::value;
        StoreColumns<kPartial>(to + j, LoadColumns<kPartial>(from + j, m), m);
      });
}

// What both directions share.
template <class T>
class RecurrentWork {
 public:
  using A = Accumulator<T>;
  using E = BlockOperand<T>;
  using Panels = BlockPanels<E>;

  // `add`: whether products are added to what is there.
  RecurrentWork(const RecurrentInputs& in, bool add)
      : in_(in), s_(in.shape), add_(add), parts_(0, 1), kernel_(nullptr) {}

  // Packs the kernel, [depth, columns] by `map`. False when scratch memory ran
  // out.
  bool Prepare(const FilterMap& map, int64_t depth, int64_t columns,
               const Parallel& parallel, const Scratch& scratch) {
    const int64_t tasks =
        EvenTasks(CeilDiv(s_.batch, kMostRows), 1, parallel.num_workers);
    parts_ = EvenParts(s_.batch, CeilDiv(s_.batch, Max(tasks, 1)));
    depth_ = depth;
    pitch_ = WholePanels<A>(columns);
    const int64_t rows = MostRows();
    operand_plane_ = rows * BlockPitch<E>(depth);
    E* const packed = scratch.Allocate<E>(Panels::Size(depth, columns));
    if (packed == nullptr) return false;
    kernel_ = Panels(packed);
    kernel_.Pack(static_cast<const T*>(in_.kernel), map, depth, columns);
    return first_.Prepare(rows, parallel, scratch) &&
           products_.Prepare(rows * pitch_, parallel, scratch) &&
           operands_.Prepare(kPlanes<E> * operand_plane_, parallel, scratch) &&
           carry_.Prepare(rows * s_.units, parallel, scratch);
  }

 protected:
  int64_t MostRows() const { return parts_.count() == 0 ? 0 : parts_.Size(0); }

  // Calls body(first row, number of rows, worker).
  template <class Body>
  void ForRows(const Parallel& parallel, const Body& body) const {
    auto task = [&](int64_t part, int worker) {
      body(parts_.Begin(part), parts_.Size(part), worker);
    };
    if (parts_.count() == 0) return;
    ParallelFor(parallel, parts_.count(),
                MostRows() * s_.steps * s_.gates() * (4 + s_.units / kLanes<A>),
                task);
  }

  // The products of `count` rows, `stride` apart, and the kernel.
  void Multiply(const T* rows, int64_t stride, int64_t count,
                int worker) const {
    const BlockRows<E> operands{{operands_[worker], operand_plane_},
                                BlockPitch<E>(depth_)};
    GatherRows(rows, stride, count, depth_, operands);
    constexpr int64_t kColumns = kPanelsTogether * kTileColumns<A>;
    for (int64_t j = 0; j < kernel_.columns(); j += kColumns) {
      MultiplyBlock<true>(operands, count,
                          kernel_.Part(j, Min(j + kColumns, kernel_.columns())),
                          add_, products_[worker] + j, pitch_);
    }
  }

  // Which step of the input is the i-th to be computed.
  int64_t Step(int64_t i) const { return s_.backwards ? s_.steps - 1 - i : i; }
  // A row's part of a tensor [batch, steps, width], or null.
  const T* At(const void* tensor, int64_t row, int64_t step,
              int64_t width) const {
    if (tensor == nullptr) return nullptr;
    return static_cast<const T*>(tensor) + (row * s_.steps + step) * width;
  }
  T* At(void* tensor, int64_t row, int64_t step, int64_t width) const {
    return const_cast<T*>(
        At(static_cast<const void*>(tensor), row, step, width));
  }
  const T* State(int i, int64_t row) const {
    return static_cast<const T*>(in_.states[i]) + row * s_.units;
  }
  bool Keeps(int64_t row, int64_t step) const {
    return in_.mask == nullptr || in_.mask[row * s_.steps + step] != 0;
  }
  // The first of a row's steps, as they are computed, that the mask keeps.
  int64_t FirstKept(int64_t row) const {
    int64_t n = 0;
    while (n < s_.steps && !Keeps(row, Step(n))) ++n;
    return n;
  }

  const RecurrentInputs& in_;
  const RecurrentShape& s_;
  const bool add_;
  EvenParts parts_;
  Panels kernel_;
  int64_t depth_ = 0, pitch_ = 0, operand_plane_ = 0;
  OfWorkers<int64_t> first_;  // of each row, FirstKept
  OfWorkers<E> operands_;
  OfWorkers<A> products_;
  OfWorkers<A> carry_;  // c, or its gradient
};

template <class T>
class ForwardWork : RecurrentWork<T> {
 public:
  explicit ForwardWork(const RecurrentArgs& args)
      : RecurrentWork<T>(args.inputs, false), args_(args) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    const int64_t gates = s_.gates();
    bias_ = scratch.Allocate<A>(gates);
    if (bias_ == nullptr) return false;
    if (args_.bias == nullptr) {
      Zero(bias_, gates);
    } else {
      Convert(static_cast<const T*>(args_.bias), gates, bias_);
    }
    return RecurrentWork<T>::Prepare({gates, 1, 0}, s_.units, gates, parallel,
                                     scratch) &&
           state_.Prepare(this->MostRows() * s_.units, parallel, scratch);
  }

  template <class Cell>
  void Run(const Parallel& parallel) {
    this->ForRows(parallel, [&](int64_t begin, int64_t rows, int worker) {
      RunRows<Cell>(begin, rows, worker);
    });
  }

 private:
  using A = Accumulator<T>;
  using RecurrentWork<T>::s_;

  template <class Cell>
  void RunRows(int64_t begin, int64_t rows, int worker) {
    constexpr bool kHasC = NumStates(Cell::kCell) > 1;
    constexpr int kSaved = NumSaved(Cell::kCell);
    const int64_t units = s_.units;
    T* const h = state_[worker];
    A* const c = this->carry_[worker];
    int64_t* const first = this->first_[worker];
    for (int64_t i = 0; i < rows; ++i) first[i] = this->FirstKept(begin + i);
    Convert(this->State(0, begin), rows * units, h);
    if constexpr (kHasC) Convert(this->State(1, begin), rows * units, c);
    for (int64_t n = 0; n < s_.steps; ++n) {
      const int64_t step = this->Step(n);
      this->Multiply(h, units, rows, worker);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = begin + i;
        const ForwardRow<T> at{
            this->At(args_.x, row, step, s_.gates()),
            this->products_[worker] + i * this->pitch_,
            bias_,
            h + i * units,
            c + i * units,
            this->At(args_.saved, row, step, kSaved * units)};
        if (this->Keeps(row, step)) {
          ForwardCell<Cell>(at, units, s_.relu);
        } else if (kSaved > 0 && at.saved != nullptr) {
          Zero(at.saved, kSaved * units);
          if constexpr (kHasC)
            Convert(at.c, units, at.saved + (kSaved - 1) * units);
        }
        T* const y = this->At(args_.y, row, step, units);
        n >= first[i] ? Convert(at.h, units, y) : Zero(y, units);
      }
    }
    Convert(h, rows * units, static_cast<T*>(args_.last[0]) + begin * units);
    if constexpr (kHasC)
      Convert(c, rows * units, static_cast<T*>(args_.last[1]) + begin * units);
  }

  const RecurrentArgs& args_;
  A* bias_ = nullptr;
  OfWorkers<T> state_;  // h
};

template <class T>
class GradientWork : RecurrentWork<T> {
 public:
  explicit GradientWork(const RecurrentGradientArgs& args)
      : RecurrentWork<T>(args.inputs, true), args_(args) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    return RecurrentWork<T>::Prepare({1, s_.gates(), 0}, s_.gates(), s_.units,
                                     parallel, scratch);
  }

  template <class Cell>
  void Run(const Parallel& parallel) {
    this->ForRows(parallel, [&](int64_t begin, int64_t rows, int worker) {
      RunRows<Cell>(begin, rows, worker);
    });
  }

 private:
  using A = Accumulator<T>;
  using RecurrentWork<T>::s_;

  template <class Cell>
  void RunRows(int64_t begin, int64_t rows, int worker) {
    constexpr bool kHasC = NumStates(Cell::kCell) > 1;
    constexpr int kSaved = NumSaved(Cell::kCell);
    const int64_t units = s_.units, gates = s_.gates();
    // The gradients of h, to which products are added.
    A* const dh = this->products_[worker];
    A* const dc = this->carry_[worker];
    void* const product_grad =
        args_.product_grad == nullptr ? args_.x_grad : args_.product_grad;
    int64_t* const first = this->first_[worker];
    for (int64_t i = 0; i < rows; ++i) {
      first[i] = this->FirstKept(begin + i);
      Convert(Of(args_.dlast[0], begin + i), units, dh + i * this->pitch_);
    }
    if constexpr (kHasC) Convert(Of(args_.dlast[1], begin), rows * units, dc);
    for (int64_t n = s_.steps - 1; n >= 0; --n) {
      const int64_t step = this->Step(n),
                    before = n > 0 ? this->Step(n - 1) : 0;
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = begin + i;
        const GradientRow<T> at{
            this->At(args_.y, row, step, units),
            this->At(args_.saved, row, step, kSaved * units),
            // What y was before the first step that counts is not h.
            n <= first[i] ? this->State(0, row)
                          : this->At(args_.y, row, before, units),
            n == 0 || !kHasC
                ? this->State(kHasC, row)
                : this->At(args_.saved, row, before, kSaved * units) +
                      (kSaved - 1) * units,
            this->At(args_.x_grad, row, step, gates),
            this->At(product_grad, row, step, gates), dh + i * this->pitch_,
            dc + i * units};
        if (n >= first[i]) Add(this->At(args_.dy, row, step, units), at.dh);
        if (this->Keeps(row, step)) {
          GradientOfCell<Cell>(at, units, s_.relu);
        } else {
          Zero(at.x_grad, gates);
          Zero(at.product_grad, gates);
        }
      }
      this->Multiply(this->At(product_grad, begin, step, gates),
                     s_.steps * gates, rows, worker);
    }
    for (int64_t i = 0; i < rows; ++i)
      Convert(dh + i * this->pitch_, units,
              Of(args_.state_grads[0], begin + i));
    if constexpr (kHasC)
      Convert(dc, rows * units, Of(args_.state_grads[1], begin));
  }

  // The part of a tensor [batch, units] that begins with a row.
  const T* Of(const void* tensor, int64_t row) const {
    return static_cast<const T*>(tensor) + row * s_.units;
  }
  T* Of(void* tensor, int64_t row) const {
    return static_cast<T*>(tensor) + row * s_.units;
  }

  void Add(const T* dy, A* dh) const {
    ForColumns<A>(s_.units,
                  [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
                    constexpr bool kPartial = decltype(partial)::value;
                    StoreColumns<kPartial>(dh + j,
                                           LoadColumns<kPartial>(dh + j, n) +
                                               LoadColumns<kPartial>(dy + j, n),
                                           n);
                  });
  }

  const RecurrentGradientArgs& args_;
};

// Runs Work<T>, made of `args`.
template <template <class> class Work, class Args>
bool Run(const Args& args, const Parallel& parallel, const Scratch& scratch) {
  return WithStorage(args.inputs.shape.dtype, [&](auto storage) {
    Work<typename decltype(storage)::type> work(args);
    if (!work.Prepare(parallel, scratch)) return false;
    switch (args.inputs.shape.cell) {
      case RecurrentCell::kRnn:
        work.template Run<RnnCell>(parallel);
        break;
      case RecurrentCell::kGru:
        work.template Run<GruCell>(parallel);
        break;
      case RecurrentCell::kLstm:
        work.template Run<LstmCell>(parallel);
        break;
    }
    return true;
  });
}

}  // namespace

RecurrentForwardFunction RecurrentForward;
RecurrentGradientFunction RecurrentGradient;

bool RecurrentForward(const RecurrentArgs& args, const Parallel& parallel,
                      const Scratch& scratch) {
  return Run<ForwardWork>(args, parallel, scratch);
}

bool RecurrentGradient(const RecurrentGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch) {
  return Run<GradientWork>(args, parallel, scratch);
}

}  // namespace tfo::TFO_ISA
