#include "kernels/contract/controls.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/error.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

template <class Fn>
void each_output(Problem& problem, Fn fn) {
  for (Operand& operand : problem.operands)
    if (operand.role != Role::In) fn(operand);
}

void flip_last_bit(Problem& problem) {
  each_output(problem, [](Operand& o) {
    if (o.bytes() > 0) o.data()[o.bytes() - dtype_size(o.dtype)] ^= std::byte{1};
  });
}

void swap_rows(const Problem&, Problem& done) {
  each_output(done, [](Operand& o) {
    if (!o.by_row || o.shape[0] < 4) return;
    const auto row = static_cast<std::ptrdiff_t>(o.row_bytes());
    // Rows 0 and 3 are clean in every kind of input.
    std::swap_ranges(o.data(), o.data() + row, o.data() + 3 * row);
  });
}

void shift_lane(const Problem&, Problem& done) {
  each_output(done, [](Operand& o) {
    const size_t row = o.row_bytes(), element = dtype_size(o.dtype);
    if (!o.by_row || row < 2 * element) return;
    for (int64_t r = 0; r < o.shape[0]; ++r) {
      std::byte* at = o.data() + static_cast<size_t>(r) * row;
      std::rotate(at, at + element, at + row);
    }
  });
}

void leave_tail(const Problem& given, Problem& done) {
  each_output(done, [&](Operand& o) {
    const size_t tail = std::min(o.bytes(), 4 * dtype_size(o.dtype)), at = o.bytes() - tail;
    std::memcpy(o.data() + at, given[o.name].data() + at, tail);
  });
}

void write_guard(const Problem&, Problem& done) {
  each_output(done, [](Operand& o) { o.data()[o.bytes()] = std::byte{0}; });
}

void write_input(const Problem&, Problem& done) {
  for (Operand& o : done.operands)
    if (o.role == Role::In && o.bytes() > 0) {
      o.data()[0] ^= std::byte{1};
      return;
    }
}

void leak_nan(const Problem&, Problem& done) {
  each_output(done, [](Operand& o) {
    if (o.dtype != DType::F32 || !o.by_row) return;
    const auto width = static_cast<int64_t>(o.row_bytes() / sizeof(float));
    for (int64_t r = 0; r + 1 < o.shape[0]; ++r)
      for (int64_t i = 0; i < width; ++i)
        if (std::isnan(o.as<float>()[r * width + i])) {
          o.as<float>()[(r + 1) * width] = std::numeric_limits<float>::quiet_NaN();
          break;
        }
  });
}

// What a kernel does that carries too few bits somewhere.
void lose_precision(const Problem&, Problem& done) {
  each_output(done, [](Operand& o) {
    if (o.dtype != DType::F32) return;
    for (int64_t i = 0; i < o.size(); ++i) o.as<float>()[i] = bf16_to_f32(f32_to_bf16(o.as<float>()[i]));
  });
}

Control launch_control(std::string name, std::function<void(const Implementation&, Problem&)> launch) {
  return {std::move(name),
          3,
          [launch](const Implementation& sound) {
            Implementation faulty = sound;
            faulty.launch = [launch, sound](Problem& problem) { launch(sound, problem); };
            return faulty;
          },
          false,
          {}};
}

bool has_output(const Kernel& kernel, const std::function<bool(const Operand&)>& is) {
  const Problem p = kernel.make(kernel.shapes(Effort::Host).at(0), Kind::Normal, 4, 1);
  return std::any_of(p.operands.begin(), p.operands.end(),
                     [&](const Operand& o) { return o.role != Role::In && is(o); });
}

}  // namespace

Control spoil_control(std::string name, int gate, std::function<void(const Problem&, Problem&)> spoil) {
  return {std::move(name),
          gate,
          [spoil](const Implementation& sound) {
            Implementation faulty = sound;
            faulty.launch = [spoil, sound](Problem& problem) {
              const Problem given = problem;
              sound.launch(problem);
              spoil(given, problem);
            };
            return faulty;
          },
          false,
          {}};
}

Control tamper_control(std::string name, int gate, std::function<void(Problem&)> tamper) {
  return {std::move(name),
          gate,
          [tamper](const Implementation& sound) {
            Implementation faulty = sound;
            faulty.launch = [tamper, sound](Problem& problem) {
              Problem other = problem;
              tamper(other);
              sound.launch(other);
              for (size_t i = 0; i < problem.operands.size(); ++i)
                if (problem.operands[i].role != Role::In) problem.operands[i].storage = other.operands[i].storage;
            };
            return faulty;
          },
          false,
          {}};
}

Control host_control(std::string name, int gate, std::function<void(Problem&)> faulty) {
  return {std::move(name),
          gate,
          [faulty](const Implementation&) {
            return Implementation{"host", faulty, {}};
          },
          true,
          {}};
}

