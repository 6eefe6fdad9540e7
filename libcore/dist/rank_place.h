// Which rank this process is and how it reaches rank 0: from the variables of torchrun, mpirun or srun, or from the
// rank 0 that started it.
#pragma once

#include <string>
#include <vector>

#include "libcore/dist/channel.h"

namespace fnx {

struct RankPlace {
  int rank = 0, world = 1, local_rank = 0;
  bool launched = false;  // by a launcher or by rank 0: every rank is there already
  int socket = -1;        // to rank 0, when that started this process
  std::string address;    // else where rank 0 listens
  int port = 0;
};

// Throws Usage when a launcher's variables are incomplete or it started another number of processes than `world`, the
// number of ranks asked for. One process of a launcher is no launch: it starts its ranks itself.
RankPlace find_rank_place(int world);

// Over TCP: rank 0 listens, the others call. Waits up to two minutes for all of them; throws Device.
std::unique_ptr<HostChannel> connect_ranks(const RankPlace& place);

// A process of this program with the same command line, by rank.
struct RankProcess {
  int rank = 0, pid = -1;
};
struct StartedRanks {
  std::unique_ptr<HostChannel> channel;  // of rank 0
  std::vector<RankProcess> processes;
};
// Starts ranks 1 .. world - 1 on this host. Their stdin holds `input`, their stdout is closed.
StartedRanks start_ranks(int world, const std::string& input);
// All of stdin, for the ranks to have as well; this process' stdin holds it again.
std::string share_stdin();
// Of a rank that start_ranks started.
std::unique_ptr<HostChannel> join_started(const RankPlace& place);

// How a started rank ended ("was killed by signal 9", "exited with code 5"); kills it when it has not within `wait_ms`.
std::string reap(const RankProcess& process, int wait_ms);

}  // namespace fnx
