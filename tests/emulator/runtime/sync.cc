// What warps do together: barriers, votes and shuffles.
#include "decode.h"

namespace emu {
namespace {

uint32_t full(Warp& w) { return w.alive; }

// Named barriers

void complete(Cta& t, NamedBarrier& b) {
  ++b.generation;
  b.arrived = 0;
  b.result_and = b.and_, b.result_or = b.or_, b.result_popc = b.popc;
  b.and_ = 1, b.or_ = 0, b.popc = 0;
  std::swap(b.released, b.gathered);
  std::fill(b.gathered.begin(), b.gathered.end(), 0);
  ++t.cluster->events;
}

// Counted in whole warps. Without a count it is all threads of the block that are still there.
bool is_complete(Cta& t, NamedBarrier const& b) {
  return b.arrived > 0 && b.arrived >= (b.count != 0 ? b.count : t.alive_warps() * 32);
}

// aux: 0 sync, 1 arrive, 2 red.and, 3 red.or, 4 red.popc; aux2: operand of the barrier's number
uint32_t bar(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, full(w))) return 0;
  Cta& t = *w.cta;
  int const at = i.aux2, reduced = i.aux >= 2 ? i.count() - 1 : i.count();
  uint32_t const first = __builtin_ctz(lanes), id = at < i.count() ? w.value(i.op(at), first) : 0;
  if (id >= 16) throw Stop("barrier " + std::to_string(id) + " does not exist");
  NamedBarrier& b = t.barriers[id];
  if (w.barrier < 0) {
    uint32_t const count = at + 1 < reduced ? w.value(i.op(at + 1), first) : 0;
    if (count % 32 != 0)
      w.cta->launch->report(w, i, first, "memory",
                            "the barrier's count of " + std::to_string(count) + " is no multiple of 32");
    if (b.arrived > 0 && b.count != count)
      w.cta->launch->report(w, i, first, "barrier",
                            "another warp gave barrier " + std::to_string(id) + " a count of " +
                                std::to_string(b.count) + ", this one " + std::to_string(count));
    b.count = count;
    b.arrived += 32;
    if (i.aux >= 2) {
      uint32_t const p = w.pred(i.op(reduced));
      b.and_ &= (p & lanes) == lanes, b.or_ |= (p & lanes) != 0, b.popc += __builtin_popcount(p & lanes);
    }
    race_release(w, b.gathered);
    ++t.cluster->events;
    w.barrier = id;
    w.barrier_generation = b.generation;
    if (is_complete(t, b)) complete(t, b);
    if (i.aux == 1) {
      w.barrier = -1;
      return lanes;
    }
  } else if (b.generation == w.barrier_generation && is_complete(t, b)) {
    complete(t, b);
  }
  if (b.generation == w.barrier_generation) return 0;
  w.barrier = -1;
  race_acquire(w, b.released);
  if (i.aux >= 2) {
    uint32_t const r = i.aux == 2 ? b.result_and : i.aux == 3 ? b.result_or : b.result_popc;
    for_lanes(lanes, [&](int l) { w.set(i.op(0), l, r); });
  }
  return lanes;
}

uint32_t warp_sync(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const mask = i.count() > 0 ? w.value(i.op(0), __builtin_ctz(lanes)) : kAll;
  return converged(w, lanes, mask) ? lanes : 0;
}

uint32_t cluster_threads(Cluster& c) {
  uint32_t n = 0;
  for (auto& t : c.ctas) n += t->alive_warps();
  return n;
}
uint32_t cluster_arrive(Warp& w, Inst const&, uint32_t lanes) {
  if (!converged(w, lanes, full(w))) return 0;
  Cluster& c = *w.cta->cluster;
  w.cluster_phase = c.phase;
  ++c.arrived;
  race_release(w, c.gathered);
  ++c.events;
  return lanes;
}
uint32_t cluster_wait(Warp& w, Inst const&, uint32_t lanes) {
  if (!converged(w, lanes, full(w))) return 0;
  Cluster& c = *w.cta->cluster;
  if (c.phase == w.cluster_phase) {
    if (c.arrived < cluster_threads(c)) return 0;
    c.arrived = 0;
    ++c.phase;
    ++c.events;
    std::swap(c.released, c.gathered);
    std::fill(c.gathered.begin(), c.gathered.end(), 0);
  }
  race_acquire(w, c.released);
  return lanes;
}

