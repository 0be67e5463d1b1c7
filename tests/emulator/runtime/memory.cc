// Loads, stores, atomics and fences.
#include "memory.h"

#include <algorithm>
#include <cmath>

#include "decode.h"
#include "formats.h"

namespace emu {
namespace {

Space space_of(Pending& p) {
  for (size_t i = 1; i < p.parts.size(); ++i) {
    auto const part = p.parts[i];
    if (part == "global") return Space::Global;
    if (part == "shared" || part == "shared::cta") return Space::Shared;
    if (part == "shared::cluster") {
      p.inst.cluster_space = true;
      return Space::Shared;
    }
    if (part == "local") return Space::Local;
    if (part.substr(0, 5) == "param") return Space::Param;
    if (part == "const") return Space::Const;
  }
  return Space::Generic;
}

// Wavefronts: of each pass over up to 128 bytes, the most distinct words that lie in one bank.
void count_shared(Warp& w, uint64_t const* addresses, uint32_t lanes, uint32_t size) {
  int const groups = size == 16 ? 4 : size == 8 ? 2 : 1;
  Cluster& c = *w.cta->cluster;
  for (int g = 0; g < groups; ++g) {
    uint32_t const part = lanes & (groups == 1 ? kAll : groups == 2 ? 0xffffu << (16 * g) : 0xffu << (8 * g));
    if (part == 0) continue;
    std::vector<uint64_t> words;
    for_lanes(part, [&](int l) {
      for (uint32_t b = 0; b < size; b += 4) words.push_back((addresses[l] + b) / 4);
    });
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    int banks[32] = {}, most = 0;
    for (uint64_t word : words) most = std::max(most, ++banks[word % 32]);
    c.shared_wavefronts += most;
    c.shared_ideal += (words.size() + 31) / 32;
  }
}

void load(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const bytes = bytes_of(i.type), size = bytes * i.vec;
  bool const extend = is_signed(i.type) && !is_float(i.type) && bytes < 8;
  Operand const& base = i.op(1);
  uint64_t addresses[32];
  bool const stats = Options::get().stats;
  for_lanes(lanes, [&](int l) {
    uint64_t const a = addresses[l] = address(w, base, l);
    uint8_t const* const p = resolve(w, i, l, i.space, a, size, Access::Read);
    uint8_t const* const state = p != nullptr && !w.defined.empty() ? shared_state(w, p) : nullptr;
    for (int j = 0; j < i.vec; ++j) {
      Operand const& o = i.ops[j];
      if (o.sink) continue;
      if (state != nullptr && !all_defined(state + j * bytes, bytes))
        w.undefine(o, l, &i - w.cta->launch->kernel->code.data());
      if (p == nullptr) {
        w.set(o, l, 0);
        continue;
      }
      if (bytes == 4 && o.cls == RegClass::Word) {
        std::memcpy(w.rows + o.row + l, p + 4 * j, 4);
      } else if (bytes == 16) {
        std::memcpy(w.rows + o.row + 4 * l, p + 16 * j, 16);
      } else {
        uint64_t v = 0;
        std::memcpy(&v, p + bytes * j, bytes);
        if (extend) v = uint64_t(int64_t(v << (64 - 8 * bytes)) >> (64 - 8 * bytes));
        w.set(o, l, v);
      }
    }
  });
  if (stats && i.space == Space::Global) count_global(w, addresses, lanes, size, false);
  if (stats && i.space == Space::Shared) count_shared(w, addresses, lanes, size);
}

void store(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const bytes = bytes_of(i.type), size = bytes * i.vec;
  Operand const& base = i.op(0);
  uint64_t addresses[32];
  if (i.space != Space::Local) ++w.cta->cluster->events;
  for_lanes(lanes, [&](int l) {
    uint64_t const a = addresses[l] = address(w, base, l);
    uint8_t* const p = resolve(w, i, l, i.space, a, size, Access::Write);
    if (p == nullptr) return;
    uint8_t* const state = !w.defined.empty() ? shared_state(w, p) : nullptr;
    uint8_t before[64];
    bool const races =
        Options::get().check_global_races && i.space != Space::Param && p == reinterpret_cast<uint8_t*>(a);
    if (races) std::memcpy(before, p, size);
    for (int j = 0; j < i.vec; ++j) {
      Operand const& o = i.ops[1 + j];
      if (w.undefined(o, l)) {
        if (state != nullptr) {
          for (uint32_t b = 0; b < bytes; ++b) state[j * bytes + b] &= ~kDefined;
        } else if (i.space != Space::Local && (i.space != Space::Generic || a >> 32 != kLocalWindow >> 32)) {
          w.cta->launch->report_undefined(w, i, l, "what it stores", w.origin[o.id]);
        }
      }
      if (bytes == 16) {
        std::memcpy(p + 16 * j, w.rows + o.row + 4 * l, 16);
      } else {
        uint64_t const v = w.value(o, l);
        std::memcpy(p + bytes * j, &v, bytes);
      }
    }
    if (races) global_access(w, i, l, a, size, Access::Write, before);
  });
  bool const stats = Options::get().stats;
  if (stats && i.space == Space::Global) count_global(w, addresses, lanes, size, true);
  if (stats && i.space == Space::Shared) count_shared(w, addresses, lanes, size);
}

enum AtomicOp { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
std::mutex atomic_mutexes[64];

template <class T>
T apply(int op, T old, T a, T b) {
  switch (op) {
    case kAdd:
      return old + a;
    case kMin:
      return a < old ? a : old;
    case kMax:
      return a > old ? a : old;
    case kExch:
      return a;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case kAnd:
        return old & a;
      case kOr:
        return old | a;
      case kXor:
        return old ^ a;
      case kCas:
        return old == a ? b : old;
      case kInc:
        return old >= a ? 0 : old + 1;
      case kDec:
        return old == 0 || old > a ? a : old - 1;
      default:
        break;
    }
  }
  throw Error("unknown atomic");
}
uint64_t apply_bits(Type t, int op, uint64_t old, uint64_t a, uint64_t b) {
  switch (t) {
    case Type::S32:
      return uint32_t(apply<int32_t>(op, old, a, b));
    case Type::U32:
    case Type::B32:
      return apply<uint32_t>(op, old, a, b);
    case Type::S64:
      return apply<int64_t>(op, old, a, b);
    case Type::U64:
    case Type::B64:
      return apply<uint64_t>(op, old, a, b);
    case Type::B16:
    case Type::U16:
      return apply<uint16_t>(op, old, a, b);
    case Type::F32:
      return bit_cast<uint32_t>(apply<float>(op, bit_cast<float>(uint32_t(old)), bit_cast<float>(uint32_t(a)), 0));
    case Type::F64:
      return bit_cast<uint64_t>(apply<double>(op, bit_cast<double>(old), bit_cast<double>(a), 0));
    case Type::F16:
    case Type::BF16:
    case Type::F16x2:
    case Type::BF16x2: {
      bool const bf = t == Type::BF16 || t == Type::BF16x2;
      auto const one = [&](uint16_t x, uint16_t y) -> uint32_t {
        float const r =
            apply<float>(op, bf ? bf16_to_float(x) : half_to_float(x), bf ? bf16_to_float(y) : half_to_float(y), 0);
        return bf ? float_to_bf16(r) : float_to_half(r);
      };
      return one(old, a) | (bits_of(t) == 32 ? one(old >> 16, a >> 16) << 16 : 0);
    }
    default:
      throw Error("atomic of a type that is not implemented");
  }
}
// aux: the operation; aux2: where the address is among the operands
void atomic(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const bytes = bytes_of(i.type);
  int const at = i.aux2;
  ++w.cta->cluster->events;
  for (uint32_t m = lanes; m != 0; m &= m - 1) {
    int const l = __builtin_ctz(m);
    uint64_t const a = address(w, i.op(at), l);
    uint8_t* const p = resolve(w, i, l, i.space, a, bytes * i.vec, Access::Atomic);
    if (p == nullptr) continue;
    if (w.undefined(i.op(at + 1), l))
      w.cta->launch->report_undefined(w, i, l, "its operand", w.origin[i.op(at + 1).id]);
    std::lock_guard lock(atomic_mutexes[reinterpret_cast<uintptr_t>(p) / 8 % 64]);
    for (int j = 0; j < i.vec; ++j) {
      uint64_t old = 0;
      std::memcpy(&old, p + j * bytes, bytes);
      uint64_t const x = w.value(i.ops[i.begin[at + 1] + j], l), y = i.aux == kCas ? w.value(i.op(at + 2), l) : 0;
      uint64_t const result = apply_bits(i.type, i.aux, old, x, y);
      std::memcpy(p + j * bytes, &result, bytes);
      if (at == 1) w.set(i.ops[j], l, old);
    }
  }
}

template <bool kGeneric>
void mapa(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    uint64_t const a = w.value(i.op(1), l), rank = w.value(i.op(2), l);
    w.set(i.op(0), l, (a & 0xffffff) | (rank + 1) << 24 | (kGeneric ? kSharedWindow : 0));
  });
}
void getctarank(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    uint32_t const hi = w.value(i.op(1), l) >> 24 & 0xff;
    w.set(i.op(0), l, hi == 0 ? w.cta->rank : hi - 1);
  });
}
void nothing(Warp&, Inst const&, uint32_t) {}
void fence(Warp& w, Inst const& i, uint32_t lanes) { race_fence(w, lanes, i.aux); }  // aux: of proxies
void thread_fence(Warp& w, Inst const&, uint32_t) { global_fence(w); }
void policy(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) { w.set(i.op(0), l, 0); });
}

}  // namespace

