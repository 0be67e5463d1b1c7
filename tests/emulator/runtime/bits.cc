// Fields, bytes and bits of integers.
#include <algorithm>

#include "elementwise.h"

namespace emu {
namespace {

template <class T>
void bfe(Warp& w, Inst const& i, uint32_t lanes) {
  constexpr int kBits = 8 * sizeof(T);
  using U = std::make_unsigned_t<T>;
  for_lanes(lanes, [&](int l) {
    T const a = w.row<T>(i.op(1))[l];
    uint32_t const pos = w.row<uint32_t>(i.op(2))[l] & 0xff, len = w.row<uint32_t>(i.op(3))[l] & 0xff;
    U const sign = std::is_signed_v<T> && len != 0 ? U(a) >> std::min<uint32_t>(pos + len - 1, kBits - 1) & 1 : 0;
    U r = 0;
    for (uint32_t j = 0; j < uint32_t(kBits); ++j)
      r |= (j < len && pos + j < uint32_t(kBits) ? U(a) >> (pos + j) & 1 : sign) << j;
    w.row<T>(i.op(0))[l] = T(r);
  });
}
template <class T>
void bfi(Warp& w, Inst const& i, uint32_t lanes) {
  constexpr uint32_t kBits = 8 * sizeof(T);
  for_lanes(lanes, [&](int l) {
    T const a = w.row<T>(i.op(1))[l];
    T f = w.row<T>(i.op(2))[l];
    uint32_t const pos = w.row<uint32_t>(i.op(3))[l] & 0xff, len = w.row<uint32_t>(i.op(4))[l] & 0xff;
    for (uint32_t j = 0; j < len && pos + j < kBits; ++j) f = (f & ~(T(1) << (pos + j))) | (a >> j & 1) << (pos + j);
    w.row<T>(i.op(0))[l] = f;
  });
}
template <class T, class F>
void to_word(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) { w.rows[i.op(0).row + l] = F()(w.row<T>(i.op(1))[l]); });
}
struct Popc {
  template <class T>
  uint32_t operator()(T x) const {
    return __builtin_popcountll(x);
  }
};
struct Clz {
  template <class T>
  uint32_t operator()(T x) const {
    return x == 0 ? 8 * sizeof(T) : __builtin_clzll(uint64_t(x)) - (64 - 8 * sizeof(T));
  }
};
template <bool kShift>
struct Bfind {
  template <class T>
  uint32_t operator()(T x) const {
    if constexpr (std::is_signed_v<T>) {
      if (x < 0) x = ~x;
    }
    using U = std::make_unsigned_t<T>;
    if (x == 0) return ~0u;
    uint32_t const top = 63 - __builtin_clzll(uint64_t(U(x)));
    return kShift ? 8 * sizeof(T) - 1 - top : top;
  }
};
struct Brev {
  template <class T>
  T operator()(T x) const {
    T r = 0;
    for (unsigned j = 0; j < 8 * sizeof(T); ++j) r |= (x >> j & 1) << (8 * sizeof(T) - 1 - j);
    return r;
  }
};

