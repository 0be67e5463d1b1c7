// Modules: what PTX declares outside of functions.
#include "cursor.h"

namespace emu {
namespace {

std::string strip_comments(std::string const& in) {
  std::string out;
  out.reserve(in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i] == '"') {
      out += in[i];
      while (++i < in.size() && in[i] != '"') out += in[i];
      out += '"';
    } else if (in[i] == '/' && i + 1 < in.size() && in[i + 1] == '/') {
      while (i < in.size() && in[i] != '\n') ++i;
      out += '\n';
    } else if (in[i] == '/' && i + 1 < in.size() && in[i + 1] == '*') {
      for (i += 2; i + 1 < in.size() && !(in[i] == '*' && in[i + 1] == '/'); ++i) {
        if (in[i] == '\n') out += '\n';
      }
      ++i;
    } else if (in[i] != 0) {
      out += in[i];
    }
  }
  return out;
}

}  // namespace

Declaration declaration(Cursor& c) {
  Declaration d;
  while (c.peek() == '.') {
    std::string_view const word = c.dotted();
    if (word == ".align") {
      int f;
      d.align = std::max<uint32_t>(d.align, c.number(f));
    } else if (word.substr(0, 2) == ".v" && word.size() == 3) {
      d.size = word[2] - '0';
    } else if (d.type == Type::None) {
      d.type = type_of(word.substr(1));
    }
  }
  d.name = c.name();
  uint32_t const element = std::max(1, bytes_of(d.type)) * std::max<uint32_t>(1, d.size);
  d.size = element;
  d.align = std::max<uint32_t>(d.align, bytes_of(d.type));
  while (c.accept('[')) {
    if (c.accept(']')) {
      d.size = 0;
      d.sized = false;
      continue;
    }
    int f;
    d.size *= c.number(f);
    c.expect(']');
  }
  return d;
}

Module::Module(std::string ptx) : text(strip_comments(ptx)) {
  Cursor c{text.data(), text.data() + text.size()};
  struct Later {
    uint8_t* to;
    std::string symbol;
    int64_t offset;
  };
  std::vector<Later> later;
  while (!c.done()) {
    bool external = false;
    std::string_view word = c.dotted();
    while (word == ".visible" || word == ".weak" || word == ".extern" || word == ".common") {
      external |= word == ".extern";
      word = c.dotted();
    }
    if (word == ".version" || word == ".address_size") {
      c.until('\n');
      ++c.line;
    } else if (word == ".target") {
      c.skip();
      target = std::string(c.until('\n'));
      ++c.line;
    } else if (word == ".file") {
      int f;
      uint32_t const index = c.number(f);
      c.until('"');
      files[index] = std::string(c.until('"'));
      c.until('\n');
      ++c.line;
    } else if (word == ".section") {
      c.until('{');
      --c.p;
      c.braced();
    } else if (word == ".entry") {
      auto kernel = std::make_unique<Kernel>();
      kernel->module = this;
      kernel->name = std::string(c.name());
      if (c.accept('(')) {
        while (!c.accept(')')) {
          c.dotted();  // .param
          Declaration const d = declaration(c);
          kernel->param_bytes = align_up(kernel->param_bytes, d.align);
          kernel->params.push_back({std::string(d.name), kernel->param_bytes, d.size, d.align});
          kernel->param_bytes += d.size;
          c.accept(',');
        }
      }
      while (c.peek() == '.') {
        std::string_view const attribute = c.dotted();
        uint32_t values[3] = {1, 1, 1};
        int count = 0, f;
        while (c.at_number()) {
          values[count++] = c.number(f);
          c.accept(',');
        }
        if (attribute == ".maxntid" || attribute == ".reqntid") kernel->max_threads = values[0] * values[1] * values[2];
        if (attribute == ".reqnctapercluster") std::memcpy(kernel->cluster, values, sizeof(values));
      }
      c.skip();
      kernel->body_line = c.line;
      kernel->body = c.braced();
      std::string const name = kernel->name;
      kernels[name] = std::move(kernel);
    } else if (word == ".func") {
      c.skip();
      char const* const from = c.p;
      std::string name;
      bool seen_name = false;
      while (c.peek() != '{' && c.peek() != ';') {
        if (c.accept('(')) {
          c.until(')');
        } else if (c.peek() == '.') {
          c.dotted();
          while (c.at_number()) {
            int f;
            c.number(f);
          }
        } else {
          std::string const word(c.name());
          if (!seen_name) name = word;
          seen_name = true;
        }
      }
      Function function{{from, size_t(c.p - from)}, {}, c.line};
      if (c.peek() == '{') {
        function.body = c.braced();
        functions[name] = function;
      } else {
        c.accept(';');
        functions.emplace(name, function);
      }
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      do {
        Declaration const d = declaration(c);
        Variable v{word == ".shared"  ? Space::Shared
                   : word == ".const" ? Space::Const
                                      : Space::Global,
                   0, d.size, d.align, external};
        uint8_t* data = nullptr;
        uint32_t size = d.size;
        std::vector<uint64_t> values;
        std::vector<std::pair<size_t, std::string>> symbols;
        if (c.accept('=')) {
          bool const list = c.accept('{');
          do {
            if (list && c.peek() == '}') break;
            bool const brace = list && c.accept('{');
            (void)brace;
            if (c.at_number()) {
              int f;
              values.push_back(c.number(f));
            } else {
              std::string name(c.name());
              if (name == "generic") {
                c.expect('(');
                name = std::string(c.name());
                c.expect(')');
              }
              symbols.push_back({values.size(), name});
              uint64_t offset = 0;
              if (c.accept('+')) {
                int f;
                offset = c.number(f);
              }
              values.push_back(offset);
            }
            while (list && c.peek() == '}' && brace) c.accept('}');
          } while (list && c.accept(','));
          if (list) c.expect('}');
          if (!d.sized) size = values.size() * bytes_of(d.type);
        }
        v.size = size;
        if (word != ".shared") {
          storage.push_back(std::make_unique<uint8_t[]>(size + 256));
          data = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(storage.back().get()) + 127) / 128 * 128);
          int const bytes = bytes_of(d.type);
          for (size_t i = 0; i < values.size(); ++i) std::memcpy(data + i * bytes, &values[i], bytes);
          for (auto const& [i, name] : symbols) later.push_back({data + i * bytes, name, int64_t(values[i])});
          v.address = reinterpret_cast<uint64_t>(data);
        }
        variables[std::string(d.name)] = v;
      } while (c.accept(','));
      c.accept(';');
    } else if (word == ".pragma" || word == ".alias") {
      c.until(';');
    } else if (word.empty()) {
      c.fail("expected a directive");
    } else {
      c.until('\n');
      ++c.line;
    }
  }
  for (Later const& l : later) {
    auto const found = variables.find(l.symbol);
    if (found == variables.end()) continue;
    uint64_t const address = found->second.address + l.offset;
    std::memcpy(l.to, &address, 8);
  }
}

}  // namespace emu
