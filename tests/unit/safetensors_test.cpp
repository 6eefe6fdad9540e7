#include "libcore/format/safetensors.h"

#include <doctest/doctest.h>

#include "kernels/error.h"
#include "tests/support/refusal.h"
#include "tests/support/safetensors_file.h"

using namespace fnx;
using fnx::test::has;
using fnx::test::refusal_of;
using fnx::test::safetensors_bytes;

namespace {

std::span<const std::byte> bytes_of(std::string_view s) { return std::as_bytes(std::span(s.data(), s.size())); }

SafetensorsHeader parse(const std::string& header, size_t data_bytes = 0) {
  return parse_safetensors(bytes_of(safetensors_bytes(header, std::string(data_bytes, '\0'))), "f.safetensors");
}

// The message of the Input error that `header` meets with; empty when it is read.
std::string refusal(const std::string& header, size_t data_bytes = 64) {
  return refusal_of([&] { parse(header, data_bytes); });
}

std::string entry(const std::string& shape, const std::string& offsets, const std::string& dtype = "\"F32\"") {
  return R"({"w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

}  // namespace

TEST_CASE("safetensors: lists tensors by offset with absolute places") {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})";
  const SafetensorsHeader h = parse(header, 16);
  REQUIRE(h.tensors.size() == 2);
  CHECK(h.incomplete.empty());
  CHECK(h.tensors[0].name == "a");
  CHECK(h.tensors[0].shape.empty());
  CHECK(h.tensors[0].elements() == 1);
  CHECK(h.tensors[0].offset == 8 + header.size());
  CHECK(h.tensors[1].name == "b");
  CHECK(h.tensors[1].dtype == DType::F16);
  CHECK(h.tensors[1].bytes == 12);
  CHECK(h.tensors[1].elements() == 6);
}

TEST_CASE("safetensors: accepts empty tensors, unknown dtypes, padding and no tensors at all") {
  CHECK(parse(entry("[0]", "[8,8]"), 8).tensors.at(0).elements() == 0);
  CHECK(parse(entry("[0]", "[8,8]"), 8).incomplete.empty());
  const SafetensorsHeader h = parse(entry("[7]", "[0,3]", "\"F4_X\""), 3);
  CHECK(!h.tensors.at(0).dtype);
  CHECK(h.tensors.at(0).dtype_text == "F4_X");
  CHECK(parse(entry("[2]", "[0,8]") + "   \n", 8).tensors.size() == 1);
  CHECK(parse("{}").tensors.empty());
}

TEST_CASE("safetensors: refuses offsets and shapes that are not integers in range, naming the value") {
  for (const char* bad : {"-1", "-0", "1e3", "8.0", "true", "null", "\"8\"", "18446744073709551615",
                          "9223372036854775808", "99999999999999999999", "[8]", "{}"}) {
    CAPTURE(bad);
    for (const std::string& text :
         {refusal(entry("[2]", "[0," + std::string(bad) + "]")), refusal(entry("[2]", "[" + std::string(bad) + ",8]")),
          refusal(entry("[" + std::string(bad) + "]", "[0,8]"))}) {
      CHECK(has(text, "f.safetensors: tensor w: "));
      CHECK(has(text, "must be"));
      if (bad[0] != '[' && bad[0] != '{') CHECK(has(text, bad));
    }
  }
  CHECK(has(refusal(entry("[2]", "[16,8]")), "[16, 8] run backwards"));
  CHECK(has(refusal(entry("[2]", "[0]")), "1 numbers"));
  CHECK(has(refusal(entry("[2]", "[0,8,9]")), "a third number"));
  CHECK(has(refusal(entry("2", "[0,8]")), "shape must be a list"));
}

TEST_CASE("safetensors: refuses a byte range that disagrees with dtype and shape") {
  CHECK(has(refusal(entry("[1000,1000]", "[0,4]")),
            "[1000, 1000] of F32 takes 4000000 bytes, but data_offsets [0, 4] span 4"));
  CHECK(has(refusal(entry("[]", "[0,0]")), "takes 4 bytes"));
  for (const char* shape : {"[4611686018427387904]", "[4294967296,4294967296]", "[4294967296,4294967296,0]",
                            "[9223372036854775807,9223372036854775807]"}) {
    CAPTURE(shape);
    CHECK(has(refusal(entry(shape, "[0,0]")), "overflows"));
    if (std::string_view(shape) != "[4611686018427387904]")
      CHECK(has(refusal(entry(shape, "[0,0]", "\"X\"")), "overflows"));
  }
  CHECK(has(refusal(entry("[2]", "[2,10]")), "not aligned to the 4 bytes of F32"));
}

