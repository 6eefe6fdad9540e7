// Routed experts: gate and up, activation, down; each (row, slot) by itself.
#include "kernels/contract/families.h"

#include <algorithm>
#include <cstring>

#include "kernels/contract/controls.h"
#include "kernels/contract/device.h"
#include "kernels/contract/entry_tools.h"
#include "kernels/contract/exl3_math.h"
#include "kernels/cuda/exl3_experts.h"

namespace fnx::contract {

namespace {

constexpr Range kRange{-30, 3};  // products of two projections stay under 65504 after rotation

int splits_of(int64_t in, int64_t out) {
#ifdef FNX_HAS_CUDA
  return cuda::exl3_splits(in, out);
#else
  return static_cast<int>(std::min<int64_t>(2, in / 32) + 0 * out);
#endif
}

// Widths of expert e's projections, in half bits: every width in turn, the half ones where the problem has them.
int half_bits_of(const Problem& p, int64_t e, int projection) {
  constexpr int kWidths[] = {6, 8, 10, 2, 12, 4, 16, 14, 7, 3, 5};
  return kWidths[(3 * e + projection) % (p.number("half_widths") != 0 ? 11 : 8)];
}

struct Expert {
  Exl3Matrix part[3];  // gate, up, down
};

// Projection sizes and where each begins in the operands that hold all experts.
struct Layout {
  int64_t in[3], out[3], scales_in[3], scales_out[3], trellis[3], scales_in_all = 0, scales_out_all = 0, words = 0;
  std::vector<int64_t> first_word;  // of expert e

  explicit Layout(const Problem& p) {
    const int64_t hidden = p.number("hidden"), width = p.number("width");
    for (int i = 0; i < 3; ++i) {
      in[i] = i == 2 ? width : hidden;
      out[i] = i == 2 ? hidden : width;
      scales_in[i] = scales_in_all;
      scales_out[i] = scales_out_all;
      scales_in_all += in[i];
      scales_out_all += out[i];
    }
    for (int64_t e = 0; e < p.number("experts"); ++e) {
      first_word.push_back(words);
      for (int i = 0; i < 3; ++i) words += projection_words(p, e, i);
    }
  }
  int64_t projection_words(const Problem& p, int64_t e, int i) const {
    return in[i] / exl3::kTile * (out[i] / exl3::kTile) * exl3::tile_words(half_bits_of(p, e, i));
  }
  // Pointers of expert e into the three operands that begin at these addresses.
  Expert expert(const Problem& p, int64_t e, const uint16_t* words_at, const uint16_t* suh, const uint16_t* svh) const {
    Expert x;
    const uint16_t* at = words_at + first_word[static_cast<size_t>(e)];
    for (int i = 0; i < 3; ++i) {
      x.part[i] = {in[i],
                   out[i],
                   static_cast<int>(p.number(i == 2 ? "down_splits" : "splits")),
                   static_cast<exl3::Codebook>(p.number("codebook")),
                   half_bits_of(p, e, i),
                   at,
                   suh + e * scales_in_all + scales_in[i],
                   svh + e * scales_out_all + scales_out[i],
                   nullptr};
      at += projection_words(p, e, i);
    }
    return x;
  }
};

Expert host_expert(const Problem& p, const Layout& layout, int64_t e) {
  return layout.expert(p, e, p["trellis"].as<uint16_t>(), p["suh"].as<uint16_t>(), p["svh"].as<uint16_t>());
}

// The expert of the last id, or the one before where that is every row's last choice, is not held, as on a rank that
// holds the others.
bool held(const Problem& p, int32_t id) {
  const int64_t experts = p.number("experts");
  return id >= 0 && id < experts && id != experts - 1 - p.number("last_known");
}

// Held experts that a row of the problem asks for.
std::vector<int64_t> asked(const Problem& p) {
  std::vector<int64_t> experts;
  const Operand& ids = p["ids"];
  for (int32_t e = 0; e < p.number("experts"); ++e)
    if (held(p, e) && std::find(ids.as<int32_t>(), ids.as<int32_t>() + ids.size(), e) != ids.as<int32_t>() + ids.size())
      experts.push_back(e);
  return experts;
}

enum class Fault : uint8_t { None, UpSkipped, GateAndUpSwapped, SiluSkipped };

class ExpertsKernel : public Kernel {
 public:
  explicit ExpertsKernel(bool many) : many_(many) {
    record_.id = many ? "exl3_experts_many" : "exl3_experts";
    record_.operation = "experts";
    if (!many) {
      record_.symbols.push_back({"exl3_gate_up_few_kernel", 256, 64, 48 * 1024, 0, kSpill});
      record_.symbols.push_back({"exl3_down_few_kernel", 256, 64, 48 * 1024, 0, kSpill});
    }
    for (const char* name : {"exl3_gate_up_many_kernel", "exl3_down_many_kernel"})
      record_.symbols.push_back({name, 128, 255, 0, kSharedLimit, 192});
    for (const char* name : {"exl3_count_kernel", "exl3_order_kernel"})
      record_.symbols.push_back({name, 256, 64, 0, 0, 0});
    record_.symbols.push_back({"exl3_rotate_pairs_kernel", 128, 128, 0, 0, 0});
    record_.symbols.push_back({"exl3_units_kernel", 1024, 64, 16 * 1024, 0, 0});
    record_.domain =
        "hidden and width multiples of 128 to 65536; rows, slots and experts from 1; widths of each projection of each "
        "expert by themselves; one codebook";
    record_.launch =
        "few: blocks of one (row, slot), of which down's wait for gate and up's of theirs; many: pairs sorted by "
        "expert, blocks of up to 32 or 96 pairs";
    record_.operands = {
        {"x", "F32", "[rows, hidden]", 16, "read; where the last id is known, beside the launch before"},
        {"ids", "I32", "[rows, slots]", 4, "read"},
        {"trellis", "I16", "three matrices an expert", 16, "read"},
        {"suh", "F16", "[hidden], [hidden], [width] an expert", 8, "read"},
        {"svh", "F16", "[width], [width], [hidden] an expert", 8, "read"},
        {"slots", "F32", "[rows, slots, hidden]", 16, "written where the id is held"}};
    record_.aliases = "none";
    record_.rows = "a slot depends on that row of x, its id and that expert";
    record_.sum_order = "each projection as exl3_linear";
    record_.rounding = "rotated inputs of the three projections to fp16";
    record_.limits = "rotated inputs beyond 65504 become inf; ids that are not held leave their slot alone";
  }

