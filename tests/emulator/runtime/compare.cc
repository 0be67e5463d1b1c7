// Comparisons, choices by them, and logic of predicates.
#include <cmath>

#include "elementwise.h"
#include "formats.h"

namespace emu {
namespace {

enum Compare { Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan };
Compare compare_of(Pending const& p) {
  static std::pair<char const*, Compare> const names[] = {
      {"eq", Eq},   {"ne", Ne},   {"lt", Lt},   {"le", Le},   {"gt", Gt},   {"ge", Ge},
      {"lo", Lt},   {"ls", Le},   {"hi", Gt},   {"hs", Ge},   {"equ", Equ}, {"neu", Neu},
      {"ltu", Ltu}, {"leu", Leu}, {"gtu", Gtu}, {"geu", Geu}, {"num", Num}, {"nan", Nan}};
  for (auto const& [name, c] : names)
    if (p.parts[1] == name) return c;
  throw Error("unknown comparison");
}
template <class T>
bool compare(int c, T a, T b) {
  bool const unordered = a != a || b != b;
  switch (c) {
    case Eq:
      return a == b;
    case Ne:
      return !unordered && a != b;
    case Lt:
      return a < b;
    case Le:
      return a <= b;
    case Gt:
      return a > b;
    case Ge:
      return a >= b;
    case Equ:
      return unordered || a == b;
    case Neu:
      return a != b;
    case Ltu:
      return !(a >= b);
    case Leu:
      return !(a > b);
    case Gtu:
      return !(a <= b);
    case Geu:
      return !(a < b);
    case Num:
      return !unordered;
    default:
      return unordered;
  }
}
template <class T>
uint32_t compare_lanes(Warp& w, Inst const& i, uint32_t lanes, int a, int b) {
  auto* const x = w.row<Slot<T>>(i.op(a));
  auto* const y = w.row<Slot<T>>(i.op(b));
  uint32_t r = 0;
  auto const loop = [&](auto f) {
    for_lanes(lanes, [&](int l) { r |= uint32_t(f(get<T>(x, l), get<T>(y, l))) << l; });
  };
  switch (i.aux2) {
    case Eq:
      loop([](T p, T q) { return p == q; });
      break;
    case Ne:
      if constexpr (std::is_integral_v<T>) {
        loop([](T p, T q) { return p != q; });
        break;
      }
      [[fallthrough]];
    default: {
      int const c = i.aux2;
      loop([c](T p, T q) { return compare<T>(c, p, q); });
    } break;
    case Lt:
      loop([](T p, T q) { return p < q; });
      break;
    case Le:
      loop([](T p, T q) { return p <= q; });
      break;
    case Gt:
      loop([](T p, T q) { return p > q; });
      break;
    case Ge:
      loop([](T p, T q) { return p >= q; });
      break;
  }
  return r;
}
uint32_t compare_any(Warp& w, Inst const& i, uint32_t lanes, int a, int b, int half = 0) {
  switch (i.type) {
    case Type::S16:
      return compare_lanes<int16_t>(w, i, lanes, a, b);
    case Type::U16:
    case Type::B16:
      return compare_lanes<uint16_t>(w, i, lanes, a, b);
    case Type::S32:
      return compare_lanes<int32_t>(w, i, lanes, a, b);
    case Type::U32:
    case Type::B32:
      return compare_lanes<uint32_t>(w, i, lanes, a, b);
    case Type::S64:
      return compare_lanes<int64_t>(w, i, lanes, a, b);
    case Type::U64:
    case Type::B64:
      return compare_lanes<uint64_t>(w, i, lanes, a, b);
    case Type::F32:
      return compare_lanes<float>(w, i, lanes, a, b);
    case Type::F64:
      return compare_lanes<double>(w, i, lanes, a, b);
    default: {
      bool const bf = i.type == Type::BF16 || i.type == Type::BF16x2;
      uint32_t r = 0;
      for_lanes(lanes, [&](int l) {
        auto const load = [&](int j) {
          uint16_t const h = uint16_t(w.rows[i.op(j).row + l] >> (16 * half));
          return bf ? bf16_to_float(h) : half_to_float(h);
        };
        r |= uint32_t(compare<float>(i.aux2, load(a), load(b))) << l;
      });
      return r;
    }
  }
}
void set_pred(Warp& w, Operand const& o, uint32_t lanes, uint32_t value) {
  if (!o.sink) w.rows[o.row] = (w.rows[o.row] & ~lanes) | (value & lanes);
}
// aux: 1 and, 2 or, 3 xor with operand 3; 8 two halves
void setp(Warp& w, Inst const& i, uint32_t lanes) {
  auto const combine = [&](uint32_t r) {
    if ((i.aux & 7) == 0) return r;
    uint32_t const c = w.pred(i.op(3));
    return (i.aux & 7) == 1 ? r & c : (i.aux & 7) == 2 ? r | c : r ^ c;
  };
  uint32_t const r = compare_any(w, i, lanes, 1, 2);
  bool const two = i.width(0) > 1;
  uint32_t const q = i.aux & 8 ? combine(compare_any(w, i, lanes, 1, 2, 1)) : combine(~r);
  uint32_t const p = combine(r);
  set_pred(w, i.ops[0], lanes, p);
  if (two) set_pred(w, i.ops[1], lanes, q);
}
void set(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const low = compare_any(w, i, lanes, 1, 2), high = i.vec == 2 ? compare_any(w, i, lanes, 1, 2, 1) : 0;
  uint32_t const c = (i.aux & 7) ? w.pred(i.op(3)) : 0;
  auto const combine = [&](uint32_t r) {
    return (i.aux & 7) == 0 ? r : (i.aux & 7) == 1 ? r & c : (i.aux & 7) == 2 ? r | c : r ^ c;
  };
  for_lanes(lanes, [&](int l) {
    auto const code = [&](uint32_t r) -> uint64_t {
      if (!(combine(r) >> l & 1)) return 0;
      switch (i.type2) {
        case Type::F32:
          return 0x3f800000;
        case Type::F16:
        case Type::F16x2:
          return 0x3c00;
        case Type::BF16:
        case Type::BF16x2:
          return 0x3f80;
        case Type::U16:
        case Type::S16:
          return 0xffff;
        default:
          return i.vec == 2 ? 0xffff : 0xffffffff;
      }
    };
    w.set(i.op(0), l, code(low) | (i.vec == 2 ? code(high) << 16 : 0));
  });
}
template <class T>
void selp(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<T>(i.op(0));
  auto* const a = w.row<T>(i.op(1));
  auto* const b = w.row<T>(i.op(2));
  uint32_t const p = w.pred(i.op(3));
  for_lanes(lanes, [&](int l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
}
template <class T>
void slct(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    bool const first = i.type2 == Type::F32 ? w.row<float>(i.op(3))[l] >= 0 : w.row<int32_t>(i.op(3))[l] >= 0;
    w.row<T>(i.op(0))[l] = w.row<T>(i.op(first ? 1 : 2))[l];
  });
}
template <class T>
void copysign_(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) { w.row<T>(i.op(0))[l] = std::copysign(w.row<T>(i.op(2))[l], w.row<T>(i.op(1))[l]); });
}
template <class T>
void testp(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    T const x = w.row<T>(i.op(1))[l];
    int const c = std::fpclassify(x);
    bool r = false;
    switch (i.aux) {
      case 0:
        r = std::isfinite(x);
        break;
      case 1:
        r = std::isinf(x);
        break;
      case 2:
        r = !std::isnan(x);
        break;
      case 3:
        r = std::isnan(x);
        break;
      case 4:
        r = c == FP_NORMAL;
        break;
      case 5:
        r = c == FP_SUBNORMAL;
        break;
    }
    w.set(i.op(0), l, r);
  });
}
void pred_logic(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const a = w.pred(i.op(1)), b = i.count() > 2 ? w.pred(i.op(2)) : 0;
  set_pred(w, i.op(0), lanes, i.aux == 0 ? a & b : i.aux == 1 ? a | b : i.aux == 2 ? a ^ b : i.aux == 3 ? ~a : a);
}

}  // namespace

