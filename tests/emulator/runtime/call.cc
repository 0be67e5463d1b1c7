// Calls of the device's runtime: printf, assertions; and traps.
#include <cstdio>

#include "decode.h"

namespace emu {
namespace {

uint8_t const* pointer(Warp& w, int lane, uint64_t a) {
  uint64_t const window = a >> 32;
  if (window == kLocalWindow >> 32)
    return w.local + size_t(lane) * w.cta->launch->kernel->local_bytes + (a & 0xffffffff);
  if (window == kSharedWindow >> 32) return w.cta->shared.data() + (a & 0xffffff);
  return reinterpret_cast<uint8_t const*>(a);
}

std::string format(Warp& w, int lane, char const* f, uint8_t const* arguments) {
  std::string out;
  size_t at = 0;
  auto const next = [&](size_t size) {
    at = (at + size - 1) / size * size;
    uint64_t v = 0;
    std::memcpy(&v, arguments + at, size);
    at += size;
    return v;
  };
  for (; *f; ++f) {
    if (*f != '%') {
      out += *f;
      continue;
    }
    std::string spec = "%";
    bool wide = false;
    while (*++f && std::strchr("0123456789.+- #lhjzt*", *f)) {
      if (*f == '*')
        spec += std::to_string(int(next(4)));
      else
        spec += *f;
      wide |= *f == 'l' || *f == 'z' || *f == 'j' || *f == 't';
    }
    if (*f == 0) break;
    char text[512];
    if (*f == '%')
      out += '%';
    else if (std::strchr("diouxXc", *f)) {
      uint64_t const v = next(wide ? 8 : 4);
      if (wide)
        std::snprintf(text, sizeof(text), (spec + *f).c_str(), v);
      else
        std::snprintf(text, sizeof(text), (spec + *f).c_str(), int(v));
      out += text;
    } else if (*f == 's') {
      std::snprintf(text, sizeof(text), (spec + *f).c_str(), pointer(w, lane, next(8)));
      out += text;
    } else if (*f == 'p') {
      std::snprintf(text, sizeof(text), "%p", reinterpret_cast<void*>(next(8)));
      out += text;
    } else {
      uint64_t const v = next(8);
      double d;
      std::memcpy(&d, &v, 8);
      std::snprintf(text, sizeof(text), (spec + *f).c_str(), d);
      out += text;
    }
  }
  return out;
}

// Operands: where in local memory the result and the arguments are.
void syscall(Warp& w, Inst const& i, uint32_t lanes) {
  std::string const function = i.name.substr(5);
  for_lanes(lanes, [&](int l) {
    uint8_t* const local = w.local + size_t(l) * w.cta->launch->kernel->local_bytes;
    auto const argument = [&](int j, int size) {
      uint64_t v = 0;
      std::memcpy(&v, local + i.ops[i.begin[1] + j].imm, size);
      return v;
    };
    if (function == "vprintf") {
      std::string const text =
          format(w, l, reinterpret_cast<char const*>(pointer(w, l, argument(0, 8))), pointer(w, l, argument(1, 8)));
      std::fputs(text.c_str(), stdout);
    } else if (function == "__assertfail") {
      auto const text = [&](int j) {
        return std::string(reinterpret_cast<char const*>(pointer(w, l, argument(j, 8))));
      };
      w.cta->launch->report(w, i, l, "assert",
                            text(1) + ":" + std::to_string(argument(2, 4)) + ": assertion failed: " + text(0));
      throw Stop("an assertion failed");
    } else {
      throw Stop("no function " + function);
    }
  });
}
void trap(Warp& w, Inst const& i, uint32_t lanes) {
  w.cta->launch->report(w, i, __builtin_ctz(lanes), "trap", "the kernel stops itself");
  throw Stop("trap");
}
void nothing(Warp&, Inst const&, uint32_t) {}

}  // namespace

bool decode_call(Pending& p) {
  Inst& i = p.inst;
  std::string_view const op = p.parts[0];
  if (op == "syscall") {
    i.cls = Class::Other;
    i.exec = syscall;
  } else if (op == "trap") {
    i.exec = trap;
  } else if (op == "brkpt") {
    i.exec = trap;
  } else if (op == "pragma") {
    i.exec = nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace emu