TEST_CASE("safetensors: refuses overlap with both names, and takes neighbours and empty tensors inside") {
  const auto two = [](const char* second) {
    return std::string(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":)") + second + "}";
  };
  const std::string text = refusal(two(R"({"dtype":"U8","shape":[8],"data_offsets":[7,15]})"));
  CHECK(has(text, "tensors a and b overlap"));
  CHECK(has(text, "[0, 8] and [7, 15]"));
  CHECK(has(refusal(two(R"({"dtype":"Q","shape":[8],"data_offsets":[0,4]})")), "overlap"));
  CHECK(refusal(two(R"({"dtype":"U8","shape":[8],"data_offsets":[8,16]})")) == "");
  CHECK(refusal(two(R"({"dtype":"U8","shape":[0],"data_offsets":[4,4]})")) == "");
}

TEST_CASE("safetensors: refuses duplicate keys with both places") {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  const std::string a2 = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]})";
  CHECK(has(refusal("{" + a + "," + a2 + "}"), "tensor a appears twice, with data_offsets [0, 1] and [1, 2]"));
  CHECK(
      has(refusal(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})"), "\"dtype\" appears twice"));
  CHECK(has(refusal(R"({"__metadata__":{"k":"1","k":"2"}})"), "appears twice"));
  CHECK(has(refusal(R"({"__metadata__":{},"__metadata__":{}})"), "appears twice"));
}

TEST_CASE("safetensors: refuses malformed headers") {
  for (const char* bad : {"[]", "{", "{}x", "{\"a\":1}", "{\"a\":{}}", "{\"a\":{\"dtype\":\"U8\",\"shape\":[]}}", " {}",
                          "{\"__metadata__\":{\"k\":1}}", "{\"__metadata__\":[]}", "\xEF\xBB\xBF{}", "{\"\xFF\":1}",
                          "\"a\"", "{\"a\":{\"dtype\":7,\"shape\":[],\"data_offsets\":[0,1]}}", "{,}", "nul",
                          "{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1],\"more\":1}}"}) {
    CAPTURE(bad);
    CHECK(has(refusal(bad), "f.safetensors: "));
  }
  using namespace std::string_literals;
  CHECK(has(refusal("{}\0"s), "NUL"));
  CHECK(has(refusal("{}\0}"s), "NUL"));
  CHECK(has(refusal("{\"a\033[2J\n\xFF\":1}"), "JSON"));
  CHECK(refusal("{\"a\\u001b[2J\":1}").find('\033') == std::string::npos);
}

TEST_CASE("safetensors: refuses header lengths of 0, over the limit and over the file") {
  const auto with_length = [](uint64_t length, size_t rest) {
    std::string file(8 + rest, ' ');
    for (int i = 0; i < 8; ++i) file[static_cast<size_t>(i)] = static_cast<char>(length >> (8 * i));
    return parse_safetensors(bytes_of(file), "f");
  };
  for (uint64_t length : {uint64_t{0}, uint64_t{1} << 63, ~uint64_t{0}, kMaxHeaderBytes + 1}) {
    CAPTURE(length);
    CHECK_THROWS_WITH_AS(with_length(length, 100), doctest::Contains("header length"), Error);
  }
  CHECK(has(with_length(101, 100).incomplete, "f has 108 bytes, its header alone asks for 109"));
  CHECK(has(with_length(2, 0).incomplete, "asks for 10"));
  CHECK(has(parse_safetensors(bytes_of("1234567"), "f").incomplete, "7 bytes"));
  CHECK(has(parse_safetensors({}, "f").incomplete, "0 bytes"));
}

TEST_CASE("safetensors: reports cut data with the tensor and the numbers") {
  const std::string header = entry("[2]", "[0,8]");
  const SafetensorsHeader h = parse(header, 7);
  CHECK(h.tensors.size() == 1);
  CHECK(has(h.incomplete, "has " + std::to_string(8 + header.size() + 7) + " bytes"));
  CHECK(has(h.incomplete, "asks for " + std::to_string(8 + header.size() + 8)));
  CHECK(has(h.incomplete, "the first is w"));
  CHECK(has(parse(entry("[3]", "[0,9223372036854775807]", "\"X\""), 8).incomplete, "are cut"));
}
