#include "libcore/dist/rank_place.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <optional>

namespace fnx {

namespace {

constexpr int kDefaultPort = 29500;  // torchrun's

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

int number(const char* name, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    throw Error(ErrorKind::Usage, fmt::format("{}={} is no number of a rank", name, text));
  return value;
}

struct Launcher {
  const char *name, *rank, *world, *local_rank, *hosts;  // hosts: a variable that is `one_host` on one host
  const char* one_host;                                  // name of a variable that it equals then, or "1"
};
constexpr Launcher kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES", "1"},
};

}  // namespace

RankPlace find_rank_place(int world) {
  RankPlace place;
  place.world = world;
  if (world == 1) return place;
  if (const auto own = variable("FNX_RANK")) {  // RANK/SOCKET, set by start_ranks
    const size_t slash = own->find('/');
    if (slash == std::string::npos) throw Error(ErrorKind::Usage, "FNX_RANK=" + *own + " is for ranks that fnx starts");
    place.rank = place.local_rank = number("FNX_RANK", own->substr(0, slash));
    place.socket = number("FNX_RANK", own->substr(slash + 1));
    place.launched = true;
    return place;
  }
  for (const Launcher& l : kLaunchers) {
    const auto rank = variable(l.rank), size = variable(l.world);
    if (!rank || !size || number(l.world, *size) == 1) continue;
    if (number(l.world, *size) != world)
      throw Error(ErrorKind::Usage, fmt::format("--tp {}: {} started {} processes ({}); give both the same number",
                                                world, l.name, *size, l.world));
    place.rank = number(l.rank, *rank);
    if (place.rank >= world) throw Error(ErrorKind::Usage, fmt::format("{}={} of {} ranks", l.rank, *rank, world));
    place.local_rank = place.rank;
    if (const auto local = variable(l.local_rank)) place.local_rank = number(l.local_rank, *local);
    const auto hosts = variable(l.hosts), all = variable(l.one_host);
    const bool one_host = hosts && *hosts == (all ? *all : l.one_host);
    place.address = variable("MASTER_ADDR").value_or(one_host ? "127.0.0.1" : "");
    if (place.address.empty())
      throw Error(ErrorKind::Usage,
                  fmt::format("{} ranks of {} on several hosts: set MASTER_ADDR to the host of rank 0", world, l.name));
    // One above MASTER_PORT, where torchrun itself listens.
    const auto port = variable("MASTER_PORT");
    place.port = 1 + (port ? number("MASTER_PORT", *port) : kDefaultPort);
    place.launched = true;
    return place;
  }
  return place;
}

}  // namespace fnx
