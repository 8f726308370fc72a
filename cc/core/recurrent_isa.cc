// Recurrent layers. Each task takes some rows of the batch through all steps,
// so that none waits for another; where there are few rows, workers share the
// units of every step.
#include "cc/core/recurrent_cells.h"
#include "cc/core/recurrent_product.h"
#include "cc/core/shared_work.h"

namespace tfo::TFO_SHARED_ISA {

RecurrentForwardFunction RecurrentForward;
RecurrentGradientFunction RecurrentGradient;

}  // namespace tfo::TFO_SHARED_ISA

namespace tfo::TFO_ISA {
namespace {

// Tiles of a task, whose products and operands a cache should hold.
constexpr int64_t kMostTiles = 8;
// Parts of the units for each worker, as these do not begin together.
constexpr int64_t kPartsOfWorker = 2;

// n elements, converted.
template <class From, class To>
TFO_INLINE void Convert(const From* from, int64_t n, To* to) {
  ForColumns<Accumulator<To>>(
      n, [&](int64_t j, auto partial, int m) TFO_INLINE_LAMBDA {
        constexpr bool kPartial = decltype(partial)::value;
        StoreColumns<kPartial>(to + j, LoadColumns<kPartial>(from + j, m), m);
      });
}

// What both directions share: `Direction` has Begin and End, for some rows, and
// Step, for some tiles and units, where no step but the first begins before the
// one before has ended for all units.
template <class T, bool kTransposed, class Direction>
class RecurrentWork {
 protected:
  using A = Accumulator<T>;
  static constexpr int64_t kUnits = RecurrentProduct<T, kTransposed>::kUnits;

  explicit RecurrentWork(const RecurrentInputs& in) : in_(in), s_(in.shape) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    first_ = scratch.Allocate<int64_t>(s_.batch);
    carry_ = scratch.Allocate<A>(s_.batch * s_.units);
    if (first_ == nullptr || carry_ == nullptr ||
        !product_.Prepare(static_cast<const T*>(in_.kernel), NumGates(s_.cell),
                          s_.units, s_.batch, parallel, scratch)) {
      return false;
    }
    // With few tiles each worker rather reads its part of the kernel (measured,
    // two cores: one row of 512 units 0.55 of the time, eight of 256 as fast;
    // 32 rows of 128 units 1.15).
    const bool few = product_.tiles().count() < parallel.num_workers;
    if (!few || s_.units <= kUnits) return true;
    shared_ = scratch.Allocate<SharedWork>(s_.steps + 1);
    return shared_ != nullptr;
  }

  // Runs `count` steps.
  template <class Cell>
  void RunSteps(int64_t count, const Parallel& parallel) {
    if (shared_ != nullptr) {
      ShareUnits<Cell>(count, parallel);
    } else {
      DivideRows<Cell>(count, parallel);
    }
  }

  // Which step of the input is the i-th to be computed.
  int64_t Place(int64_t i) const { return s_.backwards ? s_.steps - 1 - i : i; }
  // A row's part of a tensor [batch, steps, width], or null.
  const T* At(const void* tensor, int64_t row, int64_t place,
              int64_t width) const {
    if (tensor == nullptr) return nullptr;
    return static_cast<const T*>(tensor) + (row * s_.steps + place) * width;
  }
  T* At(void* tensor, int64_t row, int64_t place, int64_t width) const {
    return const_cast<T*>(
        At(static_cast<const void*>(tensor), row, place, width));
  }
  // The part of a tensor [batch, units] that begins with a row.
  const T* Of(const void* tensor, int64_t row) const {
    return static_cast<const T*>(tensor) + row * s_.units;
  }
  T* Of(void* tensor, int64_t row) const {
    return static_cast<T*>(tensor) + row * s_.units;
  }
  bool Keeps(int64_t row, int64_t place) const {
    return in_.mask == nullptr || in_.mask[row * s_.steps + place] != 0;
  }
  // The first of a row's steps, as they are computed, that the mask keeps.
  int64_t FirstKept(int64_t row) const {
    int64_t n = 0;
    while (n < s_.steps && !Keeps(row, Place(n))) ++n;
    return n;
  }