  const Record& record() const override { return record_; }

  std::vector<Shape> shapes(Effort effort) const override {
    using exl3::Codebook;
    const auto shape = [](int64_t hidden, int64_t width, int64_t experts, int64_t slots, Codebook codebook,
                          bool last_known = false) {
      return Shape{std::to_string(experts) + " experts [" + std::to_string(width) + ", " + std::to_string(hidden) +
                       "] " + exl3::codebook_name(codebook) + ", " + std::to_string(slots) + " slots" +
                       (last_known ? ", the last known" : ""),
                   {{"hidden", hidden},
                    {"width", width},
                    {"experts", experts},
                    {"slots", slots},
                    {"codebook", static_cast<int64_t>(codebook)},
                    {"half_widths", codebook == Codebook::Mul1},
                    {"last_known", last_known},
                    {"splits", splits_of(hidden, width)},
                    {"down_splits", splits_of(width, hidden)}}};
    };
    // Few pairs and, at the rows of gate 3, more than the few-row kernels take.
    if (effort == Effort::Host) return {shape(256, 128, 7, 6, Codebook::Mul1)};
    return {shape(256, 128, 7, 6, Codebook::Mul1), shape(256, 128, 6, 3, Codebook::Mcg),
            shape(256, 128, 6, 3, Codebook::ThreeInst), shape(2560, 640, 12, 10, Codebook::Mul1),
            shape(256, 128, 8, 6, Codebook::Mul1, true)};
  }

  int64_t value_rows() const override { return 4; }
  int64_t bit_rows() const override { return 150; }

