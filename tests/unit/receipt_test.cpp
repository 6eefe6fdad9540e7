#include "libcore/receipt/receipt.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/tool.h"
#include "libcore/receipt/document.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
namespace fs = std::filesystem;

TEST_CASE("hash: gives the published digests of known inputs") {
  CHECK(sha256_hex("abc", 3) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(xxh3_hex("", 0) == "99aa06d3014798d86001c324468d497f");
  const unsigned char ids[] = {1, 0, 0, 0, 0x00, 0xC9, 0x03, 0x00};
  CHECK(token_hash({1, 248064}) == xxh3_hex(ids, sizeof ids));
  CHECK(token_hash({}) == xxh3_hex("", 0));
  CHECK_THROWS_AS(sha256_file("/nonexistent/file"), Error);
}

TEST_CASE("write_file_atomic: replaces the file a link names and leaves no temporary") {
  const test::TempDir dir;
  test::write_file(dir / "real", "old");
  fs::create_symlink("real", dir / "link");
  write_file_atomic(dir / "link", "new");
  CHECK(fs::is_symlink(dir / "link"));
  CHECK(test::read_file(dir / "real") == "new");
  CHECK(std::distance(fs::directory_iterator(dir.path()), {}) == 2);
  CHECK_THROWS_WITH_AS(write_file_atomic(dir.path(), "x"), doctest::Contains("Is a directory"), Error);
  CHECK_THROWS_AS(write_file_atomic(dir / "none/x", "x"), Error);
}

TEST_CASE("receipt: judges gates by their comparator and fails what is not finite") {
  Receipt receipt;
  CHECK(receipt.add_gate("a", 1, "<=", 1, "x"));
  CHECK_FALSE(receipt.any_gate_failed());
  CHECK_FALSE(receipt.add_gate("b", 1, "<", 1, "x"));
  CHECK(receipt.add_gate("c", 2, ">", 1, "x"));
  CHECK(receipt.add_gate("d", 2, "==", 2, "x"));
  CHECK_FALSE(receipt.add_gate("e", std::nan(""), ">=", 1, "x"));
  CHECK(receipt.any_gate_failed());
  CHECK_THROWS_AS(receipt.add_gate("f", 1, "~", 1, "x"), Error);
  Receipt unjudged;
  unjudged.add_gate_not_run("g", "<=", 1, "x", "no GPU");
  CHECK_FALSE(unjudged.any_gate_failed());
}

TEST_CASE("document: gives a digest only when the run ended") {
  FrameBlocks frame{Json::object(), Json::object(), Json::object(), Json::object()};
  Receipt receipt;
  receipt.result["a"] = std::numeric_limits<double>::infinity();
  receipt.result["b"] = Json::array({uint64_t{1} << 53, (uint64_t{1} << 53) + 1, -1});
  RunRecord run;
  run.outcome = "passed";
  const Json done = make_document(frame, receipt, run);
  const std::string canonical = R"({"a":null,"b":[9007199254740992,"9007199254740993",-1],"a_reason":"not finite"})";
  CHECK(canonical_json(done["result"]) == canonical);
  CHECK(done["result_digest"] == xxh3_hex(canonical.data(), canonical.size()));
  run.outcome = "error";
  CHECK(make_document(frame, receipt, run)["result_digest"].is_null());
}

TEST_CASE("path_text: reduces absolute paths and nothing else") {
  CHECK(reduce_argument("/srv/me/pack/") == "pack");
  CHECK(reduce_argument("--model=/srv/me/my pack") == "--model=my pack");
  CHECK(reduce_argument("models/pack") == "models/pack");
  CHECK(reduce_argument("a/b=c/d") == "a/b=c/d");
  CHECK(reduce_argument("/") == "/");
  CHECK(reduce_text("cannot read /srv/me/x.bin: 3/4 of '/a/b' (a/b)") == "cannot read x.bin: 3/4 of 'b' (a/b)");
  CHECK(bare_name("/srv/pack/") == "pack");
  CHECK(bare_name("a/./b/..") == "a");
  CHECK(bare_name(".") == fs::current_path().filename());
}

TEST_CASE("parse_size: takes binary units and refuses everything else") {
  CHECK(parse_size("4096") == 4096);
  CHECK(parse_size("512 MiB") == uint64_t{512} << 20);
  CHECK(parse_size("16GiB") == uint64_t{16} << 30);
  CHECK(parse_size("0") == 0);
  for (const char* bad : {"", "GiB", "16GB", "1.5GiB", "-1", "16 gib", "17179869184GiB", "1 KiB "})
    CHECK_THROWS_AS(parse_size(bad), Error);
}

TEST_CASE("parse_list: takes numbers and ranges and refuses everything else") {
  CHECK(parse_list("1,2,8-64*2") == std::vector<int64_t>{1, 2, 8, 16, 32, 64});
  CHECK(parse_list("100-400+100") == std::vector<int64_t>{100, 200, 300, 400});
  CHECK(parse_list("5-7,3") == std::vector<int64_t>{5, 6, 7, 3});
  CHECK(parse_list("10-35*3") == std::vector<int64_t>{10, 30});
  CHECK(parse_list("-1") == std::vector<int64_t>{-1});
  CHECK(parse_list("9223372036854775806-9223372036854775807").size() == 2);
  for (const char* bad : {"", ",", "1,", "1,,2", "a", "1-", "4-1", "1-8*1", "0-8*2", "1-8+0", "0-9999999999", "1 2"})
    CHECK_THROWS_AS(parse_list(bad), Error);
}
