// Asynchronous copies: cp.async, TMA, bulk copies and st.async.
#include <algorithm>
#include <array>
#include <memory>

#include "decode.h"
#include "memory.h"

namespace emu {
namespace {

void mark_in_flight(Cta& t, uint32_t offset, uint32_t size) {
  if (!t.state.empty())
    for (uint32_t b = 0; b < size; ++b) t.state[offset + b] |= kInFlight;
}
void mark_arrived(Cta& t, uint32_t offset, uint32_t size) {
  if (!t.state.empty())
    for (uint32_t b = 0; b < size; ++b) t.state[offset + b] = kDefined;
}

// An asynchronous write to shared memory is checked when it is issued: bounds, whether another is under way, races.
bool issue_write(Warp& w, Inst const& i, int lane, Cta& t, uint32_t offset, uint32_t size, uint32_t align,
                 Clocks const& issued) {
  Launch& launch = *w.cta->launch;
  if (offset < kSharedBase || offset + size > t.shared_end) {
    launch.report(w, i, lane, "memory",
                  "copies " + std::to_string(size) + " bytes to " + hex(offset) + " of shared memory, which ends at " +
                      hex(t.shared_end));
    return false;
  }
  if (offset % align != 0) {
    launch.report(w, i, lane, "memory",
                  "copies to " + hex(offset) + " of shared memory, which is no multiple of " + std::to_string(align));
    return false;
  }
  if (!issued.empty()) race_access(w, t, i, lane, offset, size, true, &issued);
  return true;
}

// aux: 0 copies from global; the operand of the size read is aux2, -1 where there is none; vec 2: it is a predicate
void cp_async(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const size = uint32_t(i.op(2).imm);
  uint64_t addresses[32];
  Clocks const issued = race_issue(w);
  uint32_t read_lanes = 0;
  for_lanes(lanes, [&](int l) {
    uint32_t const to = uint32_t(address(w, i.op(0), l));
    uint64_t const from = addresses[l] = address(w, i.op(1), l);
    uint32_t read = size;
    if (i.aux2 >= 0) {
      uint64_t const v = w.value(i.op(i.aux2), l);
      read = i.vec == 2 ? (v ? 0 : size) : std::min<uint32_t>(uint32_t(v), size);
    }
    Cta* const owner = shared_owner(w, to);
    uint32_t const offset = to & 0xffffff;
    if (owner == nullptr || !issue_write(w, i, l, *owner, offset, size, size, issued)) return;
    proxy_write(w, *owner, i, l, offset, size, &issued);
    if (from % size != 0)
      w.cta->launch->report(w, i, l, "memory",
                            "copies from " + hex(from) + ", which is no multiple of " + std::to_string(size));
    if (read > 0 && !check_global(w, i, l, from, read, "copies from")) read = 0;
    if (read > 0) read_lanes |= 1u << l, global_access(w, i, l, from, read, Access::Read);
    auto run = [owner, offset, from, size, read] {
      uint8_t* const p = owner->shared.data() + offset;
      std::memcpy(p, reinterpret_cast<void const*>(from), read);
      std::memset(p + read, 0, size - read);
      mark_arrived(*owner, offset, size);
    };
    if (Options::get().lazy) {
      mark_in_flight(*owner, offset, size);
      w.copies.push_back({uint32_t(l), w.copy_group[l], run});
    } else {
      run();
    }
  });
  if (Options::get().stats && read_lanes) count_global(w, addresses, read_lanes, size, false);
}

void finish_copies(Warp& w, std::vector<PendingCopy>& list, uint32_t lanes, uint32_t const* groups, uint32_t keep,
                   bool open) {
  size_t kept = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    PendingCopy& c = list[i];
    bool const due = lanes >> c.lane & 1 && (open || c.group + keep < groups[c.lane]);
    if (due) {
      c.run();
    } else {
      if (kept != i) list[kept] = std::move(c);
      ++kept;
    }
  }
  list.resize(kept);
  // Later groups of the same agent count as done too: what the clocks can't tell, the bytes' own state does.
  race_wait(w, w.agent_clock);
}
void cp_async_commit(Warp& w, Inst const& i, uint32_t lanes) {
  auto* const groups = i.aux ? w.bulk_group : w.copy_group;
  for (uint32_t m = lanes; m != 0; m &= m - 1) ++groups[__builtin_ctz(m)];
}
// aux: of bulk copies; aux2: keeps so many groups, -1 waits for all, open ones too
void cp_async_wait(Warp& w, Inst const& i, uint32_t lanes) {
  bool const bulk = i.aux != 0;
  finish_copies(w, bulk ? w.bulk : w.copies, lanes, bulk ? w.bulk_group : w.copy_group, i.aux2 < 0 ? 0 : i.aux2,
                i.aux2 < 0);
}

// Where a box begins, and of im2col how far from its pixels what is loaded lies.
struct BoxPlace {
  int32_t at[5] = {};
  int32_t offsets[3] = {};
};

// Calls f(offset in the box, address in global memory, bytes, where what exists begins and ends of these) for pieces of
// up to 16 bytes of the elements that begin at `first`, the first coordinate, and at `base` by the others.
template <class F>
void for_row(TensorMap const& map, int32_t first_element, int64_t base, bool inside, uint32_t offset, F f) {
  uint32_t const row = map.box[0] * map.element_bytes;
  int64_t const first = int64_t(first_element) * map.element_bytes, end = int64_t(map.size[0]) * map.element_bytes;
  for (uint32_t b = 0; b < row; b += 16) {
    uint32_t const n = std::min(16u, row - b);
    int64_t const from = first + b;
    // The part [low, high) of the piece that exists.
    int64_t const low = std::clamp<int64_t>(-from, 0, n), high = std::clamp<int64_t>(end - from, low, n);
    f(offset + b, map.address + base + from, n, inside ? uint32_t(low) : 0, inside ? uint32_t(high) : 0);
  }
}

// Pixels one after another, by their strides: where an axis ends, it begins again and the next one goes on.
template <class F>
void for_pixels(TensorMap const& map, BoxPlace const& place, F f) {
  int const last = map.rank - 1;  // of images
  int32_t at[5];
  std::copy_n(place.at, 5, at);
  for (uint32_t pixel = 0; pixel < map.box[1]; ++pixel) {
    bool inside = true;
    int64_t base = 0;
    for (int d = 1; d <= last; ++d) {
      int64_t const x = int64_t(at[d]) + (d < last ? place.offsets[d - 1] : 0);
      inside &= x >= 0 && x < int64_t(map.size[d]);
      base += x * int64_t(map.stride[d - 1]);
    }
    for_row(map, at[0], base, inside, pixel * map.box[0] * map.element_bytes, f);
    int d = 1;
    for (; d < last; ++d) {
      if ((at[d] += map.element_stride[d]) < int64_t(map.size[d]) + map.upper[d - 1]) break;
      at[d] = map.lower[d - 1];
    }
    if (d == last) at[last] += map.element_stride[last];
  }
}

// As for_row, for a whole box.
template <class F>
void for_box(TensorMap const& map, BoxPlace const& place, F f) {
  if (map.im2col) return for_pixels(map, place, f);
  int32_t const* const at = place.at;
  uint32_t const row = map.box[0] * map.element_bytes;
  uint32_t index[5] = {};
  uint32_t offset = 0;
  while (true) {
    bool inside = true;
    int64_t base = 0;
    for (int d = 1; d < map.rank; ++d) {
      int64_t const x = int64_t(at[d]) + index[d];
      inside &= x >= 0 && x < int64_t(map.size[d]);
      base += x * int64_t(map.stride[d - 1]);
    }
    for_row(map, at[0], base, inside, offset, f);
    offset += row;
    int d = 1;
    for (; d < map.rank; ++d) {
      if (++index[d] < map.box[d]) break;
      index[d] = 0;
    }
    if (d >= map.rank) return;
  }
}

TensorMap const* tensor_map(Warp& w, Inst const& i, int lane, uint64_t at, int rank, bool im2col) {
  auto const* const map = reinterpret_cast<TensorMap const*>(at);
  if (!check_global(w, i, lane, at, 128, "reads a tensor map at")) return nullptr;
  if (at % 64 != 0)
    w.cta->launch->report(w, i, lane, "memory", "its tensor map at " + hex(at) + " is not aligned to 64 bytes");
  if (map->magic != TensorMap::kMagic || map->rank != rank) {
    w.cta->launch->report(w, i, lane, "memory",
                          map->magic != TensorMap::kMagic
                              ? "no tensor map is at " + hex(at)
                              : "its tensor map has " + std::to_string(map->rank) + " dimensions");
    return nullptr;
  }
  if (map->im2col != im2col) {
    w.cta->launch->report(w, i, lane, "memory", "its tensor map is of the other mode, tiled or im2col");
    return nullptr;
  }
  return map;
}
uint32_t box_bytes(TensorMap const& map) {
  uint32_t n = map.element_bytes;
  for (int d = 0; d < (map.im2col ? 2 : map.rank); ++d) n *= map.box[d];
  return n;
}
bool check_box(Warp& w, Inst const& i, int lane, TensorMap const& map, BoxPlace const& place) {
  bool good = true;
  for (int d = 1; map.im2col && d + 1 < map.rank; ++d) {
    if (place.at[d] < map.lower[d - 1] || place.at[d] >= int64_t(map.size[d]) + map.upper[d - 1]) {
      w.cta->launch->report(w, i, lane, "memory", "its first pixel is outside of the map's box");
      return false;
    }
  }
  for_box(map, place, [&](uint32_t, uint64_t from, uint32_t, uint32_t low, uint32_t high) {
    if (good && high > low) good = check_global(w, i, lane, from + low, high - low, "TMA accesses");
  });
  return good;
}

void deliver(Cluster& c, std::function<void()> arrive) {
  ++c.events;
  if (Options::get().lazy)
    c.pending.push_back({std::move(arrive)});
  else
    arrive();
}

// aux: dimensions; aux2: operand of the multicast mask, 0 for none; vec: how many offsets im2col has
void tma_load(Warp& w, Inst const& i, uint32_t lanes) {
  Cluster& c = *w.cta->cluster;
  for_lanes(lanes, [&](int l) {
    uint32_t const to = uint32_t(address(w, i.op(0), l)), bar = uint32_t(address(w, i.op(2), l));
    TensorMap const* const map = tensor_map(w, i, l, address(w, i.op(1), l), i.aux, i.vec > 0);
    if (map == nullptr) return;
    BoxPlace place;
    for (int d = 0; d < i.vec; ++d) place.offsets[d] = uint16_t(w.value(i.ops[i.begin[3] + d], l));
    for (int d = 0; d < i.aux; ++d) place.at[d] = int32_t(w.value(i.ops[i.begin[1] + 1 + d], l));
    if (!check_box(w, i, l, *map, place)) return;
    if (Options::get().check_global_races) {
      for_box(*map, place, [&](uint32_t, uint64_t from, uint32_t, uint32_t low, uint32_t high) {
        if (high > low) global_access(w, i, l, from + low, high - low, Access::Read);
      });
    }
    uint32_t const size = box_bytes(*map), offset = to & 0xffffff, bar_offset = bar & 0xffffff;
    uint32_t mask = 0;
    if (i.aux2) {
      mask = uint32_t(w.value(i.op(i.aux2), l));
    } else {
      Cta* const owner = shared_owner(w, to);
      if (owner != nullptr) mask = 1u << owner->rank;
    }
    for (uint32_t m = mask; m != 0; m &= m - 1) {
      uint32_t const rank = __builtin_ctz(m);
      if (rank >= c.ctas.size()) {
        w.cta->launch->report(w, i, l, "memory",
                              "its multicast mask names block " + std::to_string(rank) + ", which the cluster lacks");
        continue;
      }
      Cta* const t = c.ctas[rank].get();
      Clocks const issued = race_issue(w);
      if (!issue_write(w, i, l, *t, offset, size, 128, issued)) continue;
      proxy_access(w, *t, i, l, offset, size, true, issued);
      mark_in_flight(*t, offset, size);
      // Without a multicast, the barrier may be another block's.
      Cta* const bar_owner = i.aux2 ? t : shared_owner(w, bar);
      if (bar_owner == nullptr) continue;
      check_initialized(w, *bar_owner, i, l, bar_offset, &issued);
      deliver(c, [t, bar_owner, map = *map, place, offset, size, bar_offset, issued] {
        uint8_t* const shared = t->shared.data();
        for_box(map, place, [&](uint32_t in_box, uint64_t from, uint32_t n, uint32_t low, uint32_t high) {
          uint8_t* const p = shared + swizzle_address(map.swizzle, offset + in_box);
          if (low > 0 || high < n) std::memset(p, 0, n);
          if (high > low) std::memcpy(p + low, reinterpret_cast<void const*>(from + low), high - low);
        });
        mark_arrived(*t, offset, size);
        mbarrier_complete_tx(*bar_owner, bar_offset, size, issued);
      });
    }
  });
}

// Asynchronous reads of shared memory are of the bulk groups.
void tma_store(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) {
    TensorMap const* const map = tensor_map(w, i, l, address(w, i.op(0), l), i.aux, false);
    if (map == nullptr) return;
    BoxPlace place;
    for (int d = 0; d < i.aux; ++d) place.at[d] = int32_t(w.value(i.ops[1 + d], l));
    if (!check_box(w, i, l, *map, place)) return;
    uint32_t const from = uint32_t(address(w, i.op(1), l)), size = box_bytes(*map), offset = from & 0xffffff;
    Cta* const t = w.cta;
    if (offset < kSharedBase || offset + size > t->shared_end || offset % 128 != 0) {
      w.cta->launch->report(w, i, l, "memory",
                            "stores " + std::to_string(size) + " bytes from " + hex(offset) + " of shared memory");
      return;
    }
    if (!w.defined.empty()) {
      bool good = true;
      for_box(*map, place, [&](uint32_t in_box, uint64_t, uint32_t, uint32_t low, uint32_t high) {
        good &= high <= low || all_defined(&t->state[swizzle_address(map->swizzle, offset + in_box) + low], high - low);
      });
      if (!good) w.cta->launch->report_undefined(w, i, l, "what it stores", 0);
    }
    Clocks const issued = race_issue(w);
    if (!issued.empty()) race_access(w, *t, i, l, offset, size, false, &issued);
    proxy_access(w, *t, i, l, offset, size, false, issued);
    if (Options::get().check_global_races) {
      for_box(*map, place, [&](uint32_t in_box, uint64_t to, uint32_t, uint32_t low, uint32_t high) {
        if (high > low)
          global_access(w, i, l, to + low, high - low, Access::Write,
                        t->shared.data() + swizzle_address(map->swizzle, offset + in_box) + low);
      });
    }
    auto run = [t, map = *map, place, offset] {
      for_box(map, place, [&](uint32_t in_box, uint64_t to, uint32_t, uint32_t low, uint32_t high) {
        if (high > low)
          std::memcpy(reinterpret_cast<void*>(to + low),
                      t->shared.data() + swizzle_address(map.swizzle, offset + in_box) + low, high - low);
      });
    };
    if (Options::get().lazy)
      w.bulk.push_back({uint32_t(l), w.bulk_group[l], run});
    else
      run();
  });
}

