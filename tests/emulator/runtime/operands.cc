// Names, and operands: what they become rows of.
#include <cstring>

#include "body.h"

namespace emu {

Operand Body::new_register(RegClass cls, std::string name) {
  Operand o;
  o.cls = cls;
  o.row = words_;
  o.id = ids_++;
  words_ += words_of(cls);
  kernel_.register_names.push_back(std::move(name));
  return o;
}

Operand Body::constant(Constant::Kind kind, RegClass cls, uint64_t value) {
  auto const key = std::tuple(int(kind), int(cls), value);
  auto const found = constants_.find(key);
  if (found != constants_.end()) return found->second;
  if (cls == RegClass::Word && kind == Constant::Value) value &= 0xffffffff;
  Operand o = new_register(cls, "");
  if (kind == Constant::Value) o.constant = true, o.imm = int64_t(value);
  kernel_.constants.push_back({kind, cls, value, o.row});
  constants_[key] = o;
  return o;
}

uint32_t Body::label(Scope* scope, std::string const& name) {
  for (Scope* s = scope; s != nullptr; s = s->parent) {
    auto const found = s->labels.find(name);
    if (found != s->labels.end()) return found->second;
  }
  throw Error(kernel_.name + ": no label " + name);
}

Body::Symbol* Body::find(Scope* scope, std::string const& name) {
  for (Scope* s = scope; s != nullptr; s = s->parent) {
    auto const found = s->names.find(name);
    if (found != s->names.end()) return &found->second;
    // A register of a family is made when first used.
    size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    if (digits < name.size()) {
      auto const family = s->families.find(name.substr(0, digits));
      if (family != s->families.end() && std::stoul(name.substr(digits)) < family->second.second.second) {
        Symbol symbol{Symbol::Register, new_register(family->second.second.first, name)};
        return &(s->names[name] = symbol);
      }
    }
    if (s->function) break;
  }
  // Parameters and variables of the module are seen from everywhere.
  for (Param const& param : kernel_.params) {
    if (param.name == name) return &(scopes_[0]->names[name] = Symbol{Symbol::ParamSpace, {}, param.offset});
  }
  auto const variable = module_.variables.find(name);
  if (variable == module_.variables.end()) return nullptr;
  Variable const& v = variable->second;
  if (v.space != Space::Shared) return &(scopes_[0]->names[name] = Symbol{Symbol::Address, {}, v.address});
  if (v.external || v.size == 0) {
    kernel_.dynamic_shared = true;
    kernel_.shared_align = std::max(kernel_.shared_align, v.align);
    return &(scopes_[0]->names[name] = Symbol{Symbol::DynamicShared, {}, 0});
  }
  return &(scopes_[0]->names[name] = Symbol{Symbol::Shared, {}, place_shared(v.size, v.align)});
}

uint32_t Body::place_shared(uint32_t size, uint32_t align) {
  kernel_.shared_align = std::max(kernel_.shared_align, align);
  uint32_t const at = align_up(shared_, align);
  shared_ = at + size;
  return at;
}

void Body::operand(Cursor& c, Scope* scope, std::vector<Operand>& out, std::function<RegClass()> const& class_for) {
  char const first = c.peek();
  if (first == '{') {
    c.accept('{');
    do operand(c, scope, out, class_for);
    while (c.accept(','));
    c.expect('}');
  } else if (first == '[') {
    c.accept('[');
    do address(c, scope, out);
    while (c.accept(','));
    c.expect(']');
  } else if (first == '!') {
    c.accept('!');
    operand(c, scope, out, class_for);
    out.back().negated = true;
  } else if (c.at_number()) {
    out.push_back(immediate(c, class_for()));
  } else {
    std::string const name(c.name());
    if (name == "_") {
      Operand o;
      o.sink = true;
      out.push_back(o);
    } else {
      out.push_back(named(c, scope, name, class_for));
    }
    if (c.accept('|')) operand(c, scope, out, class_for);
  }
}

Operand Body::immediate(Cursor& c, RegClass cls) {
  int floating;
  uint64_t bits = c.number(floating);
  if (floating == 64 && cls == RegClass::Word) {
    double d;
    std::memcpy(&d, &bits, 8);
    float const f = float(d);
    uint32_t b;
    std::memcpy(&b, &f, 4);
    bits = b;
  } else if (floating == 32 && cls == RegClass::Pair) {
    uint32_t const b = uint32_t(bits);
    float f;
    std::memcpy(&f, &b, 4);
    double const d = f;
    std::memcpy(&bits, &d, 8);
  }
  Operand o = constant(Constant::Value, cls, cls == RegClass::Pred ? (bits ? 0xffffffff : 0) : bits);
  o.imm = int64_t(bits);
  return o;
}

Operand Body::named(Cursor& c, Scope* scope, std::string name, std::function<RegClass()> const& class_for) {
  if (name == "WARP_SZ") return constant(Constant::Value, class_for(), 32);
  if (c.p < c.end && *c.p == '.' && name[0] == '%') {
    name += *c.p++;
    while (c.p < c.end && name_char(*c.p)) name += *c.p++;
  }
  if (Symbol* const symbol = find(scope, name)) {
    Operand o;
    uint64_t offset = 0;
    if (symbol->kind == Symbol::Register) return symbol->reg;
    if (c.peek() == '+') {
      c.accept('+');
      int f;
      offset = c.number(f);
    }
    return symbol_address(*symbol, offset, class_for());
  }
  if (std::optional<Sreg> const special = special_of(name)) {
    bool const wide = *special == Sreg::Clock64 || *special == Sreg::Globaltimer || *special == Sreg::Gridid;
    Operand o = constant(Constant::Special, wide ? RegClass::Pair : RegClass::Word, uint64_t(*special));
    o.clock = *special == Sreg::Clock || *special == Sreg::Clock64 || *special == Sreg::Globaltimer;
    return o;
  }
  c.fail("unknown name " + name);
}

Operand Body::symbol_address(Symbol const& symbol, uint64_t offset, RegClass cls) {
  switch (symbol.kind) {
    case Symbol::Shared:
      return constant(Constant::SharedAddress, cls, symbol.value + offset);
    case Symbol::DynamicShared:
      return constant(Constant::DynamicShared, cls, offset);
    case Symbol::ParamSpace:
      return constant(Constant::ParamAddress, RegClass::Pair, symbol.value + offset);
    default:
      return constant(Constant::Value, symbol.kind == Symbol::Address ? RegClass::Pair : cls, symbol.value + offset);
  }
}

void Body::address(Cursor& c, Scope* scope, std::vector<Operand>& out) {
  auto const pair = [] { return RegClass::Word; };
  if (c.peek() == '{') return operand(c, scope, out, pair);
  int64_t displacement = 0;
  Operand o;
  if (c.at_number()) {
    int f;
    o = constant(Constant::Value, RegClass::Pair, c.number(f));
  } else {
    std::string const name(c.name());
    Symbol* const symbol = find(scope, name);
    if (symbol == nullptr) c.fail("unknown name " + name);
    local_symbol_ = symbol->kind == Symbol::Local;
    o = symbol->kind == Symbol::Register ? symbol->reg : symbol_address(*symbol, 0, RegClass::Pair);
  }
  if (c.peek() == '+' || c.peek() == '-') {
    bool const minus = c.peek() == '-';
    if (!minus) c.accept('+');
    int f;
    displacement = int64_t(c.number(f));
  }
  o.imm = displacement;
  o.constant = false;
  out.push_back(o);
}

}  // namespace emu