  template <class Cell>
  void DivideRows(int64_t count, const Parallel& parallel) {
    const EvenParts& tiles = product_.tiles();
    const int64_t wanted =
        EvenTasks(CeilDiv(tiles.count(), kMostTiles), 1, parallel.num_workers);
    const EvenParts parts(tiles.count(), CeilDiv(tiles.count(), wanted));
    auto task = [&](int64_t part, int) {
      const int64_t first = parts.Begin(part), last = parts.Begin(part + 1);
      const int64_t begin = tiles.Begin(first), end = tiles.Begin(last);
      direction().template Begin<Cell>(begin, end);
      for (int64_t n = 0; n < count; ++n)
        direction().template Step<Cell>(n, first, last, 0, s_.units);
      direction().template End<Cell>(begin, end);
    };
    ParallelFor(parallel, parts.count(), s_.batch * RowCycles() / parts.count(),
                task);
  }

  template <class Cell>
  void ShareUnits(int64_t count, const Parallel& parallel) {
    const int64_t blocks = CeilDiv(s_.units, kUnits);
    const EvenParts parts(
        blocks, CeilDiv(blocks, kPartsOfWorker * parallel.num_workers));
    direction().template Begin<Cell>(0, s_.batch);
    for (int64_t n = 0; n < count; ++n) shared_[n] = {};
    auto task = [&](int64_t, int) {
      for (int64_t n = 0; n < count; ++n) {
        shared_[n].Finish(parts.count(), [&](int64_t part) {
          const int64_t begin = parts.Begin(part) * kUnits;
          const int64_t end = Min(parts.Begin(part + 1) * kUnits, s_.units);
          direction().template Step<Cell>(n, 0, product_.tiles().count(), begin,
                                          end - begin);
        });
      }
    };
    const int64_t tasks = Min(parallel.num_workers, parts.count());
    ParallelFor(parallel, tasks, s_.batch * RowCycles() / Max(tasks, 1), task);
    direction().template End<Cell>(0, s_.batch);
  }

  Direction& direction() { return static_cast<Direction&>(*this); }
  // What a row costs.
  int64_t RowCycles() const {
    return s_.steps * s_.gates() * (4 + s_.units / kLanes<A>);
  }

  const RecurrentInputs& in_;
  const RecurrentShape& s_;
  RecurrentProduct<T, kTransposed> product_;
  int64_t* first_ = nullptr;      // of each row, FirstKept
  A* carry_ = nullptr;            // c, or its gradient, of each row
  SharedWork* shared_ = nullptr;  // of each step, if workers share it
};

template <class T>
class ForwardWork : RecurrentWork<T, false, ForwardWork<T>> {
  using Base = RecurrentWork<T, false, ForwardWork<T>>;
  using A = Accumulator<T>;
  friend Base;

 public:
  explicit ForwardWork(const RecurrentArgs& args)
      : Base(args.inputs), args_(args) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    const int64_t gates = s_.gates();
    bias_ = scratch.Allocate<A>(gates);
    h_ = scratch.Allocate<T>(s_.batch * s_.units);
    if (bias_ == nullptr || h_ == nullptr) return false;
    if (args_.bias == nullptr) {
      Zero(bias_, gates);
    } else {
      Convert(static_cast<const T*>(args_.bias), gates, bias_);
    }
    return Base::Prepare(parallel, scratch);
  }

  template <class Cell>
  void Run(const Parallel& parallel) {
    this->template RunSteps<Cell>(s_.steps, parallel);
  }

 private:
  using Base::product_;
  using Base::s_;

  template <class Cell>
  void Begin(int64_t begin, int64_t end) const {
    const int64_t units = s_.units, size = (end - begin) * units;
    Convert(this->Of(this->in_.states[0], begin), size, this->Of(h_, begin));
    if constexpr (NumStates(Cell::kCell) > 1)
      Convert(this->Of(this->in_.states[1], begin), size, C(begin));
    for (int64_t row = begin; row < end; ++row) {
      this->first_[row] = this->FirstKept(row);
      product_.Put(0, row, 0, this->Of(h_, row), 0, units);
    }
  }