// aux: 0 global to shared, 1 shared to shared of the cluster, 2 shared to global; aux2: operand of the multicast mask
void bulk_copy(Warp& w, Inst const& i, uint32_t lanes) {
  Cluster& c = *w.cta->cluster;
  for_lanes(lanes, [&](int l) {
    uint64_t const to = address(w, i.op(0), l), from = address(w, i.op(1), l);
    uint32_t const size = uint32_t(w.value(i.op(2), l));
    if (size % 16 != 0 || to % 16 != 0 || from % 16 != 0) {
      w.cta->launch->report(w, i, l, "memory",
                            "copies " + std::to_string(size) + " bytes from " + hex(from) + " to " + hex(to) +
                                ": all must be multiples of 16");
      return;
    }
    Clocks const issued = race_issue(w);
    if (i.aux == 2) {
      uint32_t const offset = uint32_t(from) & 0xffffff;
      if (offset < kSharedBase || offset + size > w.cta->shared_end || !check_global(w, i, l, to, size, "copies to"))
        return;
      Cta* const t = w.cta;
      if (!issued.empty()) race_access(w, *t, i, l, offset, size, false, &issued);
      proxy_access(w, *t, i, l, offset, size, false, issued);
      global_access(w, i, l, to, size, Access::Write, t->shared.data() + offset);
      auto run = [t, to, offset, size] { std::memcpy(reinterpret_cast<void*>(to), t->shared.data() + offset, size); };
      if (Options::get().lazy)
        w.bulk.push_back({uint32_t(l), w.bulk_group[l], run});
      else
        run();
      return;
    }
    uint8_t const* source;
    if (i.aux == 0) {
      if (!check_global(w, i, l, from, size, "copies from")) return;
      source = reinterpret_cast<uint8_t const*>(from);
      global_access(w, i, l, from, size, Access::Read);
    } else {
      source = resolve_shared(w, i, l, uint32_t(from), size, Access::Read, false);
      if (source == nullptr) return;
      if (Cta* const owner = shared_owner(w, uint32_t(from)))
        proxy_access(w, *owner, i, l, uint32_t(from) & 0xffffff, size, false, issued);
    }
    uint32_t const bar = uint32_t(address(w, i.op(3), l));
    uint32_t mask = i.aux2 ? uint32_t(w.value(i.op(i.aux2), l)) : 0;
    if (!i.aux2) {
      if (Cta* const owner = shared_owner(w, uint32_t(to))) mask = 1u << owner->rank;
    }
    for (uint32_t m = mask; m != 0; m &= m - 1) {
      Cta* const t = __builtin_ctz(m) < int(c.ctas.size()) ? c.ctas[__builtin_ctz(m)].get() : nullptr;
      uint32_t const offset = uint32_t(to) & 0xffffff;
      if (t == nullptr || !issue_write(w, i, l, *t, offset, size, 16, issued)) continue;
      proxy_access(w, *t, i, l, offset, size, true, issued);
      mark_in_flight(*t, offset, size);
      Cta* const bar_owner = i.aux2 ? t : shared_owner(w, bar);
      if (bar_owner == nullptr) continue;
      check_initialized(w, *bar_owner, i, l, bar & 0xffffff, &issued);
      deliver(c, [t, bar_owner, source, offset, size, bar, issued] {
        std::memcpy(t->shared.data() + offset, source, size);
        mark_arrived(*t, offset, size);
        mbarrier_complete_tx(*bar_owner, bar & 0xffffff, size, issued);
      });
    }
  });
}

