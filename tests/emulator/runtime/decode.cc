// From an instruction's name to what executes it.
#include "decode.h"

namespace emu {

namespace {

Type last_type(Pending const& p) {
  for (size_t i = p.parts.size(); i-- > 1;) {
    if (Type const t = type_of(p.parts[i]); t != Type::None) return t;
  }
  return Type::None;
}

}  // namespace

// Called before the operands are read: the types alone are known.
RegClass immediate_class(Pending const& p, int i) {
  std::string_view const op = p.parts[0];
  auto const wide = [](Type t) {
    return t == Type::Pred ? RegClass::Pred : bits_of(t) == 64 ? RegClass::Pair : RegClass::Word;
  };
  Type const t = last_type(p);
  if (op == "shl" || op == "shr") return i == 2 ? RegClass::Word : wide(t);
  if (op == "bfe") return i >= 2 ? RegClass::Word : wide(t);
  if (op == "bfi") return i >= 3 ? RegClass::Word : wide(t);
  if (op == "mad" && p.has("wide")) return i == 3 && bits_of(t) == 32 ? RegClass::Pair : RegClass::Word;
  if (op == "setp" || op == "set") return i == 3 ? RegClass::Pred : wide(t);
  if (op == "selp") return i == 3 ? RegClass::Pred : wide(t);
  if (op == "cvt" || op == "add" || op == "sub" || op == "mul" || op == "mad" || op == "fma" || op == "mov" ||
      op == "ld" || op == "st" || op == "atom" || op == "red" || op == "and" || op == "or" || op == "xor" ||
      op == "not" || op == "min" || op == "max" || op == "div" || op == "rem" || op == "neg" || op == "abs" ||
      op == "cvta" || op == "popc" || op == "clz" || op == "brev" || op == "bfind" || op == "sad" || op == "addc" ||
      op == "subc" || op == "madc" || op == "slct" || op == "copysign" || op == "rcp" || op == "sqrt" ||
      op == "rsqrt") {
    return wide(t);
  }
  if (op == "vote") return i == 1 ? RegClass::Pred : RegClass::Word;
  if (op == "mbarrier") return RegClass::Word;
  if (op == "mapa" && t == Type::U64) return i == 2 ? RegClass::Word : RegClass::Pair;
  return RegClass::Word;
}

void decode(Pending& p) {
  Inst& i = p.inst;
  i.type = last_type(p);
  if (!(decode_sync(p) || decode_mbarrier(p) || decode_call(p) || decode_copy(p) || decode_memory(p) || decode_mma(p) ||
        decode_wgmma(p) || decode_float(p) || decode_integer(p) || decode_bits(p) || decode_compare(p) ||
        decode_convert(p) || decode_move(p))) {
    throw Error("not implemented");
  }
  if (p.parts[0] == "mov" && i.count() > 1 && i.op(1).clock) use_clock(i);
}

}  // namespace emu
