// Ranks that are processes of this program on this host.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include "libcore/dist/rank_place.h"

extern char** environ;

namespace fnx {

namespace {

[[noreturn]] void fail(const char* what, int code) {
  throw Error(ErrorKind::Unsupported, fmt::format("starting ranks: {}: {}; lower --tp", what, std::strerror(code)));
}

// This process' words, as they were given.
std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  if (all.empty()) fail("reading /proc/self/cmdline", errno);  // a rank without words would run on its own
  std::vector<std::string> words;
  for (size_t at = 0; at < all.size();) {
    words.emplace_back(all.c_str() + at);
    at += words.back().size() + 1;
  }
  return words;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& w : words) out.push_back(w.data());
  out.push_back(nullptr);
  return out;
}

// A file without a name that holds the bytes, to be read from its start.
int memory_file(const std::string& bytes) {
  const int fd = ::memfd_create("stdin", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create", errno);
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno != EINTR) fail("write", errno);
    if (n > 0) at += static_cast<size_t>(n);
  }
  ::lseek(fd, 0, SEEK_SET);
  return fd;
}

int spawn(int rank, int socket, int input) {
  std::vector<std::string> words = own_words(), variables;
  for (char** v = environ; *v != nullptr; ++v)
    if (!std::string_view(*v).starts_with("FNX_RANK=")) variables.emplace_back(*v);
  variables.push_back(fmt::format("FNX_RANK={}/{}", rank, socket));
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, input, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, socket, socket);  // the same number: kept open
  pid_t pid = -1;
  const int code =
      ::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, pointers(words).data(), pointers(variables).data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (code != 0) fail("posix_spawn", code);
  return pid;
}

}  // namespace

std::string share_stdin() {
  std::string all;
  char buffer[65536];
  for (;;) {
    const ssize_t n = ::read(0, buffer, sizeof buffer);
    if (n < 0) throw Error(ErrorKind::Input, fmt::format("cannot read stdin: {}", std::strerror(errno)));
    if (n == 0) break;
    all.append(buffer, static_cast<size_t>(n));
  }
  const int file = memory_file(all);
  if (::dup2(file, 0) < 0) fail("dup2", errno);
  ::close(file);
  return all;
}

StartedRanks start_ranks(int world, const std::string& input) {
  StartedRanks started;
  std::vector<int> sockets, lent;
  const auto close_all = [](std::vector<int>& files) {
    for (const int file : files) ::close(file);
    files.clear();
  };
  try {
    for (int r = 1; r < world; ++r) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("socketpair", errno);
      sockets.push_back(ends[0]), lent.push_back(ends[1]);
      lent.push_back(memory_file(input));
      started.processes.push_back({r, spawn(r, ends[1], lent.back())});
      close_all(lent);
    }
  } catch (const Error&) {
    for (const RankProcess& p : started.processes) ::kill(p.pid, SIGKILL), ::waitpid(p.pid, nullptr, 0);
    close_all(lent), close_all(sockets);
    throw;
  }
  started.channel = std::make_unique<HostChannel>(0, world, std::move(sockets));
  return started;
}

std::unique_ptr<HostChannel> join_started(const RankPlace& place) {
  ::fcntl(place.socket, F_SETFD, FD_CLOEXEC);
  return std::make_unique<HostChannel>(place.rank, place.world, std::vector<int>{place.socket});
}

std::string reap(const RankProcess& process, int wait_ms) {
  int status = 0;
  for (int waited = 0;; waited += 10) {
    const pid_t got = ::waitpid(process.pid, &status, WNOHANG);
    if (got == process.pid) break;
    if (got < 0 && errno != EINTR) return "is gone";
    if (waited >= wait_ms) {
      ::kill(process.pid, SIGKILL);
      ::waitpid(process.pid, &status, 0);
      return "did not end and was killed";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {}", WTERMSIG(status));
  return fmt::format("exited with code {}", WEXITSTATUS(status));
}

}  // namespace fnx
