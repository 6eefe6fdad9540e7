// EXL3 linear layers: the dispatching kernel, the many-row kernel by itself, rotation and decoding.
#include "kernels/contract/families.h"

#include <array>
#include <cstring>

#include "kernels/contract/controls.h"
#include "kernels/contract/device.h"
#include "kernels/contract/entry_tools.h"
#include "kernels/contract/exl3_math.h"
#include "kernels/cuda/exl3_linear.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

constexpr Range kRange{-30, 8};                   // rotated values stay under 65504
enum class Path : uint8_t { Any, Beside, Many };  // Beside: the last of two matrices that share rows

int splits_of(int64_t in, int64_t out) {
#ifdef FNX_HAS_CUDA
  return cuda::exl3_splits(in, out);
#else
  return static_cast<int>(std::min<int64_t>(4, in / 32) + 0 * out);
#endif
}

Exl3Matrix matrix_of(const Problem& p) {
  return {p.number("in"),
          p.number("out"),
          static_cast<int>(p.number("splits")),
          static_cast<exl3::Codebook>(p.number("codebook")),
          static_cast<int>(p.number("half_bits")),
          p["trellis"].as<uint16_t>(),
          p["suh"].as<uint16_t>(),
          p["svh"].as<uint16_t>(),
          p.has("bias") ? p["bias"].as<float>() : nullptr};
}

Shape linear_shape(int64_t in, int64_t out, exl3::Codebook codebook, int half_bits, bool bf16, bool bias) {
  std::string label = "[" + std::to_string(in) + ", " + std::to_string(out) + "] " + exl3::codebook_name(codebook) +
                      " " + std::to_string(half_bits / 2) + (half_bits % 2 != 0 ? ".5" : "") + " bits";
  if (bf16) label += " bf16";
  if (bias) label += " bias";
  return {label,
          {{"in", in},
           {"out", out},
           {"codebook", static_cast<int64_t>(codebook)},
           {"half_bits", half_bits},
           {"bf16", bf16},
           {"bias", bias},
           {"splits", splits_of(in, out)}}};
}

// Every codebook and width, with fp32 outputs, whose bound is the tighter one.
std::vector<Shape> all_widths(int64_t in, int64_t out) {
  std::vector<Shape> list;
  for (const auto codebook : {exl3::Codebook::Mul1, exl3::Codebook::Mcg, exl3::Codebook::ThreeInst})
    for (int half_bits = 2; half_bits <= 16; ++half_bits)
      if (exl3::width_supported(codebook, half_bits))
        list.push_back(linear_shape(in, out, codebook, half_bits, false, half_bits % 3 == 0));
  return list;
}

void add_weight(Problem& p, Random& random, bool directed) {
  const int64_t in = p.number("in"), out = p.number("out"), half_bits = p.number("half_bits");
  Operand& trellis = p.add("trellis", DType::I16, Role::In, false,
                           {in / exl3::kTile, out / exl3::kTile, exl3::tile_words(static_cast<int>(half_bits))});
  fill_trellis(trellis.as<uint16_t>(), in, out, static_cast<int>(half_bits), random, directed);
  fill_scales(p.add("suh", DType::F16, Role::In, false, {in}).as<uint16_t>(), in, random, directed);
  fill_scales(p.add("svh", DType::F16, Role::In, false, {out}).as<uint16_t>(), out, random, directed);
  if (p.number("bias") != 0)
    fill(p.add("bias", DType::F32, Role::In, false, {out}).as<float>(), 1, out, Kind::Normal, {}, random);
}

#ifdef FNX_HAS_CUDA
cuda::Exl3Weight device_weight(const Problem& p, DeviceProblem& d) {
  return {p.number("in"),
          p.number("out"),
          static_cast<int>(p.number("splits")),
          static_cast<exl3::Codebook>(p.number("codebook")),
          static_cast<int>(p.number("half_bits")),
          d.get<uint16_t>("trellis"),
          d.get<uint16_t>("suh"),
          d.get<uint16_t>("svh"),
          d.get<float>("bias")};
}
#endif

