// What runs: a launch's clusters of blocks of warps, on host memory.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <set>
#include <shared_mutex>
#include <unordered_set>

#include "ptx.h"

namespace emu {

constexpr uint64_t kSharedWindow = 0x0001'0000'0000'0000, kLocalWindow = 0x0002'0000'0000'0000;
constexpr uint32_t kSharedBase = 1024;  // shared memory below belongs to the system, as on sm_90
constexpr uint32_t kAll = 0xffffffff;

// From the environment; see README.md.
struct Options {
  bool check_memory = true;  // bounds and alignment
  bool check_uninitialized = false;
  bool check_races = false;
  bool check_async = true;  // accumulators of wgmma, destinations of cp.async and TMA, before their wait
  bool check_fences =
      false;  // between generic and asynchronous proxy, registers and wgmma, mbarrier.init and its users
  bool check_global_races = false;
  bool check_lanes = false;  // shared memory that one lane writes and another reads
  bool clocks() const { return check_races || check_fences || check_global_races; }
  bool unknown_pointers = false;  // allows memory that was not allocated here
  bool lazy = true;               // asynchronous copies arrive as late as they may
  bool narrow = true;             // wgmma of fp8 keeps about 14 bits of a sum, as Hopper does
  bool stats = false;
  uint64_t seed = 0;  // of the order of warps; 0: round robin
  int threads = 1;
  int max_reports = 20;
  std::string stats_file;
  static Options const& get();
};

void say(std::string const& text);  // on stderr and to emuReports

// Device memory: what may be accessed, by address.
class Heap {
 public:
  struct Range {
    uint64_t begin = 0, end = 0;
  };
  void add(void const* p, size_t size, bool freed = false);
  void remove(void const* p);
  bool find(uint64_t address, Range& range);
  std::string describe(uint64_t address);
  static Heap& get();

 private:
  std::shared_mutex mutex_;
  std::map<uint64_t, uint64_t> ranges_, freed_;
};

struct Launch;
struct Cta;
struct Cluster;
// By actor: warps, and what each of them has under way. The second half has how much of that was fenced for the
// asynchronous proxy before it was passed on.
using Clocks = std::vector<uint32_t>;

struct Split {
  uint32_t pc, lanes;
  bool waiting;
};

// A copy that the thread `lane` has under way by cp.async, or a store of shared memory by cp.async.bulk.
struct PendingCopy {
  uint32_t lane, group;
  std::function<void()> run;
};

struct Warp {
  Cta* cta = nullptr;
  int index = 0;  // in its block
  uint32_t* rows = nullptr;
  uint8_t* local = nullptr;
  uint32_t alive = 0;
  std::vector<Split> splits;
  Heap::Range seen{};  // where the last global access was

  // Synchronization
  int barrier = -1;  // that this warp has arrived at, and waits for
  uint32_t barrier_generation = 0, barrier_result = 0;
  uint32_t cluster_phase = 0;
  bool timeout = false;  // try_wait gives up once
  std::vector<PendingCopy> copies, bulk;
  uint32_t copy_group[32] = {}, bulk_group[32] = {};
  uint32_t carry = 0;

  // Checks
  std::vector<uint32_t> defined;  // by register id: lanes whose value depends on nothing unwritten; empty: not checked
  std::vector<uint32_t> origin;   // where what is undefined came from
  std::vector<std::pair<uint32_t, uint32_t>> in_flight;  // registers that wgmma writes: id, group
  uint32_t mma_group = 0;
  std::vector<uint32_t> mma_clocks;  // of the async agent at each commit
  Clocks clocks;
  uint32_t agent_clock = 0;
  std::vector<std::pair<uint32_t, uint32_t>> fences;  // fence.proxy.async: when, which lanes
  std::vector<std::pair<Cta*, uint32_t>> unfenced;    // mbarriers that it has initialized
  uint32_t mma_fences = 0;                            // wgmma.fence
  std::vector<uint32_t> touched;      // by register id: mma_fences + 1 when an ordinary instruction wrote it last
  std::vector<uint32_t> accumulated;  // the same for wgmma, with its shape; both empty: not checked
  uint32_t lane_epoch = 0;            // instructions that bring lanes together

  // Where it stands, for reports.
  uint32_t pc = 0;

  std::vector<uint32_t> storage;
  std::vector<uint8_t> local_storage;

