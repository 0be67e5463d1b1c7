// Statements: directives, labels, instructions, and calls, which become the functions' bodies.
#include "body.h"

namespace emu {

void Body::read() {
  Scope root;
  scopes_.push_back(std::make_unique<Scope>());
  Scope* const scope = scopes_.back().get();
  Cursor c{kernel_.body.data(), kernel_.body.data() + kernel_.body.size(), kernel_.body_line};
  block(c, scope, -1);
  Pending end;
  end.parts = {"exit"};
  end.inst.name = "exit";
  end.inst.begin = {0};
  end.inst.line = c.line;
  emit(end);
  for (Fix const& fix : fixes_) {
    uint32_t const target = label(fix.scope, fix.name);
    Inst& inst = kernel_.code[fix.inst];
    if (fix.index < 0)
      inst.target = target;
    else
      inst.targets[fix.index] = target;
  }
  kernel_.register_words = words_;
  kernel_.register_count = ids_;
  kernel_.local_bytes = local_;
  kernel_.static_shared = shared_;
}

void Body::block(Cursor& c, Scope* scope, int return_label) {
  std::vector<Scope*> open{scope};
  auto current = [&] { return open.back(); };
  while (!c.done()) {
    if (c.accept('{')) {
      scopes_.push_back(std::make_unique<Scope>());
      scopes_.back()->parent = current();
      open.push_back(scopes_.back().get());
    } else if (c.accept('}')) {
      open.pop_back();
      if (open.empty()) c.fail("too many '}'");
    } else if (c.accept(';')) {
    } else if (c.peek() == '.') {
      directive(c, current());
    } else {
      statement(c, current(), return_label);
    }
  }
}

void Body::directive(Cursor& c, Scope* scope) {
  std::string_view const word = c.dotted();
  if (word == ".reg") {
    Type type = Type::None;
    while (c.peek() == '.') {
      std::string_view const modifier = c.dotted();
      if (modifier.substr(0, 2) != ".v" || modifier.size() != 3) type = type_of(modifier.substr(1));
    }
    do {
      std::string const name(c.name());
      if (c.accept('<')) {
        int f;
        uint32_t const count = c.number(f);
        c.expect('>');
        scope->families[name] = {name, {class_of(type), count}};
      } else {
        scope->names[name] = Symbol{Symbol::Register, new_register(class_of(type), name)};
      }
    } while (c.accept(','));
    c.expect(';');
  } else if (word == ".shared" || word == ".local" || word == ".param") {
    do {
      Declaration const d = declaration(c);
      if (word == ".shared") {
        scope->names[std::string(d.name)] = Symbol{Symbol::Shared, {}, place_shared(d.size, d.align)};
      } else {
        local_ = align_up(local_, std::max<uint32_t>(d.align, 8));
        scope->names[std::string(d.name)] = Symbol{Symbol::Local, {}, local_};
        local_ += d.size;
      }
    } while (c.accept(','));
    c.expect(';');
  } else if (word == ".loc") {
    int f;
    file_ = c.number(f);
    source_line_ = c.number(f);
    c.until('\n');
    ++c.line;
  } else {
    c.until(';');
  }
}

void Body::emit(Pending& p) {
  p.inst.source_file = file_;
  p.inst.source_line = source_line_;
  try {
    decode(p);
  } catch (Error const& e) {
    throw Error(kernel_.name + ", PTX line " + std::to_string(p.inst.line) + ": " + p.inst.name + ": " + e.what());
  }
  kernel_.has_wgmma |= p.inst.wgmma;
  kernel_.code.push_back(std::move(p.inst));
}

void Body::split(std::string_view name, std::vector<std::string_view>& parts) {
  size_t from = 0;
  while (from <= name.size()) {
    size_t const dot = std::min(name.find('.', from), name.size());
    parts.push_back(name.substr(from, dot - from));
    from = dot + 1;
  }
}

void Body::statement(Cursor& c, Scope* scope, int return_label) {
  Pending p;
  c.skip();
  p.inst.line = c.line;
  if (c.accept('@')) {
    p.inst.guard_negated = c.accept('!');
    std::string const name(c.name());
    Symbol* const symbol = find(scope, name);
    if (symbol == nullptr || symbol->kind != Symbol::Register) c.fail("unknown predicate " + name);
    p.inst.guard = symbol->reg.row;
    p.inst.guard_id = symbol->reg.id;
    c.skip();
  } else {
    // A label?
    Cursor ahead = c;
    if (name_char(*ahead.p)) {
      std::string const name(ahead.name());
      if (ahead.peek() == ':' && ahead.p[1] != ':') {
        ahead.accept(':');
        c = ahead;
        if (c.peek() == '.') {
          Cursor table = c;
          if (table.dotted() == ".branchtargets") {
            c = table;
            auto& labels = scope->tables[name];
            do labels.emplace_back(c.name());
            while (c.accept(','));
            c.expect(';');
            return;
          }
          if (table.dotted() == ".callprototype") return void(c.until(';'));
        }
        scope->labels[name] = kernel_.code.size();
        return;
      }
    }
  }
  std::string_view const name = c.dotted();
  if (name.empty()) c.fail("expected an instruction");
  split(name, p.parts);
  p.inst.name = std::string(name);
  if (p.parts[0] == "bra") {
    fixes_.push_back({kernel_.code.size(), -1, scope, std::string(c.name())});
    c.expect(';');
    p.inst.begin = {0};
    return emit(p);
  }
  if (p.parts[0] == "ret") {
    c.expect(';');
    p.inst.begin = {0};
    if (return_label >= 0) {
      p.parts = {"bra"};
      fixes_.push_back({kernel_.code.size(), -1, scopes_[return_label].get(), "return"});
    }
    return emit(p);
  }
  if (p.parts[0] == "call") return call(c, scope, p);
  Inst& inst = p.inst;
  local_symbol_ = false;
  for (int i = 0; c.peek() != ';'; ++i) {
    inst.begin.push_back(inst.ops.size());
    if (p.parts[0] == "brx" && i == 1) {
      std::string const table(c.name());
      std::vector<std::string>* labels = nullptr;
      for (Scope* s = scope; s != nullptr && labels == nullptr; s = s->parent) {
        auto const found = s->tables.find(table);
        if (found != s->tables.end()) labels = &found->second;
      }
      if (labels == nullptr) c.fail("unknown branch table " + table);
      inst.targets.resize(labels->size());
      for (size_t j = 0; j < labels->size(); ++j) fixes_.push_back({kernel_.code.size(), int(j), scope, (*labels)[j]});
    } else {
      operand(c, scope, inst.ops, [&] { return immediate_class(p, i); });
    }
    if (!c.accept(',')) break;
  }
  inst.begin.push_back(inst.ops.size());
  c.expect(';');
  // Parameters of calls and of functions in place lie in local memory.
  if (local_symbol_ && (p.parts[0] == "ld" || p.parts[0] == "st") && p.parts[1].substr(0, 5) == "param")
    p.parts[1] = "local";
  emit(p);
}

void Body::call(Cursor& c, Scope* scope, Pending& p) {
  std::vector<std::string> lists[2];
  std::string function;
  bool named = false;
  while (c.peek() != ';') {
    if (c.accept('(')) {
      auto& list = lists[named];
      while (!c.accept(')')) {
        list.emplace_back(c.name());
        c.accept(',');
      }
    } else {
      std::string const name(c.name());
      if (!named) function = name;
      named = true;
    }
    c.accept(',');
  }
  c.expect(';');
  auto const local = [&](std::string const& name) {
    Symbol* const symbol = find(scope, name);
    if (symbol == nullptr) c.fail("unknown parameter " + name);
    return *symbol;
  };
  auto const found = module_.functions.find(function);
  if (found == module_.functions.end() || found->second.body.data() == nullptr) {
    // One of the runtime's: its arguments are in local memory.
    p.parts = {"syscall"};
    p.inst.name = "call " + function;
    p.inst.begin = {0};
    for (auto const& list : lists) {
      for (auto const& name : list) {
        Operand o;
        o.imm = int64_t(local(name).value);
        p.inst.ops.push_back(o);
      }
      p.inst.begin.push_back(p.inst.ops.size());
    }
    return emit(p);
  }
  if (p.inst.guard >= 0) c.fail("a call under a predicate");
  if (++depth_ > 64) c.fail("recursion");
  scopes_.push_back(std::make_unique<Scope>());
  int const index = int(scopes_.size()) - 1;
  Scope* const inner = scopes_.back().get();
  inner->function = true;
  // Its header: (returned) name (parameters).
  Cursor header{found->second.header.data(), found->second.header.data() + found->second.header.size(), 0};
  int which = 0;
  bool seen = false;
  while (!header.done()) {
    if (header.accept('(')) {
      auto const& list = lists[seen];
      which = 0;
      while (!header.accept(')')) {
        std::string_view const space = header.dotted();
        Declaration const d = declaration(header);
        if (size_t(which) >= list.size()) c.fail("a call with too few parameters");
        if (space == ".reg" || space == ".param") inner->names[std::string(d.name)] = local(list[which++]);
        header.accept(',');
      }
    } else if (header.peek() == '.') {
      header.dotted();
    } else {
      header.name();
      seen = true;
    }
  }
  Cursor body{found->second.body.data(), found->second.body.data() + found->second.body.size(), found->second.line};
  block(body, inner, index);
  inner->labels["return"] = kernel_.code.size();
  --depth_;
}

void Kernel::prepare() {
  std::lock_guard lock(mutex);
  if (prepared) return;
  Body(*this).read();
  prepared = true;
}

}  // namespace emu
