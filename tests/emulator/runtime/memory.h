// What loads, stores and copies share.
#pragma once

#include "machine.h"

namespace emu {

inline uint64_t address(Warp const& w, Operand const& o, int lane) { return w.value(o, lane) + uint64_t(o.imm); }
std::string hex(uint64_t x);
// For the statistics: sectors of global memory that the lanes access.
void count_global(Warp& w, uint64_t const* addresses, uint32_t lanes, uint32_t size, bool store);

}  // namespace emu
