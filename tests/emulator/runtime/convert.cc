// Conversions.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "elementwise.h"
#include "rounding.h"

namespace emu {
namespace {

template <class D, class S>
void cvt_int(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<std::conditional_t<sizeof(D) == 8, uint64_t, uint32_t>>(i.op(0));
  auto* const s = w.row<std::conditional_t<sizeof(S) == 8, uint64_t, uint32_t>>(i.op(1));
  // A narrow result is extended to its register.
  using Wide = std::conditional_t<sizeof(D) == 8, uint64_t,
                                  std::conditional_t<sizeof(D) == 1 && std::is_signed_v<D>, int32_t, D>>;
  for_lanes(lanes, [&](int l) { d[l] = Wide(D(S(s[l]))); });
}
template <class D>
Exec cvt_int_from(Type s) {
  switch (s) {
    case Type::U8:
    case Type::B8:
      return cvt_int<D, uint8_t>;
    case Type::S8:
      return cvt_int<D, int8_t>;
    case Type::U16:
    case Type::B16:
      return cvt_int<D, uint16_t>;
    case Type::S16:
      return cvt_int<D, int16_t>;
    case Type::U32:
    case Type::B32:
      return cvt_int<D, uint32_t>;
    case Type::S32:
      return cvt_int<D, int32_t>;
    case Type::U64:
    case Type::B64:
      return cvt_int<D, uint64_t>;
    case Type::S64:
      return cvt_int<D, int64_t>;
    default:
      return nullptr;
  }
}
Exec cvt_int_between(Type d, Type s) {
  switch (d) {
    case Type::U8:
    case Type::B8:
      return cvt_int_from<uint8_t>(s);
    case Type::S8:
      return cvt_int_from<int8_t>(s);
    case Type::U16:
    case Type::B16:
      return cvt_int_from<uint16_t>(s);
    case Type::S16:
      return cvt_int_from<int16_t>(s);
    case Type::U32:
    case Type::B32:
      return cvt_int_from<uint32_t>(s);
    case Type::S32:
      return cvt_int_from<int32_t>(s);
    case Type::U64:
    case Type::B64:
      return cvt_int_from<uint64_t>(s);
    case Type::S64:
      return cvt_int_from<int64_t>(s);
    default:
      return nullptr;
  }
}
template <class D, class S>
void cvt_plain(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<D>(i.op(0));
  auto* const s = w.row<S>(i.op(1));
  for_lanes(lanes, [&](int l) { d[l] = D(s[l]); });
}
template <bool kBf>
void cvt_f32_narrow(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<float>(i.op(0));
  auto* const s = w.row<uint32_t>(i.op(1));
  for_lanes(lanes, [&](int l) { d[l] = kBf ? bf16_to_float(uint16_t(s[l])) : half_to_float(uint16_t(s[l])); });
}
template <bool kBf>
void cvt_narrow_f32(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<uint32_t>(i.op(0));
  auto* const s = w.row<float>(i.op(1));
  for_lanes(lanes, [&](int l) { d[l] = kBf ? float_to_bf16(s[l]) : float_to_half(s[l]); });
}
// d.hi = a, d.lo = b
template <bool kBf>
void cvt_pair_f32(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<uint32_t>(i.op(0));
  auto* const a = w.row<float>(i.op(1));
  auto* const b = w.row<float>(i.op(2));
  for_lanes(lanes, [&](int l) {
    d[l] = uint32_t(kBf ? float_to_bf16(a[l]) : float_to_half(a[l])) << 16 |
           (kBf ? float_to_bf16(b[l]) : float_to_half(b[l]));
  });
}
double round_to_integer(double x, Rounding r) {
  switch (r) {
    case Rounding::Zero:
      return std::trunc(x);
    case Rounding::Down:
      return std::floor(x);
    case Rounding::Up:
      return std::ceil(x);
    default:
      return std::nearbyint(x);
  }
}
Format const* format_of(Type t) {
  switch (t) {
    case Type::F16:
    case Type::F16x2:
      return &kHalf;
    case Type::BF16:
    case Type::BF16x2:
      return &kBfloat;
    case Type::E4M3:
    case Type::E4M3x2:
      return &kE4m3;
    case Type::E5M2:
    case Type::E5M2x2:
      return &kE5m2;
    case Type::TF32:
      return &kTf32;
    default:
      return nullptr;
  }
}
double load_float(Type t, uint64_t bits) {
  switch (t) {
    case Type::F32:
      return bit_cast<float>(uint32_t(bits));
    case Type::F64:
      return bit_cast<double>(bits);
    default:
      return decode(*format_of(t), uint32_t(bits));
  }
}
// aux: flags and rounding; aux2: 1 integral result of a float type, 2 satfinite
void cvt_any(Warp& w, Inst const& i, uint32_t lanes) {
  Type const dt = i.type, st = i.type2;
  Rounding const rounding = Rounding(i.aux >> 8);
  for_lanes(lanes, [&](int l) {
    uint64_t const bits = w.value(i.op(1), l);
    uint64_t result;
    auto const narrow_result = [&](double x) -> uint64_t {
      if (i.aux & kRelu) x = x > 0 ? x : x != x ? x : 0;
      if (i.aux & kSat && !(i.aux2 & 2)) x = x > 0 ? std::min(x, 1.0) : 0;
      uint32_t const code = encode(*format_of(dt), x, rounding, i.aux2 & 2);
      return dt == Type::TF32 ? uint64_t(code) << 13 : code;
    };
    if (is_float(st)) {
      double x = load_float(st, bits);
      if (i.aux & kFtz && st == Type::F32) x = flush(float(x));
      if (is_float(dt)) {
        if (i.aux2 & 1) x = round_to_integer(x, rounding);
        if (dt == Type::F64) {
          result = bit_cast<uint64_t>(finish<double>(x, i.aux));
        } else if (dt == Type::F32) {
          RoundingScope const scope(i.aux2 & 1 ? Rounding::Nearest : rounding);
          double volatile in = x;
          float const volatile out = float(in);
          float const f = finish<float>(out, i.aux);
          result = f != f ? 0x7fffffff : bit_cast<uint32_t>(f);
        } else {
          result = narrow_result(x);
        }
      } else {
        int const n = bits_of(dt);
        double const r = x != x ? 0 : round_to_integer(x, rounding);
        double const low = is_signed(dt) ? -std::ldexp(1.0, n - 1) : 0,
                     high = std::ldexp(1.0, is_signed(dt) ? n - 1 : n);
        if (r < low)
          result = is_signed(dt) ? uint64_t(INT64_MIN) >> 0 : 0;
        else if (r >= high)
          result = is_signed(dt) ? (n == 64 ? uint64_t(INT64_MAX) : (1ull << (n - 1)) - 1)
                                 : (n == 64 ? ~0ull : (1ull << n) - 1);
        else
          result = is_signed(dt) ? uint64_t(int64_t(r)) : uint64_t(r);
        if (r < low && is_signed(dt)) result = uint64_t(-(n == 64 ? 0 : (1ll << (n - 1)))) | (n == 64 ? 1ull << 63 : 0);
      }
    } else {
      int const n = bits_of(st);
      uint64_t const raw = n == 64 ? bits : bits & ((1ull << n) - 1);
      int64_t const s = is_signed(st) ? int64_t(raw << (64 - n)) >> (64 - n) : int64_t(raw);
      bool const huge = !is_signed(st) && s < 0;
      RoundingScope const scope(rounding);
      int64_t volatile vs = s;
      uint64_t volatile vu = raw;
      if (dt == Type::F32) {
        float const volatile f = huge ? float(vu) : float(vs);
        result = bit_cast<uint32_t>(float(f));
      } else if (dt == Type::F64) {
        double const volatile f = huge ? double(vu) : double(vs);
        result = bit_cast<uint64_t>(double(f));
      } else if (is_float(dt)) {
        result = narrow_result(huge ? double(raw) : double(s));
      } else if (!(i.aux & kSat)) {
        int const m = 64 - bits_of(dt);
        result = is_signed(dt) ? uint64_t(int64_t(uint64_t(s) << m) >> m) : uint64_t(s) << m >> m;
      } else {
        int const m = bits_of(dt);
        __int128 v = huge ? static_cast<__int128>(raw) : static_cast<__int128>(s);
        __int128 const low = is_signed(dt) ? -(static_cast<__int128>(1) << (m - 1)) : 0;
        __int128 const high = (static_cast<__int128>(1) << (is_signed(dt) ? m - 1 : m)) - 1;
        result = uint64_t(v < low ? low : v > high ? high : v);
      }
    }
    if (i.op(0).cls == RegClass::Word && bits_of(dt) == 16) result &= 0xffff;
    w.set(i.op(0), l, result);
  });
}
// Of pairs to pairs, or of two values to a pair.
void cvt_pair(Warp& w, Inst const& i, uint32_t lanes) {
  Type const dt = i.type, st = i.type2;
  int const out = bits_of(dt) / 2;
  bool const two = i.count() > 2;
  for_lanes(lanes, [&](int l) {
    double high, low;
    if (two) {
      high = load_float(st, w.value(i.op(1), l)), low = load_float(st, w.value(i.op(2), l));
    } else {
      int const in = bits_of(st) / 2;
      uint64_t const bits = w.value(i.op(1), l), mask = (1ull << in) - 1;
      high = load_float(st, bits >> in & mask), low = load_float(st, bits & mask);
    }
    auto const code = [&](double x) -> uint32_t {
      if (i.aux & kRelu) x = x > 0 ? x : x != x ? x : 0;
      return encode(*format_of(dt), x, Rounding(i.aux >> 8), i.aux2 & 2);
    };
    w.set(i.op(0), l, code(high) << out | code(low));
  });
}
template <bool kTruncate>
void cvt_s32_f32(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<int32_t>(i.op(0));
  auto* const a = w.row<float>(i.op(1));
  for_lanes(lanes, [&](int l) {
    float const x = a[l], r = kTruncate ? std::trunc(x) : std::nearbyint(x);
    d[l] = x != x ? 0 : r >= 0x1p31f ? INT32_MAX : r < -0x1p31f ? INT32_MIN : int32_t(r);
  });
}
// A pair of fp8 to halves: exact, by table.
template <bool kE5m2>
void cvt_half_fp8(Warp& w, Inst const& i, uint32_t lanes) {
  static auto const table = [] {
    std::array<uint16_t, 256> t;
    for (int c = 0; c < 256; ++c) t[c] = float_to_half(kE5m2 ? byte_tables().e5m2[c] : byte_tables().e4m3[c]);
    return t;
  }();
  auto* const d = w.row<uint32_t>(i.op(0));
  auto* const a = w.row<uint32_t>(i.op(1));
  for_lanes(lanes, [&](int l) { d[l] = uint32_t(table[a[l] >> 8 & 0xff]) << 16 | table[a[l] & 0xff]; });
}
void cvt_pack(Warp& w, Inst const& i, uint32_t lanes) {
  int const n = bits_of(i.type);
  int64_t const low = is_signed(i.type) ? -(1ll << (n - 1)) : 0, high = (1ll << (is_signed(i.type) ? n - 1 : n)) - 1;
  for_lanes(lanes, [&](int l) {
    auto const clamp = [&](int j) {
      uint32_t const raw = w.rows[i.op(j).row + l];
      int64_t const v = is_signed(i.type2) ? int64_t(int32_t(raw)) : int64_t(raw);
      return uint32_t(std::clamp(v, low, high)) & ((1u << n) - 1);
    };
    uint32_t r = clamp(1) << n | clamp(2);
    if (i.count() > 3) r |= w.rows[i.op(3).row + l] << (2 * n);
    w.rows[i.op(0).row + l] = r;
  });
}

}  // namespace

bool decode_convert(Pending& p) {
  if (p.parts[0] != "cvt") return false;
  Inst& i = p.inst;
  i.destinations = 1;
  i.cls = Class::Convert;
  if (p.parts[1] == "pack") {
    i.type = type_of(p.parts[3]);
    i.type2 = type_of(p.parts[4]);
    i.exec = cvt_pack;
    return true;
  }
  std::vector<Type> types;
  for (size_t j = 1; j < p.parts.size(); ++j)
    if (Type const t = type_of(p.parts[j]); t != Type::None) types.push_back(t);
  if (types.size() < 2) throw Error("needs two types");
  Type const dt = i.type = types[0], st = i.type2 = types[1];
  Rounding const rounding = rounding_of(p);
  bool integral = false;
  for (auto part : p.parts) integral |= part == "rni" || part == "rzi" || part == "rmi" || part == "rpi";
  i.aux = (p.has("ftz") ? kFtz : 0) | (p.has("sat") ? kSat : 0) | (p.has("relu") ? kRelu : 0) | int64_t(rounding) << 8;
  i.aux2 = (is_float(dt) && is_float(st) && integral ? 1 : 0) | (p.has("satfinite") ? 2 : 0);
  bool const plain = i.aux == 0 && i.aux2 == 0;
  bool const pair = dt == Type::F16x2 || dt == Type::BF16x2 || dt == Type::E4M3x2 || dt == Type::E5M2x2;
  if (pair) {
    i.exec = cvt_pair;
    if (plain && dt == Type::F16x2 && st == Type::E4M3x2) i.exec = cvt_half_fp8<false>;
    if (plain && dt == Type::F16x2 && st == Type::E5M2x2) i.exec = cvt_half_fp8<true>;
    if (plain && st == Type::F32 && dt == Type::F16x2) i.exec = cvt_pair_f32<false>;
    if (plain && st == Type::F32 && dt == Type::BF16x2) i.exec = cvt_pair_f32<true>;
    return true;
  }
  i.exec = cvt_any;
  // A register may be wider than what is read of it, or written to it.
  auto const fits = [](Type t, Operand const& o) { return (bits_of(t) == 64) == (o.cls == RegClass::Pair); };
  if (!fits(dt, i.op(0)) || !fits(st, i.op(1))) return true;
  if (!is_float(dt) && !is_float(st) && !p.has("sat")) i.exec = cvt_int_between(dt, st);
  if (dt == Type::S32 && st == Type::F32 && (i.aux & 0xff) == 0 && i.aux2 == 0) {
    if (rounding == Rounding::Nearest) i.exec = cvt_s32_f32<false>;
    if (rounding == Rounding::Zero) i.exec = cvt_s32_f32<true>;
  }
  if (!plain) return true;
  if (dt == Type::F32 && st == Type::F16) i.exec = cvt_f32_narrow<false>;
  if (dt == Type::F32 && st == Type::BF16) i.exec = cvt_f32_narrow<true>;
  if (dt == Type::F16 && st == Type::F32) i.exec = cvt_narrow_f32<false>;
  if (dt == Type::BF16 && st == Type::F32) i.exec = cvt_narrow_f32<true>;
  if (dt == Type::F32 && st == Type::S32) i.exec = cvt_plain<float, int32_t>;
  if (dt == Type::F32 && st == Type::U32) i.exec = cvt_plain<float, uint32_t>;
  if (dt == Type::F64 && st == Type::F32) i.exec = cvt_plain<double, float>;
  return true;
}

}  // namespace emu
