// Integers: arithmetic, carries, logic and shifts.
#include <algorithm>
#include <limits>

#include "elementwise.h"

namespace emu {
namespace {

template <class T>
struct Wider;
template <>
struct Wider<uint16_t> {
  using type = uint32_t;
};
template <>
struct Wider<int16_t> {
  using type = int32_t;
};
template <>
struct Wider<uint32_t> {
  using type = uint64_t;
};
template <>
struct Wider<int32_t> {
  using type = int64_t;
};
template <>
struct Wider<uint64_t> {
  using type = unsigned __int128;
};
template <>
struct Wider<int64_t> {
  using type = __int128;
};

struct MulLo {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;
      return T(U(U(a) * (sizeof(T) < 4 ? unsigned(U(b)) : U(b))));
    } else
      return a * b;
  }
};
struct MulHi {
  template <class T>
  T operator()(T a, T b) const {
    using W = typename Wider<T>::type;
    return T((W(a) * W(b)) >> (8 * sizeof(T)));
  }
};
struct MadLo {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(MulLo()(a, b) + c);
  }
};
struct MadHi {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(MulHi()(a, b) + c);
  }
};
struct MulWide {
  template <class W>
  W operator()(W a, W b, W) const {
    return a * b;
  }
};
struct MadWide {
  template <class W>
  W operator()(W a, W b, W c) const {
    return a * b + c;
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return T(~T(0));
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return T(-a);
    }
    return a / b;
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>) {
      if (b == T(-1)) return 0;
    }
    return a % b;
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return a < 0 ? T(-a) : a;
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    return T(-a);
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return T(~a);
  }
};
struct Cnot {
  template <class T>
  T operator()(T a) const {
    return a == 0;
  }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Shl {
  template <class T>
  T operator()(T a, uint32_t s) const {
    return s >= 8 * sizeof(T) ? T(0) : T(a << s);
  }
};
struct Shr {
  template <class T>
  T operator()(T a, uint32_t s) const {
    return s >= 8 * sizeof(T) ? (a < 0 ? T(-1) : T(0)) : T(a >> s);
  }
};
struct Sad {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(c + (a < b ? b - a : a - b));
  }
};
struct AddSat {
  int32_t operator()(int32_t a, int32_t b) const {
    return int32_t(std::clamp<int64_t>(int64_t(a) + b, INT32_MIN, INT32_MAX));
  }
};
struct SubSat {
  int32_t operator()(int32_t a, int32_t b) const {
    return int32_t(std::clamp<int64_t>(int64_t(a) - b, INT32_MIN, INT32_MAX));
  }
};
struct Mul24 {
  template <class T>
  T operator()(T a, T b) const {
    T const x = T(a << 8) >> 8, y = T(b << 8) >> 8;
    return T(uint32_t(x) * uint32_t(y));
  }
};
struct Mad24 {
  template <class T>
  T operator()(T a, T b, T c) const {
    return T(uint32_t(Mul24()(a, b)) + uint32_t(c));
  }
};

template <class T>
void carrying(Warp& w, Inst const& i, uint32_t lanes) {
  // aux: 1 reads the carry, 2 writes it, 4 subtracts, 8 multiplies low, 16 multiplies high
  using W = typename Wider<T>::type;
  for_lanes(lanes, [&](int l) {
    auto const at = [&](int j) { return w.row<T>(i.op(j))[l]; };
    T a = at(1), b = at(2);
    if (i.aux & 24) {
      T const product = i.aux & 8 ? T(a * b) : T((W(a) * W(b)) >> (8 * sizeof(T)));
      a = product, b = at(3);
    }
    uint32_t const in = i.aux & 1 ? w.carry >> l & 1 : 0;
    W const sum = i.aux & 4 ? W(a) - W(b) - in : W(a) + W(b) + in;
    w.row<T>(i.op(0))[l] = T(sum);
    if (i.aux & 2) w.carry = (w.carry & ~(1u << l)) | uint32_t(sum >> (8 * sizeof(T)) & 1) << l;
  });
}

}  // namespace

bool decode_integer(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  i.destinations = 1;
  i.cls = Class::Alu;
  auto const cc = [&](int64_t kind) {
    i.aux = kind | (p.has("cc") ? 2 : 0);
    i.exec = bits_of(i.type) == 64 ? carrying<uint64_t> : carrying<uint32_t>;
  };
  if (op == "add") {
    if (p.has("cc"))
      cc(0);
    else
      i.exec = p.has("sat") ? binary<int32_t, AddSat> : integer_binary<Add>(i.type);
  } else if (op == "sub") {
    if (p.has("cc"))
      cc(4);
    else
      i.exec = p.has("sat") ? binary<int32_t, SubSat> : integer_binary<Sub>(i.type);
  } else if (op == "addc") {
    cc(1);
  } else if (op == "subc") {
    cc(5);
  } else if (op == "mul") {
    i.exec = p.has("wide") ? integer_wide<MulWide>(i.type)
             : p.has("hi") ? integer_binary<MulHi>(i.type)
                           : integer_binary<MulLo>(i.type);
  } else if (op == "mad") {
    if (p.has("cc"))
      cc(p.has("hi") ? 16 : 8);
    else
      i.exec = p.has("wide") ? integer_wide<MadWide>(i.type)
               : p.has("hi") ? integer_ternary<MadHi>(i.type)
                             : integer_ternary<MadLo>(i.type);
  } else if (op == "madc") {
    cc(1 | (p.has("hi") ? 16 : 8));
  } else if (op == "mul24") {
    i.exec = i.type == Type::S32 ? binary<int32_t, Mul24> : binary<uint32_t, Mul24>;
  } else if (op == "mad24") {
    i.exec = i.type == Type::S32 ? ternary<int32_t, Mad24> : ternary<uint32_t, Mad24>;
  } else if (op == "div") {
    i.exec = integer_binary<Div>(i.type);
  } else if (op == "rem") {
    i.exec = integer_binary<Rem>(i.type);
  } else if (op == "min" || op == "max") {
    if (i.count() > 3) throw Error("this form of min and max is not implemented");
    i.exec = op == "max" ? integer_binary<Max>(i.type) : integer_binary<Min>(i.type);
  } else if (op == "abs") {
    i.exec = integer_unary<Abs>(i.type);
  } else if (op == "neg") {
    i.exec = integer_unary<Neg>(i.type);
  } else if (i.type != Type::Pred && (op == "and" || op == "or" || op == "xor" || op == "not")) {
    i.exec = op == "and"   ? integer_binary<And>(i.type)
             : op == "or"  ? integer_binary<Or>(i.type)
             : op == "xor" ? integer_binary<Xor>(i.type)
                           : integer_unary<Not>(i.type);
  } else if (op == "cnot") {
    i.exec = integer_unary<Cnot>(i.type);
  } else if (op == "shl") {
    i.exec = integer_shift<Shl>(i.type);
  } else if (op == "shr") {
    i.exec = integer_shift<Shr>(i.type);
  } else if (op == "sad") {
    i.exec = integer_ternary<Sad>(i.type);
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
