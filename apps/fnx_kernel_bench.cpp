// fnx-kernel-bench: times of the kernels on real shapes against the card's own ceilings.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <sstream>

#include "kernels/error.h"
#include "kernels/kernel_bench.h"
#include "libcore/cli/tool.h"

namespace {

using fnx::BenchSeries, fnx::Error, fnx::ErrorKind, fnx::Json, fnx::KernelBench;
using fnx::exl3::Codebook;

struct Options {
  std::string matrices = "2560x640,640x2560,2560x10240,6144x2560,2560x12288,2560x248320";
  std::string bits = "1,1.5,2,2.5,3,3.5,4,5,6,7,8", rows = "1,2,4,8,16,64,512,4096", codebook = "mul1",
              format = "table";
  std::vector<std::string> filters;
  int device = 0, repeat = 15;
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

int parse_half_bits(const std::string& text, Codebook book) {
  size_t used = 0;
  double bits = 0;
  try {
    bits = std::stod(text, &used);
  } catch (const std::exception&) {
  }
  const int half = static_cast<int>(2 * bits);
  if (used != text.size() || half != 2 * bits || !fnx::exl3::width_supported(book, half))
    throw Error(ErrorKind::Usage, "--bits: " + text + " is no width of " + codebook_name(book));
  return half;
}

struct Matrix {
  int64_t in = 0, out = 0;
};
Matrix parse_matrix(const std::string& text) {
  Matrix m;
  char x = 0, rest = 0;
  std::istringstream in(text);
  if (!(in >> m.in >> x >> m.out) || x != 'x' || in >> rest || m.in <= 0 || m.out <= 0 || m.in % 128 || m.out % 128)
    throw Error(ErrorKind::Usage, "--matrices: " + text + " is not INxOUT in multiples of 128");
  return m;
}

std::string name_of(const Matrix& m) { return fmt::format("{}x{}", m.in, m.out); }

constexpr const char* kExperts = "experts 10 of 512";
constexpr int64_t kMostDecodeRows = 16;

// What the command line asks for.
struct Plan {
  Codebook book = Codebook::Mul1;
  std::vector<Matrix> matrices;
  std::vector<int> widths;
  std::vector<int64_t> rows;
  bool experts = true;
  std::vector<fnx::BenchOperation> operations;
};

// Fills in the operations and drops what no filter names.
void keep_wanted(Plan& plan, const std::vector<std::string>& filters) {
  std::vector<int64_t> few;
  std::copy_if(plan.rows.begin(), plan.rows.end(), std::back_inserter(few),
               [](int64_t r) { return r <= kMostDecodeRows; });
  plan.operations = fnx::bench_operations(few);
  if (filters.empty()) return;
  const auto unwanted = [&](const std::string& name) {
    return std::none_of(filters.begin(), filters.end(),
                        [&](const std::string& part) { return name.find(part) != std::string::npos; });
  };
  std::erase_if(plan.matrices, [&](const Matrix& m) { return unwanted("exl3/" + name_of(m)); });
  std::erase_if(plan.operations, [&](const fnx::BenchOperation& op) { return unwanted("operation/" + op.name); });
  plan.experts = !unwanted(fmt::format("exl3/{}", kExperts));
  if (plan.matrices.empty() && plan.operations.empty() && !plan.experts)
    throw Error(
        ErrorKind::Usage,
        fmt::format("no kernel's name holds {} at these rows; names are exl3/{} or, up to {} rows, operation/{} "
                    "and the like",
                    fmt::join(filters, " or "), kExperts, kMostDecodeRows, fnx::bench_operations({1}).front().name));
}

Plan make_plan(const Options& options) {
  Plan plan;
  for (const Codebook c : {Codebook::ThreeInst, Codebook::Mcg, Codebook::Mul1})
    if (options.codebook == codebook_name(c)) plan.book = c;
  for (const std::string& m : split_list(options.matrices)) plan.matrices.push_back(parse_matrix(m));
  for (const std::string& b : split_list(options.bits)) plan.widths.push_back(parse_half_bits(b, plan.book));
  plan.rows = fnx::parse_list(options.rows);
  if (plan.matrices.empty() || plan.widths.empty() || plan.rows.empty() ||
      *std::min_element(plan.rows.begin(), plan.rows.end()) < 1)
    throw Error(ErrorKind::Usage, "--matrices, --bits and --rows need at least one entry each, rows from 1 on");
  keep_wanted(plan, options.filters);
  return plan;
}

// Another implementation's times on an H200 in microseconds, at 3, 4, 5 and 6 bits; at 1 and at 16 rows.
struct Peer {
  int64_t in, out;
  double one[4], sixteen[4];
};
constexpr Peer kPeers[] = {
    {2560, 640, {10.7, 10.4, 16.6, 16.6}, {17.2, 17.4, 18.1, 17.9}},
    {640, 2560, {6.5, 6.4, 10.6, 10.6}, {11.0, 10.9, 11.5, 11.5}},
    {2560, 10240, {24.0, 21.6, 25.1, 25.2}, {26.3, 25.9, 28.0, 28.2}},
    {6144, 2560, {20.4, 19.3, 24.4, 24.5}, {24.9, 25.8, 25.9, 26.1}},
    {2560, 12288, {25.2, 21.8, 26.3, 26.4}, {28.5, 26.3, 31.0, 31.3}},
    {2560, 248320, {280, 259, 298, 299}, {290, 276, 307, 304}},
};

class Bench {
 public:
  Bench(const Options& options, fnx::ToolRun& tool) : options_(options), plan_(make_plan(options)), tool_(tool) {
    bench_ = KernelBench::open(options.device, options.repeat);
    fnx::Receipt& receipt = tool.receipt();
    receipt.set_effective("device", bench_->device_name(), "device");
    receipt.set_effective("architecture", bench_->architecture(), "device");
    receipt.set_effective("l2_bytes", bench_->l2_bytes(), "device");
    for (const char* other : {"sm_90", "sm_120"})
      if (bench_->architecture() != other)
        receipt.add_not_run(other, "figures are of " + bench_->architecture() + ", the device of this run");
    receipt.result["cases"] = Json::array();
  }

