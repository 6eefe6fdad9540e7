// The seam: every operation of the model on device-agnostic views. The engine is written once against this interface
// and never asks which backend it has.
//
// Rules for an operation: it takes views and a stream, never allocates device memory, never synchronises, never reads a
// global. Activations are fp32, [rows, width]. A row's output bits depend on that row (and the state of its sequence)
// alone: not on the other rows, their number or the chunking. Symbols: R rows, H hidden, n streams, E experts, k slots.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/exl3.h"
#include "kernels/view.h"

namespace fnx {

// ---------------------------------------------------------------------------------------------- weights as stored

// y = W x (+ bias). Pointers are host memory that `owner` keeps alive; a backend makes its own form of it.
struct LinearSource {
  int64_t in = 0, out = 0;
  // Plain: [out, in] of F16, BF16 or F32. Null when quantized.
  const void* plain = nullptr;
  DType plain_dtype = DType::F16;
  // EXL3, see kernels/exl3.h: trellis [in/16, out/16, 8 * half_bits] words.
  const uint16_t* trellis = nullptr;
  exl3::Codebook codebook = exl3::Codebook::ThreeInst;
  int half_bits = 0;
  std::vector<float> suh, svh;  // [in], [out]: input and output scales with their signs
  // A shard of an EXL3 matrix: outputs [first_out, first_out + out) of full_out, both multiples of 128; the trellis is
  // the whole matrix' and the sum order too. 0: the matrix is no shard.
  int64_t first_out = 0, full_out = 0;
  std::vector<float> bias;  // [out] or empty
  std::vector<std::shared_ptr<const void>> owner;
};

// A linear layer in the backend's form.
class Linear {
 public:
  virtual ~Linear() = default;
  int64_t in = 0, out = 0;
};

struct ExpertSource {
  LinearSource gate, up, down;  // [f, H], [f, H], [H, f]
  // An expert without matrices is not held: its id counts, its slots are not written.
  bool held() const { return gate.trellis != nullptr || gate.plain != nullptr; }
};

// The experts of one layer in the backend's form. Those in [first, first + pooled) lie in host memory and are computed
// from lines: stretches of device memory that fill() brings them to and serve() names.
class ExpertBank {
 public:
  virtual ~ExpertBank() = default;
  int64_t experts = 0, in = 0, width = 0;
  int64_t first = 0, pooled = 0;
  std::vector<int32_t> others;  // held and not pooled
  int64_t line_bytes = 0;       // what a line for any pooled expert takes, a multiple of 256
  uint64_t host_bytes = 0;      // that the pooled ones take
  uint64_t filled_bytes = 0;    // that fill() has copied
  bool is_pooled(int64_t expert) const { return expert >= first && expert < first + pooled; }
};

// Where the next operations find a pooled expert: U8, the line that it was brought to, or nothing.
struct ServedExpert {
  int32_t expert = 0;
  View line;
  bool in_place = false;  // in host memory, where the bank keeps it: every use reads it from there
};

struct PoolOptions;  // kernels/expert_planner.h

// A guess at what rows will choose of a layer, and where copies of it wait: ids I32 [R, k], stage U8 [PoolStage::bytes
// of the pools' line_bytes]. Both empty: nothing was foreseen. The copies leave the link to those of the layer before,
// when they follow such, and then to those of the next layer's stage, which may be empty.
struct Foreseen {
  View ids, stage, next_stage;
  int64_t line_bytes = 0;
  bool follows = false;
  explicit operator bool() const { return ids.data != nullptr; }
};

// ---------------------------------------------------------------------------------------------- rows of a forward

// Consecutive rows of one sequence: row first_row + i has position start + i; `slot` names the sequence's state.
struct Lane {
  int32_t slot = 0, first_row = 0, rows = 0, start = 0;
};

// The last `tried` rows of a lane may be taken back: its slot's state becomes that before them, and what they bring is
// kept beside it. The first `kept` of the rows that the slot's last call tried belong to the sequence: they come before
// this call's first row. A lane of no rows brings its state up to date.
struct Trial {
  int32_t kept = 0, tried = 0;
};

// Describes the rows of one forward. `lanes` is the host's copy, the views are the backend's.
struct Batch {
  std::span<const Lane> lanes;
  int64_t rows = 0;
  // No row's position is at or above this; with it, rows and the number of lanes a launch is known, whatever the lanes.
  int64_t most_positions = 0;
  View lane_table;   // I32 [lanes, 4], as Lane
  View positions;    // I32 [R]
  View trials;       // I32 [lanes, 2], as Trial; empty: all zero
  View block_table;  // I32 [slots, pages a sequence]: page of a sequence's i-th run of page_tokens tokens
  View kv_table;     // likewise, of keys and values; empty: as block_table
};

// ---------------------------------------------------------------------------------------------- operands of operations

// Centred norm: RMS(x) * (1 + weight); weight F32.
struct NormWeights {
  View weight;
  float eps = 0;
};

// u = mean_s sigmoid(Up silu(Down xn / n))_s * xn_s; inj = 2 sigmoid(inject xn / n); xn = grouped norm of the stack.
struct HcWeights {
  NormWeights norm;                // [n * H]
  const Linear* down = nullptr;    // [r, n * H]
  const Linear* up = nullptr;      // [n * H, r]
  const Linear* inject = nullptr;  // [n, n * H]; null in a mixer
};

// What a stack still lacks of a sublayer: stack[r, s, :] += inj[r, s] * y[r, :]. Nothing when empty.
struct Injection {
  View inj, y;  // [R, n], [R, H]
  explicit operator bool() const { return static_cast<bool>(y); }
};

// Where gathered rows go as well: to[places[i]] is row i. places I32 [R]; those that are not below 0 differ. Nothing
// when empty.
struct RowCopies {
  View places, to;
  explicit operator bool() const { return static_cast<bool>(to); }
};

enum class Gate : uint8_t { Sigmoid, Silu };

struct GdnWeights {
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, taps = 0;
  View conv;      // F32 [2 * key_heads * key_dim + value_heads * value_dim, taps], last tap is the current row
  View a_log;     // F32 [value_heads]
  View dt_bias;   // F32 [value_heads]
  View norm;      // F32 [value_dim], not centred
  float eps = 0;  // of that norm
  Gate gate = Gate::Sigmoid;
};

// A state that may try D rows has room for D more rows of what its convolution reads.
struct GdnState {
  View conv;   // F32 [slots, taps - 1 + D, channels], oldest row first, tried rows last
  View delta;  // F32 [slots, value_heads, key_dim, value_dim]
  View tried;  // F32 [slots, D, 2, value_heads]: b and a of tried rows; empty when D is 0
  int64_t trials() const { return tried.rank > 0 ? tried.shape[1] : 0; }
};

struct QsaWeights {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t index_heads = 0, index_dim = 0, ratio = 0, blocks = 0;  // blocks: most that a row selects
  int64_t rotary = 0;                                             // rotary dims of query, key and index heads
  View inv_freq;                                                  // F32 [rotary / 2]
  NormWeights q_norm, k_norm;                                     // [head_dim]
  NormWeights index_q_norm, index_k_norm;                         // [index_dim]
};

// Paged keys and values of one layer; page_tokens is a multiple of the index ratio. Pages that kv_table numbers from
// `pages` on are those of far_keys and far_values, which may be pinned host memory: operations read and write them
// where they are.
struct KvCache {
  int64_t page_tokens = 0;
  View keys, values;  // F32 or BF16 [pages, page_tokens, kv_heads, head_dim]; keys normed and rotated
  View index_keys;    // F32 [pages, page_tokens / ratio, index_dim]: pooled, normed, rotated keys of complete blocks
  View raw_keys;      // F32 [slots, ring, index_dim]: raw index keys at position % ring, a multiple of the ratio;
                      // longer than the ratio by the rows that may be tried
  View far_keys, far_values;  // as keys; empty when no page lies there
};

// Activations of one QSA layer. Queries and index queries are normed and rotated in place by qsa_write.
struct QsaRows {
  View query_gate;  // F32 [R, heads, 2, head_dim]: query, then output gate
  View key, value;  // F32 [R, kv_heads, head_dim]
  View index;       // F32 [R, index_heads + 1, index_dim]: queries, then the raw key
  View selected;    // I32 [R, blocks]: block ids, ascending; -1 after the last
};

struct PleWeights {
  NormWeights norm_key, norm_query, norm_conv;  // [n * H]
  View conv;                                    // F32 [n * H, taps]
  int64_t taps = 0, dilation = 0;
};

// One row of sampling. Greedy when temperature is 0. Draws are keyed by (seed, stream, position) alone.
struct SampleParams {
  float temperature = 0, top_p = 1, min_p = 0;
  int32_t top_k = 0;  // 0: all
  uint64_t seed = 0, stream = 0;
  int64_t position = 0;
};

// Host memory of `params` as Backend::sample takes it on the cpu backend.
inline View params_view(std::span<const SampleParams> params) {
  return {reinterpret_cast<std::byte*>(const_cast<SampleParams*>(params.data())),
          DType::U8,
          Space::Host,
          2,
          {static_cast<int64_t>(params.size()), sizeof(SampleParams)}};
}

// ---------------------------------------------------------------------------------------------- the interface

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void synchronize() = 0;
  // False while Backend::reserve only measures: nothing may be enqueued.
  virtual bool running() const { return true; }
};

