#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <new>

#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/build_info.h"
#include "libcore/cli/completion.h"
#include "libcore/cli/console.h"
#include "libcore/cli/options.h"
#include "libcore/cli/ranks.h"
#include "libcore/cli/tool.h"
#include "libcore/receipt/document.h"
#include "libcore/receipt/platform.h"
#include "libcore/receipt/writable.h"

namespace fnx {
namespace {

// Thrown out of parsing by --help and its like: the text to print in place of a run.
struct Information {
  std::string text;
};

struct CommonOptions {
  std::string receipt, color = "auto";
  bool quiet = false, verbose = false;
};

struct Outcome {
  int code = 0;
  std::string error;
};

class Run final : public ToolRun {
 public:
  Run(Console& console, std::string receipt_path, RankPlace place, bool reads_stdin, Json settings, Json build)
      : console_(console),
        receipt_path_(std::move(receipt_path)),
        place_(std::move(place)),
        reads_stdin_(reads_stdin),
        settings_(std::move(settings)),
        build_(std::move(build)) {}
  Receipt& receipt() override { return receipt_; }
  void print(std::string_view text) override {
    if (!receipt_on_stdout() && writes()) write_stdout(text);
  }
  bool receipt_on_stdout() const override { return receipt_path_.empty(); }
  std::string receipt_path() const override { return receipt_path_; }
  void info(const std::string& line) override {
    if (writes()) console_.info(line);
  }
  void debug(const std::string& line) override { console_.debug(line); }
  void progress(std::string_view what, uint64_t done, uint64_t total) override {
    if (writes()) console_.progress(what, done, total);
  }
  bool stopping() const override { return caught_signal() != 0; }

  Ranks* start_ranks(int world) override {
    if (world == 1) return nullptr;
    if (ranks_) throw Error(ErrorKind::Internal, "the ranks were started before");
    std::string input;
    if (reads_stdin_ && !place_.launched) input = share_stdin();
    ranks_ = std::make_unique<Ranks>(place_, input, settings_, build_);
    receipt_.set_effective("rank", place_.rank, place_.launched ? "environment" : "started");
    return ranks_.get();
  }
  bool stop_together() override { return ranks_ ? ranks_->stop(stopping()) : stopping(); }
  bool writes() const override { return place_.rank == 0; }

  void finish_ranks() {
    if (ranks_) ranks_->finish(receipt_);
  }
  // Adds to the error how the other ranks ended.
  void fail_ranks(Outcome& outcome) {
    if (!ranks_ || outcome.code == 0) return;
    const std::string others = ranks_->fail(static_cast<ErrorKind>(outcome.code), outcome.error);
    if (!others.empty()) outcome.error += " (" + others + ")";
  }

