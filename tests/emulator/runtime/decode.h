// The families of instructions, each of which claims its own.
#pragma once

#include "machine.h"

namespace emu {

bool decode_integer(Pending& p);
bool decode_bits(Pending& p);
bool decode_float(Pending& p);
bool decode_compare(Pending& p);
bool decode_convert(Pending& p);
bool decode_move(Pending& p);
bool decode_copy(Pending& p);
bool decode_memory(Pending& p);
bool decode_sync(Pending& p);
bool decode_mbarrier(Pending& p);
bool decode_call(Pending& p);
bool decode_mma(Pending& p);
bool decode_wgmma(Pending& p);
void use_clock(Inst& inst);

// Lanes of the warp that must come to an instruction before any goes on.
inline bool converged(Warp const& w, uint32_t lanes, uint32_t needed) {
  return (lanes & needed & w.alive) == (needed & w.alive);
}

}  // namespace emu
