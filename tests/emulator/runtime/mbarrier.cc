// mbarriers.
#include "decode.h"

namespace emu {
namespace {

// In their 64 bits of shared memory: arrivals that are missing, arrivals of a phase, bytes that are missing, and the
// phase.
struct Mbarrier {
  uint64_t bits;
  uint32_t missing() const { return bits & 0xfffff; }
  uint32_t expected() const { return bits >> 20 & 0xfffff; }
  int32_t bytes() const { return int32_t(uint32_t(bits >> 40 & 0x3fffff) << 10) >> 10; }
  uint32_t phase() const { return bits >> 63; }
  void set(uint32_t missing, uint32_t expected, int32_t bytes, uint32_t phase) {
    bits = uint64_t(missing) | uint64_t(expected) << 20 | uint64_t(uint32_t(bytes) & 0x3fffff) << 40 |
           uint64_t(phase) << 63;
  }
};

struct Place {
  Cta* cta;
  uint32_t offset;
  uint8_t* p;
};

bool place(Warp& w, Inst const& i, int lane, Operand const& o, Place& at, bool initializes = false) {
  uint64_t const a = w.value(o, lane) + uint64_t(o.imm);
  Cta* const t = shared_owner(w, uint32_t(a));
  uint32_t const offset = uint32_t(a) & 0xffffff;
  if (t == nullptr || offset < kSharedBase || offset + 8 > t->shared_end || offset % 8 != 0) {
    char text[64];
    std::snprintf(text, sizeof(text), "has no mbarrier at 0x%llx", static_cast<unsigned long long>(a));
    w.cta->launch->report(w, i, lane, "memory", text);
    return false;
  }
  if (!t->state.empty()) {
    if (!initializes && !(t->state[offset] & kDefined)) {
      w.cta->launch->report(w, i, lane, "uninitialized", "uses an mbarrier that was never initialized");
      return false;
    }
    for (int b = 0; b < 8; ++b) t->state[offset + b] |= kDefined;
  }
  if (!initializes) check_initialized(w, *t, i, lane, offset);
  at = {t, offset, t->shared.data() + offset};
  return true;
}
Mbarrier read(Place const& at) {
  Mbarrier b;
  std::memcpy(&b.bits, at.p, 8);
  return b;
}
void write(Place const& at, Mbarrier b) {
  if (b.missing() == 0 && b.bytes() == 0) {
    b.set(b.expected(), b.expected(), 0, b.phase() ^ 1);
    Cta::Sync& sync = at.cta->syncs[at.offset];
    std::swap(sync.released, sync.gathered);
    std::fill(sync.gathered.begin(), sync.gathered.end(), 0);
  }
  std::memcpy(at.p, &b.bits, 8);
  ++at.cta->cluster->events;
}
void arrive(Warp& w, Inst const& i, int lane, Place const& at, uint32_t count, int32_t expect, bool drop) {
  Mbarrier b = read(at);
  if (count > b.missing()) {
    w.cta->launch->report(w, i, lane, "barrier",
                          "an mbarrier of " + std::to_string(b.expected()) + " arrivals gets more in one phase");
    count = b.missing();
  }
  if (!w.clocks.empty()) race_release(w, at.cta->syncs[at.offset].gathered);
  b.set(b.missing() - count, b.expected() - (drop ? count : 0), b.bytes() + expect, b.phase());
  write(at, b);
}

void mbarrier_init(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    Place at;
    if (!place(w, i, l, i.op(0), at, true)) return;
    uint32_t const count = w.value(i.op(1), l);
    if (count == 0 || count > 0xfffff)
      w.cta->launch->report(w, i, l, "barrier", "initializes an mbarrier for " + std::to_string(count) + " arrivals");
    Mbarrier b;
    b.set(count, count, 0, 0);
    std::memcpy(at.p, &b.bits, 8);
    Cta::Sync& sync = at.cta->syncs[at.offset];
    sync = {};
    if (Options::get().check_fences) {
      sync.initializer = race_actor(w, false);
      sync.lane = l, sync.clock = w.clocks[sync.initializer], sync.line = i.line;
      w.unfenced.push_back({at.cta, at.offset});
    }
    ++at.cta->cluster->events;
  });
}
void mbarrier_inval(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    Place at;
    if (place(w, i, l, i.op(0), at) && !at.cta->state.empty()) std::memset(&at.cta->state[at.offset], 0, 8);
  });
}
// aux: 1 expects bytes, 2 drops, 4 returns the state; aux2: the address's operand
void mbarrier_arrive(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    Place at;
    if (!place(w, i, l, i.op(i.aux2), at)) return;
    uint32_t const x = i.count() > i.aux2 + 1 ? w.value(i.op(i.aux2 + 1), l) : 1;
    if (i.aux2 == 1) w.set(i.op(0), l, read(at).bits);
    arrive(w, i, l, at, i.aux & 1 ? 1 : x, i.aux & 1 ? int32_t(x) : 0, i.aux & 2);
  });
}
void mbarrier_tx(Warp& w, Inst const& i, uint32_t lanes) {  // aux: 1 expects, -1 completes
  for_lanes(lanes, [&](int l) {
    Place at;
    if (!place(w, i, l, i.op(0), at)) return;
    Mbarrier b = read(at);
    b.set(b.missing(), b.expected(), b.bytes() + int32_t(i.aux) * int32_t(w.value(i.op(1), l)), b.phase());
    write(at, b);
  });
}
// aux: 1 by parity, 2 may wait
uint32_t mbarrier_wait(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t finished = 0;
  for_lanes(lanes, [&](int l) {
    Place at;
    bool done = true;
    if (place(w, i, l, i.op(1), at)) {
      uint64_t const state = w.value(i.op(2), l);
      uint32_t const phase = i.aux & 1 ? uint32_t(state & 1) : uint32_t(state >> 63);
      done = read(at).phase() != phase;
      if (done && !w.clocks.empty()) race_acquire(w, at.cta->syncs[at.offset].released);
    }
    if (!done && i.aux & 2 && !w.timeout) return;
    w.set(i.op(0), l, done);
    finished |= 1u << l;
  });
  if (finished) w.timeout = false;
  return finished;
}
void mbarrier_pending(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) { w.set(i.op(0), l, Mbarrier{w.value(i.op(1), l)}.missing()); });
}
// The thread's copies are taken as done; then it arrives.
void cp_async_mbarrier(Warp& w, Inst const& i, uint32_t lanes) {
  for (size_t j = 0; j < w.copies.size();) {
    if (lanes >> w.copies[j].lane & 1) {
      auto const copy = std::move(w.copies[j]);
      w.copies.erase(w.copies.begin() + j);
      copy.run();
    } else {
      ++j;
    }
  }
  race_wait(w, w.agent_clock);
  for_lanes(lanes, [&](int l) {
    Place at;
    if (!place(w, i, l, i.op(0), at)) return;
    if (!i.aux) {  // it counts as one more arrival
      Mbarrier b = read(at);
      b.set(b.missing() + 1, b.expected(), b.bytes(), b.phase());
      std::memcpy(at.p, &b.bits, 8);
    }
    arrive(w, i, l, at, 1, 0, false);
  });
}

}  // namespace

