// A warp's turn: its splits, the instructions they execute, and what is known of its registers.
#include "machine.h"

namespace emu {

// Lanes at the lowest instruction run first, so that those that parted meet again where their ways do.
bool Warp::turn(int budget) {
  for (Split& s : splits) s.waiting = false;
  bool progress = false;
  while (budget > 0 && !splits.empty()) {
    for (size_t i = 0; i < splits.size(); ++i) {
      for (size_t j = i + 1; j < splits.size();) {
        if (splits[i].pc == splits[j].pc) {
          splits[i].lanes |= splits[j].lanes;
          splits[i].waiting = false;
          splits[j] = splits.back();
          splits.pop_back();
        } else {
          ++j;
        }
      }
    }
    size_t lowest = splits.size();
    for (size_t i = 0; i < splits.size(); ++i) {
      if (!splits[i].waiting && (lowest == splits.size() || splits[i].pc < splits[lowest].pc)) lowest = i;
    }
    if (lowest == splits.size()) break;
    run(lowest, budget, progress);
  }
  return progress;
}

void Warp::run(size_t index, int& budget, bool& progress) {
  Launch& launch = *cta->launch;
  Cluster& cluster = *cta->cluster;
  Options const& options = Options::get();
  Inst const* const code = launch.kernel->code.data();
  uint32_t at = splits[index].pc, lanes = splits[index].lanes;
  uint32_t stop = kAll;
  bool const several = splits.size() > 1;
  int own = several ? std::min(budget, 5000) : budget;
  for (Split const& s : splits) {
    if (s.pc > at) stop = std::min(stop, s.pc);
  }
  budget -= own;
  auto const keep = [&] { splits[index] = {at, lanes, false}; };
  while (own > 0) {
    if (at >= stop) {
      budget += own;
      return keep();
    }
    --own;
    Inst const& inst = code[at];
    uint32_t active = lanes;
    if (inst.guard >= 0) active &= inst.guard_negated ? ~rows[inst.guard] : rows[inst.guard];
    pc = at;
    if (options.stats) {
      ++cluster.executed[at];
      cluster.executed_lanes[at] += __builtin_popcount(active);
    }
    if (options.check_uninitialized || !in_flight.empty() || !touched.empty()) track(inst, lanes);
    switch (inst.flow) {
      case Flow::Next:
        if (active != 0) inst.exec(*this, inst, active);
        ++at;
        progress = true;
        break;
      case Flow::Branch:
        progress = true;
        if (active == lanes) {
          at = inst.target;
        } else if (active == 0) {
          ++at;
        } else {
          splits[index] = {at + 1, lanes & ~active, false};
          splits.push_back({inst.target, active, false});
          budget += own;
          return;
        }
        break;
      case Flow::BranchIndexed: {
        progress = true;
        std::map<uint32_t, uint32_t> ways;
        for_lanes(lanes, [&](int l) {
          if (!(active >> l & 1)) {
            ways[at + 1] |= 1u << l;
            return;
          }
          uint64_t const i = value(inst.op(0), l);
          if (i >= inst.targets.size()) throw Stop("brx.idx beyond its table at " + launch.where(at));
          ways[inst.targets[i]] |= 1u << l;
        });
        bool first = true;
        for (auto const& [to, which] : ways) {
          if (first)
            splits[index] = {to, which, false};
          else
            splits.push_back({to, which, false});
          first = false;
        }
        budget += own;
        return;
      }
      case Flow::Exit:
        progress = true;
        ++cluster.events;
        alive &= ~active;
        lanes &= ~active;
        ++at;
        for (auto* list : {&copies, &bulk}) {
          for (size_t i = 0; i < list->size();) {
            if (active >> (*list)[i].lane & 1) {
              auto const copy = std::move((*list)[i]);
              list->erase(list->begin() + i);
              copy.run();
            } else {
              ++i;
            }
          }
        }
        if (lanes == 0) {
          splits[index] = splits.back();
          splits.pop_back();
          budget += own;
          return;
        }
        break;
      case Flow::Sync: {
        if (active == 0) {
          ++at;
          progress = true;
          break;
        }
        uint32_t const finished = inst.sync(*this, inst, active);
        uint32_t const stay = active & ~finished;
        lane_epoch += finished != 0;
        if (stay == 0) {
          ++at;
          progress = true;
          break;
        }
        uint32_t const go = lanes & ~stay;
        splits[index] = {at, stay, true};
        if (go != 0) {
          splits.push_back({at + 1, go, false});
          progress = true;
        }
        budget += own;
        return;
      }
    }
  }
  keep();
  // Lanes that spin must let the others of their warp run.
  if (several) splits[index].waiting = true;
}

// Which registers hold what was never written, which wgmma is still to write, and which were written since its fence.
void Warp::track(Inst const& inst, uint32_t lanes) {
  Launch& launch = *cta->launch;
  uint32_t active = lanes;
  if (inst.guard >= 0) active &= inst.guard_negated ? ~rows[inst.guard] : rows[inst.guard];
  int const first_source = inst.destinations < inst.count() ? inst.begin[inst.destinations] : int(inst.ops.size());
  bool const mma = inst.cls == Class::Mma, move = inst.cls == Class::Move;
  if (!in_flight.empty() && !mma && active != 0) {
    uint32_t group = kAll;
    for (size_t i = 0; i < inst.ops.size(); ++i) {
      for (auto const& [id, its] : in_flight) {
        if (inst.ops[i].id != id || inst.ops[i].sink) continue;
        if (move && int(i) >= first_source)
          group = its;
        else
          launch.report(*this, inst, __builtin_ctz(active), "async",
                        std::string(int(i) < first_source ? "writes" : "reads") + " the wgmma accumulator " +
                            launch.kernel->register_names[id] + " before wgmma.wait_group");
      }
    }
    if (group != kAll) {
      for (int i = 0; i < first_source; ++i) in_flight.push_back({inst.ops[i].id, group});
    }
  }
  if (!touched.empty() && !inst.wgmma && active != 0) {
    // Of a copy the source's writer counts: ptxas removes most. Constants count as never written: nvcc moves them
    // behind the fence.
    uint32_t when = move ? 0 : mma_fences + 1;
    for (size_t i = first_source; move && i < inst.ops.size(); ++i) when = std::max(when, touched[inst.ops[i].id]);
    for (int i = 0; i < first_source; ++i) touched[inst.ops[i].id] = when;
  }
  if (defined.empty()) return;
  uint32_t const here = &inst - launch.kernel->code.data();
  if (inst.guard >= 0) {
    if (uint32_t const bad = lanes & ~defined[inst.guard_id]) {
      launch.report_undefined(*this, inst, __builtin_ctz(bad),
                              "its predicate " + launch.kernel->register_names[inst.guard_id], origin[inst.guard_id]);
      defined[inst.guard_id] |= bad;
    }
  }
  if (active == 0 || mma) return;
  uint32_t bad = 0, from = here;
  bool const select = std::string_view(inst.name).substr(0, 5) == "selp.";
  bool const memory = inst.cls == Class::LoadStore || inst.cls == Class::Atomic,
             addresses = memory || inst.cls == Class::Copy;
  for (size_t i = first_source; i < inst.ops.size(); ++i) {
    Operand const& o = inst.ops[i];
    if (o.sink) continue;
    uint32_t undefined = ~defined[o.id] & active;
    if (select && i == 1) undefined &= pred(inst.ops[3]);
    if (select && i == 2) undefined &= ~pred(inst.ops[3]);
    if (undefined == 0) continue;
    bad |= undefined;
    if (origin[o.id] != 0) from = origin[o.id];
    if (addresses && int(i) == first_source) {
      launch.report_undefined(*this, inst, __builtin_ctz(undefined),
                              "its address in " + launch.kernel->register_names[o.id], origin[o.id]);
      defined[o.id] |= undefined;
    }
  }
  if (memory) bad = 0;
  for (int i = 0; i < first_source; ++i) {
    Operand const& o = inst.ops[i];
    if (o.sink) continue;
    defined[o.id] = (defined[o.id] & ~active) | (active & ~bad);
    if (bad != 0) origin[o.id] = from;
  }
}

}  // namespace emu