// Shuffles and votes

// aux: 0 up, 1 down, 2 bfly, 3 idx
uint32_t shfl(Warp& w, Inst const& i, uint32_t lanes) {
  if (!converged(w, lanes, uint32_t(w.value(i.op(4), __builtin_ctz(lanes))))) return 0;
  uint32_t a[32], result[32], valid = 0;
  int from[32];
  for (int l = 0; l < 32; ++l) a[l] = w.rows[i.op(1).row + l];
  for_lanes(lanes, [&](int l) {
    uint32_t const b = w.rows[i.op(2).row + l] & 31, c = w.rows[i.op(3).row + l], clamp = c & 31, segment = c >> 8 & 31;
    int const max_lane = (l & segment) | (clamp & ~segment), min_lane = l & segment;
    int j;
    bool p;
    switch (i.aux) {
      case 0:
        j = l - int(b), p = j >= max_lane;
        break;
      case 1:
        j = l + int(b), p = j <= max_lane;
        break;
      case 2:
        j = l ^ int(b), p = j <= max_lane;
        break;
      default:
        j = min_lane | (b & ~segment & 31), p = j <= max_lane;
    }
    if (!p) j = l;
    if (!(lanes >> j & 1) && p)
      w.cta->launch->report(w, i, l, "shuffle", "reads lane " + std::to_string(j) + ", which does not take part");
    result[l] = a[j];
    from[l] = j;
    valid |= uint32_t(p) << l;
  });
  uint32_t const source_defined = w.defined.empty() ? kAll : w.defined[i.op(1).id];
  for_lanes(lanes, [&](int l) {
    w.set(i.ops[0], l, result[l]);
    if (i.width(0) > 1) w.set(i.ops[1], l, valid >> l & 1);
    if (!w.defined.empty() && !i.ops[0].sink) {
      w.defined[i.ops[0].id] |= 1u << l;
      if (!(source_defined >> from[l] & 1)) w.undefine(i.ops[0], l, w.origin[i.op(1).id]);
    }
  });
  return lanes;
}

// aux: 0 all, 1 any, 2 uni, 3 ballot
uint32_t vote(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const mask = i.count() > 2 ? uint32_t(w.value(i.op(2), __builtin_ctz(lanes))) : lanes;
  if (!converged(w, lanes, mask)) return 0;
  uint32_t const p = w.pred(i.op(1)) & lanes;
  uint32_t const r = i.aux == 0 ? p == lanes : i.aux == 1 ? p != 0 : i.aux == 2 ? p == lanes || p == 0 : p;
  for_lanes(lanes, [&](int l) { w.set(i.op(0), l, r); });
  return lanes;
}

uint32_t match(Warp& w, Inst const& i, uint32_t lanes) {  // aux: 0 any, 1 all
  if (!converged(w, lanes, uint32_t(w.value(i.op(2), __builtin_ctz(lanes))))) return 0;
  uint32_t result[32];
  bool all = true;
  for_lanes(lanes, [&](int l) {
    result[l] = 0;
    for_lanes(lanes, [&](int k) { result[l] |= uint32_t(w.value(i.op(1), l) == w.value(i.op(1), k)) << k; });
    all &= result[l] == lanes;
  });
  for_lanes(lanes, [&](int l) {
    w.set(i.ops[0], l, i.aux == 0 ? result[l] : all ? lanes : 0);
    if (i.width(0) > 1) w.set(i.ops[1], l, all);
  });
  return lanes;
}

