// The cells of recurrent layers: one step of one row.
//
// A new cell is an entry of RecurrentCell and a struct below.
#ifndef TFO_CC_CORE_RECURRENT_CELLS_H_
#define TFO_CC_CORE_RECURRENT_CELLS_H_

#include "cc/core/elementwise.h"
#include "cc/core/recurrent.h"
#include "cc/core/vector_math.h"

namespace tfo::TFO_ISA {
namespace {

template <class T>
struct ForwardRow {
  using A = Accumulator<T>;

  const T* x;
  const A* products;
  int64_t product_stride;  // from gate to gate
  const A* bias;
  T* h;  // the state before the step, then that behind it
  A* c;
  T* saved;  // or null
};

template <class T>
struct GradientRow {
  using A = Accumulator<T>;

  const T* y;
  const T* saved;
  const T* h;  // the states before the step
  const T* c;
  T* x_grad;
  T* product_grad;
  A* dh;  // the gradient of h', then what of that of h is not the product's
  A* dc;
};

// The functions of a cell at columns from j on, of which there are n.
template <class T, bool kRelu, bool kPartial>
struct CellColumns {
  using A = Accumulator<T>;
  using V = Vec<A>;
  using F = VectorActivation<T>;
  static constexpr Activation kAct =
      kRelu ? Activation::kRelu : Activation::kTanh;

  const int64_t units, j;
  const int n;

  template <class U>
  TFO_INLINE V Load(const U* gates, int gate) const {
    return LoadColumns<kPartial>(gates + gate * units + j, n);
  }
  template <class U>
  TFO_INLINE void Store(U* gates, int gate, V v) const {
    StoreColumns<kPartial>(gates + gate * units + j, v, n);
  }
  TFO_INLINE V Product(const ForwardRow<T>& row, int gate) const {
    return LoadColumns<kPartial>(row.products + gate * row.product_stride + j,
                                 n) +
           Load(row.bias, gate);
  }

  static TFO_INLINE V Act(V z) { return F::template Value<kAct>(z, V{}); }
  static TFO_INLINE V ActSlope(V a) { return F::template Slope<kAct>(a, V{}); }
  static TFO_INLINE V Logistic(V z) { return F::Logistic(z); }
  static TFO_INLINE V LogisticSlope(V s) { return s * (A(1) - s); }
};

struct RnnCell {
  static constexpr RecurrentCell kCell = RecurrentCell::kRnn;

  template <class T, class Columns>
  static TFO_INLINE void Forward(const ForwardRow<T>& row, const Columns& at) {
    at.Store(row.h, 0, Columns::Act(at.Load(row.x, 0) + at.Product(row, 0)));
  }

  template <class T, class Columns>
  static TFO_INLINE void Gradient(const GradientRow<T>& row,
                                  const Columns& at) {
    const auto y = at.Load(row.y, 0);
    at.Store(row.x_grad, 0, at.Load(row.dh, 0) * Columns::ActSlope(y));
    at.Store(row.dh, 0, typename Columns::V{});
  }
};

struct GruCell {
  static constexpr RecurrentCell kCell = RecurrentCell::kGru;

  template <class T, class Columns>
  static TFO_INLINE void Forward(const ForwardRow<T>& row, const Columns& at) {
    const auto z = Columns::Logistic(at.Load(row.x, 0) + at.Product(row, 0));
    const auto r = Columns::Logistic(at.Load(row.x, 1) + at.Product(row, 1));
    const auto p = at.Product(row, 2);
    const auto n = Columns::Act(at.Load(row.x, 2) + r * p);
    at.Store(row.h, 0, n + z * (at.Load(row.h, 0) - n));
    if (row.saved == nullptr) return;
    at.Store(row.saved, 0, z);
    at.Store(row.saved, 1, r);
    at.Store(row.saved, 2, n);
    at.Store(row.saved, 3, p);
  }

  template <class T, class Columns>
  static TFO_INLINE void Gradient(const GradientRow<T>& row,
                                  const Columns& at) {
    const auto z = at.Load(row.saved, 0), r = at.Load(row.saved, 1);
    const auto n = at.Load(row.saved, 2), p = at.Load(row.saved, 3);
    const auto dh = at.Load(row.dh, 0), h = at.Load(row.h, 0);
    const auto dz = dh * (h - n) * Columns::LogisticSlope(z);
    const auto dn = (dh - dh * z) * Columns::ActSlope(n);
    const auto dr = dn * p * Columns::LogisticSlope(r);
    at.Store(row.x_grad, 0, dz);
    at.Store(row.x_grad, 1, dr);
    at.Store(row.x_grad, 2, dn);
    at.Store(row.product_grad, 0, dz);
    at.Store(row.product_grad, 1, dr);
    at.Store(row.product_grad, 2, dn * r);
    at.Store(row.dh, 0, dh * z);
  }
};

struct LstmCell {
  static constexpr RecurrentCell kCell = RecurrentCell::kLstm;

  template <class T, class Columns>
  static TFO_INLINE void Forward(const ForwardRow<T>& row, const Columns& at) {
    const auto i = Columns::Logistic(at.Load(row.x, 0) + at.Product(row, 0));
    const auto f = Columns::Logistic(at.Load(row.x, 1) + at.Product(row, 1));
    const auto g = Columns::Act(at.Load(row.x, 2) + at.Product(row, 2));
    const auto o = Columns::Logistic(at.Load(row.x, 3) + at.Product(row, 3));
    const auto c = f * at.Load(row.c, 0) + i * g;
    at.Store(row.c, 0, c);
    at.Store(row.h, 0, o * Columns::Act(c));
    if (row.saved == nullptr) return;
    at.Store(row.saved, 0, i);
    at.Store(row.saved, 1, f);
    at.Store(row.saved, 2, g);
    at.Store(row.saved, 3, o);
    at.Store(row.saved, 4, c);
  }

  template <class T, class Columns>
  static TFO_INLINE void Gradient(const GradientRow<T>& row,
                                  const Columns& at) {
    const auto i = at.Load(row.saved, 0), f = at.Load(row.saved, 1);
    const auto g = at.Load(row.saved, 2), o = at.Load(row.saved, 3);
    const auto a = Columns::Act(at.Load(row.saved, 4));
    const auto dh = at.Load(row.dh, 0);
    const auto dc = at.Load(row.dc, 0) + dh * o * Columns::ActSlope(a);
    at.Store(row.x_grad, 0, dc * g * Columns::LogisticSlope(i));
    at.Store(row.x_grad, 1, dc * at.Load(row.c, 0) * Columns::LogisticSlope(f));
    at.Store(row.x_grad, 2, dc * i * Columns::ActSlope(g));
    at.Store(row.x_grad, 3, dh * a * Columns::LogisticSlope(o));
    at.Store(row.dc, 0, dc * f);
    at.Store(row.dh, 0, typename Columns::V{});
  }
};

// Calls body(CellColumns) for units [begin, begin + n).
template <class T, class Body>
TFO_INLINE void ForUnits(const RecurrentShape& s, int64_t begin, int64_t n,
                         const Body& body) {
  const auto run = [&](auto relu) {
    ForColumns<Accumulator<T>>(
        n, [&](int64_t j, auto partial, int m) TFO_INLINE_LAMBDA {
          body(CellColumns<T, decltype(relu)::value, decltype(partial)::value>{
              s.units, begin + j, m});
        });
  };
  s.relu ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace
}  // namespace tfo::TFO_ISA

#endif  // TFO_CC_CORE_RECURRENT_CELLS_H_
