// Floats: arithmetic and functions.
#include <algorithm>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "rounding.h"

namespace emu {
namespace {

struct Fmul {
  template <class T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct Fdiv {
  template <class T>
  T operator()(T a, T b) const {
    return a / b;
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return std::fma(a, b, c);
  }
};
struct Fneg {
  template <class T>
  T operator()(T a) const {
    return -a;
  }
};
struct Fabs {
  template <class T>
  T operator()(T a) const {
    return std::fabs(a);
  }
};
struct Sqrt {
  template <class T>
  T operator()(T a) const {
    return std::sqrt(a);
  }
};
struct Rcp {
  template <class T>
  T operator()(T a) const {
    return T(1) / a;
  }
};
// Approximations, here as exact as double makes them.
struct Rsqrt {
  template <class T>
  T operator()(T a) const {
    return T(1.0 / std::sqrt(double(a)));
  }
};
struct Ex2 {
  template <class T>
  T operator()(T a) const {
    return T(std::exp2(double(a)));
  }
};
struct Lg2 {
  template <class T>
  T operator()(T a) const {
    return T(std::log2(double(a)));
  }
};
struct Sin {
  template <class T>
  T operator()(T a) const {
    return T(std::sin(double(a)));
  }
};
struct Cos {
  template <class T>
  T operator()(T a) const {
    return T(std::cos(double(a)));
  }
};
struct Tanh {
  template <class T>
  T operator()(T a) const {
    return T(std::tanh(double(a)));
  }
};
template <bool kMax, bool kPropagate>
struct Fminmax {
  template <class T>
  T operator()(T a, T b) const {
    if (a != a || b != b) {
      if (kPropagate || (a != a && b != b)) return sizeof(T) == 4 ? T(bit_cast<float>(0x7fffffffu)) : T(NAN);
      return a != a ? b : a;
    }
    if (a == 0 && b == 0) return kMax == std::signbit(a) ? b : a;
    return (kMax ? a > b : a < b) ? a : b;
  }
};

// Floats with rounding, flushing and saturation, one lane at a time.
template <class T, class F, int N>
void careful(Warp& w, Inst const& i, uint32_t lanes) {
  RoundingScope const scope(Rounding(i.aux >> 8));
  for_lanes(lanes, [&](int l) {
    T x[3] = {};
    for (int j = 0; j < N; ++j) {
      x[j] = w.row<T>(i.op(1 + j))[l];
      if (i.aux & kFtz) x[j] = flush(x[j]);
    }
    T volatile y;
    if constexpr (N == 1)
      y = F()(x[0]);
    else if constexpr (N == 2)
      y = F()(x[0], x[1]);
    else
      y = F()(x[0], x[1], x[2]);
    w.row<T>(i.op(0))[l] = finish<T>(y, i.aux);
  });
}

// 16-bit floats, alone or in pairs, computed in float or, where that would round twice, in double.
template <bool kBf>
struct Narrow {
  static float load(uint16_t x) { return kBf ? bf16_to_float(x) : half_to_float(x); }
  static uint16_t store(float x) { return kBf ? float_to_bf16(x) : float_to_half(x); }
  static uint16_t store(double x) { return uint16_t(encode(kBf ? kBfloat : kHalf, x)); }
};
template <bool kBf, class F, int N>
void narrow(Warp& w, Inst const& i, uint32_t lanes) {
  using H = Narrow<kBf>;
  int const halves = i.vec;
  for_lanes(lanes, [&](int l) {
    uint32_t result = 0;
    for (int h = 0; h < halves; ++h) {
      float x[3] = {};
      for (int j = 0; j < N; ++j) {
        x[j] = H::load(uint16_t(w.rows[i.op(1 + j).row + l] >> (16 * h)));
        if (i.aux & kFtz && std::fabs(x[j]) < 0x1p-14f && !kBf) x[j] = std::copysign(0.0f, x[j]);
      }
      uint16_t y;
      if constexpr (N == 3) {
        double const d = fma_to_odd(x[0], x[1], x[2]);
        y = H::store(i.aux & (kSat | kRelu) ? finish<double>(d, i.aux & (kSat | kRelu)) : d);
      } else {
        float v;
        if constexpr (N == 1)
          v = F()(x[0]);
        else
          v = F()(x[0], x[1]);
        y = H::store(finish<float>(v, i.aux & (kSat | kRelu)));
      }
      result |= uint32_t(y) << (16 * h);
    }
    w.rows[i.op(0).row + l] = result;
  });
}
void narrow_neg(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const mask = i.vec == 2 ? 0x80008000 : 0x8000;
  for_lanes(lanes, [&](int l) { w.rows[i.op(0).row + l] = w.rows[i.op(1).row + l] ^ mask; });
}
void narrow_abs(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const mask = i.vec == 2 ? 0x80008000 : 0x8000;
  for_lanes(lanes, [&](int l) { w.rows[i.op(0).row + l] = w.rows[i.op(1).row + l] & ~mask; });
}

// The three forms of a float instruction with N sources.
template <class F, int N>
void choose_float(Pending& p) {
  Inst& i = p.inst;
  i.cls = Class::Fp;
  i.aux = (p.has("ftz") ? kFtz : 0) | (p.has("sat") ? kSat : 0) | (p.has("relu") ? kRelu : 0) |
          int64_t(rounding_of(p)) << 8;
  switch (i.type) {
    case Type::F32:
      if (i.aux)
        i.exec = careful<float, F, N>;
      else if constexpr (N == 1)
        i.exec = unary<float, F>;
      else if constexpr (N == 2)
        i.exec = binary<float, F>;
      else
        i.exec = ternary<float, F>;
      break;
    case Type::F64:
      if (i.aux)
        i.exec = careful<double, F, N>;
      else if constexpr (N == 1)
        i.exec = unary<double, F>;
      else if constexpr (N == 2)
        i.exec = binary<double, F>;
      else
        i.exec = ternary<double, F>;
      break;
    case Type::F16:
    case Type::F16x2:
      i.vec = i.type == Type::F16x2 ? 2 : 1;
      i.exec = narrow<false, F, N>;
      break;
    case Type::BF16:
    case Type::BF16x2:
      i.vec = i.type == Type::BF16x2 ? 2 : 1;
      i.exec = narrow<true, F, N>;
      break;
    default:
      throw Error("not of this type");
  }
}

}  // namespace

bool decode_float(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  if (!is_float(i.type)) return false;
  i.destinations = 1;
  i.cls = Class::Alu;
  if (op == "add") {
    choose_float<Add, 2>(p);
  } else if (op == "sub") {
    choose_float<Sub, 2>(p);
  } else if (op == "mul") {
    choose_float<Fmul, 2>(p);
  } else if (op == "mad" || op == "fma") {
    choose_float<Fma, 3>(p);
  } else if (op == "div") {
    choose_float<Fdiv, 2>(p);
  } else if (op == "min" || op == "max") {
    bool const max = op == "max";
    if (p.has("xorsign") || i.count() > 3) throw Error("this form of min and max is not implemented");
    if (p.has("NaN"))
      max ? choose_float<Fminmax<true, true>, 2>(p) : choose_float<Fminmax<false, true>, 2>(p);
    else
      max ? choose_float<Fminmax<true, false>, 2>(p) : choose_float<Fminmax<false, false>, 2>(p);
  } else if (op == "abs" || op == "neg") {
    bool const neg = op == "neg";
    i.vec = i.type == Type::F16x2 || i.type == Type::BF16x2 ? 2 : 1;
    if (bits_of(i.type) == 16 || i.vec == 2)
      i.exec = neg ? narrow_neg : narrow_abs;
    else
      neg ? choose_float<Fneg, 1>(p) : choose_float<Fabs, 1>(p);
  } else if (op == "sqrt") {
    choose_float<Sqrt, 1>(p);
  } else if (op == "rcp") {
    choose_float<Rcp, 1>(p);
  } else if (op == "rsqrt") {
    choose_float<Rsqrt, 1>(p);
  } else if (op == "ex2") {
    choose_float<Ex2, 1>(p);
  } else if (op == "lg2") {
    choose_float<Lg2, 1>(p);
  } else if (op == "sin") {
    choose_float<Sin, 1>(p);
  } else if (op == "cos") {
    choose_float<Cos, 1>(p);
  } else if (op == "tanh") {
    choose_float<Tanh, 1>(p);
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
