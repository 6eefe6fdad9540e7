// The three streams of a tool and its signals.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace fnx {

enum class ColorMode { Auto, Always, Never };

// Gives descriptors 0 to 2 a harmless target when the caller closed them, so that no file opened later lands there.
void guard_standard_streams();

// Writes all of `text` to stdout at once; throws Output when that fails.
void write_stdout(std::string_view text);

// SIGINT and SIGTERM are noted (a second one ends the process), SIGPIPE is ignored.
void install_signal_handlers();
// The signal noted, or 0.
int caught_signal();

// Lines and one progress bar on stderr.
class Console {
 public:
  explicit Console(std::string tool);
  void configure(bool quiet, bool verbose, ColorMode color);

  void info(std::string_view line);
  void debug(std::string_view line);
  // "<tool>: error: <line>", one such line for each line of `message`.
  void error(std::string_view message);
  void progress(std::string_view what, uint64_t done, uint64_t total);

 private:
  void write_line(std::string_view line);
  void clear_bar();

  std::string tool_;
  std::mutex mutex_;
  bool terminal_ = false, color_ = false, quiet_ = false, verbose_ = false;
  bool bar_ = false;
  int64_t next_bar_ns_ = 0;
};

}  // namespace fnx
