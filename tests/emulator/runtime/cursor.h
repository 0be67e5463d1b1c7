// Reading the text of PTX.
#pragma once

#include <cctype>
#include <cstring>
#include <string>
#include <string_view>

#include "ptx.h"

namespace emu {

inline bool name_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

// A position in the text, with what the grammar needs to step on.
struct Cursor {
  char const *p, *end;
  uint32_t line = 1;

  void skip() {
    while (p < end && std::isspace(static_cast<unsigned char>(*p))) line += *p++ == '\n';
  }
  bool done() {
    skip();
    return p >= end;
  }
  char peek() {
    skip();
    return p < end ? *p : 0;
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++p;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail(std::string("expected '") + c + "'");
  }
  [[noreturn]] void fail(std::string const& what) {
    throw Error("PTX line " + std::to_string(line) + ": " + what +
                " before: " + std::string(p, std::min<size_t>(end - p, 60)));
  }
  std::string_view name() {
    skip();
    char const* const from = p;
    while (p < end && name_char(*p)) ++p;
    if (p == from) fail("expected a name");
    return {from, size_t(p - from)};
  }
  // A mnemonic or directive with its modifiers.
  std::string_view dotted() {
    skip();
    char const* const from = p;
    while (p < end && (name_char(*p) || *p == '.' || *p == ':')) ++p;
    return {from, size_t(p - from)};
  }
  std::string_view until(char c) {
    char const* const from = p;
    while (p < end && *p != c) line += *p++ == '\n';
    std::string_view const text(from, p - from);
    if (p < end) ++p;
    return text;
  }
  // The text within braces, which begins here.
  std::string_view braced() {
    expect('{');
    char const* const from = p;
    for (int depth = 1; p < end; ++p) {
      line += *p == '\n';
      if (*p == '"')
        while (++p < end && *p != '"') {
        }
      if (*p == '{') ++depth;
      if (*p == '}' && --depth == 0) break;
    }
    return {from, size_t(p++ - from)};
  }
  bool at_number() {
    char const c = peek();
    return std::isdigit(static_cast<unsigned char>(c)) ||
           (c == '-' && p + 1 < end && std::isdigit(static_cast<unsigned char>(p[1])));
  }
  // An integer, or the bits of a float: `floating` tells which, as 32 or 64.
  uint64_t number(int& floating) {
    floating = 0;
    bool const negative = accept('-');
    if (*p == '0' && p + 1 < end && (p[1] == 'f' || p[1] == 'F' || p[1] == 'd' || p[1] == 'D')) {
      floating = p[1] == 'f' || p[1] == 'F' ? 32 : 64;
      p += 2;
      uint64_t bits = 0;
      for (; std::isxdigit(static_cast<unsigned char>(*p)); ++p)
        bits = bits * 16 + (std::isdigit(*p) ? *p - '0' : (*p | 32) - 'a' + 10);
      return negative ? bits ^ (floating == 32 ? 0x80000000ull : 1ull << 63) : bits;
    }
    char const* q = p;
    while (std::isdigit(static_cast<unsigned char>(*q))) ++q;
    if (*q == '.') {
      char* after;
      double const d = std::strtod(p, &after) * (negative ? -1 : 1);
      p = after;
      floating = 64;
      uint64_t bits;
      std::memcpy(&bits, &d, 8);
      return bits;
    }
    char* after;
    uint64_t const value = std::strtoull(p, &after, 0);
    p = after;
    if (*p == 'U' || *p == 'u') ++p;
    return negative ? -value : value;
  }
};

struct Declaration {
  Space space = Space::Global;
  Type type = Type::None;
  uint32_t align = 1, size = 0;
  std::string_view name;
  bool external = false, sized = true;
};

// What follows a space directive: .align 4 .b8 name[16], or .u64 .ptr .global .align 16 name.
Declaration declaration(Cursor& c);

inline uint32_t align_up(uint32_t x, uint32_t a) { return (x + a - 1) / a * a; }

}  // namespace emu