void st_async(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const bytes = bytes_of(i.type), size = bytes * i.vec;
  auto const issued = std::make_shared<Clocks const>(race_issue(w));
  for_lanes(lanes, [&](int l) {
    uint32_t const to = uint32_t(address(w, i.op(0), l)), bar = uint32_t(address(w, i.op(2), l)),
                   offset = to & 0xffffff;
    Cta *const t = shared_owner(w, to), *const bar_owner = shared_owner(w, bar);
    if (t == nullptr || bar_owner == nullptr || !issue_write(w, i, l, *t, offset, size, size, *issued)) return;
    mark_in_flight(*t, offset, size);
    std::array<uint64_t, 4> values;
    bool good = true;
    for (int j = 0; j < i.vec; ++j) {
      values[j] = w.value(i.ops[i.begin[1] + j], l);
      good &= !w.undefined(i.ops[i.begin[1] + j], l);
    }
    deliver(*w.cta->cluster, [t, bar_owner, offset, size, bytes, values, bar, issued, good] {
      for (uint32_t j = 0; j < size / bytes; ++j) std::memcpy(t->shared.data() + offset + j * bytes, &values[j], bytes);
      mark_arrived(*t, offset, size);
      if (!good) std::memset(&t->state[offset], 0, size);
      mbarrier_complete_tx(*bar_owner, bar & 0xffffff, size, *issued);
    });
  });
}

