// Programs of named cases: `program CASE` ends with 0 where all checks of the case hold, and else names one.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#define CHECK(condition)                                                      \
  if (!(condition)) {                                                         \
    std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                             \
  }

#define CASE(name) {#name, name}

inline void run_case(char** arguments, std::map<std::string, std::function<void()>> const& cases) {
  cases.at(arguments[1])();
}
