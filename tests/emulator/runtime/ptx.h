// PTX text as the interpreter sees it: modules of kernels, kernels of instructions whose operands are rows of a
// register file.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace emu {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Type : uint8_t {
  None,
  Pred,
  B8,
  B16,
  B32,
  B64,
  B128,
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  F16,
  F16x2,
  BF16,
  BF16x2,
  TF32,
  F32,
  F64,
  E4M3,
  E5M2,
  E4M3x2,
  E5M2x2,
  S4,
  U4,
  B1,
  F32x2
};
Type type_of(std::string_view name);  // None where it names no type
int bits_of(Type);
inline int bytes_of(Type t) { return bits_of(t) / 8; }
bool is_signed(Type);
bool is_float(Type);

enum class Space : uint8_t { Generic, Global, Shared, Local, Param, Const };

// A register is a row with a value for each lane: 32-bit words for up to 32 bits, else more words a lane. A predicate
// is one word with a bit for each lane. Immediates, addresses of variables and special registers are rows too, filled
// beforehand.
enum class RegClass : uint8_t { Pred, Word, Pair, Quad };
RegClass class_of(Type t);
inline uint32_t words_of(RegClass c) {
  return c == RegClass::Pred ? 1 : c == RegClass::Word ? 32 : c == RegClass::Pair ? 64 : 128;
}

struct Operand {
  uint32_t row = 0;  // offset in words
  uint32_t id = 0;   // of the register, for shadow state
  RegClass cls = RegClass::Word;
  bool negated = false;   // !p
  bool sink = false;      // _
  bool constant = false;  // imm is its value
  bool clock = false;     // a special register that changes
  int64_t imm = 0;        // or the displacement of an address
};

struct Warp;
struct Inst;
using Exec = void (*)(Warp&, Inst const&, uint32_t lanes);
// Executes for the lanes that need not wait, and returns these.
using SyncExec = uint32_t (*)(Warp&, Inst const&, uint32_t lanes);

enum class Flow : uint8_t { Next, Branch, BranchIndexed, Exit, Sync };
enum class Class : uint8_t { Alu, Fp, Convert, Move, Control, LoadStore, Atomic, Barrier, Shuffle, Mma, Copy, Other };

struct Inst {
  Exec exec = nullptr;
  SyncExec sync = nullptr;
  Flow flow = Flow::Next;
  Class cls = Class::Other;
  bool guard_negated = false;
  int32_t guard = -1;  // row of the predicate
  uint32_t guard_id = 0;
  uint32_t target = 0;
  std::vector<uint32_t> targets;
  std::vector<Operand> ops;    // all operands, vectors and addresses flattened
  std::vector<uint8_t> begin;  // of each operand in ops, and the end
  uint8_t destinations = 0;    // how many operands at the front are written
  bool reads_destination = false;
  bool strong = false;    // a load or store that others may race with: volatile, relaxed, acquire, release
  bool releases = false;  // has .release or .acq_rel
  bool wgmma = false;
  Type type = Type::None, type2 = Type::None;
  Space space = Space::Generic;
  bool cluster_space = false;
  uint8_t vec = 1;
  int64_t aux = 0, aux2 = 0;  // meaning depends on the instruction
  std::shared_ptr<void> extra;
  uint32_t line = 0;                          // of the PTX
  uint32_t source_file = 0, source_line = 0;  // of .loc
  std::string name;                           // opcode with modifiers

  Operand const& op(int i) const { return ops[begin[i]]; }
  int count() const { return int(begin.size()) - 1; }
  int width(int i) const { return begin[i + 1] - begin[i]; }
};

struct Param {
  std::string name;
  uint32_t offset = 0, size = 0, align = 1;
};

// What a constant row holds.
struct Constant {
  enum Kind : uint8_t { Value, ParamAddress, SharedAddress, DynamicShared, Special } kind = Value;
  RegClass cls = RegClass::Word;
  uint64_t value = 0;
  uint32_t row = 0;
};

enum class Sreg : uint8_t {
  TidX,
  TidY,
  TidZ,
  NtidX,
  NtidY,
  NtidZ,
  CtaidX,
  CtaidY,
  CtaidZ,
  NctaidX,
  NctaidY,
  NctaidZ,
  Laneid,
  Warpid,
  Nwarpid,
  Smid,
  Nsmid,
  Gridid,
  LanemaskEq,
  LanemaskLe,
  LanemaskLt,
  LanemaskGe,
  LanemaskGt,
  ClusteridX,
  ClusteridY,
  ClusteridZ,
  NclusteridX,
  NclusteridY,
  NclusteridZ,
  ClusterCtaidX,
  ClusterCtaidY,
  ClusterCtaidZ,
  ClusterNctaidX,
  ClusterNctaidY,
  ClusterNctaidZ,
  ClusterCtarank,
  ClusterNctarank,
  IsExplicitCluster,
  DynamicSmem,
  TotalSmem,
  Clock,
  Clock64,
  Globaltimer,
  WorkspaceHigh,
  WorkspaceLow,
  Zero
};

struct Module;

struct Kernel {
  Module* module = nullptr;
  std::string name;
  std::vector<Param> params;
  uint32_t param_bytes = 0;
  uint32_t max_threads = 0;
  uint32_t cluster[3] = {0, 0, 0};
  std::string_view body;
  uint32_t body_line = 0;

  // After prepare():
  bool prepared = false;
  std::vector<Inst> code;
  std::vector<Constant> constants;
  uint32_t register_words = 0, register_count = 0;
  std::vector<std::string> register_names;
  uint32_t static_shared = 0, shared_align = 16, local_bytes = 0;
  bool dynamic_shared = false, has_wgmma = false;
  std::mutex mutex;

  void prepare();
};

struct Variable {
  Space space;
  uint64_t address = 0;  // on the host, for global and const
  uint32_t size = 0, align = 1;
  bool external = false;
};

struct Module {
  std::string text;  // comments removed
  std::string target;
  std::map<std::string, std::unique_ptr<Kernel>, std::less<>> kernels;
  struct Function {
    std::string_view header, body;
    uint32_t line;
  };
  std::map<std::string, Function, std::less<>> functions;
  std::map<std::string, Variable, std::less<>> variables;
  std::map<uint32_t, std::string> files;
  std::vector<std::unique_ptr<uint8_t[]>> storage;

  explicit Module(std::string ptx);
};

// Chooses what executes an instruction from its name; throws Error where there is nothing (decode.cc).
struct Pending {
  std::vector<std::string_view> parts;  // of the name, without the dots
  Inst inst;
  bool has(std::string_view modifier) const {
    for (size_t i = 1; i < parts.size(); ++i)
      if (parts[i] == modifier) return true;
    return false;
  }
  // The part at i of the name; empty beyond its end.
  std::string_view part(size_t i) const { return i < parts.size() ? parts[i] : std::string_view(); }
  // Makes it an instruction that the warp executes when its lanes have come together.
  bool sync(SyncExec exec, Class cls, int destinations) {
    inst.flow = Flow::Sync;
    inst.sync = exec;
    inst.cls = cls;
    inst.destinations = destinations;
    return true;
  }
};
void decode(Pending& p);
std::optional<Sreg> special_of(std::string_view name);
// The class of the row for an immediate at operand i of this instruction.
RegClass immediate_class(Pending const& p, int i);

}  // namespace emu
