#include "libcore/engine/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "kernels/error.h"

namespace fnx {

namespace {
constexpr int64_t kPageTokens = 64;  // at least; a page holds whole index blocks

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
}  // namespace

StatePool::StatePool(const ModelConfig& config, Backend& backend, Stream& stream, const StateOptions& options)
    : config_(config), backend_(backend), options_(options), stream_(stream), sequences_(options.slots) {
  const int64_t ratio = std::max<int64_t>(1, config.index_ratio), slots = options.slots;
  page_tokens_ = divide_up(kPageTokens, ratio) * ratio;
  pages_ = divide_up(options.tokens, page_tokens_) + slots;  // a sequence's last page is partly empty
  const auto qsa_cache = [&] {
    KvCache kv;
    kv.page_tokens = page_tokens_;
    kv.keys = make(options.kv_dtype, {pages_, page_tokens_, config.kv_heads, config.head_dim});
    kv.values = make(options.kv_dtype, {pages_, page_tokens_, config.kv_heads, config.head_dim});
    kv.index_keys = make(DType::F32, {pages_, page_tokens_ / ratio, config.index_head_dim});
    kv.raw_keys = make(DType::F32, {slots, ratio + divide_up(options.trials, ratio) * ratio, config.index_head_dim});
    return kv;
  };
  gdn_.resize(config.layers()), kv_.resize(config.layers());
  for (int64_t l = 0; l < config.layers(); ++l) {
    if (config.layer_types[l] == LayerType::SparseAttention) {
      kv_[l] = qsa_cache();
      continue;
    }
    gdn_[l].conv = make(DType::F32, {slots, config.gdn_conv_kernel - 1 + options.trials, config.gdn_conv_width()});
    gdn_[l].delta = make(DType::F32, {slots, config.gdn_value_heads, config.gdn_key_dim, config.gdn_value_dim});
    if (options.trials > 0) gdn_[l].tried = make(DType::F32, {slots, options.trials, 2, config.gdn_value_heads});
  }
  const int64_t ple_rows = (config.ple_conv_kernel - 1) * config.ngram_size + options.trials;
  for (size_t i = 0; i < config.ple_layers.size(); ++i)
    ple_.push_back(make(DType::F32, {slots, ple_rows, config.streams * config.hidden_size}));
  if (options.draft_head) {
    kv_.push_back(qsa_cache());
    last_stack_ = make(DType::F32, {slots * waiting_rows(), config.streams, config.hidden_size});
  }
  table_width_ = std::min(pages_, divide_up(options.max_tokens, page_tokens_));
  table_.resize(slots * table_width_);
  free_pages_.resize(pages_);
  std::iota(free_pages_.rbegin(), free_pages_.rend(), 0);
}

View StatePool::make(DType dtype, std::initializer_list<int64_t> dims) {
  size_t bytes = dtype_size(dtype);
  for (int64_t d : dims) bytes *= static_cast<size_t>(d);
  buffers_.push_back(backend_.allocate(bytes, Space::Device));
  return buffers_.back().view(dtype, dims);
}

int64_t StatePool::bytes() const {
  int64_t n = 0;
  for (const Buffer& b : buffers_) n += static_cast<int64_t>(b.bytes());
  return n;
}

int32_t StatePool::open() {
  const auto it = std::find_if(sequences_.begin(), sequences_.end(), [](const Sequence& s) { return !s.open; });
  if (it == sequences_.end())
    throw Error(ErrorKind::Unsupported,
                fmt::format("all {} sequence slots are in use; raise --parallel", sequences_.size()));
  it->open = true;
  const auto slot = static_cast<int32_t>(it - sequences_.begin());
  const auto clear = [&](const View& v) {
    if (v && v.size() > 0) backend_.clear(stream_, v.rows(slot, 1));
  };
  for (const GdnState& s : gdn_) clear(s.conv), clear(s.delta);
  for (const KvCache& kv : kv_) clear(kv.raw_keys);
  for (const View& v : ple_) clear(v);
  if (last_stack_) backend_.clear(stream_, last_stack_.rows(slot * waiting_rows(), waiting_rows()));
  return slot;
}

void StatePool::close(int32_t slot) {
  free_pages_.insert(free_pages_.end(), sequences_[slot].pages.rbegin(), sequences_[slot].pages.rend());
  sequences_[slot] = {};
}

void StatePool::append(int32_t slot, std::span<const int32_t> tokens) {
  Sequence& s = sequences_[slot];
  const auto length = static_cast<int64_t>(s.tokens.size() + tokens.size());
  if (s.on_trial > 0) throw Error(ErrorKind::Internal, "tokens are appended behind tokens on trial");
  reserve(slot, length);
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.absorbed = -1;
}

void StatePool::reserve(int32_t slot, int64_t length) {
  Sequence& s = sequences_[slot];
  if (length > options_.max_tokens)
    throw Error(ErrorKind::Unsupported,
                fmt::format("a sequence of {} tokens exceeds the limit of {} tokens", length, options_.max_tokens));
  const int64_t need = divide_up(length, page_tokens_) - static_cast<int64_t>(s.pages.size());
  if (need > static_cast<int64_t>(free_pages_.size()))
    throw Error(ErrorKind::Unsupported,
                fmt::format("{} more KV pages of {} tokens are needed, {} are free; lower --parallel "
                            "or --max-tokens",
                            need, page_tokens_, free_pages_.size()));
  if (need > 0) {
    const auto first = static_cast<int64_t>(s.pages.size());
    for (int64_t i = 0; i < need; ++i) {
      s.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
    }
    std::copy_n(s.pages.begin() + first, need, table_.begin() + slot * table_width_ + first);
  }
}

void StatePool::try_rows(int32_t slot, int32_t tried) {
  if (tried < 0 || tried > options_.trials)
    throw Error(ErrorKind::Internal, fmt::format("{} rows on trial, at most {} are possible", tried, options_.trials));
  sequences_[slot].on_trial = tried;
}

void StatePool::keep(int32_t slot, int32_t kept) {
  Sequence& s = sequences_[slot];
  if (kept < 0 || kept > s.on_trial)
    throw Error(ErrorKind::Internal, fmt::format("{} rows kept of {} on trial", kept, s.on_trial));
  s.tokens.resize(s.tokens.size() - static_cast<size_t>(s.on_trial - kept));
  s.lag = kept, s.on_trial = 0;
}

void StatePool::each_part(int32_t slot, const std::function<void(const View&)>& part) const {
  const Sequence& s = sequences_[slot];
  if (s.on_trial > 0 || s.lag > 0 || s.waiting > 1)
    throw Error(ErrorKind::Internal, "a state that lags behind its tokens is not whole");
  const auto rows_of = [&](const View& v, int64_t first, int64_t count) {
    View slot_rows = v.rows(slot, 1);
    slot_rows = slot_rows.reshape({v.shape[1], slot_rows.size() / v.shape[1]});
    if (count > 0) part(slot_rows.rows(first, count));
  };
  for (const GdnState& g : gdn_)
    if (g.delta) {
      part(g.delta.rows(slot, 1));
      if (g.conv.size() > 0) rows_of(g.conv, 0, g.conv.shape[1] - options_.trials);
    }
  for (const View& v : ple_)
    if (v.size() > 0) rows_of(v, 0, v.shape[1] - options_.trials);
  if (last_stack_) part(last_stack_.rows(stack_place(slot, std::max<int64_t>(1, length(slot)) - 1), 1));
  for (size_t i = 0; i < kv_.size(); ++i) {
    const KvCache& kv = kv_[i];
    if (!kv.keys) continue;
    // The draft head is one row behind: its last row waits for the next token.
    const bool draft = options_.draft_head && i + 1 == kv_.size();
    int64_t left = std::max<int64_t>(0, length(slot) - (draft ? 1 : 0)), blocks = left / config_.index_ratio;
    // Of raw keys those of the incomplete block: a ring holds whole blocks.
    rows_of(kv.raw_keys, blocks * config_.index_ratio % kv.raw_keys.shape[1], left % config_.index_ratio);
    for (size_t p = 0; p < s.pages.size() && left > 0; ++p, left -= page_tokens_) {
      const int64_t n = std::min(left, page_tokens_), per_page = page_tokens_ / config_.index_ratio;
      const auto in_page = [&](const View& v, int64_t rows) {
        View page = v.rows(s.pages[p], 1);
        page = page.reshape({v.shape[1], page.size() / v.shape[1]});
        part(page.rows(0, rows));
      };
      in_page(kv.keys, n), in_page(kv.values, n);
      if (const int64_t b = std::min(blocks, per_page); b > 0) in_page(kv.index_keys, b);
      blocks -= per_page;
    }
  }
}

std::vector<std::byte> StatePool::dump(int32_t slot) const {
  const std::vector<int32_t>& tokens = sequences_[slot].tokens;
  const auto* ids = reinterpret_cast<const std::byte*>(tokens.data());
  std::vector<std::byte> out(ids, ids + tokens.size() * sizeof(int32_t));
  const std::vector<std::byte> states = save(slot).states;
  out.insert(out.end(), states.begin(), states.end());
  return out;
}

size_t StatePool::saved_bytes(int32_t slot) const {
  size_t bytes = 0;
  each_part(slot, [&](const View& v) { bytes += static_cast<size_t>(v.bytes()); });
  return bytes;
}

Snapshot StatePool::save(int32_t slot) const {
  Snapshot out;
  out.tokens = sequences_[slot].tokens;
  out.states.resize(saved_bytes(slot));
  std::byte* to = out.states.data();
  each_part(slot, [&](const View& v) {
    View host = v;
    host.space = Space::Host, host.data = to;
    backend_.copy(stream_, host, v);
    to += v.bytes();
  });
  stream_.synchronize();
  return out;
}

int32_t StatePool::restore(const Snapshot& snapshot) {
  const int32_t slot = open();
  try {
    append(slot, snapshot.tokens);
    set_waiting(slot, snapshot.tokens.empty() ? 0 : 1, -1);
    const size_t bytes = saved_bytes(slot);
    if (bytes != snapshot.states.size())
      throw Error(ErrorKind::Input, fmt::format("a snapshot of {} tokens has {} bytes of states, this model needs {}",
                                                snapshot.tokens.size(), snapshot.states.size(), bytes));
  } catch (...) {
    close(slot);
    throw;
  }
  auto* from = const_cast<std::byte*>(snapshot.states.data());
  each_part(slot, [&](const View& v) {
    View host = v;
    host.space = Space::Host, host.data = from;
    backend_.copy(stream_, v, host);
    from += v.bytes();
  });
  stream_.synchronize();
  return slot;
}

}  // namespace fnx
