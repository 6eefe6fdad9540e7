#include "kernels/contract/gates.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>

#include "kernels/cpu/threads.h"
#include "kernels/error.h"

namespace fnx::contract {

namespace {

constexpr int64_t kWindows[] = {1, 2, 3, 16, 17, 64, 128};
// Rows of gate 3 on the host, whose implementations take one row after another: enough for the faults above 16 rows.
constexpr int64_t kHostRows = 40;

GateResult failed(const std::string& detail, uint64_t checks) { return {Outcome::Fail, detail, checks}; }

struct Case {
  size_t index;
  const Shape& shape;
  Kind kind;
  uint64_t& checks;
};

// Runs every case until one fails: `run` says what is wrong. The first failure by number counts, so that threads do not
// change what is reported; exceptions go on up.
GateResult each_case(const Cases& cases, const Deadline& deadline, const std::function<std::string(const Case&)>& run) {
  const size_t kinds = cases.kinds.size(), count = cases.shapes.size() * kinds;
  std::vector<std::string> wrong(count);
  std::vector<uint64_t> checks(count, 0);
  std::vector<std::exception_ptr> thrown(count);
  std::atomic<size_t> end{count};
  cpu::ThreadPool pool(std::min(cases.threads, static_cast<int>(count)));
  pool.run(static_cast<int64_t>(count), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    if (at >= end.load()) return;
    try {
      deadline.check();
      wrong[at] = run({at, cases.shapes[at / kinds], cases.kinds[at % kinds], checks[at]});
    } catch (...) {
      thrown[at] = std::current_exception();
    }
    if (wrong[at].empty() && !thrown[at]) return;
    size_t first = end.load();
    while (at < first && !end.compare_exchange_weak(first, at)) {
    }
  });
  uint64_t all = 0;
  for (size_t i = 0; i < count; ++i) {
    if (thrown[i]) std::rethrow_exception(thrown[i]);
    all += checks[i];
    if (!wrong[i].empty())
      return failed(cases.shapes[i / kinds].label + ", " + kind_name(cases.kinds[i % kinds]) + " inputs: " + wrong[i],
                    all);
  }
  return {Outcome::Pass, "", all};
}

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

// Why rows [first, first + count) alone differ from the same rows of the whole; empty when they do not.
std::string window_difference(const Kernel& kernel, const Implementation& implementation, const Problem& given,
                              const Problem& whole, int64_t first, int64_t count) {
  Problem part = kernel.part(given, first, count);
  implementation.launch(part);
  const std::string where = first_difference(whole, part, first, false);
  return where.empty() ? ""
                       : "a window of " + std::to_string(count) + " rows at row " + std::to_string(first) +
                             " gives other bits than the whole: " + where;
}

std::string check_counts(const Kernel& kernel, const Implementation& implementation, const Problem& given,
                         const Problem& whole, const Deadline& deadline, uint64_t& checks) {
  for (int64_t rows = 1; rows <= given.rows; ++rows) {
    deadline.check();
    ++checks;
    if (std::string what = window_difference(kernel, implementation, given, whole, 0, rows); !what.empty()) return what;
  }
  return "";
}

std::string check_windows(const Kernel& kernel, const Implementation& implementation, const Problem& given,
                          const Problem& whole, Random& random, const Deadline& deadline, uint64_t& checks) {
  for (const int64_t rows : kWindows) {
    if (rows > given.rows) continue;
    int64_t firsts[] = {0, random.below(given.rows - rows + 1), given.rows - rows};
    for (const int64_t first : firsts) {
      deadline.check();
      ++checks;
      if (std::string what = window_difference(kernel, implementation, given, whole, first, rows); !what.empty())
        return what;
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
                        const Deadline& deadline, std::vector<Comparison>& by_shape) {
  std::vector<Comparison> found(cases.shapes.size() * cases.kinds.size());
  const auto run = [&](const Case& c) -> std::string {
    const Problem given = kernel.make(c.shape, c.kind, kernel.value_rows(), 1 + c.index);
    Problem done = given;
    implementation.launch(done);
    ++c.checks;
    if (const std::string name = damaged_guard(done); !name.empty()) return "wrote outside " + name;
    if (const std::string name = written_input(given, done); !name.empty()) return "wrote its input " + name;
    if (const std::string what = kernel.check_choices(given, done); !what.empty()) return what;
    for (const Expectation& wanted : kernel.expect(given, done))
      found[c.index].merge(compare(wanted, done[wanted.operand]));
    return found[c.index].failure;
  };
  const GateResult result = each_case(cases, deadline, run);
  by_shape.resize(cases.shapes.size());
  for (size_t i = 0; i < found.size(); ++i) by_shape[i / cases.kinds.size()].merge(found[i]);
  return result;
}

GateResult check_bits(const Kernel& kernel, const Implementation& implementation, const Cases& cases,
                      const Deadline& deadline) {
  return each_case(cases, deadline, [&](const Case& c) -> std::string {
    const uint64_t seed = 1001 + c.index;
    Random random(seed, 1);
    const bool device = implementation.name == "device";
    const int64_t rows = device ? kernel.bit_rows() : std::min(kernel.bit_rows(), kHostRows);
    const Problem given = kernel.make(c.shape, c.kind, rows, seed);
    Problem whole = given;
    implementation.launch(whole);
    const auto same = [&](const Problem& other, const std::string& what) -> std::string {
      ++c.checks;
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
      for (const OperandRecord& o : kernel.record().operands) shift = std::max(shift, static_cast<size_t>(o.alignment));
      Problem moved = displaced(given, shift);
      implementation.launch(moved);
      wrong = same(moved, "another memory layout");
    }
    if (wrong.empty() && implementation.replay) {
      Problem replayed = given;
      implementation.replay(replayed);
      wrong = same(replayed, "a graph's replay");
    }
    if (wrong.empty() && device && kernel.host_is_exact(c.kind)) {
      Problem stated = given;
      kernel.host(stated);
      wrong = same(stated, "the stated sum order");
    }
    if (!wrong.empty()) return wrong;
    if (kernel.sequential()) return check_chunks(kernel, implementation, given, whole, random, deadline, c.checks);
    wrong = check_windows(kernel, implementation, given, whole, random, deadline, c.checks);
    if (wrong.empty() && device && c.kind == Kind::Normal)
      wrong = check_counts(kernel, implementation, given, whole, deadline, c.checks);
    return wrong;
  });
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