 private:
  Console& console_;
  std::string receipt_path_;
  RankPlace place_;
  bool reads_stdin_;
  Json settings_, build_;
  Receipt receipt_;
  std::unique_ptr<Ranks> ranks_;
};

std::string device_lines() {
  const CpuInfo cpu = cpu_info();
  std::string out = fmt::format("cpu  {}, {} threads, {:.1f} GiB\n", cpu.name, cpu.threads,
                                static_cast<double>(cpu.ram_bytes) / (1 << 30));
  for (const GpuInfo& gpu : list_gpus())
    out += fmt::format("{}    {}, {}, {:.1f} GiB\n", gpu.index, gpu.name, gpu.architecture,
                       static_cast<double>(gpu.memory_bytes) / (1 << 30));
  return out;
}

std::string help_text(const CLI::App& app, const ToolInfo& info) {
  std::string out = "Examples:\n";
  for (const std::string& example : info.examples) out += "  " + example + "\n";
  return out + "\n" + app.help();
}

void add_common_options(CLI::App& app, const ToolInfo& info, CommonOptions& common) {
  app.set_help_flag("");
  app.add_option("--receipt", common.receipt,
                 "Receipt file, - for stdout; default " + info.name + ".receipt.json here or in FNX_RECEIPT_DIR")
      ->type_name("PATH")
      ->group(kCommonGroup);
  app.add_flag("-q,--quiet", common.quiet, "No log lines and no progress bar")->group(kCommonGroup);
  app.add_flag("-v,--verbose", common.verbose, "More log lines")->group(kCommonGroup);
  app.add_option("--color", common.color, "Colour on stderr")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->group(kCommonGroup);
  const auto add_information = [&](const char* name, const char* what, std::function<std::string()> text) {
    app.add_flag_callback(
           name, [text = std::move(text)] { throw Information{text()}; }, what)
        ->trigger_on_parse()
        ->group(kCommonGroup);
  };
  add_information("-h,--help", "Print this help", [&] { return help_text(app, info); });
  add_information("--version", "Print version and build", [&] { return version_text(info.name); });
  add_information("--list-devices", "Print the devices this build can use", device_lines);
  app.add_option_function<std::string>(
         "--completion", [&](const std::string& shell) { throw Information{completion_script(app, info.name, shell)}; },
         "Print a completion script")
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->type_name("SHELL")
      ->trigger_on_parse()
      ->group(kCommonGroup);
  if (CLI::Option* model = app.get_option_no_throw("--model")) model->envname("FNX_MODEL");
  if (CLI::Option* device = app.get_option_no_throw("--device")) device->envname("FNX_DEVICE");
}

// Where the receipt goes, read without the parser so that a wrong command line has one too.
struct ReceiptTarget {
  std::string path;  // empty: stdout
  bool known = true, from_environment = false;
};

ReceiptTarget receipt_target(const std::vector<std::string>& argv, const std::string& tool) {
  for (size_t i = 1; i < argv.size(); ++i) {
    std::string path;
    if (argv[i] == "--receipt") {
      if (i + 1 == argv.size()) return {"", false, false};
      path = argv[i + 1];
    } else if (argv[i].starts_with("--receipt=")) {
      path = argv[i].substr(10);
    } else {
      continue;
    }
    if (path.empty()) return {"", false, false};
    return {path == "-" ? "" : path, true, false};
  }
  const std::string file = tool + ".receipt.json";
  const char* folder = std::getenv("FNX_RECEIPT_DIR");
  if (folder && *folder) return {(std::filesystem::path(folder) / file).string(), true, true};
  return {file, true, false};
}

bool is_receipt(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::string head(256, '\0');
  in.read(head.data(), static_cast<std::streamsize>(head.size()));
  return in.gcount() == 0 || head.find("\"fnx.receipt\"") != std::string::npos;
}

// What writing the receipt would destroy: a file that is no receipt, or is an argument too; empty if nothing.
std::string overwritten_file(const std::vector<std::string>& argv, const std::string& receipt) {
  std::error_code error;
  if (receipt.empty() || !std::filesystem::is_regular_file(receipt, error)) return "";
  if (!is_receipt(receipt)) return receipt + ", which is no receipt";
  for (size_t i = 1; i < argv.size(); ++i) {
    if (argv[i] == "--receipt") {
      ++i;  // its own value
      continue;
    }
    if (argv[i].starts_with("--receipt=")) continue;
    const size_t value = argv[i].starts_with('-') ? argv[i].find('=') + 1 : 0;
    const std::string path = argv[i].substr(value);
    if (!path.empty() && std::filesystem::equivalent(path, receipt, error))
      return path + ", which the command line names";
  }
  return "";
}

// Whether an option takes its value from stdin.
bool reads_stdin(const std::vector<std::string>& argv) {
  for (size_t i = 1; i < argv.size(); ++i)
    if ((argv[i] == "-" && argv[i - 1] != "--receipt") || (argv[i].ends_with("=-") && argv[i] != "--receipt=-"))
      return true;
  return false;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[32];
  return std::string(text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc));
}

double seconds(const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; }

// The receipt of one run: written first as incomplete, then finally.
class ReceiptWriter {
 public:
  ReceiptWriter(ReceiptTarget target, std::string tool) : target_(std::move(target)) {
    frame_.tool = tool_block(tool);
    frame_.platform = platform_block();
    run_.start_utc = utc_now();
  }

  void describe(const CLI::App& app, const std::vector<std::string>& argv) {
    frame_.invocation = invocation_block(app, argv, target_.from_environment);
    frame_.requested = requested_block(app);
  }

  const Json& settings() const { return frame_.requested; }
  // What must be the same program on every rank.
  Json build() const {
    return Json{{"commit", frame_.tool["commit"]}, {"executable_sha256", frame_.tool["executable_sha256"]}};
  }

  void write_incomplete() {
    run_.outcome = "incomplete";
    if (target_.path.empty()) return;
    if (written_in_place(target_.path)) return require_writable(target_.path);  // its reader wants one document
    write_file_atomic(target_.path, pretty_json(make_document(frame_, {}, run_)));
  }

  void write_final(const Receipt& receipt, const std::string& outcome, int code, const std::string& error) {
    rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    run_.wall_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    run_.user_s = seconds(usage.ru_utime);
    run_.system_s = seconds(usage.ru_stime);
    run_.peak_rss_bytes = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
    run_.outcome = outcome;
    run_.exit_code = code;
    if (!error.empty()) run_.error = reduce_text(error);
    const std::string text = pretty_json(make_document(frame_, receipt, run_));
    if (target_.path.empty())
      write_stdout(text);
    else
      write_file_atomic(target_.path, text);
  }