void require_matrix(const Problem& p) {
  const int64_t in = p.number("in"), out = p.number("out"), half_bits = p.number("half_bits");
  require_range("in", in, 128, 65536, 128);
  require_range("out", out, 128, 524288, 128);
  require_range("splits", p.number("splits"), 1, std::min<int64_t>(32, in / 32));
  const auto codebook = static_cast<exl3::Codebook>(p.number("codebook"));
  if (!exl3::width_supported(codebook, static_cast<int>(half_bits)))
    refuse(std::string(exl3::codebook_name(codebook)) + " has no width of " + std::to_string(half_bits) + " half bits");
}

class LinearKernel : public Kernel {
 public:
  explicit LinearKernel(Path path) : path_(path) {
    record_.id = path == Path::Any ? "exl3_linear" : path == Path::Beside ? "exl3_linears" : "exl3_linear_many";
    record_.operation = "linear";
    if (path != Path::Many) record_.symbols.push_back({"exl3_few_kernel", 256, 64, 48 * 1024, 0, kSpill});
    record_.symbols.push_back({"exl3_many_kernel", 256, 255, 0, kSharedLimit, 0});
    record_.symbols.push_back({"exl3_rotate_kernel", 128, 64, 0, 0, 0});
    record_.symbols.push_back({"exl3_decode_kernel", 256, 64, 0, 0, 0});
    record_.domain =
        "in a multiple of 128 to 65536, out a multiple of 128 to 524288, rows from 1; 1 to 8 bits, with mul1 also 1.5, "
        "2.5 "
        "and 3.5; codebooks 3inst, mcg, mul1; y F32 or BF16";
    record_.launch =
        "few rows: out/128 x splits blocks, of several matrices one launch beside the other; many rows: rotation, a "
        "warp a block of 128; decoding, a warp a tile; then "
        "groups of "
        "rows x out/128 blocks";
    record_.operands = {{"x", "F32", "[rows, in]", 16, "read"},
                        {"trellis", "I16", "[in/16, out/16, 16 * bits]", 16, "read"},
                        {"suh", "F16", "[in]", 8, "read"},
                        {"svh", "F16", "[out]", 8, "read"},
                        {"bias", "F32", "[out] or none", 16, "read"},
                        {"y", "F32 or BF16", "[rows, out]", 16, "written"}};
    record_.aliases = "none";
    record_.rows =
        "a row of y depends on that row of x and the weight: 1 to 300 rows and windows of them give equal bits, "
        "checked "
        "at every codebook and width";
    record_.sum_order =
        "mma.m16n8k16 chain over a split's k-tiles ascending, splits ascending in fp32, butterflies of strides 1 to 64";
    record_.rounding = "rotated input to fp16; y to bf16 when it is BF16";
    record_.limits = "rotated inputs beyond 65504 become inf; splits a function of the full shape";
  }

  const Record& record() const override { return record_; }

  std::vector<Shape> shapes(Effort effort) const override {
    using exl3::Codebook;
    if (effort == Effort::Host)
      return {linear_shape(640, 256, Codebook::Mul1, 7, false, true),
              linear_shape(256, 128, Codebook::Mcg, 8, true, false),
              linear_shape(128, 128, Codebook::ThreeInst, 12, false, false)};
    std::vector<Shape> list = shapes(Effort::Host);
    for (Shape& s : all_widths(512, 256)) list.push_back(std::move(s));
    list.push_back(linear_shape(512, 256, Codebook::Mul1, 8, true, true));
    list.push_back(linear_shape(512, 256, Codebook::ThreeInst, 6, true, false));
    list.push_back(linear_shape(2560, 640, Codebook::Mul1, 8, false, false));
    list.push_back(linear_shape(640, 2560, Codebook::Mul1, 6, false, false));
    list.push_back(linear_shape(6144, 2560, Codebook::Mul1, 12, false, false));
    return list;
  }

