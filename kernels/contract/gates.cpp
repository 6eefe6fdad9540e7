#include "kernels/contract/gates.h"

#include <algorithm>
#include <cstring>

#include "kernels/error.h"

namespace fnx::contract {

namespace {

constexpr int64_t kWindows[] = {1, 2, 3, 16, 17, 64, 128};

std::string case_name(const Shape& shape, Kind kind) { return shape.label + ", " + kind_name(kind) + " inputs"; }

GateResult failed(const std::string& detail, uint64_t checks) { return {Outcome::Fail, detail, checks}; }

// Name and byte of the first output that differs between rows [first, ...) of `whole` and `part`; empty when none does.
std::string first_difference(const Problem& whole, const Problem& part, int64_t first, bool with_state) {
  for (size_t i = 0; i < part.operands.size(); ++i) {
    const Operand &a = whole.operands[i], &b = part.operands[i];
    if (b.role == Role::In || (!b.by_row && !with_state)) continue;
    const size_t begin = b.by_row ? static_cast<size_t>(first) * a.row_bytes() : 0;
    if (std::memcmp(a.data() + begin, b.data(), b.bytes()) == 0) continue;
    for (size_t at = 0; at < b.bytes(); ++at)
      if (a.data()[begin + at] != b.data()[at])
        return b.name + " at element " + std::to_string(at / dtype_size(b.dtype));
  }
  return "";
}

// A mangled name holds each identifier after its length.
bool names_symbol(const std::string& identifier, const std::string& symbol) {
  return symbol == identifier || symbol.find(std::to_string(identifier.size()) + identifier) != std::string::npos;
}

// Copies of what a later window of the sequence starts from.
void carry_state(const Problem& from, Problem& to) {
  for (size_t i = 0; i < to.operands.size(); ++i)
    if (to.operands[i].role == Role::InOut && !to.operands[i].by_row) to.operands[i].storage = from.operands[i].storage;
}

std::string check_windows(const Kernel& kernel, const Implementation& implementation, const Problem& given,
                          const Problem& whole, Random& random, const Deadline& deadline, uint64_t& checks) {
  for (const int64_t rows : kWindows) {
    if (rows > given.rows) continue;
    int64_t firsts[] = {0, random.below(given.rows - rows + 1), given.rows - rows};
    for (const int64_t first : firsts) {
      deadline.check();
      Problem part = kernel.part(given, first, rows);
      implementation.launch(part);
      ++checks;
      if (const std::string where = first_difference(whole, part, first, false); !where.empty())
        return "a window of " + std::to_string(rows) + " rows at row " + std::to_string(first) +
               " gives other bits than the whole: " + where;
    }
  }
  return "";
}

std::string check_chunks(const Kernel& kernel, const Implementation& implementation, const Problem& given,
                         const Problem& whole, Random& random, const Deadline& deadline, uint64_t& checks) {
  for (const int64_t rows : kWindows) {
    if (rows > given.rows) continue;
    Problem state = given;
    int64_t count = 1 + random.below(rows);
    for (int64_t first = 0; first < given.rows; first += count, count = rows) {
      deadline.check();
      count = std::min(count, given.rows - first);
      Problem part = kernel.part(given, first, count);
      carry_state(state, part);
      implementation.launch(part);
      ++checks;
      const bool last = first + count == given.rows;
      if (const std::string where = first_difference(whole, part, first, last); !where.empty())
        return "a chunk of " + std::to_string(count) + " rows at row " + std::to_string(first) +
               " gives other bits than the whole: " + where;
      state = std::move(part);
    }
  }
  return "";
}

}  // namespace

const char* outcome_name(Outcome outcome) {
  switch (outcome) {
    case Outcome::Pass:
      return "pass";
    case Outcome::Fail:
      return "fail";
    case Outcome::NotRun:
      return "not run";
    case Outcome::NotCompleted:
      return "not completed";
  }
  return "?";
}

Deadline::Deadline(double seconds, std::function<bool()> stopping) : stopping_(std::move(stopping)) {
  if (seconds > 0)
    end_ = std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

void Deadline::check() const {
  if ((end_ && std::chrono::steady_clock::now() >= *end_) || (stopping_ && stopping_())) throw TimeUp{};
}

std::vector<std::string> missing_fields(const Record& record) {
  std::vector<std::string> missing;
  const auto need = [&](bool present, const char* name) {
    if (!present) missing.emplace_back(name);
  };
  need(!record.id.empty(), "id");
  need(!record.operation.empty(), "operation");
  need(!record.symbols.empty(), "symbols");
  need(!record.domain.empty(), "domain");
  need(!record.launch.empty(), "launch");
  need(!record.operands.empty(), "operands");
  need(!record.aliases.empty(), "aliases");
  need(!record.rows.empty(), "rows");
  need(!record.sum_order.empty(), "sum_order");
  need(!record.rounding.empty(), "rounding");
  need(!record.limits.empty(), "limits");
  for (const SymbolRecord& s : record.symbols) {
    need(!s.name.empty() && s.threads > 0 && s.registers > 0, "symbols: name, threads or registers");
    need(s.static_shared_bytes + s.dynamic_shared_bytes <= kSharedLimit, "symbols: shared memory over 99 KiB");
    need(int64_t{s.threads} * s.registers <= kRegisterLimit, "symbols: more registers than a block may have");
  }
  for (const OperandRecord& o : record.operands)
    need(!o.name.empty() && !o.dtypes.empty() && !o.shape.empty() && o.alignment > 0 && !o.access.empty(), "operands");
  return missing;
}

Implementation Kernel::host_implementation() const {
  return {"host",
          [this](Problem& problem) {
            require(problem);
            host(problem);
          },
          {}};
}

GateResult check_resources(const Record& record, const std::vector<SymbolResources>& measured) {
  uint64_t checks = 0;
  for (const SymbolResources& m : measured) {
    const auto limit = std::find_if(record.symbols.begin(), record.symbols.end(),
                                    [&](const SymbolRecord& s) { return names_symbol(s.name, m.name); });
    if (limit == record.symbols.end()) return failed(m.name + ": launched, and not in the record", checks);
    std::string over;
    const auto at_most = [&](const char* what, int64_t is, int64_t most) {
      ++checks;
      if (is > most && over.empty())
        over = m.name + ": " + what + " " + std::to_string(is) + ", at most " + std::to_string(most);
    };
    at_most("registers", m.registers, limit->registers);
    at_most("static shared bytes", m.static_shared_bytes, limit->static_shared_bytes);
    at_most("dynamic shared bytes", m.dynamic_shared_bytes, limit->dynamic_shared_bytes);
    at_most("local bytes", m.local_bytes, limit->local_bytes);
    at_most("threads", m.threads, std::min(limit->threads, m.max_threads));
    if (!over.empty()) return failed(over, checks);
  }
  for (const SymbolRecord& s : record.symbols)
    if (std::none_of(measured.begin(), measured.end(),
                     [&](const SymbolResources& m) { return names_symbol(s.name, m.name); }))
      return failed(s.name + ": in the record, and never launched", checks);
  return {Outcome::Pass, "", checks};
}

GateResult check_values(const Kernel& kernel, const Implementation& implementation, const Cases& cases,
                        const Deadline& deadline, Comparison& total) {
  uint64_t checks = 0, seed = 1;
  for (const Shape& shape : cases.shapes)
    for (const Kind kind : cases.kinds) {
      deadline.check();
      const Problem given = kernel.make(shape, kind, kernel.value_rows(), seed++);
      Problem done = given;
      implementation.launch(done);
      ++checks;
      const std::string where = case_name(shape, kind) + ": ";
      if (const std::string name = damaged_guard(done); !name.empty())
        return failed(where + "wrote outside " + name, checks);
      if (const std::string name = written_input(given, done); !name.empty())
        return failed(where + "wrote its input " + name, checks);
      if (const std::string what = kernel.check_choices(given, done); !what.empty())
        return failed(where + what, checks);
      for (const Expectation& wanted : kernel.expect(given, done)) {
        const Comparison c = compare(wanted, done[wanted.operand]);
        total.merge(c);
        if (!c.failure.empty()) return failed(where + c.failure, checks);
      }
    }
  return {Outcome::Pass, "", checks};
}

GateResult check_bits(const Kernel& kernel, const Implementation& implementation, const Cases& cases,
                      const Deadline& deadline) {
  uint64_t checks = 0, seed = 1001;
  for (const Shape& shape : cases.shapes)
    for (const Kind kind : cases.kinds) {
      deadline.check();
      Random random(seed, 1);
      const Problem given = kernel.make(shape, kind, kernel.bit_rows(), seed++);
      const std::string where = case_name(shape, kind) + ": ";
      Problem whole = given;
      implementation.launch(whole);
      const auto same = [&](const Problem& other, const std::string& what) -> std::string {
        ++checks;
        const std::string at = first_difference(whole, other, 0, true);
        return at.empty() ? "" : what + " gives other bits: " + at;
      };
      std::string wrong;
      for (int i = 0; i < 2 && wrong.empty(); ++i) {
        Problem again = given;
        implementation.launch(again);
        wrong = same(again, "a repeated launch");
      }
      if (wrong.empty()) {
        size_t shift = 0;
        for (const OperandRecord& o : kernel.record().operands)
          shift = std::max(shift, static_cast<size_t>(o.alignment));
        Problem moved = displaced(given, shift);
        implementation.launch(moved);
        wrong = same(moved, "another memory layout");
      }
      if (wrong.empty() && implementation.replay) {
        Problem replayed = given;
        implementation.replay(replayed);
        wrong = same(replayed, "a graph's replay");
      }
      if (wrong.empty() && implementation.name == "device" && kernel.host_is_exact(kind)) {
        Problem stated = given;
        kernel.host(stated);
        wrong = same(stated, "the stated sum order");
      }
      if (wrong.empty())
        wrong = (kernel.sequential() ? check_chunks : check_windows)(kernel, implementation, given, whole, random,
                                                                     deadline, checks);
      if (!wrong.empty()) return failed(where + wrong, checks);
    }
  return {Outcome::Pass, "", checks};
}

GateResult check_refusals(const Kernel& kernel, const Implementation& implementation, const Deadline& deadline) {
  uint64_t checks = 0;
  const Shape shape = kernel.shapes(Effort::Host).at(0);
  for (const Refusal& refusal : kernel.refusals()) {
    deadline.check();
    Problem spoilt = kernel.make(shape, Kind::Normal, kernel.value_rows(), 1);
    refusal.spoil(spoilt);
    const Problem before = spoilt;
    ++checks;
    bool refused = false;
    try {
      implementation.launch(spoilt);
    } catch (const Error& error) {
      refused = true;
      if (std::string(error.what()).find_first_of("0123456789") == std::string::npos)
        return failed(refusal.what + ": the refusal names no number: " + error.what(), checks);
    }
    if (!refused) return failed(refusal.what + ": launched", checks);
    for (size_t i = 0; i < before.operands.size(); ++i)
      if (before.operands[i].storage != spoilt.operands[i].storage)
        return failed(refusal.what + ": refused, yet wrote " + before.operands[i].name, checks);
  }
  if (checks == 0) return failed("no refusal is recorded", 0);
  return {Outcome::Pass, "", checks};
}

}  // namespace fnx::contract
