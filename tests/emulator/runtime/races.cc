// Races in shared memory: accesses that nothing orders, by vector clocks. An actor is a warp, or what a warp has issued
// that runs beside it. Lanes of one warp are not told apart, but by lane_access. Beside that, what lacks a fence;
// global memory.
#include <algorithm>

#include "machine.h"

namespace emu {

uint32_t race_actor(Warp const& w, bool agent) {
  return w.cta->rank * w.cta->cluster->actors_per_cta + (agent ? w.cta->cluster->actors_per_cta / 2 : 0) + w.index;
}

Clocks race_issue(Warp& w) {
  if (w.clocks.empty()) return {};
  Clocks issued = w.clocks;
  issued[race_actor(w, true)] = ++w.agent_clock;
  return issued;
}

void race_join(Clocks& to, Clocks const& from) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

void race_release(Warp& w, Clocks& to) {
  if (w.clocks.empty()) return;
  to.resize(w.clocks.size());
  race_join(to, w.clocks);
  ++w.clocks[race_actor(w, false)];
}

void race_acquire(Warp& w, Clocks const& from) {
  if (w.clocks.size() == from.size()) race_join(w.clocks, from);
}

void race_wait(Warp& w, uint32_t agent_clock) {
  if (w.clocks.empty()) return;
  uint32_t& clock = w.clocks[race_actor(w, true)];
  clock = std::max(clock, agent_clock);
}

void race_access(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size, bool write,
                 Clocks const* issued) {
  if (owner.race.empty()) return;
  Clocks const& now = issued != nullptr ? *issued : w.clocks;
  uint16_t const actor = race_actor(w, issued != nullptr);
  uint32_t const clock = now[actor], line = inst.line;
  auto const name = [&](uint32_t other) {
    uint32_t const per = w.cta->cluster->actors_per_cta, in = other % per;
    std::string text =
        in >= per / 2 ? "what warp " + std::to_string(in - per / 2) + " issued" : "warp " + std::to_string(in);
    return other / per == w.cta->rank ? text : text + " of the cluster's block " + std::to_string(other / per);
  };
  auto const report = [&](char const* what, uint32_t other, uint32_t other_line, uint32_t at) {
    w.cta->launch->report(w, inst, lane, "race",
                          std::string(write ? "writes" : "reads") + " byte " + std::to_string(at) +
                              " of shared memory, which " + name(other) + " " + what + " at PTX line " +
                              std::to_string(other_line) + ", with nothing that orders the two");
  };
  for (uint32_t at = offset & ~3u; at < offset + size; at += 4) {
    RaceWord& word = owner.race[at / 4];
    uint8_t bytes = 0;
    for (uint32_t b = 0; b < 4; ++b) bytes |= (at + b >= offset && at + b < offset + size) << b;
    if (word.writer != 0xffff && word.writer != actor && word.written & bytes && word.write_clock > now[word.writer]) {
      report("wrote", word.writer, word.write_line, at);
    }
    if (write) {
      if (word.read & bytes) {
        if (word.readers >= 0) {
          auto const& [clocks, lines] = owner.race_readers[word.readers];
          for (uint32_t other = 0; other < clocks.size(); ++other) {
            if (other != actor && clocks[other] > now[other]) {
              report("read", other, lines[other], at);
              break;
            }
          }
        } else if (word.reader != actor && word.read_clock > now[word.reader]) {
          report("read", word.reader, word.read_line, at);
        }
      }
      word.written = word.writer == actor && word.write_clock == clock ? word.written | bytes : bytes;
      word.writer = actor, word.write_clock = clock, word.write_line = line;
      word.read &= ~bytes;
      if (word.read == 0) {
        if (word.readers >= 0) owner.unused_readers.push_back(word.readers);
        word.readers = -1, word.reader = 0xffff;
      }
    } else {
      if (word.reader != 0xffff && word.reader != actor && word.read_clock > now[word.reader] && word.readers < 0) {
        if (owner.unused_readers.empty()) {
          owner.unused_readers.push_back(owner.race_readers.size());
          owner.race_readers.emplace_back();
        }
        word.readers = owner.unused_readers.back();
        owner.unused_readers.pop_back();
        auto& [clocks, lines] = owner.race_readers[word.readers];
        clocks.assign(now.size(), 0), lines.assign(now.size(), 0);
        clocks[word.reader] = word.read_clock, lines[word.reader] = word.read_line;
      }
      if (word.readers >= 0) {
        owner.race_readers[word.readers].first[actor] = clock;
        owner.race_readers[word.readers].second[actor] = line;
      }
      word.reader = actor, word.read_clock = clock, word.read_line = line;
      word.read |= bytes;
    }
  }
}

// Proxies

namespace {

std::string byte_of(uint32_t at) { return "byte " + std::to_string(at) + " of shared memory"; }

Warp* warp_of(Cluster& c, uint32_t actor) {
  uint32_t const per = c.actors_per_cta, in = actor % per;
  return in >= per / 2 ? nullptr : &c.ctas[actor / per]->warps[in];
}

// Whether each of these lanes has executed a fence since they wrote, up to the fence that another knows of.
bool all_fenced(Warp const& w, uint32_t lanes, uint32_t wrote, uint32_t known) {
  auto const later = [](uint32_t clock, auto const& fence) { return clock < fence.first; };
  for (auto f = std::upper_bound(w.fences.begin(), w.fences.end(), known, later);
       f != w.fences.begin() && lanes != 0;) {
    --f;
    if (f->first < wrote) break;
    lanes &= ~f->second;
  }
  return lanes == 0;
}

}  // namespace

void race_fence(Warp& w, uint32_t lanes, bool proxy) {
  if (!Options::get().check_fences) return;
  Cluster& c = *w.cta->cluster;
  uint32_t const own = race_actor(w, false), half = w.clocks.size() / 2, per = c.actors_per_cta, now = w.clocks[own];
  size_t kept = 0;
  for (auto const& [t, offset] : w.unfenced) {
    Cta::Sync& sync = t->syncs[offset];
    if (lanes >> sync.lane & 1)
      sync.fenced = now;
    else
      w.unfenced[kept++] = {t, offset};
  }
  w.unfenced.resize(kept);
  if (proxy) {
    w.clocks[half + own] = now;
    w.fences.push_back({now, lanes});
    // What cp.async wrote may be fenced by who waits for it: its thread can't where it only arrives at an mbarrier.
    for (uint32_t a = 0; a < half; ++a) {
      if (a % per >= per / 2) w.clocks[half + a] = w.clocks[a];
    }
  }
  ++w.clocks[own];
}

void proxy_write(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size,
                 Clocks const* issued) {
  if (owner.proxy.empty()) return;
  uint16_t const actor = race_actor(w, issued != nullptr);
  uint32_t const clock = issued != nullptr ? (*issued)[actor] : w.clocks[actor];
  for (uint32_t at = offset / 4; at <= (offset + size - 1) / 4; ++at) {
    ProxyWord& word = owner.proxy[at];
    bool const more = word.writer == actor && word.clock == clock;
    word = {actor, clock, (more ? word.lanes : 0) | 1u << lane, inst.line};
  }
}

void proxy_access(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size, bool write,
                  Clocks const& issued) {
  if (owner.proxy.empty()) return;
  Cluster& c = *w.cta->cluster;
  uint32_t const half = issued.size() / 2;
  for (uint32_t at = offset / 4; at <= (offset + size - 1) / 4; ++at) {
    ProxyWord& word = owner.proxy[at];
    // What nothing orders at all is for the check of races.
    if (word.writer != 0xffff && word.clock <= issued[word.writer]) {
      uint32_t const known = issued[half + word.writer];
      Warp const* const writer = warp_of(c, word.writer);
      if (word.clock > known || (writer != nullptr && !all_fenced(*writer, word.lanes, word.clock, known))) {
        uint32_t const in = word.writer % c.actors_per_cta;
        w.cta->launch->report(
            w, inst, lane, "fence",
            std::string(write ? "writes " : "reads ") + byte_of(4 * at) + " by the asynchronous proxy, which " +
                (writer != nullptr ? "warp " + std::to_string(in)
                                   : "cp.async of warp " + std::to_string(in - c.actors_per_cta / 2)) +
                " wrote at PTX line " + std::to_string(word.line) +
                ", with no fence.proxy.async of the writing threads between");
        word.writer = 0xffff;
      }
    }
    if (write) word.writer = 0xffff;
  }
}

void check_initialized(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, Clocks const* issued) {
  if (!Options::get().check_fences) return;
  auto const found = owner.syncs.find(offset);
  if (found == owner.syncs.end() || found->second.initializer == 0xffff) return;
  Cta::Sync const& sync = found->second;
  uint32_t const known = (issued != nullptr ? *issued : w.clocks)[sync.initializer];
  auto const at = [&] { return "an mbarrier that was initialized at PTX line " + std::to_string(sync.line); };
  if (sync.clock > known) {
    w.cta->launch->report(w, inst, lane, "fence", "uses " + at() + ", with nothing that orders the two");
  } else if (issued != nullptr && (sync.fenced == 0 || sync.fenced > known)) {
    w.cta->launch->report(
        w, inst, lane, "fence",
        "has TMA use " + at() + ", with no fence.mbarrier_init or fence.proxy.async of that thread between");
  }
}

// Lanes

void lane_access(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size, bool write) {
  if (owner.lanes.empty()) return;
  uint16_t const warp = race_actor(w, false);
  for (uint32_t at = offset & ~3u; at < offset + size; at += 4) {
    LaneWord& word = owner.lanes[at / 4];
    uint8_t bytes = 0;
    for (uint32_t b = 0; b < 4; ++b) bytes |= (at + b >= offset && at + b < offset + size) << b;
    bool const same = word.warp == warp && word.epoch == w.lane_epoch;
    if (write) {
      word = {warp, uint8_t(lane), uint8_t(bytes | (same && word.lane == lane ? word.bytes : 0)), w.lane_epoch,
              inst.line};
    } else if (same && word.lane != lane && word.bytes & bytes) {
      w.cta->launch->report(w, inst, lane, "warp",
                            "reads " + byte_of(at) + ", which lane " + std::to_string(word.lane) +
                                " of its warp wrote at PTX line " + std::to_string(word.line) +
                                ", with no __syncwarp between");
    }
  }
}

// Global memory

// Within a cluster the warps' clocks order accesses. Between clusters, which may run one after the other here, an
// access counts as ordered where its cluster has executed a fence and then an atomic or a volatile store (or released)
// later, and the other's cluster an atomic, acquire or volatile load after that, at whatever address.
namespace {

struct GlobalAccess {
  uint32_t cluster, clock, epoch, line;
  uint16_t actor;
  uint8_t bytes;  // none: no access
};
// A word, in a table where the last to come takes the place: it forgets, but it is bounded.
struct GlobalWord {
  uint64_t word, launch;
  GlobalAccess write, atomic, reads[2];
};
constexpr uint64_t kGlobalWords = 1 << 20;
constexpr size_t kFences = 1024;  // what comes after so many counts as ordered
std::mutex global_mutex;

void close_epoch(Cluster& c) {
  auto& releases = c.launch->releases[c.index];
  if (c.accessed && releases.size() < kFences) releases.push_back(0);
  c.accessed = false;
}

}  // namespace

void global_fence(Warp& w) {
  if (!Options::get().check_global_races) return;
  std::lock_guard lock(global_mutex);
  close_epoch(*w.cta->cluster);
}

void global_access(Warp& w, Inst const& inst, int lane, uint64_t address, uint32_t size, Access access,
                   void const* other) {
  if (!Options::get().check_global_races) return;
  Launch& launch = *w.cta->launch;
  Cluster& c = *w.cta->cluster;
  // Zeroes that no page is taken for before they are used.
  static GlobalWord* const table = static_cast<GlobalWord*>(std::calloc(kGlobalWords, sizeof(GlobalWord)));
  std::lock_guard lock(global_mutex);
  std::vector<uint64_t>& releases = launch.releases[c.index];
  bool const plain = access != Access::Atomic && !inst.strong;
  if (plain || access == Access::Atomic) {
    bool const atomic = access == Access::Atomic;
    // An atomic's epoch is the time at which it releases itself.
    uint32_t const epoch = atomic ? launch.global_time + 1 : releases.size();
    GlobalAccess const mine{c.index,   w.clocks[race_actor(w, false)], epoch,
                            inst.line, uint16_t(race_actor(w, false)), 0};
    auto const check = [&](GlobalAccess const& before, uint8_t bytes, char const* what, uint64_t at,
                           bool before_atomic = false) {
      if (!(before.bytes & bytes)) return;
      auto const& its = launch.releases[before.cluster];
      if (before.cluster == c.index && (before.actor == mine.actor || before.clock <= w.clocks[before.actor])) return;
      if (before_atomic ? before.epoch < c.acquired
                        : before.epoch >= kFences ||
                              (before.epoch < its.size() && its[before.epoch] != 0 && its[before.epoch] < c.acquired))
        return;
      launch.report(w, inst, lane, "grace",
                    std::string(access == Access::Read    ? "reads"
                                : access == Access::Write ? "writes"
                                                          : "changes") +
                        " global memory, " + Heap::get().describe(at) + ", which " +
                        (before.cluster == c.index ? "another warp" : "another block") + " " + what + " at PTX line " +
                        std::to_string(before.line) + ", with nothing that orders the two");
    };
    for (uint64_t at = address & ~3ull; at < address + size; at += 4) {
      GlobalWord& word = table[at / 4 % kGlobalWords];
      if (word.word != at / 4 || word.launch != launch.serial) {
        word = {};
        word.word = at / 4, word.launch = launch.serial;
      }
      uint8_t bytes = 0, changed = 0;
      for (uint32_t b = 0; b < 4; ++b) {
        if (at + b < address || at + b >= address + size) continue;
        bytes |= 1 << b;
        if (other != nullptr)
          changed |= (static_cast<uint8_t const*>(other)[at + b - address] != *reinterpret_cast<uint8_t const*>(at + b))
                     << b;
      }
      GlobalAccess now = mine;
      now.bytes = bytes;
      if (access == Access::Read) {
        // Loads of what atomics change are too common: if (x > *most) atomicMax(most, x).
        check(word.write, bytes, "wrote", at);
        if (word.reads[0].bytes != 0 && word.reads[0].cluster != c.index) word.reads[1] = word.reads[0];
        word.reads[0] = now;
      } else {
        check(word.write, atomic ? bytes : changed, "wrote", at);
        if (!atomic) {
          check(word.atomic, bytes, "changed by an atomic", at, true);
          for (GlobalAccess const& read : word.reads) check(read, bytes, "read", at);
        }
        GlobalAccess& last = atomic ? word.atomic : word.write;
        if (last.cluster == now.cluster && last.actor == now.actor && last.clock == now.clock &&
            last.epoch == now.epoch)
          now.bytes |= last.bytes;
        last = now;
      }
    }
    c.accessed = true;
  }
  if (access == Access::Atomic || (inst.strong && access == Access::Write)) {
    if (inst.releases) close_epoch(c);
    ++launch.global_time;
    for (auto r = releases.rbegin(); r != releases.rend() && *r == 0; ++r) *r = launch.global_time;
  }
  if (access == Access::Atomic || (inst.strong && access == Access::Read)) c.acquired = ++launch.global_time;
}

}  // namespace emu