void mbarrier_complete_tx(Cta& t, uint32_t offset, uint32_t bytes, Clocks const& issued) {
  Place const at{&t, offset, t.shared.data() + offset};
  if (offset < kSharedBase || offset + 8 > t.shared_end) return;
  Mbarrier b = read(at);
  if (!issued.empty()) {
    Cta::Sync& sync = t.syncs[offset];
    sync.gathered.resize(issued.size());
    race_join(sync.gathered, issued);
  }
  b.set(b.missing(), b.expected(), b.bytes() - int32_t(bytes), b.phase());
  write(at, b);
}

bool decode_mbarrier(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  if (op == "mbarrier") {
    i.cls = Class::Barrier;
    if (p.part(1) == "init")
      i.exec = mbarrier_init;
    else if (p.part(1) == "inval")
      i.exec = mbarrier_inval;
    else if (p.part(1) == "arrive" || p.part(1) == "arrive_drop") {
      i.aux = (p.has("expect_tx") ? 1 : 0) | (p.part(1) == "arrive_drop" ? 2 : 0);
      // A state is returned where the first operand is no address.
      i.aux2 = i.aux & 1 ? (i.count() > 2 ? 1 : 0)
                         : (i.count() > 1 && (i.op(0).sink || i.op(0).cls == RegClass::Pair) ? 1 : 0);
      i.destinations = i.aux2;
      i.exec = mbarrier_arrive;
    } else if (p.part(1) == "expect_tx" || p.part(1) == "complete_tx") {
      i.aux = p.part(1) == "expect_tx" ? 1 : -1;
      i.exec = mbarrier_tx;
    } else if (p.part(1) == "test_wait" || p.part(1) == "try_wait") {
      i.aux = (p.has("parity") ? 1 : 0) | (p.part(1) == "try_wait" ? 2 : 0);
      return p.sync(mbarrier_wait, Class::Barrier, 1);
    } else if (p.part(1) == "pending_count") {
      i.destinations = 1;
      i.exec = mbarrier_pending;
    } else {
      return false;
    }
  } else if (op == "cp" && p.part(2) == "mbarrier") {
    i.cls = Class::Barrier;
    i.aux = p.has("noinc");
    i.exec = cp_async_mbarrier;
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