std::vector<Control> all_controls(const Kernel& kernel) {
  std::vector<Control> list;
  const auto measured_control = [&](const char* name, std::function<void(std::vector<SymbolResources>&)> measure) {
    list.push_back({name, 1, {}, true, std::move(measure)});
  };
  measured_control("a register too many", [](auto& m) { ++m.back().registers; });
  measured_control("a local spill", [](auto& m) { m.front().local_bytes += 8; });
  measured_control("a symbol that is missing", [](auto& m) { m.pop_back(); });
  measured_control("a symbol without a record", [](auto& m) { m.push_back({"unknown", 1, 32, 32, 0, 0, 0}); });
  if (has_output(kernel, [](const Operand& o) { return o.by_row; }))
    list.push_back(spoil_control("two rows swapped", 2, swap_rows));
  if (has_output(kernel, [](const Operand& o) { return o.by_row && o.row_bytes() >= 2 * dtype_size(o.dtype); }))
    list.push_back(spoil_control("off by one lane", 2, shift_lane));
  list.push_back(spoil_control("unwritten tail", 2, leave_tail));
  list.push_back(spoil_control("write past the end", 2, write_guard));
  list.push_back(spoil_control("write to an input", 2, write_input));
  if (has_output(kernel, [](const Operand& o) { return o.dtype == DType::F32; }))
    list.push_back(spoil_control("bf16 precision", 2, lose_precision));
  if (!kernel.sequential() && has_output(kernel, [](const Operand& o) { return o.dtype == DType::F32 && o.by_row; }))
    list.push_back(spoil_control("NaN in the next row", 2, leak_nan));

  // What is no row's is compared whole alone, at one number of rows.
  if (kernel.sequential() || has_output(kernel, [](const Operand& o) { return o.by_row; }))
    list.push_back(launch_control("other bits above 16 rows", [](const Implementation& sound, Problem& problem) {
      sound.launch(problem);
      if (problem.rows > 16) flip_last_bit(problem);
    }));
  list.push_back({"stale counter",
                  3,
                  [](const Implementation& sound) {
                    Implementation faulty = sound;
                    // Of this plant alone: host and device may run beside each other.
                    faulty.launch = [sound, launches = std::make_shared<int>(0)](Problem& problem) {
                      sound.launch(problem);
                      if (++*launches % 2 == 0) flip_last_bit(problem);
                    };
                    return faulty;
                  },
                  false,
                  {}});
  list.push_back(launch_control("bits of the layout", [](const Implementation& sound, Problem& problem) {
    sound.launch(problem);
    if (problem.operands.front().offset != kGuard) flip_last_bit(problem);
  }));
  list.push_back({"graph replays other arguments",
                  3,
                  [](const Implementation& sound) {
                    Implementation faulty = sound;
                    const auto replay = sound.replay ? sound.replay : sound.launch;
                    faulty.replay = [replay](Problem& problem) {
                      replay(problem);
                      flip_last_bit(problem);
                    };
                    return faulty;
                  },
                  false,
                  {}});

  list.push_back({"launches whatever it is given",
                  4,
                  [](const Implementation& sound) {
                    Implementation faulty = sound;
                    faulty.launch = [sound](Problem& problem) {
                      try {
                        sound.launch(problem);
                      } catch (const Error&) {
                      }
                    };
                    return faulty;
                  },
                  false,
                  {}});
  list.push_back({"writes, then refuses",
                  4,
                  [](const Implementation& sound) {
                    Implementation faulty = sound;
                    faulty.launch = [sound](Problem& problem) {
                      flip_last_bit(problem);
                      sound.launch(problem);
                    };
                    return faulty;
                  },
                  false,
                  {}});
  for (Control& own : kernel.controls()) list.push_back(std::move(own));
  return list;
}

ControlResult run_control(const Kernel& kernel, const Control& control, const Implementation& sound,
                          const Deadline& deadline) {
  const Record& record = kernel.record();
  const Cases cases{kernel.shapes(Effort::Host), {std::begin(kAllKinds), std::end(kAllKinds)}};
  GateResult result;
  std::vector<Comparison> found;
  if (control.gate == 1) {
    std::vector<SymbolResources> measured;
    for (const SymbolRecord& s : record.symbols)
      measured.push_back(
          {s.name, s.registers, s.threads, s.threads, s.static_shared_bytes, s.dynamic_shared_bytes, s.local_bytes});
    control.measure(measured);
    result = check_resources(record, measured);
  } else {
    const Implementation faulty = control.plant(sound);
    if (control.gate == 2) result = check_values(kernel, faulty, cases, deadline, found);
    if (control.gate == 3) result = check_bits(kernel, faulty, cases, deadline);
    if (control.gate == 4) result = check_refusals(kernel, faulty, deadline);
  }
  const bool host = control.gate == 1 || control.host_only || sound.name == "host";
  return {control.name, control.gate, host ? "host" : "device", result.outcome == Outcome::Fail, result.detail};
}

}  // namespace fnx::contract
