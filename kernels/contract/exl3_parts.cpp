// Rotation and decoding by themselves. A "row" is a block of 128 inputs, so that windows are matrices of fewer inputs.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/contract/entry.h"
#include "kernels/contract/exl3_math.h"
#include "kernels/contract/families.h"
#include "kernels/cuda/exl3_linear.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

constexpr int64_t kBlock = exl3::kHadamard;

// xh of one row in the order of cuda::exl3_rotated_index, from values by input.
template <class T>
std::vector<T> rotated_order(const std::vector<T>& by_input) {
  std::vector<T> out(by_input.size());
  for (size_t k = 0; k < by_input.size(); ++k)
    out[static_cast<size_t>(cuda::exl3_rotated_index(1, 0, static_cast<int64_t>(k)))] = by_input[k];
  return out;
}

void rotate_host(Problem& p, bool bf16) {
  const int64_t in = p.rows * kBlock;
  std::vector<uint16_t> xh(static_cast<size_t>(in));
  for (int64_t b = 0; b < in; b += kBlock) {
    float v[kBlock];
    rotate_block(p["x"].as<float>() + b, p["suh"].as<uint16_t>() + b, bf16, v);
    for (int64_t i = 0; i < kBlock; ++i) xh[static_cast<size_t>(b + i)] = f32_to_f16(v[i]);
  }
  std::copy_n(rotated_order(xh).data(), in, p["xh"].as<uint16_t>());
}