  template <class Cell>
  void Step(int64_t n, int64_t first, int64_t last, int64_t unit,
            int64_t count) const {
    constexpr int kSaved = NumSaved(Cell::kCell);
    const int64_t place = this->Place(n), units = s_.units;
    const EvenParts& tiles = product_.tiles();
    product_.Run(n, first, last, unit, count);
    for (int64_t row = tiles.Begin(first); row < tiles.Begin(last); ++row) {
      const ForwardRow<T> at{this->At(args_.x, row, place, s_.gates()),
                             product_.Products(row),
                             product_.stride(),
                             bias_,
                             this->Of(h_, row),
                             C(row),
                             this->At(args_.saved, row, place, kSaved * units)};
      if (this->Keeps(row, place)) {
        ForUnits<T>(s_, unit, count,
                    [&](const auto& columns) { Cell::Forward(at, columns); });
      } else if (kSaved > 0 && at.saved != nullptr) {
        for (int i = 0; i < kSaved; ++i)
          Zero(at.saved + i * units + unit, count);
        if constexpr (NumStates(Cell::kCell) > 1)
          Convert(at.c + unit, count, at.saved + (kSaved - 1) * units + unit);
      }
      T* const y = this->At(args_.y, row, place, units) + unit;
      n >= this->first_[row] ? Convert(at.h + unit, count, y) : Zero(y, count);
      product_.Put(n + 1, row, 0, at.h, unit, count);
    }
  }

  template <class Cell>
  void End(int64_t begin, int64_t end) const {
    const int64_t size = (end - begin) * s_.units;
    Convert(this->Of(h_, begin), size, this->Of(args_.last[0], begin));
    if constexpr (NumStates(Cell::kCell) > 1)
      Convert(C(begin), size, this->Of(args_.last[1], begin));
  }

  A* C(int64_t row) const { return this->carry_ + row * s_.units; }

  const RecurrentArgs& args_;
  A* bias_ = nullptr;
  T* h_ = nullptr;
};

template <class T>
class GradientWork : RecurrentWork<T, true, GradientWork<T>> {
  using Base = RecurrentWork<T, true, GradientWork<T>>;
  using A = Accumulator<T>;
  friend Base;

 public:
  explicit GradientWork(const RecurrentGradientArgs& args)
      : Base(args.inputs),
        args_(args),
        product_grad_(args.product_grad == nullptr ? args.x_grad
                                                   : args.product_grad) {}

  // False when scratch memory ran out.
  bool Prepare(const Parallel& parallel, const Scratch& scratch) {
    dh_ = scratch.Allocate<A>(s_.batch * s_.units);
    return dh_ != nullptr && Base::Prepare(parallel, scratch);
  }

  template <class Cell>
  void Run(const Parallel& parallel) {
    // The last has nothing but a product.
    this->template RunSteps<Cell>(s_.steps + 1, parallel);
  }

 private:
  using Base::product_;
  using Base::s_;

  template <class Cell>
  void Begin(int64_t begin, int64_t end) const {
    const int64_t size = (end - begin) * s_.units;
    for (int64_t row = begin; row < end; ++row)
      this->first_[row] = this->FirstKept(row);
    Convert(this->Of(args_.dlast[0], begin), size, Dh(begin));
    if constexpr (NumStates(Cell::kCell) > 1)
      Convert(this->Of(args_.dlast[1], begin), size, Dc(begin));
  }

  template <class Cell>
  void Step(int64_t n, int64_t first, int64_t last, int64_t unit,
            int64_t count) const {
    const EvenParts& tiles = product_.tiles();
    if (n > 0) product_.Run(n - 1, first, last, unit, count);
    for (int64_t row = tiles.Begin(first); row < tiles.Begin(last); ++row) {
      if (n > 0) Add(product_.Products(row) + unit, count, Dh(row) + unit);
      if (n < s_.steps) StepOfRow<Cell>(n, row, unit, count);
    }
  }

