// What the environment says; see README.md.
#include <cstdlib>
#include <sstream>

#include "machine.h"

namespace emu {
namespace {

bool flag(char const* name, bool otherwise) {
  char const* const value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : std::string_view(value) != "0";
}
long number(char const* name, long otherwise) {
  char const* const value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : std::atol(value);
}

}  // namespace

Options const& Options::get() {
  // Never destroyed: the statistics are written when the process ends.
  static Options const& options = *new Options([] {
    Options o;
    // EMU_CHECK: a list of memory, uninit, race, async, fence, grace, warp; "all" or "none".
    if (char const* const checks = std::getenv("EMU_CHECK")) {
      std::set<std::string> names;
      std::istringstream list(checks);
      for (std::string name; std::getline(list, name, ',');) {
        static std::set<std::string> const known{"all",   "none",  "memory", "uninit", "race",
                                                 "async", "fence", "grace",  "warp"};
        if (!known.count(name)) say("EMU_CHECK: there is no check " + name);
        names.insert(name);
      }
      auto const has = [&](char const* name) { return names.count("all") + names.count(name) > 0; };
      o.check_memory = has("memory");
      o.check_uninitialized = has("uninit");
      o.check_races = has("race");
      o.check_async = has("async");
      o.check_fences = has("fence");
      o.check_global_races = has("grace");
      o.check_lanes = has("warp");
    }
    o.unknown_pointers = flag("EMU_UNKNOWN_POINTERS", false);
    o.lazy = flag("EMU_LAZY", true);
    o.narrow = flag("EMU_NARROW", true);
    o.seed = number("EMU_SEED", 0);
    o.threads = number("EMU_THREADS", 1);
    o.max_reports = number("EMU_MAX_REPORTS", 20);
    if (char const* const file = std::getenv("EMU_STATS")) o.stats = true, o.stats_file = file;
    return o;
  }());
  return options;
}

}  // namespace emu