uint32_t redux(Warp& w, Inst const& i, uint32_t lanes) {  // aux: 0 add, 1 min, 2 max, 3 and, 4 or, 5 xor
  if (!converged(w, lanes, uint32_t(w.value(i.op(2), __builtin_ctz(lanes))))) return 0;
  bool const s = is_signed(i.type);
  int64_t r = 0;
  bool first = true;
  for_lanes(lanes, [&](int l) {
    uint32_t const raw = w.rows[i.op(1).row + l];
    int64_t const v = s ? int64_t(int32_t(raw)) : int64_t(raw);
    if (first)
      r = v;
    else
      r = i.aux == 0   ? r + v
          : i.aux == 1 ? std::min(r, v)
          : i.aux == 2 ? std::max(r, v)
          : i.aux == 3 ? r & v
          : i.aux == 4 ? r | v
                       : r ^ v;
    first = false;
  });
  for_lanes(lanes, [&](int l) { w.set(i.op(0), l, uint32_t(r)); });
  return lanes;
}

uint32_t elect(Warp& w, Inst const& i, uint32_t lanes) {
  uint32_t const mask = uint32_t(w.value(i.op(1), __builtin_ctz(lanes)));
  if (!converged(w, lanes, mask)) return 0;
  int const leader = __builtin_ctz(lanes & mask);
  for_lanes(lanes, [&](int l) {
    w.set(i.ops[0], l, leader);
    if (i.width(0) > 1) w.set(i.ops[1], l, l == leader);
  });
  return lanes;
}
void activemask(Warp& w, Inst const& i, uint32_t lanes) {
  for_lanes(lanes, [&](int l) { w.set(i.op(0), l, lanes); });
}

}  // namespace

bool decode_sync(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  if (op == "bra" || op == "brx") {
    i.flow = op == "bra" ? Flow::Branch : Flow::BranchIndexed;
    i.cls = Class::Control;
  } else if (op == "exit" || op == "ret") {
    i.flow = Flow::Exit;
    i.cls = Class::Control;
  } else if (op == "bar" && p.part(1) == "warp") {
    return p.sync(warp_sync, Class::Barrier, 0);
  } else if (op == "barrier" && p.part(1) == "cluster") {
    return p.sync(p.part(2) == "arrive" ? cluster_arrive : cluster_wait, Class::Barrier, 0);
  } else if (op == "bar" || op == "barrier") {
    if (p.has("arrive")) i.aux = 1;
    if (p.has("red")) i.aux = p.has("and") ? 2 : p.has("or") ? 3 : 4;
    i.aux2 = i.aux >= 2 ? 1 : 0;
    return p.sync(bar, Class::Barrier, i.aux >= 2);
  } else if (op == "shfl") {
    if (p.part(1) != "sync") throw Error("only shfl.sync");
    i.aux = p.part(2) == "up" ? 0 : p.part(2) == "down" ? 1 : p.part(2) == "bfly" ? 2 : 3;
    return p.sync(shfl, Class::Shuffle, 1);
  } else if (op == "vote") {
    i.aux = p.has("all") ? 0 : p.has("any") ? 1 : p.has("uni") ? 2 : 3;
    return p.sync(vote, Class::Shuffle, 1);
  } else if (op == "match") {
    i.aux = p.part(1) == "all";
    return p.sync(match, Class::Shuffle, 1);
  } else if (op == "redux") {
    if (is_float(i.type)) throw Error("redux of floats is not implemented");
    i.aux = p.has("add") ? 0 : p.has("min") ? 1 : p.has("max") ? 2 : p.has("and") ? 3 : p.has("or") ? 4 : 5;
    return p.sync(redux, Class::Shuffle, 1);
  } else if (op == "elect") {
    return p.sync(elect, Class::Shuffle, 1);
  } else if (op == "activemask") {
    i.destinations = 1;
    i.cls = Class::Shuffle;
    i.exec = activemask;
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