  Problem make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) const override {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 7);
    const bool directed = kind == Kind::Directed;
    const int64_t in = p.number("in");
    Operand& x = p.add("x", DType::F32, Role::In, true, {rows, in});
    if (!directed) fill(x.as<float>(), rows, in, kind, kRange, Random(seed, 8));
    add_weight(p, random, directed);
    if (directed) fill_directed(p["x"].as<float>(), rows, in, p["suh"].as<uint16_t>(), random);
    p.add("y", p.number("bf16") != 0 ? DType::BF16 : DType::F32, Role::Out, true, {rows, p.number("out")});
    return p;
  }

  std::vector<Expectation> expect(const Problem& given, const Problem&) const override {
    return {reference(given, Rotation::Fp16)};
  }

  bool cpu(Problem& p) const override {
    const Exl3Matrix m = matrix_of(p);
    const auto backend = make_cpu_backend({1, uint64_t{1} << 26});
    const auto weights = backend->load_linear(linear_source(m));
    const auto stream = backend->make_stream();
    std::vector<float> y(static_cast<size_t>(p.rows * m.out));
    backend->linear(*stream, *weights, p["x"].view(), float_view(y, {p.rows, m.out}));
    for (int64_t r = 0; r < p.rows; ++r) store_row(p["y"], r, y.data() + r * m.out);
    return true;
  }
  std::vector<Expectation> expect_cpu(const Problem& given, const Problem&) const override {
    return {reference(given, Rotation::Exact)};
  }

  void require(const Problem& p) const override {
    require_matrix(p);
    require_range("rows", p.rows, 1, INT32_MAX);
    require_alignment(p, record_);
  }

  void host(Problem& p) const override { run_host(p, Exl3Fault::None); }
  // Two numbers 2^30 apart cancel or vanish whole, however a tensor core aligns its sums.
  bool host_is_exact(Kind kind) const override { return kind == Kind::Directed; }

  std::vector<Refusal> refusals() const override {
    return {{"in of 600", set_number("in", 600)},
            {"out of 200", set_number("out", 200)},
            {"in of 131072", set_number("in", 131072)},
            {"no rows", [](Problem& p) { p.rows = 0; }},
            {"a width of 9 bits", set_number("half_bits", 18)},
            {"a width of 1.5 bits with mcg",
             [](Problem& p) {
               p.numbers.find("half_bits")->second = 3;
               p.numbers.find("codebook")->second = static_cast<int64_t>(exl3::Codebook::Mcg);
             }},
            {"no splits", set_number("splits", 0)},
            {"more splits than pairs of tiles", set_number("splits", 4096)},
            {"x off by 4 bytes", misalign("x", 4)},
            {"trellis off by 8 bytes", misalign("trellis", 8)},
            {"suh off by 2 bytes", misalign("suh", 2)},
            {"y off by 4 bytes", misalign("y", 4)}};
  }

  std::vector<Control> controls() const override {
    const auto inside = [this](const char* name, int gate, Exl3Fault fault) {
      return host_control(name, gate, [this, fault](Problem& p) { run_host(p, fault); });
    };
    // A many-row kernel with an order of its own.
    const auto many_rows = [this](const char* name, Exl3Fault fault) {
      return host_control(name, 3, [this, fault](Problem& p) { run_host(p, p.rows > 16 ? fault : Exl3Fault::None); });
    };
    return {inside("dropped k-tile", 2, Exl3Fault::DroppedTile),
            inside("stale split sum", 2, Exl3Fault::RepeatedSplit),
            inside("column of the neighbouring lane", 2, Exl3Fault::ShiftedColumn),
            inside("bf16 rotation", 2, Exl3Fault::Bf16Rotation),
            inside("output not rotated", 2, Exl3Fault::UnrotatedOutput),
            many_rows("splits in descending order above 16 rows", Exl3Fault::ReversedSplits),
            many_rows("two chains a split above 16 rows", Exl3Fault::TwoChains),
            tamper_control("wrong codebook", 2,
                           [](Problem& p) {
                             p.numbers.find("codebook")->second = static_cast<int64_t>(exl3::Codebook::ThreeInst);
                             p.numbers.find("half_bits")->second &= ~int64_t{1};
                           }),
            tamper_control("another k-tile's weights", 2,
                           [](Problem& p) {
                             Operand& t = p["trellis"];
                             std::memcpy(t.data(), t.data() + 3 * t.row_bytes(), t.row_bytes());
                           }),
            tamper_control("scales of the next output", 2, [](Problem& p) {
              Operand& s = p["svh"];
              std::memmove(s.data(), s.data() + sizeof(uint16_t), s.bytes() - sizeof(uint16_t));
            })};
  }