  template <class Cell>
  void StepOfRow(int64_t n, int64_t row, int64_t unit, int64_t count) const {
    constexpr bool kHasC = NumStates(Cell::kCell) > 1;
    constexpr int kSaved = NumSaved(Cell::kCell);
    const int64_t units = s_.units, gates = s_.gates();
    const int64_t i = s_.steps - 1 - n, place = this->Place(i);
    const auto before = [&](const void* tensor, int64_t width) {
      return this->At(tensor, row, this->Place(i - 1), width);
    };
    const auto state = [&](int number) {
      return this->Of(this->in_.states[number], row);
    };
    const GradientRow<T> at{
        this->At(args_.y, row, place, units),
        this->At(args_.saved, row, place, kSaved * units),
        // What y was before the first step that counts is not h.
        i <= this->first_[row] ? state(0) : before(args_.y, units),
        !kHasC   ? nullptr
        : i == 0 ? state(1)
                 : before(args_.saved, kSaved * units) + (kSaved - 1) * units,
        this->At(args_.x_grad, row, place, gates),
        this->At(product_grad_, row, place, gates), Dh(row), Dc(row)};
    if (i >= this->first_[row])
      Add(this->At(args_.dy, row, place, units) + unit, count, at.dh + unit);
    const bool kept = this->Keeps(row, place);
    if (kept) {
      ForUnits<T>(s_, unit, count,
                  [&](const auto& columns) { Cell::Gradient(at, columns); });
    }
    for (int64_t gate = 0; gate < NumGates(s_.cell); ++gate) {
      if (!kept) {
        Zero(at.x_grad + gate * units + unit, count);
        Zero(at.product_grad + gate * units + unit, count);
      }
      product_.Put(n, row, gate, at.product_grad + gate * units, unit, count);
    }
  }

  template <class Cell>
  void End(int64_t begin, int64_t end) const {
    const int64_t size = (end - begin) * s_.units;
    Convert(Dh(begin), size, this->Of(args_.state_grads[0], begin));
    if constexpr (NumStates(Cell::kCell) > 1)
      Convert(Dc(begin), size, this->Of(args_.state_grads[1], begin));
  }

  template <class U>
  static void Add(const U* more, int64_t count, A* dh) {
    ForColumns<A>(count, [&](int64_t j, auto partial, int n) TFO_INLINE_LAMBDA {
      constexpr bool kPartial = decltype(partial)::value;
      StoreColumns<kPartial>(
          dh + j,
          LoadColumns<kPartial>(dh + j, n) + LoadColumns<kPartial>(more + j, n),
          n);
    });
  }

  A* Dh(int64_t row) const { return dh_ + row * s_.units; }
  A* Dc(int64_t row) const { return this->carry_ + row * s_.units; }

  const RecurrentGradientArgs& args_;
  void* const product_grad_;
  A* dh_ = nullptr;
};

// Runs Work<T>, made of `args`, unless its type has shared() for it.
template <template <class> class Work, class Args, class Shared>
bool Run(const Args& args, const Parallel& parallel, const Scratch& scratch,
         const Shared& shared) {
  const RecurrentShape& s = args.inputs.shape;
  if (s.batch == 0 || s.units == 0) return true;
  const auto own = [&](auto storage) {
    Work<typename decltype(storage)::type> work(args);
    if (!work.Prepare(parallel, scratch)) return false;
    switch (s.cell) {
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
  };
  return WithStorage(s.dtype, UnlessShared(own, shared));
}

}  // namespace

RecurrentForwardFunction RecurrentForward;
RecurrentGradientFunction RecurrentGradient;

bool RecurrentForward(const RecurrentArgs& args, const Parallel& parallel,
                      const Scratch& scratch) {
  return Run<ForwardWork>(args, parallel, scratch, [&] {
    return TFO_SHARED_ISA::RecurrentForward(args, parallel, scratch);
  });
}

bool RecurrentGradient(const RecurrentGradientArgs& args,
                       const Parallel& parallel, const Scratch& scratch) {
  return Run<GradientWork>(args, parallel, scratch, [&] {
    return TFO_SHARED_ISA::RecurrentGradient(args, parallel, scratch);
  });
}

}  // namespace tfo::TFO_ISA
