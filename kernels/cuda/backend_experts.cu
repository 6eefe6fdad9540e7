// Expert banks of the cuda backend: loading, lines, the table that the kernels find an expert by.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/backend.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/embed.h"
#include "kernels/cuda/host_threads.h"
#include "kernels/cuda/weight_form.h"
#include "kernels/expert_planner.h"

namespace fnx::cuda {

namespace {

size_t serve_ids_bytes(int64_t experts) { return aligned_part(static_cast<size_t>(experts) * sizeof(int32_t)); }

std::byte* bytes_of(const Buffer& b) { return b.view(DType::U8, {0}).data; }

void fill_arena(CudaExperts& bank, const std::vector<ExpertSource>& experts) {
  std::byte* to = bytes_of(bank.arena);
  on_host_threads(bank.pooled, [&](int64_t i) {
    const int64_t e = bank.first + i;
    bank.extents[i].write(experts[e], static_cast<int32_t>(e), to + bank.at[i]);
  });
}

PoolState state_of(const ExpertBank& bank, const PoolOptions& options, const View& state) {
  return PoolState::at(state.data, options.experts, options.lines, bank.experts);
}

ForeseenExperts foreseen_of(const ExpertBank& bank, const Foreseen& foreseen) {
  ForeseenExperts f;
  if (!foreseen) return f;
  f.ids = foreseen.ids.as<int32_t>();
  f.count = static_cast<int32_t>(std::min<int64_t>(foreseen.ids.size(), PoolStage::kForeseen));
  f.first = static_cast<int32_t>(bank.first);
  f.stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
  return f;
}

}  // namespace

std::byte* CudaExperts::home(int32_t expert) const {
  std::byte* const host = bytes_of(arena);
  if (host == nullptr) return nullptr;
  void* device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&device, host, 0), "cudaHostGetDevicePointer");
  return static_cast<std::byte*>(device) + at[expert - first];
}

std::unique_ptr<ExpertBank> CudaBackend::load_experts(std::vector<ExpertSource> experts, int64_t pooled) {
  auto bank = std::make_unique<CudaExperts>();
  place_experts(*bank, experts, pooled);
  const auto held = std::find_if(experts.begin(), experts.end(), [](const ExpertSource& e) { return e.held(); });
  if (held == experts.end()) return bank;
  const LinearSource& first = held->gate;
  bank->in = first.in, bank->width = first.out, bank->codebook = first.codebook;
  if (hidden_ == 0) hidden_ = bank->in, expert_width_ = bank->width;
  if (bank->in != hidden_ || bank->width != expert_width_)
    throw Error(ErrorKind::Unsupported, "expert banks of two shapes, " + std::to_string(hidden_) + " x " +
                                            std::to_string(expert_width_) + " and " + std::to_string(bank->in) + " x " +
                                            std::to_string(bank->width) + "; use --backend cpu");
  size_t trellis = 0, held_count = 0;
  for (size_t e = 0; e < experts.size(); ++e) {
    if (!experts[e].held()) continue;
    ++held_count;
    for (const LinearSource* s : {&experts[e].gate, &experts[e].up, &experts[e].down}) {
      if (s->plain != nullptr || s->codebook != bank->codebook || !s->bias.empty())
        throw Error(ErrorKind::Unsupported,
                    "the cuda backend runs routed experts in EXL3, of one codebook a layer and without bias; use "
                    "--backend cpu");
      if (!bank->is_pooled(static_cast<int64_t>(e))) trellis += aligned_part(static_cast<size_t>(matrix_bytes(*s)));
    }
  }
  for (int64_t i = 0; i < bank->pooled; ++i) {
    bank->extents.emplace_back(experts[bank->first + i]);
    bank->at.push_back(static_cast<int64_t>(bank->host_bytes));
    bank->host_bytes += bank->extents.back().stride();
    bank->line_bytes = std::max(bank->line_bytes, bank->extents.back().stride());
  }
  if (bank->pooled > 0) {
    bank->arena = memory_->pinned(bank->host_bytes);
    if (!memory_->plan()) fill_arena(*bank, experts);
    make_serve_blocks(bank->experts);
  }

  const size_t in_bytes = aligned_part(bank->in * 2), width_bytes = aligned_part(bank->width * 2);
  const size_t scales = held_count * 3 * (in_bytes + width_bytes);
  bank->memory = memory_->device(trellis + scales + aligned_part(experts.size() * sizeof(Exl3Expert)) +
                                     aligned_part(bank->pooled * sizeof(PooledExpert)),
                                 load_stream_);
  std::byte* base = bytes_of(bank->memory);
  // One run of bytes from the arena's start to its end, so that the uploads are few and large.
  uploader().seek(base);
  static constexpr std::byte kZeros[kPartAlign] = {};
  size_t at = 0;
  const auto put = [&](const void* from, size_t bytes) {
    const size_t was = at;
    uploader().write(from, bytes);
    uploader().write(kZeros, aligned_part(bytes) - bytes);
    at += aligned_part(bytes);
    return reinterpret_cast<const uint16_t*>(base + was);
  };
  bank->entries.resize(experts.size());
  const auto each = [&](auto fn) {
    for (size_t e = 0; e < experts.size(); ++e) {
      if (!experts[e].held()) continue;
      const bool here = !bank->is_pooled(static_cast<int64_t>(e));
      fn(here, experts[e].gate, bank->entries[e].gate);
      fn(here, experts[e].up, bank->entries[e].up);
      fn(here, experts[e].down, bank->entries[e].down);
    }
  };
  each([&](bool here, const LinearSource& s, Exl3Matrix& m) {
    if (here) m.trellis = put(s.trellis, static_cast<size_t>(matrix_bytes(s)));
    m.half_bits = s.half_bits;
  });
  each([&](bool, const LinearSource& s, Exl3Matrix& m) {
    m.suh = put(halves(s.suh, "suh", s).data(), s.suh.size() * 2);
    m.svh = put(halves(s.svh, "svh", s).data(), s.svh.size() * 2);
  });
  bank->table = const_cast<Exl3Expert*>(
      reinterpret_cast<const Exl3Expert*>(put(bank->entries.data(), bank->entries.size() * sizeof(Exl3Expert))));
  std::vector<PooledExpert> homes;
  for (int64_t i = 0; i < bank->pooled; ++i) {
    const ExpertExtent& x = bank->extents[i];
    homes.push_back({bank->home(static_cast<int32_t>(bank->first + i)), x.up, x.down, x.bytes});
  }
  if (bank->pooled > 0)
    bank->homes = reinterpret_cast<const PooledExpert*>(put(homes.data(), homes.size() * sizeof(PooledExpert)));
  uploader().finish();
  return bank;
}