void nothing(Warp&, Inst const&, uint32_t) {}

}  // namespace

bool decode_copy(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  if (op == "st" && p.part(1) == "async") {
    i.cls = Class::LoadStore;
    i.vec = i.width(1);
    i.exec = st_async;
  } else if (op == "cp" && p.part(1) == "async" && p.part(2) != "bulk") {
    i.cls = Class::Copy;
    if (p.part(2) == "commit_group") {
      i.exec = cp_async_commit;
    } else if (p.part(2) == "wait_group" || p.part(2) == "wait_all") {
      i.aux2 = p.part(2) == "wait_all" ? -1 : i.op(0).imm;
      i.exec = cp_async_wait;
    } else if (p.part(2) == "mbarrier") {
      return false;
    } else {
      int const rest = i.count() - 3 - p.has("L2::cache_hint");
      i.aux2 = rest > 0 ? 3 : -1;
      i.vec = rest > 0 && i.op(3).cls == RegClass::Pred ? 2 : 1;
      i.exec = cp_async;
    }
  } else if (op == "cp" && p.part(1) == "async" && p.part(2) == "bulk") {
    i.cls = Class::Copy;
    if (p.part(3) == "commit_group") {
      i.aux = 1;
      i.exec = cp_async_commit;
    } else if (p.part(3) == "wait_group") {
      i.aux = 1;
      i.aux2 = i.op(0).imm;
      i.exec = cp_async_wait;
    } else if (p.part(3) == "prefetch") {
      i.cls = Class::Other;
      i.exec = nothing;
    } else if (p.part(3) == "tensor") {
      i.aux = p.part(4)[0] - '0';
      bool const to_shared = p.part(5).substr(0, 6) == "shared", im2col = p.has("im2col");
      if ((im2col && !to_shared) || p.has("im2col_no_offs") || p.has("tile::gather4") || p.has("tile::scatter4"))
        throw Error("this mode is not implemented");
      i.vec = im2col ? i.aux - 2 : 0;
      i.aux2 = p.has("multicast::cluster") ? 3 + im2col : 0;
      i.exec = to_shared ? tma_load : tma_store;
    } else {
      bool const to_shared = p.part(3).substr(0, 6) == "shared", from_global = p.part(4) == "global";
      i.aux = to_shared ? (from_global ? 0 : 1) : 2;
      i.aux2 = p.has("multicast::cluster") ? 4 : 0;
      i.exec = bulk_copy;
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
