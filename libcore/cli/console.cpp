#include "libcore/cli/console.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "kernels/error.h"

namespace fnx {
namespace {

volatile std::sig_atomic_t g_signal = 0;

void note_signal(int signal) { g_signal = signal; }

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EAGAIN) {  // whoever shares it has made it one that does not block
      pollfd writable{fd, POLLOUT, 0};
      (void)::poll(&writable, 1, -1);
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

}  // namespace

void guard_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) (void)::open("/dev/null", O_RDONLY);  // takes the lowest free number, which is fd
}

void write_stdout(std::string_view text) {
  if (!write_all(1, text))
    throw Error(ErrorKind::Output, std::string("stdout cannot be written: ") + std::strerror(errno));
}

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  for (const int refused_write : {SIGPIPE, SIGXFSZ}) ::signal(refused_write, SIG_IGN);  // write() says it
}

int caught_signal() { return g_signal; }

Console::Console(std::string tool) : tool_(std::move(tool)) { configure(false, false, ColorMode::Auto); }

void Console::configure(bool quiet, bool verbose, ColorMode color) {
  terminal_ = ::isatty(2) == 1;
  quiet_ = quiet;
  verbose_ = verbose;
  const char* no_color = std::getenv("NO_COLOR");
  color_ = color == ColorMode::Always || (color == ColorMode::Auto && terminal_ && (!no_color || !*no_color));
}

void Console::info(std::string_view line) {
  if (!quiet_) write_line(fmt::format("{}: {}\n", tool_, line));
}

void Console::debug(std::string_view line) {
  if (verbose_) write_line(fmt::format("{}: {}\n", tool_, line));
}

void Console::error(std::string_view message) {
  while (!message.empty()) {
    const size_t end = std::min(message.find('\n'), message.size());
    if (end > 0)
      write_line(fmt::format("{}: {}error:{} {}\n", tool_, color_ ? "\033[31m" : "", color_ ? "\033[0m" : "",
                             message.substr(0, end)));
    message.remove_prefix(std::min(end + 1, message.size()));
  }
}

void Console::progress(std::string_view what, uint64_t done, uint64_t total) {
  if (!terminal_ || quiet_) return;
  const std::lock_guard lock(mutex_);
  if (done >= total) {
    clear_bar();
    return;
  }
  const int64_t now = now_ns();
  if (now < next_bar_ns_) return;
  next_bar_ns_ = now + 100'000'000;
  constexpr size_t kWidth = 30;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const size_t full = static_cast<size_t>(share * kWidth);
  write_all(2, fmt::format("\r\033[K{} [{}{}] {:3.0f}%", what, std::string(full, '#'), std::string(kWidth - full, '.'),
                           share * 100));
  bar_ = true;
}

void Console::write_line(std::string_view line) {
  const std::lock_guard lock(mutex_);
  clear_bar();
  write_all(2, line);
}

void Console::clear_bar() {
  if (bar_) write_all(2, "\r\033[K");
  bar_ = false;
}

}  // namespace fnx