void CudaBackend::make_serve_blocks(int64_t experts) {
  const size_t bytes = serve_ids_bytes(experts) + static_cast<size_t>(experts) * sizeof(Exl3Expert);
  if (serving_[0].host.bytes() >= bytes) return;
  for (ServeBlock& b : serving_) {
    if (b.read) b.read->wait();
    b.host = memory_->pinned(bytes);
    b.read = make_event();
  }
}

void CudaBackend::fill(Stream& stream, ExpertBank& bank, int32_t expert, View line) {
  auto& b = static_cast<CudaExperts&>(bank);
  const int64_t i = expert - b.first;
  const ExpertExtent& extent = b.extents[i];
  if (line.bytes() < extent.bytes)
    throw Error(ErrorKind::Internal, "a line of " + std::to_string(line.bytes()) + " bytes for an expert of " +
                                         std::to_string(extent.bytes));
  auto& s = static_cast<BackendStream&>(stream);
  if (!s.running()) return;
  check_cuda(cudaMemcpyAsync(line.data, bytes_of(b.arena) + b.at[i], static_cast<size_t>(extent.bytes),
                             cudaMemcpyHostToDevice, s.handle()),
             "copy of an expert");
  b.filled_bytes += static_cast<uint64_t>(extent.bytes);
}