bool decode_compare(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  i.destinations = 1;
  i.cls = Class::Alu;
  if (op == "setp" || op == "set") {
    i.aux2 = compare_of(p);
    i.aux = p.has("and") ? 1 : p.has("or") ? 2 : p.has("xor") ? 3 : 0;
    if (op == "setp") {
      if (i.type == Type::F16x2 || i.type == Type::BF16x2) i.aux |= 8;
      i.exec = setp;
    } else {
      i.type2 = type_of(p.parts[p.parts.size() - 2]);
      i.vec = i.type == Type::F16x2 || i.type == Type::BF16x2 ? 2 : 1;
      i.exec = set;
    }
  } else if (op == "selp") {
    i.exec = bits_of(i.type) == 64 ? selp<uint64_t> : selp<uint32_t>;
  } else if (op == "slct") {
    i.type2 = i.type;
    i.type = type_of(p.parts[p.parts.size() - 2]);
    i.exec = bits_of(i.type) == 64 ? slct<uint64_t> : slct<uint32_t>;
  } else if (op == "copysign") {
    i.exec = i.type == Type::F64 ? copysign_<double> : copysign_<float>;
  } else if (op == "testp") {
    i.aux = p.has("finite")       ? 0
            : p.has("infinite")   ? 1
            : p.has("number")     ? 2
            : p.has("notanumber") ? 3
            : p.has("normal")     ? 4
                                  : 5;
    i.exec = i.type == Type::F64 ? testp<double> : testp<float>;
  } else if (i.type == Type::Pred && (op == "and" || op == "or" || op == "xor" || op == "not")) {
    i.aux = op == "and" ? 0 : op == "or" ? 1 : op == "xor" ? 2 : 3;
    i.exec = pred_logic;
  } else if (i.type == Type::Pred && op == "mov") {
    i.aux = 4;
    i.exec = pred_logic;
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