// A point in a stream's work, set by Backend::record.
class Event {
 public:
  virtual ~Event() = default;
  // Returns when the work before that point is done; at once when it was never set.
  virtual void wait() = 0;
};

// Recorded operations; the memory that they name outlives it.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch(Stream&) = 0;
  virtual uint64_t bytes() const = 0;    // of device memory, as measured
  virtual int64_t launches() const = 0;  // kernels, copies and fills
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;
  // How keys and values are stored unless the user says otherwise: F32 or BF16.
  virtual DType kv_dtype() const = 0;
  virtual std::unique_ptr<Stream> make_stream() = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  // One that also notes the time of its point.
  virtual std::unique_ptr<Event> make_timed_event() = 0;
  // From one timed event's point to another's; waits for both.
  virtual double elapsed_ns(Event& from, Event& to) = 0;
  virtual void record(Stream&, Event&) = 0;
  // What follows on the stream waits for the event's point; for nothing when it was never set.
  virtual void wait(Stream&, Event&) = 0;
  // Zero-filled; host memory is such that copies from it run beside the host. Throws Unsupported with the bytes asked
  // and available.
  virtual Buffer allocate(size_t bytes, Space space) = 0;
  // Bytes of device memory that are in use: weights, buffers, workspaces.
  virtual uint64_t device_bytes() const = 0;
  // Provides the workspaces of the operations that `calls` enqueues on the stream, without running them: operations
  // do not allocate. Views need shapes and no memory. `calls` may be skipped where nothing needs providing.
  virtual void reserve(Stream&, const std::function<void()>& calls) = 0;
  // Records the operations that `calls` enqueues on the stream, without running them. Null where a backend has
  // nothing to record. Throws Device when that fails, and what `calls` throws; the stream can be used on.
  virtual std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& calls) = 0;
  virtual std::unique_ptr<Linear> load_linear(LinearSource source) = 0;
  // Of the first `pooled`, those held, one after the other, go to pinned host memory, and none of them is served yet;
  // the others to the device.
  virtual std::unique_ptr<ExpertBank> load_experts(std::vector<ExpertSource> experts, int64_t pooled) = 0;

  // dst = src, bytes of equal size, between any two spaces.
  virtual void copy(Stream&, View dst, View src) = 0;
  // dst = 0.
  virtual void clear(Stream&, View dst) = 0;
  // to[i] = from[ids[i]]; rows of ids below 0 stay, and have no copies. ids I32 [R], rows of a multiple of 4 bytes;
  // none of from, to and the copies overlap.
  virtual void gather(Stream&, View ids, View from, View to, const RowCopies& copies) = 0;

  // out[r, c, :] = table[tokens[r], :] for every c. tokens I32 [R], table [V, H] of F16, BF16 or F32, out [R, copies,
  // H].
  virtual void embed(Stream&, View tokens, View table, View out) = 0;
  // Normalises each of the groups of `group` elements in a row by itself; x, out [R, groups * group], weight as long.
  virtual void grouped_norm(Stream&, const NormWeights&, int64_t group, View x, View out) = 0;
  // y[r] = W x[r] + bias. x [R, in], y [R, out].
  virtual void linear(Stream&, const Linear&, View x, View y) = 0;
  // y_i[r] = W_i x[r] + bias_i, of linears that share x. A backend may choose their sum orders together: the same for
  // any number of rows, and not always those of linear().
  virtual void linears(Stream&, std::span<const Linear* const>, View x, std::span<const View> y) = 0;
  // out[r] = a[r] + b[r / repeat]: a, out [R * repeat, W], b [R, W]. out may be a.
  virtual void add(Stream&, int64_t repeat, View a, View b, View out) = 0;

  // Completes the stack with what it lacks; then stack [R, n, H] -> u [R, H], inj [R, n]. inj is empty when the weights
  // have no inject, and never lacking.inj.
  virtual void hc_mix(Stream&, const HcWeights&, const Injection& lacking, View stack, View u, View inj) = 0;
  // Completes a stack that no mix follows.
  virtual void hc_inject(Stream&, const Injection& lacking, View stack) = 0;

  // Causal convolution, delta rule and gated norm, row after row within each lane; updates the state of each lane's
  // slot. qkv [R, channels], z [R, Vd], b and a [R, value_heads], out [R, Vd].
  virtual void gdn(Stream&, const GdnWeights&, const Batch&, View qkv, View z, View b, View a, const GdnState&,
                   View out) = 0;

  // Norms and rotates queries, keys and index queries; stores keys, values and index keys; pools each block that a row
  // completes.
  virtual void qsa_write(Stream&, const QsaWeights&, const Batch&, const QsaRows&, const KvCache&) = 0;
  // Fills rows.selected: the min(blocks, complete) complete blocks of highest score, ties to the lower id.
  virtual void qsa_select(Stream&, const QsaWeights&, const Batch&, const QsaRows&, const KvCache&) = 0;
  // out[r] = softmax(q k) v over the selected blocks' tokens and the tail, times sigmoid(gate). out [R, heads *
  // head_dim].
  virtual void qsa_attend(Stream&, const QsaWeights&, const Batch&, const QsaRows&, const KvCache&, View out) = 0;

  // p = softmax(logits); the k largest in descending order, ties to the lower id; renormalised to sum 1 when asked.
  // logits [R, E] -> ids I32 [R, k], weights F32 [R, k]. ids may have one more column: it is filled with E, the expert
  // after the routed ones.
  virtual void router(Stream&, bool normalise, View logits, View ids, View weights) = 0;
  // Copies a pooled expert to a line of at least line_bytes, in the stream's order.
  virtual void fill(Stream&, ExpertBank&, int32_t expert, View line) = 0;
  // Names where experts of the bank are from here on; not to be recorded. An expert that is not pooled is served again,
  // or not, by any line or none.
  virtual void serve(Stream&, ExpertBank&, std::span<const ServedExpert>) = 0;
  // Plans a request by the rule of kernels/expert_planner.h, whose state is in device memory, lists the copies to make,
  // and serves each expert that has a line from there, from the stage when it has a place on it, and every other pooled
  // one in place; so must serve() have done before the first plan. ids I32 [R, k or more]: the first k of each row are
  // its choice, which all count as heat; pooled ones are the request. state U8 [PoolState::bytes], lines U8 [L, line
  // bytes]. Orders what the request misses from the copies to the stage of what was foreseen of this layer.
  virtual void plan_experts(Stream&, ExpertBank&, const PoolOptions&, int64_t k, View ids, View state, View lines,
                            const Foreseen&) = 0;
  // Makes the copies that the last plan of that state listed, where it serves them from, but for what is there; before
  // the next use of its lines, and after fill_foreseen() of the same.
  virtual void fill_planned(Stream&, ExpertBank&, const PoolOptions&, View state, View lines, const Foreseen&) = 0;
  // Copies what the last plan serves from the stage to its lines and serves it from there; after that plan's use of the
  // stage, and before the next plan. The stage may be filled again afterwards.
  virtual void settle_planned(Stream&, ExpertBank&, const PoolOptions&, View state, View lines, const Foreseen&) = 0;
  // Copies experts that are foreseen and have no line to the stage until the layer's plan, which may run beside it, has
  // given its order, and then what that lacks. A stage is zero at first.
  virtual void fill_foreseen(Stream&, ExpertBank&, const PoolOptions&, View state, const Foreseen&) = 0;
  // For debugging: waits for the stream and throws Internal when the line of a served expert holds another's canary.
  virtual void check_served(Stream&, const ExpertBank&) = 0;
  // slots[r, j] = down(silu(gate x) * up x) of expert ids[r, j]. x [R, H], slots [R, k, H]; slots of experts that are
  // not held or not served stay as they are.
  virtual void experts(Stream&, const ExpertBank&, View x, View ids, View slots) = 0;
  // slots[r, j] = parts[w, r, j], w = min(ids[r, j] / per_part, W - 1): each slot from the part whose bank holds its
  // expert. parts [W, R, k, H], ids [R, k], slots [R, k, H].
  virtual void take_slots(Stream&, int64_t per_part, View ids, View parts, View slots) = 0;
  // out [R, N] = parts side by side: parts[i] [R, N_i], the N_i together N.
  virtual void join_columns(Stream&, std::span<const View> parts, View out) = 0;
  // out = silu(gate) * up, element by element.
  virtual void swiglu(Stream&, View gate, View up, View out) = 0;
  // y[r] = sum_j weights[r, j] * slots[r, j] in slot order, then + sigmoid(shared_gate[r]) * shared[r]. slots [R, k,
  // H]; or [R, k + 1, H], whose last is the shared expert's, and shared is empty.
  virtual void combine(Stream&, View slots, View weights, View shared, View shared_gate, View y) = 0;

  // Decodes gathered table rows: packed I16 [R, heads, 1 + dim * bits / 16], or plain [R, heads, dim] when bits is 0;
  // bias F32 [heads, dim] or empty; out F32 [R, heads * dim].
  virtual void ngram_decode(Stream&, int bits, View packed, View bias, View out) = 0;
  // stack += w + silu(conv c): w_s = sigmoid(gate_s) * value, c the normed w. key [R, n * H], value [R, H], stack
  // [R, n, H], state F32 [slots, (taps - 1) * dilation + D, n * H], oldest row first, tried rows last.
  virtual void ple_mix(Stream&, const PleWeights&, const Batch&, View key, View value, View state, View stack) = 0;

  // ids[r] = a draw from logits[r, 0 .. valid). params U8 [R, sizeof(SampleParams)], a SampleParams a row; greedy:
  // every temperature is 0. logits [R, V], ids I32 [R].
  virtual void sample(Stream&, int64_t valid, bool greedy, View params, View logits, View ids) = 0;
};

// The reference backend: exact decoded weights, fp32 values, fp64 accumulation in a stated order.
struct CpuOptions {
  int threads = 0;                   // 0: all cores
  uint64_t decoded_cache_bytes = 0;  // most memory for decoded weights; 0: half of physical memory
};
std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options = {});

// A GPU; products on tensor cores from fp16 operands, fp32 sums. Throws Unsupported without CUDA in the build or
// without such a device. Whether the kernels are qualified for it is the caller's question.
struct CudaOptions {
  int device = 0;
  uint64_t memory_limit = 0;  // most bytes of device memory to use; 0: what is free
  bool plan = false;          // count memory, allocate and run nothing: needs no device; views have no memory
};
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options = {});

}  // namespace fnx