  Problem make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) const override {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 11);
    const bool directed = kind == Kind::Directed;
    const int64_t hidden = p.number("hidden"), slots = p.number("slots"), experts = p.number("experts");
    const int64_t known = p.number("last_known");
    fill(p.add("x", DType::F32, Role::In, true, {rows, hidden}).as<float>(), rows, hidden,
         directed ? Kind::Cancelling : kind, kRange, Random(seed, 12));
    auto* ids = p.add("ids", DType::I32, Role::In, true, {rows, slots}).as<int32_t>();
    // Distinct experts a row; -1 and the expert that is not held among them.
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t first = random.below(experts);
      for (int64_t j = 0; j < slots; ++j) ids[r * slots + j] = static_cast<int32_t>((first + j) % (experts - known));
      if (known != 0) ids[r * slots + slots - 1] = static_cast<int32_t>(experts - 1);
      if (r % 5 == 4) ids[r * slots] = -1;
    }
    const Layout layout(p);
    auto* words = p.add("trellis", DType::I16, Role::In, false, {layout.words}).as<uint16_t>();
    for (int64_t i = 0; i < layout.words; ++i) words[i] = static_cast<uint16_t>(random.bits() >> 48);
    fill_scales(p.add("suh", DType::F16, Role::In, false, {experts, layout.scales_in_all}).as<uint16_t>(),
                experts * layout.scales_in_all, random, false);
    auto* svh = p.add("svh", DType::F16, Role::In, false, {experts, layout.scales_out_all}).as<uint16_t>();
    // Small output scales, as trained weights have: the activation stays in range.
    for (int64_t i = 0; i < experts * layout.scales_out_all; ++i)
      svh[i] = f32_to_f16(static_cast<float>((random.below(2) == 0 ? 1 : -1) * (0.02 + 0.02 * random.uniform())));
    p.add("slots", DType::F32, Role::Out, true, {rows, slots, hidden});
    return p;
  }

  std::vector<Expectation> expect(const Problem& given, const Problem&) const override {
    return {reference(given, Rotation::Fp16)};
  }
  std::vector<Expectation> expect_cpu(const Problem& given, const Problem&) const override {
    return {reference(given, Rotation::Exact)};
  }

  bool cpu(Problem& p) const override {
    const Layout layout(p);
    const auto backend = make_cpu_backend({1, uint64_t{1} << 28});
    std::vector<ExpertSource> sources;
    for (int64_t e = 0; e < p.number("experts"); ++e) {
      const Expert x = host_expert(p, layout, e);
      sources.push_back({linear_source(x.part[0]), linear_source(x.part[1]), linear_source(x.part[2])});
    }
    const auto bank = backend->load_experts(std::move(sources), 0);
    const auto stream = backend->make_stream();
    const int64_t slots = p.number("slots"), hidden = p.number("hidden");
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t j = 0; j < slots; ++j) {
        const int64_t at = r * slots + j;
        if (!held(p, p["ids"].as<int32_t>()[at])) continue;
        View x = p["x"].view().rows(r, 1), id = p["ids"].view().reshape({p.rows * slots, 1}).rows(at, 1);
        View slot = p["slots"].view().reshape({p.rows * slots, 1, hidden}).rows(at, 1);
        backend->experts(*stream, *bank, x, id, slot);
      }
    return true;
  }

  void require(const Problem& p) const override {
    require_range("rows", p.rows, 1, INT32_MAX);
    require_range("slots", p.number("slots"), 1, 64);
    require_range("experts", p.number("experts"), 1, 65536);
    require_range("hidden", p.number("hidden"), 128, 65536, 128);
    require_range("width", p.number("width"), 128, 65536, 128);
    require_alignment(p, record_);
  }

  void host(Problem& p) const override { run_host(p, Fault::None); }

  std::vector<Refusal> refusals() const override {
    return {{"hidden of 200", set_number("hidden", 200)}, {"width of 64", set_number("width", 64)},
            {"no slots", set_number("slots", 0)},         {"no rows", [](Problem& p) { p.rows = 0; }},
            {"x off by 4 bytes", misalign("x", 4)},       {"slots off by 8 bytes", misalign("slots", 8)}};
  }

  std::vector<Control> controls() const override {
    const auto inside = [this](const char* name, Fault fault) {
      return host_control(name, 2, [this, fault](Problem& p) { run_host(p, fault); });
    };
    return {inside("up left out", Fault::UpSkipped), inside("gate and up swapped", Fault::GateAndUpSwapped),
            inside("silu left out", Fault::SiluSkipped),
            tamper_control("crossed slot table", 2,
                           [](Problem& p) {
                             auto* ids = p["ids"].as<int32_t>();
                             std::swap(ids[0], ids[1]);
                           }),
            tamper_control("id of the next row", 2,
                           [](Problem& p) {
                             Operand& ids = p["ids"];
                             std::memmove(ids.data(), ids.data() + ids.row_bytes(), ids.bytes() - ids.row_bytes());
                           }),
            // On the host alone: mcg has no half widths, which the kernels leave to the loader.
            host_control("wrong codebook", 2, [this](Problem& p) {
              set_number("codebook", static_cast<int64_t>(exl3::Codebook::Mcg))(p);
              run_host(p, Fault::None);
            })};
  }

#ifdef FNX_HAS_CUDA
  Implementation device() const override { return device_implementation(enqueue()); }
  std::vector<SymbolResources> resources(const Problem& p) const override { return launched_symbols(enqueue(), p); }
