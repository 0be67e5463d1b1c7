// Reading the body of a kernel.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cursor.h"

namespace emu {

// The body of a kernel, with those of the functions that it calls in place of the calls.
class Body {
 public:
  explicit Body(Kernel& kernel) : kernel_(kernel), module_(*kernel.module) {}

  void read();

 private:
  struct Symbol {
    enum Kind { Register, Shared, DynamicShared, Local, ParamSpace, Address } kind;
    Operand reg;
    uint64_t value = 0;
  };
  struct Scope {
    Scope* parent = nullptr;
    std::unordered_map<std::string, Symbol> names;
    std::unordered_map<std::string, std::pair<std::string, std::pair<RegClass, uint32_t>>> families;  // %r<10>
    std::unordered_map<std::string, uint32_t> labels;
    std::unordered_map<std::string, std::vector<std::string>> tables;  // .branchtargets
    bool function = false;                                             // names of the caller are not seen from here
  };
  struct Fix {
    size_t inst;
    int index;
    Scope* scope;
    std::string name;
  };

  Kernel& kernel_;
  Module& module_;
  std::vector<std::unique_ptr<Scope>> scopes_;
  std::vector<Fix> fixes_;
  std::map<std::tuple<int, int, uint64_t>, Operand> constants_;
  uint32_t words_ = 0, ids_ = 0, local_ = 0, shared_ = 0, file_ = 0, source_line_ = 0, unique_ = 0;
  int depth_ = 0;
  bool local_symbol_ = false;  // whether the last address was of a local variable or a call's parameter

  Operand new_register(RegClass cls, std::string name);
  Operand constant(Constant::Kind kind, RegClass cls, uint64_t value);
  uint32_t label(Scope* scope, std::string const& name);
  Symbol* find(Scope* scope, std::string const& name);
  uint32_t place_shared(uint32_t size, uint32_t align);
  void block(Cursor& c, Scope* scope, int return_label);
  void directive(Cursor& c, Scope* scope);
  // `class_for` gives the class of an immediate.
  void operand(Cursor& c, Scope* scope, std::vector<Operand>& out, std::function<RegClass()> const& class_for);
  Operand immediate(Cursor& c, RegClass cls);
  Operand named(Cursor& c, Scope* scope, std::string name, std::function<RegClass()> const& class_for);
  Operand symbol_address(Symbol const& symbol, uint64_t offset, RegClass cls);
  // Within brackets: base + displacement, or a vector or scalar of coordinates.
  void address(Cursor& c, Scope* scope, std::vector<Operand>& out);
  void emit(Pending& p);
  static void split(std::string_view name, std::vector<std::string_view>& parts);
  void statement(Cursor& c, Scope* scope, int return_label);
  // call (returned), function, (arguments): the function's body, its parameters being the caller's.
  void call(Cursor& c, Scope* scope, Pending& p);
};

}  // namespace emu
