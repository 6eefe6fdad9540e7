#include "kernels/contract/inputs.h"

#include <cmath>
#include <limits>
#include <numbers>

namespace fnx::contract {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::Normal:
      return "normal";
    case Kind::Exponents:
      return "exponents";
    case Kind::Cancelling:
      return "cancelling";
    case Kind::Extremes:
      return "extremes";
    case Kind::NonFinite:
      return "non-finite";
    case Kind::Directed:
      return "directed";
  }
  return "?";
}

double Random::normal() {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

void fill(float* x, int64_t rows, int64_t width, Kind kind, Range range, Random random, int64_t slice) {
  const float largest = std::ldexp(1.0f, range.highest);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x + r * width;
    for (int64_t i = 0; i < width; ++i) switch (kind) {
        case Kind::Exponents: {
          const int span = range.highest - range.lowest;
          const double mantissa = 1.0 + random.uniform();
          const int exponent = range.lowest + static_cast<int>(random.below(span));
          row[i] = static_cast<float>(std::ldexp(random.below(2) == 0 ? mantissa : -mantissa, exponent));
          break;
        }
        case Kind::Cancelling:
          row[i] = i % 2 == 1 ? -row[i - 1] * (1.0f + static_cast<float>(random.below(9) - 4) * 0x1p-22f)
                              : static_cast<float>(random.normal());
          break;
        case Kind::Extremes: {
          const float choices[] = {0.0f, -0.0f, 0x1p-149f, -0x1.8p-130f, largest, -largest, 0x1p-126f, 1.0f};
          // A few large values a row, so that their sum stays in range.
          const int64_t pick = random.below(64);
          row[i] =
              pick < 2 ? choices[4 + pick] : choices[(pick % 2 == 0 ? 0 : 6) + random.below(pick % 2 == 0 ? 4 : 2)];
          break;
        }
        case Kind::Directed: {
          const float pattern[] = {largest, 1.0f, -largest};
          row[i] = i % slice == 0 ? pattern[(i / slice + r) % 3] : 0.0f;
          break;
        }
        default:
          row[i] = static_cast<float>(random.normal());
      }
    if (kind != Kind::NonFinite || r % 3 == 0) continue;
    row[random.below(width)] =
        r % 3 == 1 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace fnx::contract