void CudaBackend::serve(Stream& stream, ExpertBank& bank, std::span<const ServedExpert> served) {
  auto& b = static_cast<CudaExperts&>(bank);
  auto& s = static_cast<BackendStream&>(stream);
  if (served.empty() || !s.running()) return;
  ServeBlock& block = serving_[next_serving_++ % serving_.size()];
  block.read->wait();
  const size_t ids_bytes = serve_ids_bytes(static_cast<int64_t>(served.size()));
  auto* ids = reinterpret_cast<int32_t*>(bytes_of(block.host));
  auto* entries = reinterpret_cast<Exl3Expert*>(bytes_of(block.host) + ids_bytes);
  for (size_t i = 0; i < served.size(); ++i) {
    const int32_t e = served[i].expert;
    Exl3Expert entry = b.entries[e];
    const std::byte* line = served[i].in_place ? b.home(e) : served[i].line.data;
    if (b.is_pooled(e) && line != nullptr) {
      const ExpertExtent& extent = b.extents[e - b.first];
      entry.gate.trellis = reinterpret_cast<const uint16_t*>(line);
      entry.up.trellis = reinterpret_cast<const uint16_t*>(line + extent.up);
      entry.down.trellis = reinterpret_cast<const uint16_t*>(line + extent.down);
      b.entries[e] = entry;
    }
    if (line == nullptr) entry.gate.trellis = nullptr;
    if (b.is_pooled(e)) b.entries[e].gate.trellis = entry.gate.trellis;
    ids[i] = e, entries[i] = entry;
  }
  // The kernel reads the block from host memory: a copy would wait behind those of experts.
  move_rows(
      {ids, entries, b.table, static_cast<int64_t>(served.size()), static_cast<int64_t>(sizeof(Exl3Expert)), true},
      s.handle());
  record(stream, *block.read);
}

void CudaBackend::plan_experts(Stream& stream, ExpertBank& bank, const PoolOptions& options, int64_t k, View ids,
                               View state, View lines, const Foreseen& foreseen) {
  const auto& b = static_cast<const CudaExperts&>(bank);
  auto& s = static_cast<BackendStream&>(stream);
  if (!s.running()) return;
  PlanExpertsParams p;
  p.state = state_of(b, options, state);
  p.counts = options.policy == PoolPolicy::LfuDecay, p.decay_touches = options.decay_touches;
  p.ids = ids.as<int32_t>(), p.rows = ids.shape[0], p.columns = ids.shape[1], p.k = k;
  p.first = b.first, p.homes = b.homes, p.table = b.table + b.first;
  p.lines = lines.data, p.line_bytes = lines.row_size();
  p.foreseen = foreseen_of(b, foreseen);
  cuda::plan_experts(p, s.handle());
}

void CudaBackend::fill_planned(Stream& stream, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                               const Foreseen& foreseen) {
  const auto& b = static_cast<const CudaExperts&>(bank);
  auto& s = static_cast<BackendStream&>(stream);
  if (!s.running()) return;
  cuda::fill_planned(
      {state_of(b, options, state), b.homes, lines.data, lines.row_size(), foreseen_of(b, foreseen).stage}, s.handle());
}

void CudaBackend::settle_planned(Stream& stream, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                                 const Foreseen& foreseen) {
  const auto& b = static_cast<const CudaExperts&>(bank);
  auto& s = static_cast<BackendStream&>(stream);
  if (!s.running()) return;
  cuda::settle_planned(
      {state_of(b, options, state), b.homes, b.table + b.first, lines.data, foreseen_of(b, foreseen).stage},
      s.handle());
}

void CudaBackend::fill_foreseen(Stream& stream, ExpertBank& bank, const PoolOptions& options, View state,
                                const Foreseen& foreseen) {
  const auto& b = static_cast<const CudaExperts&>(bank);
  auto& s = static_cast<BackendStream&>(stream);
  if (!s.running()) return;
  StageOrder* const next = foreseen.next_stage.data == nullptr
                               ? nullptr
                               : PoolStage::at(foreseen.next_stage.data, foreseen.line_bytes).order;
  cuda::fill_foreseen({state_of(b, options, state), b.homes, foreseen_of(b, foreseen), foreseen.follows, next},
                      s.handle());
}

void CudaBackend::check_served(Stream& stream, const ExpertBank& bank) {
  const auto& b = static_cast<const CudaExperts&>(bank);
  auto& s = static_cast<BackendStream&>(stream);
  if (!s.running()) return;
  std::vector<Exl3Expert> table(b.entries.size());
  check_cuda(
      cudaMemcpyAsync(table.data(), b.table, table.size() * sizeof(Exl3Expert), cudaMemcpyDeviceToHost, s.handle()),
      "table of experts");
  s.synchronize();
  for (int64_t i = 0; i < b.pooled; ++i) {
    const auto e = static_cast<int32_t>(b.first + i);
    if (table[e].gate.trellis == nullptr) continue;
    std::array<int32_t, 4> held{};
    check_cuda(
        cudaMemcpyAsync(held.data(), reinterpret_cast<const std::byte*>(table[e].gate.trellis) + b.extents[i].canary,
                        sizeof held, cudaMemcpyDefault, s.handle()),
        "canary");
    s.synchronize();
    require_canary(e, held.data());
  }
}

}  // namespace fnx::cuda
