#include "libcore/cli/ranks.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "libcore/receipt/document.h"

namespace fnx {

namespace {

constexpr int64_t kStopCalls = 8;  // between two talks about stopping
constexpr int kEndMs = 5000;       // that a rank may take to end after the others
constexpr int kUnwindMs = 7000;    // that this rank may take to end once another is lost
constexpr auto kStep = std::chrono::milliseconds(50);

// Options that ranks may have of their own.
bool may_differ(const std::string& key) { return key == "device" || key == "threads"; }

std::string flag(std::string key) {
  for (char& c : key)
    if (c == '_') c = '-';
  return "--" + key;
}

}  // namespace

Ranks::Ranks(const RankPlace& place, const std::string& input, const Json& settings, const Json& build)
    : place_(place) {
  if (!place.launched) {
    StartedRanks started = start_ranks(place.world, input);
    processes_ = std::move(started.processes), channel_ = std::move(started.channel);
  } else {
    channel_ = place.socket >= 0 ? join_started(place) : connect_ranks(place);
  }
  try {
    compare(settings, build);
  } catch (const Error& e) {
    const std::string others = fail(e.kind(), e.what());
    throw Error(e.kind(), others.empty() ? e.what() : fmt::format("{} ({})", e.what(), others));
  }
  channel_->watch([this] { lost(); });
}

Ranks::~Ranks() {
  *ended_ = true;
  channel_->end_watch();
  communicator_.reset();
  channel_.reset();
  reap_all(kEndMs);
}

void Ranks::compare(const Json& settings, const Json& build) {
  const std::vector<std::string> all = channel_->exchange(canonical_json({{"settings", settings}, {"build", build}}));
  const Json first = Json::parse(all[0]);
  for (size_t r = 1; r < all.size(); ++r) {
    const Json other = Json::parse(all[r]);
    for (const char* block : {"build", "settings"}) {
      const bool options = std::string(block) == "settings";
      for (const auto& [key, value] : first[block].items()) {
        const Json there = other[block].value(key, Json());
        if (value == there || (options && may_differ(key))) continue;
        throw Error(ErrorKind::Usage, fmt::format("{} is {} on rank 0 and {} on rank {}; give every rank the same",
                                                  options ? flag(key) : "the program's " + key, canonical_json(value),
                                                  canonical_json(there), r));
      }
    }
  }
}

void Ranks::connect(bool cuda) {
  communicator_ = cuda ? make_nccl_communicator(*channel_) : make_host_communicator(*channel_);
  connected_ = communicator_.get();
}

// On the watch's thread. The main thread throws at its next check; if the device holds it all the same, this ends it.
void Ranks::lost() {
  std::thread([ended = ended_] {
    for (int waited = 0; waited < kUnwindMs; waited += 50) {
      if (*ended) return;
      std::this_thread::sleep_for(kStep);
    }
    if (*ended) return;
    std::fputs("a rank is lost and this one does not come back from the device: ended\n", stderr);
    std::_Exit(static_cast<int>(ErrorKind::Device));
  }).detach();
  if (Communicator* c = connected_) c->abort();
}

bool Ranks::stop(bool mine) {
  if (!stopped_ && stop_calls_++ % kStopCalls == 0) stopped_ = !communicator_->agree(!mine);
  return stopped_;
}

void Ranks::finish(Receipt& receipt) {
  channel_->end_watch();
  const std::string result = canonical_json(receipt.result);
  const Json mine{{"rank", place_.rank},
                  {"effective", receipt.effective},
                  {"evidence", receipt.evidence},
                  {"result_hash", xxh3_hex(result.data(), result.size())}};
  const std::vector<std::string> all = channel_->exchange(canonical_json(mine));
  Json ranks = Json::array();
  int64_t different = 0;
  for (const std::string& text : all) {
    ranks.push_back(Json::parse(text));
    different += ranks.back()["result_hash"] != mine["result_hash"];
  }
  receipt.evidence["ranks"] = ranks;
  receipt.add_gate("ranks_of_other_results", static_cast<double>(different), "==", 0, "ranks");
  *ended_ = true;
}

std::string Ranks::fail(ErrorKind kind, const std::string& why) noexcept {
  *ended_ = true;
  channel_->fail(kind, why);
  channel_->end_watch();
  if (communicator_) communicator_->abort();
  try {
    return reap_all(kEndMs, static_cast<int>(kind));
  } catch (const std::exception&) {
    return "";
  }
}

std::string Ranks::reap_all(int wait_ms, int expected) {
  std::string out;
  for (const RankProcess& p : processes_) {
    const std::string how = reap(p, wait_ms);
    if (how != "exited with code 0" && how != fmt::format("exited with code {}", expected))
      out += fmt::format("{}rank {} {}", out.empty() ? "" : ", ", p.rank, how);
  }
  processes_.clear();
  return out;
}

}  // namespace fnx