  bool turn(int budget);
  bool done() const { return splits.empty(); }
  template <class T>
  T* row(Operand const& o) {
    return reinterpret_cast<T*>(rows + o.row);
  }
  int thread(int lane) const { return index * 32 + lane; }
  uint64_t value(Operand const& o, int lane) const {
    switch (o.cls) {
      case RegClass::Pred:
        return (rows[o.row] >> lane & 1) ^ o.negated;
      case RegClass::Word:
        return rows[o.row + lane];
      default:
        return reinterpret_cast<uint64_t const*>(rows + o.row)[lane * (o.cls == RegClass::Quad ? 2 : 1)];
    }
  }
  void set(Operand const& o, int lane, uint64_t v) {
    if (o.sink) return;
    switch (o.cls) {
      case RegClass::Pred:
        rows[o.row] = (rows[o.row] & ~(1u << lane)) | uint32_t(v & 1) << lane;
        break;
      case RegClass::Word:
        rows[o.row + lane] = uint32_t(v);
        break;
      default:
        reinterpret_cast<uint64_t*>(rows + o.row)[lane * (o.cls == RegClass::Quad ? 2 : 1)] = v;
    }
  }
  bool undefined(Operand const& o, int lane) const {
    return !defined.empty() && !o.sink && !(defined[o.id] >> lane & 1);
  }
  void undefine(Operand const& o, int lane, uint32_t from) {
    if (o.sink) return;
    defined[o.id] &= ~(1u << lane);
    origin[o.id] = from;
  }
  uint32_t pred(Operand const& o) const { return o.negated ? ~rows[o.row] : rows[o.row]; }

 private:
  void run(size_t split, int& budget, bool& progress);
  void track(Inst const& inst, uint32_t lanes);
};

struct NamedBarrier {
  uint32_t arrived = 0, generation = 0, count = 0, and_ = 1, or_ = 0, popc = 0, result_and = 0, result_or = 0,
           result_popc = 0;
  Clocks gathered, released;
};

// For a word of shared memory: who wrote it last, and who has read it since.
struct RaceWord {
  uint16_t writer = 0xffff, reader = 0xffff;
  uint8_t written = 0, read = 0;  // bytes of it
  uint32_t write_clock = 0, read_clock = 0, write_line = 0, read_line = 0;
  int32_t readers = -1;  // index of a table of all clocks, where several read it
};

// The generic proxy's last write to a word of shared memory, until the asynchronous proxy writes it.
struct ProxyWord {
  uint16_t writer = 0xffff;
  uint32_t clock = 0, lanes = 0, line = 0;
};

// The last lane to store to a word of shared memory.
struct LaneWord {
  uint16_t warp = 0xffff;
  uint8_t lane = 0, bytes = 0;
  uint32_t epoch = 0, line = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  Launch* launch = nullptr;
  uint32_t id[3] = {}, rank = 0;
  std::vector<uint8_t> shared;
  uint32_t shared_end = 0;
  std::vector<uint8_t> state;  // of shared memory's bytes: kDefined, kInFlight
  NamedBarrier barriers[16];
  std::vector<Warp> warps;
  std::vector<RaceWord> race;
  std::vector<ProxyWord> proxy;
  std::vector<LaneWord> lanes;
  std::vector<std::pair<Clocks, std::vector<uint32_t>>> race_readers;
  std::vector<int32_t> unused_readers;  // of race_readers
  struct Sync {
    Clocks gathered, released;
    // Of mbarrier.init: by which warp and lane, when; when it was fenced.
    uint16_t initializer = 0xffff;
    uint8_t lane = 0;
    uint32_t clock = 0, fenced = 0, line = 0;
  };
  std::unordered_map<uint32_t, Sync> syncs;  // mbarriers and atomics by address

  uint32_t alive_warps() const {
    uint32_t n = 0;
    for (Warp const& w : warps) n += !w.done();
    return n;
  }
};
constexpr uint8_t kDefined = 1, kInFlight = 2;

// A copy by TMA that has been issued and not arrived.
struct AsyncCopy {
  std::function<void()> arrive;
};

struct Cluster {
  Launch* launch = nullptr;
  uint32_t id[3] = {};
  std::vector<std::unique_ptr<Cta>> ctas;
  std::deque<AsyncCopy> pending;
  uint64_t events = 0;  // what may let another warp go on
  uint32_t phase = 0, arrived = 0;
  Clocks gathered, released;
  std::mt19937_64 random;
  uint32_t actors_per_cta = 0;
  uint32_t index = 0;                              // in the launch
  uint64_t acquired = 0;                           // when it last saw what others released
  bool accessed = false;                           // global memory, since its last fence
  std::vector<uint64_t> executed, executed_lanes;  // by instruction, for the statistics
  uint64_t sectors = 0, sector_bytes = 0, store_sectors = 0, store_bytes = 0, shared_wavefronts = 0, shared_ideal = 0;
  std::unordered_set<uint64_t> loaded;  // sectors of global memory: what a cache without limits reads
};

struct Report {
  std::string kind, text;
  uint64_t count = 1;
};

struct Launch {
  Kernel* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  uint32_t dynamic_at = 0, shared_end = 0;
  bool cooperative = false, explicit_cluster = false;
  uint32_t workspace[16] = {};  // cooperative groups' barrier of the grid
  std::vector<uint8_t> params;
  uint8_t* param_base = nullptr;
  std::mutex mutex;
  std::map<std::pair<std::string, uint32_t>, Report> reports;
  std::atomic<bool> failed{false};
  uint64_t instructions = 0, lane_instructions = 0;
  std::vector<uint64_t> executed, executed_lanes;
  uint64_t sectors = 0, sector_bytes = 0, store_sectors = 0, store_bytes = 0, shared_wavefronts = 0, shared_ideal = 0;
  std::unordered_set<uint64_t> loaded;
  double seconds = 0;
  uint64_t serial = 0;
  uint64_t global_time = 0;
  std::vector<std::vector<uint64_t>>
      releases;  // of each cluster and fence: when what came before was released, 0: not yet