#ifdef FNX_HAS_CUDA
  Implementation device() const override { return device_implementation(enqueue()); }
  std::vector<SymbolResources> resources(const Problem& p) const override { return launched_symbols(enqueue(), p); }
#endif

 private:
  static Expectation reference(const Problem& given, Rotation rotation) {
    const Exl3Reference layer(matrix_of(given));
    Expectation y{"y", {}, {}};
    for (int64_t r = 0; r < given.rows; ++r)
      for (Bounded b : layer.row(exact_row(given["x"], r), rotation)) {
        // bf16 keeps eight significant bits, so half an ulp is up to 2^-8 of the value, as 2^-24 is of fp32's 24 bits.
        if (given.number("bf16") != 0) b.error += 0x1p-8 * (std::abs(b.value) + b.error) + 0x1p-134;
        y.push(b);
      }
    return y;
  }

  void run_host(Problem& p, Exl3Fault fault) const {
    const Exl3Matrix m = matrix_of(p);
    const std::vector<float> decoded = decode(m);
    std::vector<float> y(static_cast<size_t>(m.out));
    for (int64_t r = 0; r < p.rows; ++r) {
      linear_row(m, decoded, p["x"].as<float>() + r * m.in, y.data(), fault);
      store_row(p["y"], r, y.data());
    }
  }

#ifdef FNX_HAS_CUDA
  Enqueue enqueue() const {
    return [path = path_](const Problem& p, DeviceProblem& d) {
      cuda::Exl3Linear launch{device_weight(p, d), p.rows, d.get<float>("x"), d.at("y"), p["y"].dtype, nullptr, 0};
      const bool sound = p.number("in") == p["suh"].size() && p.number("out") == p["svh"].size() && p.rows > 0 &&
                         p.number("splits") >= 1 && p.number("splits") <= p.number("in") / 32;
      if (sound)
        launch.workspace_bytes = cuda::exl3_linears_workspace_bytes(std::array{launch.weight, launch.weight}, p.rows);
      else
        launch.workspace_bytes = size_t{1} << 26;
      launch.workspace = d.workspace("split sums", launch.workspace_bytes);
      if (path != Path::Beside)
        return (path == Path::Many ? cuda::exl3_linear_many : cuda::exl3_linear)(launch, d.stream());
      cuda::Exl3Linear first = launch;
      first.y = d.scratch("y of the first", p["y"].bytes() + 16);
      cuda::exl3_linears(std::array{first, launch}, d.stream());
    };
  }
#endif

  Path path_;
  Record record_;
};

}  // namespace

void add_exl3_linear(KernelList& list) {
  list.push_back(std::make_unique<LinearKernel>(Path::Any));
  list.push_back(std::make_unique<LinearKernel>(Path::Beside));
  list.push_back(std::make_unique<LinearKernel>(Path::Many));
}

}  // namespace fnx::contract
