// Which memory is the device's.
#include <sstream>

#include "machine.h"

namespace emu {

Heap& Heap::get() {
  static Heap* const heap = new Heap;
  return *heap;
}

void Heap::add(void const* p, size_t size, bool freed) {
  std::unique_lock lock(mutex_);
  auto const begin = reinterpret_cast<uint64_t>(p);
  if (!freed) freed_.erase(freed_.lower_bound(begin), freed_.lower_bound(begin + size));
  (freed ? freed_ : ranges_)[begin] = begin + size;
}

void Heap::remove(void const* p) {
  std::unique_lock lock(mutex_);
  ranges_.erase(reinterpret_cast<uint64_t>(p));
}

bool Heap::find(uint64_t address, Range& range) {
  std::shared_lock lock(mutex_);
  auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) return false;
  --next;
  if (address >= next->second) return false;
  range = {next->first, next->second};
  return true;
}

std::string Heap::describe(uint64_t address) {
  std::shared_lock lock(mutex_);
  std::ostringstream out;
  for (auto const& [table, verb] :
       {std::pair(&freed_, "in freed memory of "), std::pair(&ranges_, "in an allocation of ")}) {
    auto next = table->upper_bound(address);
    if (next == table->begin()) continue;
    --next;
    if (address < next->second) {
      out << verb << next->second - next->first << " bytes at its byte " << address - next->first;
      return out.str();
    }
  }
  auto const next = ranges_.upper_bound(address);
  uint64_t after = ~0ull, before = ~0ull;
  if (next != ranges_.begin()) before = address - std::prev(next)->second;
  if (next != ranges_.end()) after = next->first - address;
  if (before <= after && before < (1 << 24)) {
    out << before << " bytes beyond an allocation of " << std::prev(next)->second - std::prev(next)->first << " bytes";
  } else if (after < (1 << 24)) {
    out << after << " bytes before an allocation of " << next->second - next->first << " bytes";
  } else {
    out << "not near any allocation";
  }
  return out.str();
}

}  // namespace emu
