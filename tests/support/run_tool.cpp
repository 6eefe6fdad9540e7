#include "tests/support/run_tool.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <stdexcept>

extern char** environ;

namespace fnx {
namespace {

namespace fs = std::filesystem;

struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    read_end = fds[0];
    write_end = fds[1];
  }
  ~Pipe() {
    close_end(read_end);
    close_end(write_end);
  }
  static void close_end(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
};

bool sets(const std::string& assignment, const std::string& name) { return assignment.rfind(name + "=", 0) == 0; }

std::string unique_name() {
  static int counter = 0;
  return std::to_string(::getpid()) + "-" + std::to_string(counter++);
}

std::vector<std::string> make_environment(const std::vector<std::string>& env, std::string& receipt_dir) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    bool drop = text.rfind("FNX_", 0) == 0 || sets(text, "NO_COLOR") || sets(text, "XDG_CACHE_HOME");
    for (const std::string& own : env) drop = drop || sets(text, own.substr(0, own.find('=')));
    if (!drop) out.push_back(text);
  }
  bool cache = false;
  for (const std::string& own : env) {
    if (sets(own, "FNX_RECEIPT_DIR")) receipt_dir = own.substr(16);
    cache = cache || sets(own, "XDG_CACHE_HOME");
    out.push_back(own);
  }
  if (receipt_dir.empty()) {
    receipt_dir = FNX_BINARY_DIR "/test-receipts/" + unique_name();
    fs::create_directories(receipt_dir);
    out.push_back("FNX_RECEIPT_DIR=" + receipt_dir);
  }
  if (!cache) out.push_back("XDG_CACHE_HOME=" FNX_BINARY_DIR "/test-cache/" + std::to_string(::getpid()));
  return out;
}

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> out;
  for (const std::string& word : words) out.push_back(const_cast<char*>(word.c_str()));
  out.push_back(nullptr);
  return out;
}

// Moves bytes between the child and us until both of its streams end.
void exchange(Pipe& in, Pipe& out, Pipe& err, const std::string& stdin_text, RunResult& result) {
  size_t sent = 0;
  if (stdin_text.empty()) Pipe::close_end(in.write_end);
  while (out.read_end >= 0 || err.read_end >= 0) {
    pollfd fds[3] = {{in.write_end, POLLOUT, 0}, {out.read_end, POLLIN, 0}, {err.read_end, POLLIN, 0}};
    if (::poll(fds, 3, -1) < 0) continue;
    if (fds[0].fd >= 0 && fds[0].revents) {
      const ssize_t n =
          ::write(in.write_end, stdin_text.data() + sent, std::min<size_t>(stdin_text.size() - sent, 4096));
      if (n > 0) sent += static_cast<size_t>(n);
      if (n <= 0 || sent == stdin_text.size()) Pipe::close_end(in.write_end);
    }
    const auto drain = [](const pollfd& fd, int& end, std::string& text) {
      if (fd.fd < 0 || !fd.revents) return;
      char buffer[65536];
      const ssize_t n = ::read(end, buffer, sizeof buffer);
      if (n > 0)
        text.append(buffer, static_cast<size_t>(n));
      else
        Pipe::close_end(end);
    };
    drain(fds[1], out.read_end, result.out);
    drain(fds[2], err.read_end, result.err);
  }
}

}  // namespace

RunResult run_command(const std::vector<std::string>& argv, const std::string& stdin_text,
                      const std::vector<std::string>& env, const std::string& cwd) {
  RunResult result;
  const std::vector<std::string> environment = make_environment(env, result.receipt_dir);
  const std::vector<char*> arguments = pointers(argv), variables = pointers(environment);
  Pipe in, out, err;
  ::signal(SIGPIPE, SIG_IGN);
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    ::signal(SIGPIPE, SIG_DFL);
    if (!cwd.empty() && ::chdir(cwd.c_str()) != 0) ::_exit(127);
    ::dup2(in.read_end, 0);
    ::dup2(out.write_end, 1);
    ::dup2(err.write_end, 2);
    ::execve(arguments[0], arguments.data(), variables.data());
    ::_exit(127);
  }
  Pipe::close_end(in.read_end);
  Pipe::close_end(out.write_end);
  Pipe::close_end(err.write_end);
  exchange(in, out, err, stdin_text, result);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.exit_code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

std::string tool_path(const std::string& name) { return FNX_BINARY_DIR "/bin/" + name; }

Json read_receipt(const RunResult& run, const std::string& tool) {
  return read_json(fs::path(run.receipt_dir) / (tool + ".receipt.json"));
}

}  // namespace fnx
