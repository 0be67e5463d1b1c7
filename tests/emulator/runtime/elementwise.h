// Instructions that do the same to the value of each lane.
#pragma once

#include <type_traits>

#include "decode.h"

namespace emu {

template <class T>
using Slot = std::conditional_t<(sizeof(T) < 4), uint32_t, T>;
template <class T>
T get(Slot<T> const* p, int l) {
  return T(p[l]);
}
template <class T>
void put(Slot<T>* p, int l, T v) {
  if constexpr (sizeof(T) < 4)
    p[l] = std::make_unsigned_t<T>(v);
  else
    p[l] = v;
}

template <class T, class F>
void unary(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<Slot<T>>(i.op(0));
  auto* const a = w.row<Slot<T>>(i.op(1));
  for_lanes(lanes, [&](int l) { put<T>(d, l, F()(get<T>(a, l))); });
}
template <class T, class F>
void binary(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<Slot<T>>(i.op(0));
  auto* const a = w.row<Slot<T>>(i.op(1));
  auto* const b = w.row<Slot<T>>(i.op(2));
  for_lanes(lanes, [&](int l) { put<T>(d, l, F()(get<T>(a, l), get<T>(b, l))); });
}
template <class T, class F>
void ternary(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<Slot<T>>(i.op(0));
  auto* const a = w.row<Slot<T>>(i.op(1));
  auto* const b = w.row<Slot<T>>(i.op(2));
  auto* const c = w.row<Slot<T>>(i.op(3));
  for_lanes(lanes, [&](int l) { put<T>(d, l, F()(get<T>(a, l), get<T>(b, l), get<T>(c, l))); });
}
// Of a type to one twice as wide.
template <class T, class W, class F>
void widening(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<W>(i.op(0));
  auto* const a = w.row<Slot<T>>(i.op(1));
  auto* const b = w.row<Slot<T>>(i.op(2));
  auto* const c = i.count() > 3 ? w.row<W>(i.op(3)) : nullptr;
  for_lanes(lanes, [&](int l) { d[l] = F()(W(get<T>(a, l)), W(get<T>(b, l)), c ? c[l] : W(0)); });
}
// The second operand is 32 bits wide whatever the type.
template <class T, class F>
void shift(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<Slot<T>>(i.op(0));
  auto* const a = w.row<Slot<T>>(i.op(1));
  auto* const b = w.row<uint32_t>(i.op(2));
  for_lanes(lanes, [&](int l) { put<T>(d, l, F()(get<T>(a, l), b[l])); });
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return a - b;
  }
};

// Of an operation on integers, the one for a type.
template <class F>
Exec integer_unary(Type t) {
  switch (t) {
    case Type::S16:
      return unary<int16_t, F>;
    case Type::S32:
      return unary<int32_t, F>;
    case Type::S64:
      return unary<int64_t, F>;
    case Type::U16:
    case Type::B16:
      return unary<uint16_t, F>;
    case Type::U32:
    case Type::B32:
      return unary<uint32_t, F>;
    case Type::U64:
    case Type::B64:
      return unary<uint64_t, F>;
    default:
      throw Error("not of this type");
  }
}
template <class F>
Exec integer_binary(Type t) {
  switch (t) {
    case Type::S16:
      return binary<int16_t, F>;
    case Type::S32:
      return binary<int32_t, F>;
    case Type::S64:
      return binary<int64_t, F>;
    case Type::U16:
    case Type::B16:
      return binary<uint16_t, F>;
    case Type::U32:
    case Type::B32:
      return binary<uint32_t, F>;
    case Type::U64:
    case Type::B64:
      return binary<uint64_t, F>;
    default:
      throw Error("not of this type");
  }
}
template <class F>
Exec integer_ternary(Type t) {
  switch (t) {
    case Type::S16:
      return ternary<int16_t, F>;
    case Type::S32:
      return ternary<int32_t, F>;
    case Type::S64:
      return ternary<int64_t, F>;
    case Type::U16:
    case Type::B16:
      return ternary<uint16_t, F>;
    case Type::U32:
    case Type::B32:
      return ternary<uint32_t, F>;
    case Type::U64:
    case Type::B64:
      return ternary<uint64_t, F>;
    default:
      throw Error("not of this type");
  }
}
template <class F>
Exec integer_shift(Type t) {
  switch (t) {
    case Type::S16:
      return shift<int16_t, F>;
    case Type::S32:
      return shift<int32_t, F>;
    case Type::S64:
      return shift<int64_t, F>;
    case Type::U16:
    case Type::B16:
      return shift<uint16_t, F>;
    case Type::U32:
    case Type::B32:
      return shift<uint32_t, F>;
    case Type::U64:
    case Type::B64:
      return shift<uint64_t, F>;
    default:
      throw Error("not of this type");
  }
}
template <class F>
Exec integer_wide(Type t) {
  switch (t) {
    case Type::S16:
      return widening<int16_t, int32_t, F>;
    case Type::U16:
      return widening<uint16_t, uint32_t, F>;
    case Type::S32:
      return widening<int32_t, int64_t, F>;
    case Type::U32:
      return widening<uint32_t, uint64_t, F>;
    default:
      throw Error("not of this type");
  }
}

}  // namespace emu