  // Runs the grid; throws Error where the kernel cannot go on. Returns whether there were no reports.
  bool run();
  void report(Warp& w, Inst const& inst, int lane, std::string const& kind, std::string const& what);
  std::string where(uint32_t pc) const;
  void report_undefined(Warp& w, Inst const& inst, int lane, std::string const& what, uint32_t origin);
  std::string json() const;

 private:
  void run_clusters(std::vector<Cluster*> const& clusters);
  void start(Cluster& cluster, uint64_t index);
  void deadlock(std::vector<Cluster*> const& clusters, char const* kind);
};

uint64_t special_register(Warp const& w, int lane, Sreg s);
std::string demangle(std::string const& name);

struct Stop : Error {
  using Error::Error;
};

// Lanes ---------------------------------------------------------------------------------------------------------------

template <class F>
inline __attribute__((always_inline)) void for_lanes(uint32_t lanes, F f) {
  if (lanes == kAll) {
#pragma GCC ivdep
    for (int l = 0; l < 32; ++l) f(l);
  } else {
    for (uint32_t m = lanes; m != 0; m &= m - 1) f(__builtin_ctz(m));
  }
}

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Memory (memory.cc)

enum class Access : uint8_t { Read, Write, Atomic };

// The host's address of what a lane accesses; null where it was reported.
uint8_t* resolve(Warp& w, Inst const& inst, int lane, Space space, uint64_t address, uint32_t size, Access access);
// As above, of shared memory: 32-bit address, of this block or with the cluster's rank in its upper byte.
uint8_t* resolve_shared(Warp& w, Inst const& inst, int lane, uint32_t address, uint32_t size, Access access,
                        bool aligned = true);
Cta* shared_owner(Warp& w, uint32_t address);  // null where there is none
// The state of bytes of shared memory that resolve() gave; null where it is other memory.
uint8_t* shared_state(Warp& w, uint8_t const* p);
inline bool all_defined(uint8_t const* state, uint32_t size) {
  uint8_t all = kDefined;
  for (uint32_t b = 0; b < size; ++b) all &= state[b];
  return all;
}
bool check_global(Warp& w, Inst const& inst, int lane, uint64_t address, uint32_t size, char const* what);

// Races (races.cc): vector clocks of warps and of the asynchronous agents beside them.
uint32_t race_actor(Warp const& w, bool agent);
// What is known to have happened before something asynchronous that this warp issues now; empty where races are not
// checked.
Clocks race_issue(Warp& w);
// `issued`: by what the warp issued then, else by the warp itself.
void race_access(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size, bool write,
                 Clocks const* issued = nullptr);
void race_join(Clocks& to, Clocks const& from);
void race_release(Warp& w, Clocks& to);
void race_acquire(Warp& w, Clocks const& from);
// The warp waits for all that it issued up to this clock of its agent.
void race_wait(Warp& w, uint32_t agent_clock);
// fence.proxy.async, or fence.mbarrier_init.
void race_fence(Warp& w, uint32_t lanes, bool proxy);
// The generic proxy writes shared memory; by cp.async where `issued` is given.
void proxy_write(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size,
                 Clocks const* issued = nullptr);
// The asynchronous proxy accesses it.
void proxy_access(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size, bool write,
                  Clocks const& issued);
// An instruction of another warp, or where `issued` is given TMA, uses an mbarrier.
void check_initialized(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset,
                       Clocks const* issued = nullptr);
// Lanes of a warp, to shared memory.
void lane_access(Warp& w, Cta& owner, Inst const& inst, int lane, uint32_t offset, uint32_t size, bool write);
// Global memory: what a store has there (or will have) is in `other`, to tell what it changes.
void global_access(Warp& w, Inst const& inst, int lane, uint64_t address, uint32_t size, Access access,
                   void const* other = nullptr);
void global_fence(Warp& w);  // __threadfence

// mbarriers (sync.cc), which TMA completes too.
void mbarrier_complete_tx(Cta& cta, uint32_t offset, uint32_t bytes, Clocks const& issued);

// The tensor map that the shim makes in place of the driver's.
struct TensorMap {
  static constexpr uint32_t kMagic = 0x454d5531;
  uint32_t magic;
  uint8_t rank, element_bytes, swizzle, interleave, fill_nan, type;  // swizzle: 0, 1, 2, 3 for none, 32, 64, 128 bytes
  uint8_t unused[6];
  uint64_t address;
  uint64_t stride[4];  // bytes, of dimensions 1 on
  uint32_t size[5];
  uint16_t box[5];  // im2col: channels, pixels
  uint8_t element_stride[5];
  bool im2col;
  int16_t lower[3], upper[3];  // corners of where im2col walks, from the first and from the last of each spatial axis
};
static_assert(sizeof(TensorMap) <= 128);

// Bytes of shared memory change places within rows of so many bytes, by their address.
inline uint32_t swizzle_address(int mode, uint32_t address) {
  return mode == 0 ? address : address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace emu