void count_global(Warp& w, uint64_t const* addresses, uint32_t lanes, uint32_t size, bool store) {
  uint64_t sectors[64];
  int n = 0;
  for_lanes(lanes, [&](int l) {
    for (uint64_t s = addresses[l] / 32; s <= (addresses[l] + size - 1) / 32 && n < 64; ++s) sectors[n++] = s;
  });
  std::sort(sectors, sectors + n);
  Cluster& c = *w.cta->cluster;
  uint64_t const unique = std::unique(sectors, sectors + n) - sectors;
  (store ? c.store_sectors : c.sectors) += unique;
  if (!store) c.loaded.insert(sectors, sectors + unique);
  (store ? c.store_bytes : c.sector_bytes) += uint64_t(size) * __builtin_popcount(lanes);
}

bool decode_memory(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  i.space = space_of(p);
  i.cls = Class::LoadStore;
  i.releases = p.has("release") || p.has("acq_rel");
  i.strong = p.has("volatile") || p.has("relaxed") || p.has("acquire") || p.has("release") || p.has("mmio");
  auto const none = [&] {
    i.cls = Class::Other;
    i.exec = nothing;
    i.destinations = 0;
    return true;
  };
  if (op == "ld" || op == "ldu") {
    i.destinations = 1;
    i.vec = i.width(0);
    i.exec = load;
  } else if (op == "st") {
    i.vec = i.width(1);
    i.exec = store;
  } else if (op == "atom" || op == "red") {
    if (p.part(1) == "async") throw Error("red.async is not implemented");
    static char const* const names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    i.aux = -1;
    for (int j = 0; j < 10; ++j)
      if (p.has(names[j])) i.aux = j;
    if (i.aux < 0) throw Error("unknown atomic");
    i.cls = Class::Atomic;
    i.destinations = op == "atom";
    i.aux2 = i.destinations;
    i.vec = i.width(i.aux2 + 1);
    i.exec = atomic;
  } else if (op == "mapa") {
    i.destinations = 1;
    i.cls = Class::Alu;
    i.exec = i.space == Space::Shared ? mapa<false> : mapa<true>;
  } else if (op == "getctarank") {
    i.destinations = 1;
    i.cls = Class::Alu;
    i.exec = getctarank;
  } else if (op == "createpolicy") {
    i.destinations = 1;
    i.exec = policy;
  } else if (op == "fence" && ((p.part(1) == "proxy" && p.part(2).substr(0, 5) == "async" && !p.has("global")) ||
                               p.part(1) == "mbarrier_init")) {
    i.cls = Class::Other;
    i.aux = p.part(1) == "proxy";
    i.exec = fence;
  } else if ((op == "membar" && p.part(1) != "cta" && p.part(1) != "proxy") ||
             (op == "fence" && p.part(1) != "proxy" && (p.has("gpu") || p.has("sys")))) {
    i.cls = Class::Other;
    i.exec = thread_fence;
  } else if (op == "prefetch" || op == "prefetchu" || op == "fence" || op == "membar" || op == "griddepcontrol" ||
             op == "setmaxnreg" || op == "discard" || op == "applypriority" || op == "nanosleep" || op == "pmevent") {
    return none();
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
