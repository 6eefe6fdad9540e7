#include "kernels/exl3.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <string>

#include "libcore/format/checkpoint.h"

using namespace fnx;

TEST_CASE("exl3: decodes every reference trellis bit for bit") {
  const Checkpoint matrix(FNX_SOURCE_DIR "/fixtures/golden/format-matrix.safetensors", {.strict = false});
  int decoded = 0;
  for (const TensorInfo& t : matrix.tensors()) {
    if (!t.name.ends_with(".trellis")) continue;
    CAPTURE(t.name);
    const std::string stem = t.name.substr(0, t.name.size() - 8);
    const exl3::Codebook codebook = stem.starts_with("mul1")  ? exl3::Codebook::Mul1
                                    : stem.starts_with("mcg") ? exl3::Codebook::Mcg
                                                              : exl3::Codebook::ThreeInst;
    const int half_bits = static_cast<int>(2 * std::strtod(stem.c_str() + stem.find('.') + 1, nullptr));
    REQUIRE(exl3::width_supported(codebook, half_bits));
    REQUIRE(t.shape == std::vector<int64_t>{8, 8, exl3::tile_words(half_bits)});
    const TensorData trellis = matrix.read(t), wanted = matrix.read(matrix.require(stem + ".decoded"));
    int different = 0;
    for (int tile = 0; tile < 64; ++tile)
      for (int p = 0; p < exl3::kTileValues; ++p) {
        const uint16_t* words = trellis.as<uint16_t>() + tile * exl3::tile_words(half_bits);
        const int row = tile / 8 * exl3::kTile + exl3::value_row(p),
                  column = tile % 8 * exl3::kTile + exl3::value_column(p);
        const uint16_t value = exl3::decode_state(exl3::tile_state(words, p, half_bits), codebook);
        different += value != wanted.as<uint16_t>()[row * 128 + column];
      }
    CHECK(different == 0);
    ++decoded;
  }
  CHECK(decoded == 27);
}

TEST_CASE("exl3: one trellis means three different matrices under the three codebooks") {
  int same[3] = {};
  for (uint32_t s = 0; s < 65536; ++s) {
    const auto state = static_cast<uint16_t>(s);
    const uint16_t a = exl3::decode_state(state, exl3::Codebook::ThreeInst);
    const uint16_t b = exl3::decode_state(state, exl3::Codebook::Mcg),
                   c = exl3::decode_state(state, exl3::Codebook::Mul1);
    same[0] += a == b;
    same[1] += b == c;
    same[2] += a == c;
  }
  for (int n : same) CHECK(n < 655);
}

TEST_CASE("exl3: half widths belong to mul1 alone") {
  for (int half_bits = 0; half_bits <= 18; ++half_bits) {
    CAPTURE(half_bits);
    const bool whole = half_bits % 2 == 0 && half_bits >= 2 && half_bits <= 16;
    const bool half = half_bits == 3 || half_bits == 5 || half_bits == 7;
    CHECK(exl3::width_supported(exl3::Codebook::Mul1, half_bits) == (whole || half));
    CHECK(exl3::width_supported(exl3::Codebook::Mcg, half_bits) == whole);
    CHECK(exl3::width_supported(exl3::Codebook::ThreeInst, half_bits) == whole);
  }
}