std::unique_ptr<Kernel> rotate_entry() {
  Entry e;
  e.record = {"exl3_rotate",
              "linear",
              {{"exl3_rotate_kernel", 128, 64, 0, 0, 0}},
              "in a multiple of 128 to 65536, rows from 1",
              "a warp a block of 128 inputs of a row",
              {{"x", "F32", "[rows, in]", 16, "read"},
               {"suh", "F16", "[in]", 8, "read"},
               {"xh", "F16", "[in/16, rows, 16] in fragment order", 8, "written"}},
              "none",
              "a block of a row depends on itself",
              "butterflies of strides 1, 2, 4, ... 64 in fp32",
              "xh to fp16",
              "values beyond 65504 become inf"};
  e.host_shapes = {{"blocks of 128", {{"in_step", kBlock}}}};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    fill(p.add("x", DType::F32, Role::In, true, {rows, kBlock}).as<float>(), rows, kBlock, kind, {-30, 8},
         Random(seed, 1));
    Random random(seed, 2);
    fill_scales(p.add("suh", DType::F16, Role::In, true, {rows, kBlock}).as<uint16_t>(), rows * kBlock, random, false);
    p.add("xh", DType::F16, Role::Out, true, {rows, kBlock});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    std::vector<Bounded> xh;
    for (int64_t r = 0; r < given.rows; ++r)
      for (int64_t n = 0; n < kBlock; ++n) {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < kBlock; ++i) {
          const double v = given["x"].at(r * kBlock + i) * given["suh"].at(r * kBlock + i);
          sum += __builtin_popcountll(static_cast<uint64_t>(i & n)) % 2 == 0 ? v : -v;
          size += std::abs(v);
        }
        const double scale = 1.0 / std::sqrt(128.0);
        xh.push_back(round_to_f16({sum * scale, gamma(10) * size * scale + kBlock * 0x1p-149}));
      }
    Expectation e{"xh", {}, {}};
    for (const Bounded& b : rotated_order(xh)) e.push(b);
    return std::vector<Expectation>{e};
  };
  e.domain = [](const Problem& p) { require_range("in", p.rows * p.number("in_step"), kBlock, 65536, kBlock); };
  e.host = [](Problem& p) { rotate_host(p, false); };
  e.exact_kinds = {Kind::Normal, Kind::Exponents, Kind::Directed};
  e.refusals = {{"in of 7 times 100", set_number("in_step", 100)},
                {"x off by 4 bytes", misalign("x", 4)},
                {"suh off by 2 bytes", misalign("suh", 2)}};
  e.controls = {host_control("rounded to bf16", 2, [](Problem& p) { rotate_host(p, true); }),
                tamper_control("signs of the next input", 2, [](Problem& p) {
                  Operand& s = p["suh"];
                  std::memmove(s.data(), s.data() + 2, s.bytes() - 2);
                })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::exl3_rotate(
        {1, p.rows * p.number("in_step"), d.get<float>("x"), d.get<uint16_t>("suh"), d.get<uint16_t>("xh")},
        d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

Exl3Matrix matrix_of(const Problem& p) {
  return {p.rows * kBlock,
          p.number("out"),
          1,
          static_cast<exl3::Codebook>(p.number("codebook")),
          static_cast<int>(p.number("half_bits")),
          p["trellis"].as<uint16_t>(),
          nullptr,
          nullptr,
          nullptr};
}

std::unique_ptr<Kernel> decode_entry() {
  Entry e;
  e.record = {"exl3_decode",
              "linear",
              {{"exl3_decode_kernel", 256, 64, 0, 0, 0}},
              "as exl3_linear: every width and codebook",
              "a warp a tile",
              {{"trellis", "I16", "[in/16, out/16, 16 * bits]", 16, "read"}, {"w", "F16", "[in, out]", 4, "written"}},
              "none",
              "a tile depends on itself",
              "none: no sums",
              "values as kernels/exl3.h defines them",
              "none"};
  for (const auto codebook : {exl3::Codebook::Mul1, exl3::Codebook::Mcg, exl3::Codebook::ThreeInst})
    for (int half_bits = 2; half_bits <= 16; ++half_bits)
      if (exl3::width_supported(codebook, half_bits)) {
        const Shape shape{std::string(exl3::codebook_name(codebook)) + " " + std::to_string(half_bits) + " half bits",
                          {{"out", 128}, {"codebook", static_cast<int64_t>(codebook)}, {"half_bits", half_bits}}};
        (e.host_shapes.size() < 4 ? e.host_shapes : e.more_device_shapes).push_back(shape);
      }
  e.value_rows = 4;
  e.bit_rows = 18;
  e.make = [](const Shape& shape, Kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 1);
    const int64_t out = p.number("out"), half_bits = p.number("half_bits");
    const int64_t words = exl3::tile_words(static_cast<int>(half_bits));
    Operand& trellis =
        p.add("trellis", DType::I16, Role::In, true, {rows, kBlock / exl3::kTile * (out / exl3::kTile) * words});
    fill_trellis(trellis.as<uint16_t>(), rows * kBlock, out, static_cast<int>(half_bits), random, false);
    p.add("w", DType::F16, Role::Out, true, {rows, kBlock * out});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    Expectation w{"w", {}, {}};
    for (const float v : decode(matrix_of(given))) w.push({v, 0});
    return std::vector<Expectation>{w};
  };
  e.domain = [](const Problem& p) {
    require_range("out", p.number("out"), 128, 524288, 128);
    const auto codebook = static_cast<exl3::Codebook>(p.number("codebook"));
    if (!exl3::width_supported(codebook, static_cast<int>(p.number("half_bits"))))
      refuse(std::string(exl3::codebook_name(codebook)) + " has no width of " + std::to_string(p.number("half_bits")) +
             " half bits");
  };
  const auto host = [](Problem& p, const Exl3Matrix& m) {
    const std::vector<float> w = decode(m);
    std::transform(w.begin(), w.end(), p["w"].as<uint16_t>(), f32_to_f16);
  };
  e.host = [host](Problem& p) { host(p, matrix_of(p)); };
  e.exact_kinds = {Kind::Normal};
  e.refusals = {{"a width of 9 bits", set_number("half_bits", 18)},
                {"out of 200", set_number("out", 200)},
                {"trellis off by 2 bytes", misalign("trellis", 2)}};
  e.controls = {tamper_control("wrong codebook", 2,
                               [](Problem& p) {
                                 p.numbers.find("codebook")->second = static_cast<int64_t>(exl3::Codebook::ThreeInst);
                                 p.numbers.find("half_bits")->second &= ~int64_t{1};
                               }),
                tamper_control("words of a pair swapped", 2, [](Problem& p) {
                  auto* w = p["trellis"].as<uint16_t>();
                  for (int64_t i = 0; i + 1 < p["trellis"].size(); i += 2) std::swap(w[i], w[i + 1]);
                })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::Exl3Weight w;
    w.in = p.rows * kBlock;
    w.out = p.number("out");
    w.splits = 1;
    w.codebook = static_cast<exl3::Codebook>(p.number("codebook"));
    w.half_bits = static_cast<int>(p.number("half_bits"));
    w.trellis = d.get<uint16_t>("trellis");
    // Decoding reads no scales; the loader's check wants them there.
    w.suh = w.svh = static_cast<const uint16_t*>(d.workspace("scales", 1 << 16));
    cuda::exl3_decode(w, d.get<uint16_t>("w"), d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace

void add_exl3_parts(KernelList& list) {
  list.push_back(rotate_entry());
  list.push_back(decode_entry());
}

}  // namespace fnx::contract