void lop3(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<uint32_t>(i.op(0));
  auto* const a = w.row<uint32_t>(i.op(1));
  auto* const b = w.row<uint32_t>(i.op(2));
  auto* const c = w.row<uint32_t>(i.op(3));
  uint32_t m[8];
  for (int j = 0; j < 8; ++j) m[j] = i.aux >> j & 1 ? kAll : 0;
  for_lanes(lanes, [&](int l) {
    uint32_t const x = a[l], y = b[l], z = c[l];
    d[l] = (~x & ~y & ~z & m[0]) | (~x & ~y & z & m[1]) | (~x & y & ~z & m[2]) | (~x & y & z & m[3]) |
           (x & ~y & ~z & m[4]) | (x & ~y & z & m[5]) | (x & y & ~z & m[6]) | (x & y & z & m[7]);
  });
}
void shf(Warp& w, Inst const& i, uint32_t lanes) {  // aux: 1 right, 2 clamp
  for_lanes(lanes, [&](int l) {
    uint64_t const both = uint64_t(w.rows[i.op(2).row + l]) << 32 | w.rows[i.op(1).row + l];
    uint32_t s = w.rows[i.op(3).row + l];
    s = i.aux & 2 ? std::min(s, 32u) : s & 31;
    w.rows[i.op(0).row + l] = i.aux & 1 ? uint32_t(both >> s)
                              : s == 0  ? uint32_t(both >> 32)
                                        : uint32_t(both >> (32 - s));
  });
}
void prmt(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    uint64_t const both = uint64_t(w.rows[i.op(2).row + l]) << 32 | w.rows[i.op(1).row + l];
    uint32_t const s = w.rows[i.op(3).row + l];
    uint32_t select[4];
    uint32_t const n = s & 3;
    switch (i.aux) {
      case 1:
        for (uint32_t j = 0; j < 4; ++j) select[j] = n + j;
        break;  // f4e
      case 2:
        for (uint32_t j = 0; j < 4; ++j) select[j] = (n - j) & 7;
        break;  // b4e
      case 3:
        for (uint32_t j = 0; j < 4; ++j) select[j] = n;
        break;  // rc8
      case 4:
        for (uint32_t j = 0; j < 4; ++j) select[j] = std::max(j, n);
        break;  // ecl
      case 5:
        for (uint32_t j = 0; j < 4; ++j) select[j] = std::min(j, n);
        break;  // ecr
      case 6:
        for (uint32_t j = 0; j < 4; ++j) select[j] = (n & 1) * 2 + (j & 1);
        break;  // rc16
      default:
        for (uint32_t j = 0; j < 4; ++j) select[j] = s >> (4 * j) & 15;
    }
    uint32_t r = 0;
    for (int j = 0; j < 4; ++j) {
      uint32_t byte = both >> (8 * (select[j] & 7)) & 0xff;
      if (i.aux == 0 && select[j] & 8) byte = byte & 0x80 ? 0xff : 0;
      r |= byte << (8 * j);
    }
    w.rows[i.op(0).row + l] = r;
  });
}
void dp4a(Warp& w, Inst const& i,
          uint32_t lanes) {  // aux: 1 a signed, 2 b signed, 4 two 16-bit values of a, 8 the high half of b
  for_lanes(lanes, [&](int l) {
    uint32_t const a = w.rows[i.op(1).row + l], b = w.rows[i.op(2).row + l];
    uint32_t sum = w.rows[i.op(3).row + l];
    for (int j = 0; j < (i.aux & 4 ? 2 : 4); ++j) {
      int32_t x, y;
      if (i.aux & 4) {
        uint32_t const half = a >> (16 * j) & 0xffff, byte = b >> (8 * (j + (i.aux & 8 ? 2 : 0))) & 0xff;
        x = i.aux & 1 ? int16_t(half) : int32_t(half), y = i.aux & 2 ? int8_t(byte) : int32_t(byte);
      } else {
        uint32_t const p = a >> (8 * j) & 0xff, q = b >> (8 * j) & 0xff;
        x = i.aux & 1 ? int8_t(p) : int32_t(p), y = i.aux & 2 ? int8_t(q) : int32_t(q);
      }
      sum += uint32_t(x * y);
    }
    w.rows[i.op(0).row + l] = sum;
  });
}

}  // namespace

bool decode_bits(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  i.destinations = 1;
  i.cls = Class::Alu;
  if (op == "shf") {
    i.aux = (p.has("r") ? 1 : 0) | (p.has("clamp") ? 2 : 0);
    i.exec = shf;
  } else if (op == "lop3") {
    if (i.width(0) > 1) throw Error("lop3 with a predicate is not implemented");
    i.aux = i.op(4).imm;
    i.exec = lop3;
  } else if (op == "prmt") {
    i.aux = p.has("f4e")    ? 1
            : p.has("b4e")  ? 2
            : p.has("rc8")  ? 3
            : p.has("ecl")  ? 4
            : p.has("ecr")  ? 5
            : p.has("rc16") ? 6
                            : 0;
    i.exec = prmt;
  } else if (op == "dp4a" || op == "dp2a") {
    size_t const n = p.parts.size();
    i.aux = (p.parts[n - 2] == "s32" ? 1 : 0) | (p.parts[n - 1] == "s32" ? 2 : 0) | (op == "dp2a" ? 4 : 0) |
            (p.has("hi") ? 8 : 0);
    i.exec = dp4a;
  } else if (op == "bfe") {
    i.exec = i.type == Type::S32     ? bfe<int32_t>
             : i.type == Type::S64   ? bfe<int64_t>
             : bits_of(i.type) == 64 ? bfe<uint64_t>
                                     : bfe<uint32_t>;
  } else if (op == "bfi") {
    i.exec = bits_of(i.type) == 64 ? bfi<uint64_t> : bfi<uint32_t>;
  } else if (op == "popc") {
    i.exec = bits_of(i.type) == 64 ? to_word<uint64_t, Popc> : to_word<uint32_t, Popc>;
  } else if (op == "clz") {
    i.exec = bits_of(i.type) == 64 ? to_word<uint64_t, Clz> : to_word<uint32_t, Clz>;
  } else if (op == "bfind") {
    if (p.has("shiftamt"))
      i.exec = i.type == Type::S32   ? to_word<int32_t, Bfind<true>>
               : i.type == Type::S64 ? to_word<int64_t, Bfind<true>>
               : i.type == Type::U64 ? to_word<uint64_t, Bfind<true>>
                                     : to_word<uint32_t, Bfind<true>>;
    else
      i.exec = i.type == Type::S32   ? to_word<int32_t, Bfind<false>>
               : i.type == Type::S64 ? to_word<int64_t, Bfind<false>>
               : i.type == Type::U64 ? to_word<uint64_t, Bfind<false>>
                                     : to_word<uint32_t, Bfind<false>>;
  } else if (op == "brev") {
    i.exec = integer_unary<Brev>(i.type);
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
