// The scheduler: clusters that begin, take turns, and end.
#include <xmmintrin.h>

#include <chrono>
#include <thread>

#include "machine.h"

namespace emu {
namespace {

// Rounds to nearest and keeps subnormals, whatever the calling thread does: XLA's flush them.
struct FloatMode {
  unsigned const before = _mm_getcsr();
  FloatMode() { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(before); }
};

}  // namespace

void Launch::start(Cluster& c, uint64_t index) {
  uint32_t const per[3] = {grid[0] / cluster[0], grid[1] / cluster[1], grid[2] / cluster[2]};
  c.id[0] = index % per[0], c.id[1] = index / per[0] % per[1], c.id[2] = index / per[0] / per[1];
  uint32_t const size = cluster[0] * cluster[1] * cluster[2], threads = block[0] * block[1] * block[2],
                 warps = (threads + 31) / 32;
  Options const& options = Options::get();
  bool const fresh = c.ctas.empty();
  if (fresh) {
    for (uint32_t i = 0; i < size; ++i) c.ctas.push_back(std::make_unique<Cta>());
  }
  c.launch = this;
  c.index = index;
  c.acquired = 0;
  c.accessed = false;
  c.pending.clear();
  c.phase = c.arrived = 0;
  c.actors_per_cta = 2 * warps;
  uint32_t const actors = c.actors_per_cta * size;
  c.gathered.assign(options.clocks() ? 2 * actors : 0, 0);
  c.released = c.gathered;
  c.random.seed(options.seed * 1000003 + index);
  if (options.stats && c.executed.empty()) {
    c.executed.resize(kernel->code.size());
    c.executed_lanes.resize(kernel->code.size());
  }
  for (uint32_t r = 0; r < size; ++r) {
    Cta& t = *c.ctas[r];
    t.cluster = &c;
    t.launch = this;
    t.rank = r;
    uint32_t const in[3] = {r % cluster[0], r / cluster[0] % cluster[1], r / cluster[0] / cluster[1]};
    for (int d = 0; d < 3; ++d) t.id[d] = c.id[d] * cluster[d] + in[d];
    t.shared_end = shared_end;
    t.shared.assign(shared_end + 16, 0xa5);
    if (options.check_uninitialized || options.check_async) t.state.assign(shared_end + 16, 0);
    if (options.check_races) t.race.assign(shared_end / 4 + 4, {});
    if (options.check_fences) t.proxy.assign(shared_end / 4 + 4, {});
    if (options.check_lanes) t.lanes.assign(shared_end / 4 + 4, {});
    t.race_readers.clear();
    t.unused_readers.clear();
    t.syncs.clear();
    for (NamedBarrier& b : t.barriers) {
      b = {};
      b.gathered.assign(c.gathered.size(), 0);
      b.released = b.gathered;
    }
    if (fresh) t.warps.resize(warps);
    for (uint32_t i = 0; i < warps; ++i) {
      Warp& w = t.warps[i];
      w.cta = &t;
      w.index = i;
      uint32_t const count = std::min(32u, threads - 32 * i);
      w.alive = count == 32 ? kAll : (1u << count) - 1;
      w.splits.assign(1, {0, w.alive, false});
      w.barrier = -1;
      w.cluster_phase = 0;
      w.timeout = false;
      w.copies.clear();
      w.bulk.clear();
      w.in_flight.clear();
      w.mma_group = 0;
      w.mma_clocks.clear();
      w.agent_clock = 0;
      w.clocks.assign(c.gathered.size(), 0);
      if (options.clocks()) w.clocks[race_actor(w, false)] = 1;
      w.fences.clear();
      w.unfenced.clear();
      w.mma_fences = w.lane_epoch = 0;
      if (options.check_fences && kernel->has_wgmma) {
        w.touched.assign(kernel->register_count, 0);
        w.accumulated = w.touched;
      }
      if (fresh) {
        w.storage.assign(kernel->register_words + 16, 0);
        w.rows = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(w.storage.data()) + 63) / 64 * 64);
        w.storage.reserve(w.storage.size());
        w.local_storage.assign(size_t(kernel->local_bytes) * 32, 0);
        w.local = w.local_storage.data();
      }
      for (Constant const& k : kernel->constants) {
        if (!fresh && k.kind != Constant::Special) continue;
        auto const fill = [&](auto value_of) {
          if (k.cls == RegClass::Pred) {
            w.rows[k.row] = value_of(0) ? kAll : 0;
          } else if (k.cls == RegClass::Word) {
            for (int l = 0; l < 32; ++l) w.rows[k.row + l] = uint32_t(value_of(l));
          } else {
            for (int l = 0; l < 32; ++l) reinterpret_cast<uint64_t*>(w.rows + k.row)[l] = value_of(l);
          }
        };
        switch (k.kind) {
          case Constant::Value:
            fill([&](int) { return k.value; });
            break;
          case Constant::ParamAddress:
            fill([&](int) { return reinterpret_cast<uint64_t>(param_base) + k.value; });
            break;
          case Constant::SharedAddress:
            fill([&](int) { return kSharedBase + k.value; });
            break;
          case Constant::DynamicShared:
            fill([&](int) { return dynamic_at + k.value; });
            break;
          case Constant::Special:
            fill([&](int l) { return special_register(w, l, Sreg(k.value)); });
        }
      }
      if (options.check_uninitialized) {
        w.defined.assign(kernel->register_count, 0);
        w.origin.assign(kernel->register_count, 0);
        // The rows that were filled above have no name.
        for (uint32_t id = 0; id < kernel->register_count; ++id) {
          if (kernel->register_names[id].empty()) w.defined[id] = kAll;
        }
      }
    }
  }
}

