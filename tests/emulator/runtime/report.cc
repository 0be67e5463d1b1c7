// What is reported, and the statistics.
#include <cxxabi.h>

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <utility>

#include "cudart_emulator.h"
#include "machine.h"

namespace {

std::mutex said_mutex;
std::string said;

}  // namespace

std::string emuReports() {
  std::lock_guard lock(said_mutex);
  return std::exchange(said, {});
}

namespace emu {

void say(std::string const& text) {
  std::lock_guard lock(said_mutex);
  std::cerr << "[emu] " << text << std::endl;
  said += (said.empty() ? "" : "\n") + text;
}

std::string demangle(std::string const& name) {
  int status;
  char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result.size() > 160 ? result.substr(0, 160) + "..." : result;
}

std::string Launch::where(uint32_t pc) const {
  Inst const& inst = kernel->code[std::min<size_t>(pc, kernel->code.size() - 1)];
  std::ostringstream out;
  out << "PTX line " << inst.line << " (" << inst.name << ")";
  if (inst.source_line != 0) {
    auto const file = kernel->module->files.find(inst.source_file);
    out << ", " << (file == kernel->module->files.end() ? "?" : file->second) << ":" << inst.source_line;
  }
  return out.str();
}

void Launch::report(Warp& w, Inst const& inst, int lane, std::string const& kind, std::string const& what) {
  failed = true;
  std::lock_guard lock(mutex);
  uint32_t const pc = &inst - kernel->code.data();
  auto const key = std::pair(kind, pc);
  auto const found = reports.find(key);
  if (found != reports.end()) {
    ++found->second.count;
    return;
  }
  int const t = w.thread(lane);
  std::ostringstream out;
  out << demangle(kernel->name) << ", " << where(pc) << ", block (" << w.cta->id[0] << "," << w.cta->id[1] << ","
      << w.cta->id[2] << "), thread (" << t % block[0] << "," << t / block[0] % block[1] << ","
      << t / block[0] / block[1] << "): " << what;
  reports[key] = {kind, out.str()};
  if (int(reports.size()) <= Options::get().max_reports) say(kind + ": " + out.str());
}

void Launch::report_undefined(Warp& w, Inst const& inst, int lane, std::string const& what, uint32_t origin) {
  report(w, inst, lane, "uninitialized",
         what + " depends on what was never written" + (origin == 0 ? "" : ", first read at " + where(origin)));
}

void Launch::deadlock(std::vector<Cluster*> const& clusters, char const* kind) {
  std::ostringstream out;
  out << kind << " in " << demangle(kernel->name) << "; these warps are not done:";
  int shown = 0;
  for (Cluster* c : clusters) {
    for (auto& t : c->ctas) {
      for (Warp& w : t->warps) {
        for (Split const& s : w.splits) {
          if (++shown > 64) continue;
          out << "\n  block (" << t->id[0] << "," << t->id[1] << "," << t->id[2] << ") warp " << w.index << " lanes "
              << std::hex << s.lanes << std::dec << " at " << where(s.pc);
          Inst const& inst = kernel->code[s.pc];
          if (w.barrier >= 0) {
            NamedBarrier const& b = t->barriers[w.barrier];
            out << ", barrier " << w.barrier << " with " << b.arrived << " of "
                << (b.count ? b.count : t->alive_warps() * 32) << " threads";
          }
          if (inst.name.compare(0, 8, "mbarrier") == 0) {
            for (size_t i = 0; i < inst.ops.size(); ++i) {
              out << (i ? ", " : " operands ") << std::hex
                  << w.value(inst.ops[i], __builtin_ctz(s.lanes)) + inst.ops[i].imm * !inst.ops[i].constant << std::dec;
            }
          }
        }
      }
    }
  }
  failed = true;
  {
    std::lock_guard lock(mutex);
    reports[{kind, 0}] = {kind, out.str()};
  }
  say(out.str());
  throw Stop(kind);
}

std::string Launch::json() const {
  static char const* const names[] = {"alu",    "fp",      "convert", "move", "control", "load_store",
                                      "atomic", "barrier", "shuffle", "mma",  "copy",    "other"};
  std::map<std::string, uint64_t> by_class, mma;
  for (size_t i = 0; i < executed.size(); ++i) {
    if (executed[i] == 0) continue;
    Inst const& inst = kernel->code[i];
    by_class[names[int(inst.cls)]] += executed[i];
    if (inst.cls == Class::Mma) mma[inst.name] += executed[i];
  }
  std::ostringstream out;
  out << "{\"kernel\": \"" << demangle(kernel->name) << "\", \"grid\": [" << grid[0] << "," << grid[1] << "," << grid[2]
      << "], \"block\": [" << block[0] << "," << block[1] << "," << block[2] << "], \"seconds\": " << seconds
      << ", \"warp_instructions\": " << instructions << ", \"lane_instructions\": " << lane_instructions
      << ", \"by_class\": {";
  char const* comma = "";
  for (auto const& [name, n] : by_class) out << comma << "\"" << name << "\": " << n, comma = ", ";
  out << "}, \"mma\": {";
  comma = "";
  for (auto const& [name, n] : mma) out << comma << "\"" << name << "\": " << n, comma = ", ";
  out << "}, \"global_load_sectors\": " << sectors << ", \"global_load_bytes\": " << sector_bytes
      << ", \"global_loaded_once_bytes\": " << 32 * loaded.size() << ", \"global_store_sectors\": " << store_sectors
      << ", \"global_store_bytes\": " << store_bytes << ", \"shared_wavefronts\": " << shared_wavefronts
      << ", \"shared_wavefronts_ideal\": " << shared_ideal << ", \"reports\": " << reports.size() << "}";
  return out.str();
}

}  // namespace emu