#endif

 private:
  Expectation reference(const Problem& p, Rotation rotation) const {
    const Layout layout(p);
    const int64_t slots = p.number("slots"), hidden = p.number("hidden"), width = p.number("width");
    Expectation out{"slots", std::vector<double>(static_cast<size_t>(p.rows * slots * hidden), 0.0),
                    std::vector<double>(static_cast<size_t>(p.rows * slots * hidden), kUntouched)};
    for (const int64_t e : asked(p)) {
      const Expert x = host_expert(p, layout, e);
      const Exl3Reference layers[3] = {Exl3Reference(x.part[0]), Exl3Reference(x.part[1]),
                                       Exl3Reference(x.part[2], true)};
      for (int64_t at = 0; at < p.rows * slots; ++at) {
        if (p["ids"].as<int32_t>()[at] != e) continue;
        const std::vector<Bounded> row = exact_row(p["x"], at / slots);
        const auto gate = layers[0].row(row, rotation), up = layers[1].row(row, rotation);
        std::vector<Bounded> h(static_cast<size_t>(width));
        for (size_t i = 0; i < h.size(); ++i) h[i] = swiglu_reference(gate[i], up[i]);
        const auto y = layers[2].row(h, rotation);
        out.put(at * hidden, y);
      }
    }
    return out;
  }

  void run_host(Problem& p, Fault fault) const {
    const Layout layout(p);
    const int64_t slots = p.number("slots"), hidden = p.number("hidden");
    const auto width = static_cast<size_t>(p.number("width"));
    std::vector<float> gate(width), up(width), h(width);
    for (const int64_t e : asked(p)) {
      const Expert x = host_expert(p, layout, e);
      const std::vector<float> w[3] = {decode(x.part[0]), decode(x.part[1]), decode(x.part[2])};
      for (int64_t at = 0; at < p.rows * slots; ++at) {
        if (p["ids"].as<int32_t>()[at] != e) continue;
        const float* row = p["x"].as<float>() + at / slots * hidden;
        linear_row(x.part[0], w[0], row, gate.data());
        linear_row(x.part[1], w[1], row, up.data());
        if (fault == Fault::GateAndUpSwapped) std::swap(gate, up);
        for (size_t i = 0; i < width; ++i)
          h[i] = fault == Fault::SiluSkipped ? gate[i] * up[i]
                                             : swiglu_value(gate[i], fault == Fault::UpSkipped ? 1.0f : up[i]);
        linear_row(x.part[2], w[2], h.data(), p["slots"].as<float>() + at * hidden);
      }
    }
  }

#ifdef FNX_HAS_CUDA
  Enqueue enqueue() const {
    return [many = many_](const Problem& p, DeviceProblem& d) {
      const Layout layout(p);
      cuda::Exl3Experts launch;
      launch.rows = p.rows;
      launch.slots_per_row = p.number("slots");
      launch.last_known = p.number("last_known") != 0;
      launch.experts = p.number("experts");
      launch.hidden = p.number("hidden");
      launch.width = p.number("width");
      launch.codebook = static_cast<exl3::Codebook>(p.number("codebook"));
      // Padding is zero too: the table is compared byte by byte with the one that is already there.
      std::vector<cuda::Exl3Expert> table(static_cast<size_t>(launch.experts));
      std::memset(static_cast<void*>(table.data()), 0, table.size() * sizeof(cuda::Exl3Expert));
      for (int64_t e = 0; e < launch.experts; ++e) {
        if (!held(p, static_cast<int32_t>(e))) continue;
        const Expert x =
            layout.expert(p, e, d.get<uint16_t>("trellis"), d.get<uint16_t>("suh"), d.get<uint16_t>("svh"));
        cuda::Exl3Expert& to = table[static_cast<size_t>(e)];
        cuda::Exl3Matrix* parts[] = {&to.gate, &to.up, &to.down};
        for (int i = 0; i < 3; ++i) {
          parts[i]->trellis = x.part[i].trellis;
          parts[i]->suh = x.part[i].suh;
          parts[i]->svh = x.part[i].svh;
          parts[i]->half_bits = x.part[i].half_bits;
        }
      }
      launch.table = static_cast<const cuda::Exl3Expert*>(
          d.constant("experts", table.data(), table.size() * sizeof(cuda::Exl3Expert)));
      launch.ids = d.get<int32_t>("ids");
      launch.x = d.get<float>("x");
      launch.slots = d.get<float>("slots");
      const bool sound = p.rows > 0 && launch.slots_per_row > 0 && launch.hidden % 128 == 0 && launch.width % 128 == 0;
      launch.workspace_bytes = sound ? cuda::exl3_experts_workspace_bytes(p.rows, launch.slots_per_row, launch.experts,
                                                                          launch.hidden, launch.width)
                                     : size_t{1} << 26;
      launch.workspace = d.workspace("pairs", launch.workspace_bytes);
      (many ? cuda::exl3_experts_many : cuda::exl3_experts)(launch, d.stream());
    };
  }
#endif

  bool many_;
  Record record_;
};

}  // namespace

void add_exl3_experts(KernelList& list) {
  list.push_back(std::make_unique<ExpertsKernel>(false));
  list.push_back(std::make_unique<ExpertsKernel>(true));
}

}  // namespace fnx::contract
