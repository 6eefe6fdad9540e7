#include "kernels/float16.h"

#include <doctest/doctest.h>

#include <cmath>

using namespace fnx;

TEST_CASE("float16: every fp16 and bf16 pattern survives the way to fp32 and back") {
  int wrong = 0;
  for (uint32_t h = 0; h < 65536; ++h) {
    const auto bits = static_cast<uint16_t>(h);
    if (std::isnan(f16_to_f32(bits)))
      wrong += !std::isnan(f16_to_f32(f32_to_f16(f16_to_f32(bits))));
    else
      wrong += f32_to_f16(f16_to_f32(bits)) != bits;
    if (!std::isnan(bf16_to_f32(bits))) wrong += f32_to_bf16(bf16_to_f32(bits)) != bits;
  }
  CHECK(wrong == 0);
}

TEST_CASE("float16: rounds halfway values to even and overflows to infinity") {
  CHECK(f32_to_f16(2049.0f) == f32_to_f16(2048.0f));
  CHECK(f32_to_f16(2051.0f) == f32_to_f16(2052.0f));
  CHECK(f32_to_f16(65519.9f) == 0x7BFF);
  CHECK(f32_to_f16(65520.0f) == 0x7C00);
  CHECK(f32_to_f16(0x1p-25f) == 0);
  CHECK(f32_to_f16(0x1.8p-25f) == 1);
  CHECK(f32_to_bf16(1.00390625f) == 0x3F80);
}