void Launch::run_clusters(std::vector<Cluster*> const& clusters) {
  Options const& options = Options::get();
  std::vector<Warp*> warps;
  for (Cluster* c : clusters) {
    for (auto& t : c->ctas) {
      for (Warp& w : t->warps) warps.push_back(&w);
    }
  }
  std::mt19937_64& random = clusters[0]->random;
  auto const count_events = [&] {
    uint64_t sum = 0;
    for (Cluster* c : clusters) sum += c->events;
    return sum;
  };
  uint64_t last = count_events();
  int timeouts = 0;
  uint64_t idle_rounds = 0;
  while (true) {
    if (options.seed != 0) std::shuffle(warps.begin(), warps.end(), random);
    bool progress = false, alive = false;
    for (Warp* w : warps) {
      if (w->done()) continue;
      alive = true;
      progress |= w->turn(options.seed != 0 ? 1 + random() % 2000 : 20000);
    }
    if (!alive) {
      for (Cluster* c : clusters) {
        while (!c->pending.empty()) {
          auto const copy = std::move(c->pending.front());
          c->pending.pop_front();
          copy.arrive();
        }
      }
      return;
    }
    uint64_t const now = count_events();
    if (now != last) {
      last = now;
      timeouts = 0;
      idle_rounds = 0;
      continue;
    }
    // Nothing has happened that one warp could wait for of another: what was copied asynchronously arrives now.
    bool arrived = false;
    for (Cluster* c : clusters) {
      if (c->pending.empty()) continue;
      for (size_t n = 1 + c->pending.size() / 8; n > 0; --n) {
        size_t const which = options.seed != 0 ? random() % c->pending.size() : 0;
        auto const copy = std::move(c->pending[which]);
        c->pending.erase(c->pending.begin() + which);
        copy.arrive();
      }
      ++c->events;
      arrived = true;
    }
    if (arrived) continue;
    if (!progress) {
      if (++timeouts > 64) deadlock(clusters, "deadlock");
      for (Warp* w : warps) w->timeout = true;
    } else if (++idle_rounds > 20000) {
      deadlock(clusters, "livelock");
    }
  }
}

bool Launch::run() {
  auto const begin = std::chrono::steady_clock::now();
  kernel->prepare();
  uint32_t const align = std::max(16u, kernel->shared_align);
  dynamic_at = (kSharedBase + kernel->static_shared + align - 1) / align * align;
  shared_end = dynamic_at + dynamic_shared;
  params.resize(params.size() + 256);
  param_base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(params.data()) + 127) / 128 * 128);
  std::memmove(param_base, params.data(), kernel->param_bytes);
  Heap::get().add(param_base, std::max(1u, kernel->param_bytes));
  workspace[0] = sizeof(workspace);
  if (cooperative) Heap::get().add(workspace, sizeof(workspace));
  uint64_t const size = uint64_t(cluster[0]) * cluster[1] * cluster[2];
  uint64_t const count = uint64_t(grid[0]) * grid[1] * grid[2] / size;
  static std::atomic<uint64_t> serials{0};
  serial = ++serials;
  if (Options::get().check_global_races) releases.resize(count);
  std::string error;
  std::atomic<uint64_t> next{0};
  auto const collect = [&](Cluster& c) {
    std::lock_guard lock(mutex);
    if (executed.size() < c.executed.size())
      executed.resize(c.executed.size()), executed_lanes.resize(c.executed.size());
    for (size_t i = 0; i < c.executed.size(); ++i)
      executed[i] += c.executed[i], executed_lanes[i] += c.executed_lanes[i];
    sectors += c.sectors, sector_bytes += c.sector_bytes, store_sectors += c.store_sectors,
        store_bytes += c.store_bytes;
    shared_wavefronts += c.shared_wavefronts, shared_ideal += c.shared_ideal;
    loaded.insert(c.loaded.begin(), c.loaded.end());
  };
  auto const work = [&] {
    FloatMode const mode;
    Cluster c;
    try {
      if (cooperative) {
        std::vector<std::unique_ptr<Cluster>> all;
        std::vector<Cluster*> some;
        for (uint64_t i = next++; i < count; i = next++) {
          all.push_back(std::make_unique<Cluster>());
          start(*all.back(), i);
          some.push_back(all.back().get());
        }
        if (!some.empty()) run_clusters(some);
        for (auto& one : all) collect(*one);
        return;
      }
      for (uint64_t i = next++; i < count; i = next++) {
        start(c, i);
        run_clusters({&c});
      }
    } catch (Error const& e) {
      std::lock_guard lock(mutex);
      error = e.what();
      failed = true;
      next = count;
    }
    collect(c);
  };
  std::vector<std::thread> threads;
  if (!cooperative) {
    for (int i = 1; i < std::min<int64_t>(Options::get().threads, count); ++i) threads.emplace_back(work);
  }
  work();
  for (auto& t : threads) t.join();
  Heap::get().remove(param_base);
  if (cooperative) Heap::get().remove(workspace);
  seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (size_t i = 0; i < executed.size(); ++i) instructions += executed[i], lane_instructions += executed_lanes[i];
  if (!error.empty() && reports.empty()) say(demangle(kernel->name) + ": " + error);
  return !failed;
}

}  // namespace emu