  void run() {
    measure_ceilings();
    uint64_t done = 0;
    const uint64_t experts = plan_.experts ? plan_.widths.size() : 0;
    const uint64_t total = plan_.matrices.size() * plan_.widths.size() + experts + plan_.operations.size();
    for (const Matrix& m : plan_.matrices)
      for (const int half : plan_.widths) {
        if (tool_.stopping()) return;
        measure_linear(m, half, plan_.rows);
        tool_.progress("kernels", ++done, total);
      }
    for (uint64_t i = 0; i < experts; ++i) {
      measure_experts(plan_.widths[i]);
      tool_.progress("kernels", ++done, total);
    }
    for (const fnx::BenchOperation& op : plan_.operations) {
      if (tool_.stopping()) return;
      measure_operation(op);
      tool_.progress("kernels", ++done, total);
    }
  }

 private:
  double add(const std::string& name, const std::string& phase, const BenchSeries& s) {
    fnx::Receipt& receipt = tool_.receipt();
    receipt.add_series(name, "us", phase, s.us);
    receipt.result["cases"].push_back(Json{{"name", name},
                                           {"launches", s.launches},
                                           {"weight_copies", s.copies},
                                           {"moved_bytes", s.bytes},
                                           {"trellis_values", s.values},
                                           {"flops", s.flops}});
    return median(s.us);
  }

  void measure_ceilings() {
    BenchSeries s = bench_->read_ceiling();
    read_ = s.bytes / add("ceiling/read", "cold", s);
    s = bench_->copy_ceiling();
    const double copy = s.bytes / add("ceiling/copy", "cold", s);
    // The floor of a decode takes the fastest width, so that it is a floor for all.
    for (const int half : {6, 8, 10, 12}) {
      s = bench_->decode_ceiling(plan_.book, half);
      decode_ = std::max(decode_, s.values / add(fmt::format("ceiling/decode/{}", half / 2.0), "warm", s));
      if (plan_.book != Codebook::Mul1) break;
    }
    s = bench_->mma_ceiling();
    mma_ = s.flops / add("ceiling/mma", "warm", s);
    line(fmt::format("{}, {}: read {:.0f} GB/s, copy {:.0f} GB/s, decode {} {:.2f}e12 values/s, mma {:.0f} TFLOP/s\n",
                     bench_->device_name(), bench_->architecture(), read_ / 1e3, copy / 1e3, options_.codebook,
                     decode_ / 1e6, mma_ / 1e6));
    line(fmt::format("{:<22}{:>5}{:>6}{:>6}{:>11}{:>10}{:>10}{:>9}{:>9}", "kernel", "bits", "rows", "phase", "us",
                     "GB/s", "TFLOP/s", "floor us", "x floor"));
  }

  // The larger of bytes, decoding and products at their ceilings, in microseconds.
  double floor_us(const BenchSeries& s) const {
    return std::max({s.bytes / read_, s.values / decode_, s.flops / mma_});
  }

  // bits: empty for what is not quantized.
  double show(const std::string& series, const std::string& name, const std::string& bits, int64_t rows,
              const std::string& phase, const BenchSeries& s) {
    const double us = add(fmt::format("{}/rows{}", series, rows), phase, s);
    line(fmt::format("{:<22}{:>5}{:>6}{:>6}{:>11.2f}{:>10.0f}{:>10.1f}{:>9.2f}{:>9.2f}", name, bits, rows, phase, us,
                     s.bytes / us / 1e3, s.flops / us / 1e6, floor_us(s), us / floor_us(s)));
    return us;
  }
  double show_exl3(const std::string& name, int half, int64_t rows, const std::string& phase, const BenchSeries& s) {
    const std::string bits = fmt::format("{}", half / 2.0);
    return show(fmt::format("{}/{}/{}", name, options_.codebook, bits), name, bits, rows, phase, s);
  }

