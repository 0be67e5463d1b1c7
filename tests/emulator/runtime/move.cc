// Moves, and what addresses are.
#include "elementwise.h"

namespace emu {
namespace {

template <class T>
void mov(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const d = w.row<T>(i.op(0));
  auto* const a = w.row<T>(i.op(1));
  for_lanes(lanes, [&](int l) { d[l] = a[l]; });
}
void mov_pack(Warp& w, Inst const& i, uint32_t lanes) {
  int const total = bits_of(i.type), to = i.width(0), from = i.width(1);
  for_lanes(lanes, [&](int l) {
    unsigned __int128 all = 0;
    int const in = total / from, out = total / to;
    for (int j = 0; j < from; ++j) {
      Operand const& o = i.ops[i.begin[1] + j];
      unsigned __int128 v = w.value(o, l);
      if (o.cls == RegClass::Quad)
        v |= static_cast<unsigned __int128>(reinterpret_cast<uint64_t*>(w.rows + o.row)[2 * l + 1]) << 64;
      if (in < 64) v &= (1ull << in) - 1;
      all |= v << (j * in);
    }
    for (int j = 0; j < to; ++j) {
      Operand const& o = i.ops[j];
      if (o.sink) continue;
      unsigned __int128 v = all >> (j * out);
      if (out < 64) v &= (1ull << out) - 1;
      w.set(o, l, uint64_t(v));
      if (o.cls == RegClass::Quad) reinterpret_cast<uint64_t*>(w.rows + o.row)[2 * l + 1] = uint64_t(v >> 64);
    }
  });
}
void mov_clock(Warp& w, Inst const& i, uint32_t lanes) {
  static thread_local uint64_t clock = 0;
  clock += 8;
  ++w.cta->cluster->events;  // who looks at the clock may wait for time to pass
  for_lanes(lanes, [&](int l) { w.set(i.op(0), l, clock); });
}
template <int kKind>
void cvta(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    uint64_t const a = w.value(i.op(1), l);
    w.set(i.op(0), l, kKind == 0 ? a : kKind == 1 ? a | kSharedWindow : kKind == 2 ? a | kLocalWindow : a & 0xffffffff);
  });
}
void isspacep(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    uint64_t const window = w.value(i.op(1), l) >> 32, hi = w.value(i.op(1), l) >> 24 & 0xff;
    bool const shared = window == kSharedWindow >> 32, local = window == kLocalWindow >> 32;
    w.set(i.op(0), l,
          i.aux == 0   ? !shared && !local
          : i.aux == 1 ? shared && (hi == 0 || hi == w.cta->rank + 1)
          : i.aux == 2 ? shared
                       : local);
  });
}

}  // namespace

bool decode_move(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  i.destinations = 1;
  i.cls = Class::Move;
  if (op == "mov") {
    if (i.width(0) > 1 || i.width(1) > 1 || bits_of(i.type) == 128) {
      i.exec = mov_pack;
    } else {
      i.exec = bits_of(i.type) == 64 ? mov<uint64_t> : mov<uint32_t>;
    }
  } else if (op == "cvta") {
    if (p.parts[1] == "to")
      i.exec = p.parts[2] == "shared" || p.parts[2] == "shared::cta" || p.parts[2] == "shared::cluster" ||
                       p.parts[2] == "local"
                   ? cvta<3>
                   : cvta<0>;
    else
      i.exec = p.parts[1].substr(0, 6) == "shared" ? cvta<1> : p.parts[1] == "local" ? cvta<2> : cvta<0>;
  } else if (op == "isspacep") {
    i.cls = Class::Alu;
    i.aux = p.parts[1] == "global"                                  ? 0
            : p.parts[1] == "shared" || p.parts[1] == "shared::cta" ? 1
            : p.parts[1] == "shared::cluster"                       ? 2
                                                                    : 3;
    i.exec = isspacep;
  } else {
    return false;
  }
  return true;
}

// A clock is read anew each time.
void use_clock(Inst& inst) { inst.exec = mov_clock; }

}  // namespace emu
