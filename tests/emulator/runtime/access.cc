// What an access may touch, and where that is on the host.
#include <algorithm>
#include <cstdio>

#include "memory.h"

namespace emu {

std::string hex(uint64_t x) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(x));
  return text;
}

uint8_t* shared_state(Warp& w, uint8_t const* p) {
  for (auto& t : w.cta->cluster->ctas) {
    if (!t->state.empty() && p >= t->shared.data() && p < t->shared.data() + t->shared.size())
      return t->state.data() + (p - t->shared.data());
  }
  return nullptr;
}

Cta* shared_owner(Warp& w, uint32_t a) {
  uint32_t const hi = a >> 24;
  if (hi == 0) return w.cta;
  return hi - 1 < w.cta->cluster->ctas.size() ? w.cta->cluster->ctas[hi - 1].get() : nullptr;
}

uint8_t* resolve_shared(Warp& w, Inst const& inst, int lane, uint32_t a, uint32_t size, Access access, bool aligned) {
  Cta* const t = shared_owner(w, a);
  uint32_t const offset = a & 0xffffff;
  Launch& launch = *w.cta->launch;
  char const* const verb = access == Access::Read ? "reads " : access == Access::Write ? "writes " : "changes ";
  if (t == nullptr || offset < kSharedBase || offset + size > t->shared_end) {
    launch.report(w, inst, lane, "memory",
                  verb + std::to_string(size) + " bytes at " + hex(a) + " of shared memory, which is from " +
                      hex(kSharedBase) + " to " + hex(w.cta->shared_end));
    return nullptr;
  }
  if (aligned && (offset & (size - 1)) != 0) {
    launch.report(w, inst, lane, "memory",
                  verb + std::to_string(size) + " bytes at " + hex(a) + " of shared memory, which is not aligned");
    return nullptr;
  }
  if (!t->state.empty()) {
    Options const& options = Options::get();
    for (uint32_t b = 0; b < size; ++b) {
      uint8_t& state = t->state[offset + b];
      if (state & kInFlight && options.check_async) {
        launch.report(w, inst, lane, "async",
                      verb + hex(a) + " of shared memory before a wait for the asynchronous copy that writes it");
        break;
      }
      if (access != Access::Read) state |= kDefined;
    }
  }
  if (access != Access::Read) proxy_write(w, *t, inst, lane, offset, size);
  if (access != Access::Atomic)
    lane_access(w, *t, inst, lane, offset, size, access == Access::Write);
  else
    ++w.lane_epoch;
  if (!w.clocks.empty()) {
    if (access == Access::Atomic) {
      Cta::Sync& sync = t->syncs[offset];
      race_acquire(w, sync.released);
      race_release(w, sync.released);
    } else {
      race_access(w, *t, inst, lane, offset, size, access == Access::Write);
    }
  }
  return t->shared.data() + offset;
}

bool check_global(Warp& w, Inst const& inst, int lane, uint64_t a, uint32_t size, char const* what) {
  if (a >= w.seen.begin && a + size <= w.seen.end) return true;
  Options const& options = Options::get();
  if (!options.check_memory) return true;
  Heap::Range range;
  if (Heap::get().find(a, range) && a + size <= range.end) {
    w.seen = range;
    return true;
  }
  if (options.unknown_pointers && range.end == 0) return true;
  w.cta->launch->report(
      w, inst, lane, "memory",
      std::string(what) + " " + std::to_string(size) + " bytes at " + hex(a) + ", " + Heap::get().describe(a));
  return false;
}

uint8_t* resolve(Warp& w, Inst const& inst, int lane, Space space, uint64_t a, uint32_t size, Access access) {
  if (space == Space::Generic) {
    uint64_t const window = a >> 32;
    space = window == kSharedWindow >> 32 ? Space::Shared : window == kLocalWindow >> 32 ? Space::Local : Space::Global;
    if (space != Space::Global) a &= 0xffffffff;
  }
  char const* const verb = access == Access::Read ? "reads" : access == Access::Write ? "writes" : "changes";
  switch (space) {
    case Space::Shared:
      return resolve_shared(w, inst, lane, uint32_t(a), size, access);
    case Space::Local: {
      uint32_t const bytes = w.cta->launch->kernel->local_bytes;
      if (a + size > bytes) {
        w.cta->launch->report(
            w, inst, lane, "memory",
            std::string(verb) + " " + hex(a) + " of local memory, which has " + std::to_string(bytes) + " bytes");
        return nullptr;
      }
      return w.local + size_t(lane) * bytes + a;
    }
    case Space::Param:
    case Space::Const:
      return reinterpret_cast<uint8_t*>(a);
    default:
      if (!check_global(w, inst, lane, a, size, verb)) return nullptr;
      if ((a & (size - 1)) != 0 && Options::get().check_memory) {
        w.cta->launch->report(
            w, inst, lane, "memory",
            std::string(verb) + " " + std::to_string(size) + " bytes at " + hex(a) + ", which is not aligned");
        return nullptr;
      }
      if (access != Access::Write || inst.strong) global_access(w, inst, lane, a, size, access);
      return reinterpret_cast<uint8_t*>(a);
  }
}

}  // namespace emu