  void measure_linear(const Matrix& m, int half, const std::vector<int64_t>& rows) {
    const std::string name = name_of(m), of = fmt::format("/{}/{}", name, half / 2.0);
    std::map<int64_t, double> times;
    for (const int64_t r : rows) {
      const BenchSeries s = bench_->linear(m.in, m.out, plan_.book, half, r, true, "auto");
      times[r] = show_exl3(name, half, r, "cold", s);
      if (r == 1) {
        show_exl3(name, half, r, "warm", bench_->linear(m.in, m.out, plan_.book, half, r, false, "auto"));
        if (plan_.book == Codebook::Mul1 && half >= 6 && half <= 12 && m.in * m.out >= 15'000'000)
          gate("one_row_over_floor" + of, times[r] / floor_us(s), "<=", m.out >= 100'000 ? 1.35 : 2, "ratio");
      }
      if (r == 4096 && m.in * m.out >= 15'000'000)
        card_gate("many_rows" + of, s.flops / times[r] / 1e6, ">=", 400, "TFLOP/s");
    }
    if (times.contains(1) && times.contains(16) && m.in * m.out >= 15'000'000)
      gate("sixteen_rows_over_one" + of, times[16] / times[1], "<=", 1.3, "ratio");
    if (plan_.book != Codebook::Mul1 || half % 2 || half < 6 || half > 12) return;
    for (const Peer& p : kPeers)
      if (p.in == m.in && p.out == m.out) {
        if (times.contains(1)) card_gate("one_row" + of, times[1], "<=", p.one[half / 2 - 3], "us");
        if (times.contains(16)) card_gate("sixteen_rows" + of, times[16], "<=", p.sixteen[half / 2 - 3], "us");
      }
  }

  void measure_experts(int half) {
    for (const int64_t rows : {1, 4, 16, 64, 512}) {
      if (tool_.stopping()) return;
      const BenchSeries s = bench_->experts(2560, 640, plan_.book, half, 512, 10, rows, "auto");
      const double us = show_exl3(kExperts, half, rows, "cold", s);
      if (rows == 1 && (half == 6 || half == 8))
        card_gate(fmt::format("ten_experts_one_row/{}", half / 2.0), us, "<=", 15, "us");
    }
  }

  void measure_operation(const fnx::BenchOperation& op) {
    const BenchSeries s = bench_->operation(op);
    const double us = show("operation/" + op.name, op.name, "", op.rows, s.copies > 1 ? "cold" : "warm", s);
    if (op.rows == 1 && op.limited)
      card_gate("operation/" + op.name, us, "<=", fnx::operation_limit_us(floor_us(s)), "us");
  }

  void gate(const std::string& name, double value, const char* comparator, double limit, const std::string& unit) {
    tool_.receipt().add_gate(name, value, comparator, limit, unit);
  }
  // Limits in microseconds or TFLOP/s hold for the card on which they were set.
  void card_gate(const std::string& name, double value, const char* comparator, double limit, const std::string& unit) {
    if (bench_->device_name().find("H200") != std::string::npos) return gate(name, value, comparator, limit, unit);
    tool_.receipt().add_gate_not_run(name, comparator, limit, unit, "the limit was set for an H200");
  }

  void line(const std::string& text) {
    if (options_.format == "table") tool_.print(text + "\n");
  }

  const Options& options_;
  const Plan plan_;
  fnx::ToolRun& tool_;
  std::unique_ptr<KernelBench> bench_;
  double read_ = 0, decode_ = 0, mma_ = 0;  // bytes, values, operations a microsecond
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const fnx::ToolInfo info{
      "fnx-kernel-bench",
      "Times of the EXL3 kernels and of the operations of decoding on real shapes, beside the card's own read, decode "
      "and tensor-core ceilings.",
      {"fnx-kernel-bench", "fnx-kernel-bench exl3 --matrices 2560x12288 --bits 3,4 --rows 1,16,4096",
       "fnx-kernel-bench operation/qsa operation/gdn --rows 1"}};
  return fnx::run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("filter", options.filters, "Parts of kernel names, exl3/... or operation/...; all without one")
            ->type_name("FILTER");
        app.add_option("--matrices", options.matrices, "Matrices as INxOUT")->type_name("LIST")->capture_default_str();
        app.add_option("--bits", options.bits, "Widths")->type_name("LIST")->capture_default_str();
        app.add_option("--rows", options.rows, "Row counts; of operations those up to 16")
            ->type_name("LIST")
            ->capture_default_str();
        app.add_option("--codebook", options.codebook, "Codebook")
            ->check(CLI::IsMember({"mul1", "mcg", "3inst"}))
            ->capture_default_str();
        app.add_option("--device", options.device, "GPU index")->capture_default_str();
        app.add_option("--repeat", options.repeat, "Graph replays a figure")
            ->check(CLI::Range(1, 10000))
            ->capture_default_str();
        app.add_option("--format", options.format, "Form of the output; json is the list of series")
            ->check(CLI::IsMember({"table", "json"}))
            ->capture_default_str();
      },
      [&](fnx::ToolRun& tool) {
        Bench(options, tool).run();
        if (options.format == "json") tool.print(tool.receipt().measurements.dump(2) + "\n");
      });
}