 private:
  ReceiptTarget target_;
  FrameBlocks frame_;
  RunRecord run_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// The one catch: what `action` threw, as exit code and message.
Outcome guarded(const std::function<void()>& action) {
  try {
    action();
    return {};
  } catch (const Error& error) {
    return {static_cast<int>(error.kind()), error.what()};
  } catch (const std::bad_alloc&) {
    return {static_cast<int>(ErrorKind::Unsupported), "this machine has too little memory for the run"};
  } catch (const std::exception& error) {
    return {static_cast<int>(ErrorKind::Internal), std::string("internal: ") + error.what()};
  }
}

// Ends a run: error line, final receipt, exit code.
int finish(Console& console, ReceiptWriter& writer, const Receipt& receipt, Outcome outcome) {
  std::string name = "passed";
  if (outcome.code == 0 && receipt.any_gate_failed()) outcome.code = static_cast<int>(ErrorKind::Gate);
  if (outcome.code != 0) name = outcome.code == static_cast<int>(ErrorKind::Gate) ? "failed" : "error";
  if (caught_signal() != 0) {
    outcome.code = 128 + caught_signal();
    name = "interrupted";
    if (outcome.error.empty()) outcome.error = "interrupted by a signal";
  }
  console.error(outcome.error);
  const Outcome written = guarded([&] { writer.write_final(receipt, name, outcome.code, outcome.error); });
  if (written.code == 0) return outcome.code;
  console.error("receipt: " + written.error);
  return outcome.code > 1 ? outcome.code : written.code;
}

}  // namespace

int run_tool(int argc, char** argv, const ToolInfo& info, const std::function<void(CLI::App&)>& configure,
             const std::function<void(ToolRun&)>& body) {
  guard_standard_streams();
  install_signal_handlers();
  const std::vector<std::string> words(argv, argv + argc);
  Console console(info.name);
  CLI::App app(info.summary, info.name);
  CommonOptions common;
  const Outcome configured = guarded([&] {
    app.option_defaults()->always_capture_default();
    configure(app);
    add_common_options(app, info, common);
  });
  if (configured.code != 0) {
    console.error(configured.error);
    return static_cast<int>(ErrorKind::Internal);
  }

  Outcome usage;
  try {
    app.parse(argc, argv);
    refuse_odd_numbers(app);
  } catch (const Information& information) {
    const Outcome printed = guarded([&] { write_stdout(information.text); });
    console.error(printed.error);
    return printed.code;
  } catch (const CLI::ParseError& error) {
    usage = {static_cast<int>(ErrorKind::Usage), usage_message(app, error)};
  } catch (const std::exception& error) {
    usage = {static_cast<int>(ErrorKind::Usage), error.what()};
  }
  console.configure(common.quiet, common.verbose,
                    common.color == "always"  ? ColorMode::Always
                    : common.color == "never" ? ColorMode::Never
                                              : ColorMode::Auto);

  ReceiptTarget target = receipt_target(words, info.name);
  if (!target.known) {
    console.error(usage.code != 0 ? usage.error : "--receipt needs a path or -");
    return static_cast<int>(ErrorKind::Usage);
  }
  if (const std::string file = overwritten_file(words, target.path); !file.empty()) {
    console.error("the receipt would overwrite " + file + "; give another --receipt");
    return static_cast<int>(ErrorKind::Usage);
  }
  RankPlace place;
  if (const CLI::Option* tp = app.get_option_no_throw("--tp"); tp != nullptr && usage.code == 0)
    usage = guarded([&] { place = find_rank_place(tp->as<int>()); });
  if (place.rank > 0) target.path = "/dev/null";  // rank 0's receipt has the others' part
  ReceiptWriter writer(target, info.name);
  writer.describe(app, words);
  if (usage.code != 0) return finish(console, writer, {}, usage);

  const Outcome begun = guarded([&] { writer.write_incomplete(); });
  if (begun.code != 0) {
    console.error("receipt: " + begun.error);
    return begun.code;
  }
  Run run(console, target.path, place, reads_stdin(words), writer.settings(), writer.build());
  Outcome outcome = guarded([&] {
    body(run);
    run.finish_ranks();
  });
  run.fail_ranks(outcome);
  // The rank 0 that started this one prints the error, if it lives.
  if (place.socket >= 0 && !outcome.error.starts_with("rank 0 ended")) outcome.error.clear();
  return finish(console, writer, run.receipt(), outcome);
}

}  // namespace fnx
