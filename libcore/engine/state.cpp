#include "libcore/engine/state.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/error.h"

namespace fnx {

namespace {
constexpr int64_t kPageTokens = 64;  // at least; a page holds whole index blocks

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
}  // namespace

StatePool::StatePool(const ModelConfig& config, Backend& backend, Stream& stream, const StateOptions& options)
    : config_(config),
      backend_(backend),
      options_(options),
      stream_(stream),
      page_tokens_(page_tokens_of(config)),
      waiting_rows_(options.trials > 0 ? std::min(options.waiting, std::max(kLeastWaiting, kWaiting / options.slots))
                                       : 1),
      pages_(page_pool(options, page_tokens_)),
      sequences_(options.slots) {
  const int64_t ratio = std::max<int64_t>(1, config.index_ratio), slots = options.slots;
  const int64_t near = pages_.near(), far = pages_.free() - near;
  const auto qsa_cache = [&] {
    const auto pages = [&](int64_t count, Space space) {
      return make(options.kv_dtype, {count, page_tokens_, config.kv_heads, config.head_dim}, space);
    };
    KvCache kv;
    kv.page_tokens = page_tokens_;
    kv.keys = pages(near, Space::Device), kv.values = pages(near, Space::Device);
    if (far > 0) kv.far_keys = pages(far, Space::Host), kv.far_values = pages(far, Space::Host);
    const int64_t most = std::min(far, pages_.width());
    if (most > 0 && staged_keys_.rank == 0)
      staged_keys_ = pages(most, Space::Device), staged_values_ = pages(most, Space::Device);
    kv.index_keys = make(DType::F32, {near + far, page_tokens_ / ratio, config.index_head_dim});
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
}

int64_t StatePool::page_tokens_of(const ModelConfig& c) {
  const int64_t ratio = std::max<int64_t>(1, c.index_ratio);
  return divide_up(kPageTokens, ratio) * ratio;
}

PagePool StatePool::page_pool(const StateOptions& o, int64_t page_tokens) {
  const int64_t pages = divide_up(o.tokens, page_tokens) + o.slots;  // a sequence's last page is partly empty
  const int64_t near = o.device_tokens > 0 ? std::min(pages, divide_up(o.device_tokens, page_tokens)) : pages;
  return {pages, near, o.slots, std::min(pages, divide_up(o.max_tokens, page_tokens))};
}

View StatePool::make(DType dtype, std::initializer_list<int64_t> dims, Space space) {
  size_t bytes = dtype_size(dtype);
  for (int64_t d : dims) bytes *= static_cast<size_t>(d);
  std::vector<Buffer>& buffers = space == Space::Host ? host_buffers_ : buffers_;
  buffers.push_back(backend_.allocate(bytes, space));
  return buffers.back().view(dtype, dims);
}

int64_t StatePool::bytes_of(const std::vector<Buffer>& buffers) {
  int64_t n = 0;
  for (const Buffer& b : buffers) n += static_cast<int64_t>(b.bytes());
  return n;
}

int64_t StatePool::caches() const {
  return std::count_if(kv_.begin(), kv_.end(), [](const KvCache& kv) { return kv.keys.rank > 0; });
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
  pages_.close(slot);
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
  if (length > options_.max_tokens)
    throw Error(ErrorKind::Unsupported,
                fmt::format("a sequence of {} tokens exceeds the limit of {} tokens", length, options_.max_tokens));
  const int64_t count = divide_up(length, page_tokens_), need = count - pages_.count(slot);
  if (need > pages_.free())
    throw Error(ErrorKind::Unsupported,
                fmt::format("{} more KV pages of {} tokens are needed, {} are free; lower --parallel "
                            "or --max-tokens",
                            need, page_tokens_, pages_.free()));
  if (need > 0) spill(pages_.grow(slot, count));
}

// Neighbours go together.
void StatePool::spill(std::span<const PagePool::Move> moves) {
  for (size_t first = 0, end = 0; first < moves.size(); first = end) {
    const auto [from, to] = moves[first];
    for (end = first + 1; end < moves.size(); ++end) {
      const auto along = static_cast<int32_t>(end - first);
      if (moves[end].from != from + along || moves[end].to != to + along) break;
    }
    const auto count = static_cast<int64_t>(end - first);
    for (const KvCache& kv : kv_) {
      if (kv.keys.rank == 0) continue;
      const int64_t far = to - pages_.near();
      backend_.copy(stream_, kv.far_keys.rows(far, count), kv.keys.rows(from, count));
      backend_.copy(stream_, kv.far_values.rows(far, count), kv.values.rows(from, count));
      traffic_.spilled_bytes += static_cast<uint64_t>(2 * kv.keys.rows(from, count).bytes());
    }
  }
}

void StatePool::stage(int32_t slot, const KvCache& kv) {
  const int64_t pages = pages_.spilled(slot);
  for (int64_t first = 0, end = 0; first < pages; first = end) {
    const int32_t from = pages_.place(slot, first);
    for (end = first + 1; end < pages && pages_.place(slot, end) == from + end - first;) ++end;
    const int64_t far = from - pages_.near(), count = end - first;
    backend_.copy(stream_, staged_keys_.rows(first, count), kv.far_keys.rows(far, count));
    backend_.copy(stream_, staged_values_.rows(first, count), kv.far_values.rows(far, count));
    traffic_.staged_bytes += static_cast<uint64_t>(2 * staged_keys_.rows(first, count).bytes());
  }
  traffic_.staged += pages;
}

KvCache StatePool::staged(const KvCache& kv) const {
  KvCache out = kv;
  out.far_keys = staged_keys_, out.far_values = staged_values_;
  return out;
}

PageTraffic StatePool::traffic() const {
  PageTraffic t = traffic_;
  t.pages = pages_.counts();
  const auto it = std::find_if(kv_.begin(), kv_.end(), [](const KvCache& kv) { return kv.keys.rank > 0; });
  const int64_t page = it == kv_.end() ? 0 : 2 * it->keys.rows(0, 1).bytes();
  if (t.spilled_bytes != static_cast<uint64_t>(t.pages.spilled * caches() * page) ||
      t.staged_bytes != static_cast<uint64_t>(t.staged * page))
    throw Error(ErrorKind::Internal,
                fmt::format("{} KV pages of {} caches were spilled with {} bytes, {} staged with {}; a page has {}",
                            t.pages.spilled, caches(), t.spilled_bytes, t.staged, t.staged_bytes, page));
  return t;
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
    for (int64_t p = 0; p < pages_.count(slot) && left > 0; ++p, left -= page_tokens_) {
      const int64_t n = std::min(left, page_tokens_), per_page = page_tokens_ / config_.index_ratio;
      const auto in_page = [&](const View& v, int64_t page, int64_t rows) {
        View whole = v.rows(page, 1);
        whole = whole.reshape({v.shape[1], whole.size() / v.shape[1]});
        part(whole.rows(0, rows));
      };
      const int64_t place = pages_.place(slot, p), far = place - pages_.near();
      in_page(far < 0 ? kv.keys : kv.far_keys, far < 0 ? place : far, n);
      in_page(far < 0 ? kv.values : kv.far_values, far < 0 ? place : far, n);
      if (const int64_t b = std::min(blocks, per_page); b > 0) in_page(kv.index_keys, pages_.page(slot, p), b);
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
