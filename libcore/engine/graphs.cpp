#include "libcore/engine/graphs.h"

#include <algorithm>
#include <utility>

#include "kernels/error.h"
#include "libcore/dist/communicator.h"

namespace fnx {

namespace {
constexpr size_t kMostGraphs = 64;
constexpr int64_t kLongestPause = 128;
}  // namespace

GraphCache::GraphCache(Backend& backend, bool enabled, int64_t inject_failures, Communicator* ranks)
    : backend_(backend), ranks_(ranks), enabled_(enabled), inject_failures_(inject_failures) {
  if (ranks_ != nullptr && ranks_->rank() + 1 < ranks_->world()) inject_failures_ = 0;
}

bool GraphCache::replay(const RoundKey& key, bool recordable, Stream& stream) {
  const auto it = enabled_ && recordable ? entries_.find(key) : entries_.end();
  if (it == entries_.end() || !it->second.graph) {
    ++counters_.eager;
    return false;
  }
  it->second.used = ++clock_;
  it->second.graph->launch(stream);
  ++counters_.replays;
  return true;
}

void GraphCache::record(const RoundKey& key, Stream& stream, const std::function<void()>& work) {
  if (!enabled_) return;
  Entry& entry = entries_[key];
  entry.used = ++clock_;
  if (!std::exchange(entry.seen, true)) {
    ++counters_.firsts;
    if (entries_.size() > kMostGraphs) drop_oldest();
    return;
  }
  if (entry.pause > 0) {
    --entry.pause;
    return;
  }
  bool failed = false;
  try {
    entry.graph = backend_.capture(stream, [&] {
      work();
      if (inject_failures_ <= 0) return;
      --inject_failures_;
      throw Error(ErrorKind::Device, "injected failure of a capture");
    });
  } catch (const Error&) {
    failed = true;
  }
  if (ranks_ != nullptr && !ranks_->agree(!failed)) failed = true;
  if (failed) {
    entry.graph = nullptr;
    ++counters_.failed;
    entry.pause = entry.next_pause;
    entry.next_pause = std::min(2 * entry.next_pause, kLongestPause);
    return;
  }
  if (!entry.graph) {  // the backend records nothing
    enabled_ = false;
    entries_.clear();
    return;
  }
  ++counters_.captures;
  counters_.bytes += entry.graph->bytes();
}

void GraphCache::drop_oldest() {
  const auto oldest = std::min_element(entries_.begin(), entries_.end(),
                                       [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
  if (oldest->second.graph) counters_.bytes -= oldest->second.graph->bytes();
  entries_.erase(oldest);
}

}  // namespace fnx
