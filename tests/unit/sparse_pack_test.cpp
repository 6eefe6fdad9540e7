#include <doctest/doctest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "kernels/error.h"
#include "libcore/format/checkpoint.h"
#include "libcore/format/exl3_linear.h"
#include "libcore/format/model_config.h"
#include "libcore/format/ngram_table.h"
#include "libcore/format/pack_writer.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using fnx::test::TempDir;

namespace {

// Resident memory of this process, bytes.
int64_t resident() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, pages = 0;
  statm >> total >> pages;
  return pages * 4096;
}

// What the folder's files take on disk, holes not counted.
int64_t disk_bytes(const std::filesystem::path& folder) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    struct stat info = {};
    REQUIRE(::stat(entry.path().c_str(), &info) == 0);
    bytes += info.st_blocks * 512;
  }
  return bytes;
}

}  // namespace

TEST_CASE("sparse_pack: the published layout is read in strict mode within 500 MiB") {
  const TempDir dir;
  PackWriteOptions how;
  how.sparse = true;
  write_pack(SyntheticSource(SyntheticSpec::parse("synth:flash-next-4.05bpw")), dir / "pack", how);
  CHECK(disk_bytes(dir / "pack") < (int64_t{150} << 20));

  const int64_t before = resident();
  const Checkpoint pack(dir / "pack");
  const int64_t used = resident() - before;
  MESSAGE("headers read in ", used / 1048576, " MiB");
#ifndef __SANITIZE_ADDRESS__
  CHECK(used < (int64_t{500} << 20));
#endif
  CHECK(pack.files().size() == 10);
  CHECK(pack.tensors().size() == 303126);
  CHECK(pack.problems().empty());

  const ModelConfig config = ModelConfig::load(dir / "pack/config.json");
  const auto expert = describe_linear(pack, "model.language_model.layers.47.mlp.experts.511.down_proj");
  REQUIRE(expert);
  CHECK(expert->in == config.expert_size);
  CHECK(expert->half_bits == 8);
  const NgramTable table(pack, "model.language_model.layers.1.ple.ple_embedding.ngram_embedding", config.ngram_heads(),
                         config.ngram_dim());
  CHECK(table.rows() == 320001536);
  CHECK(table.row(320001535) - table.row(0) == int64_t{320001535} * 122);
  CHECK(table.head_sizes().back() == 20000171);
  CHECK(table.multipliers() == std::vector<int64_t>{23703573157769, 20109073645365, 8052911324071});
}

TEST_CASE("pack_writer: a folder appears when it is whole, and nothing is left of one that was stopped") {
  const TempDir dir;
  const SyntheticSource source(SyntheticSpec::parse("synth:tiny,layers=1,experts=4"));
  PackWriteOptions how;
  int asked = 0;
  uint64_t last = 0;
  how.stopping = [&] {
    CHECK_FALSE(std::filesystem::exists(dir / "pack"));
    return ++asked > 20;
  };
  how.progress = [&](uint64_t done, uint64_t total) {
    CHECK(done > last);
    CHECK(total == source.bytes());
    last = done;
  };
  CHECK_THROWS_AS(write_pack(source, dir / "pack", how), Error);
  CHECK(std::filesystem::is_empty(dir.path()));
  std::filesystem::create_directory(dir / "pack");
  write_pack(source, dir / "pack");
  CHECK(Checkpoint(dir / "pack").tensors().size() == source.tensors().size());
  CHECK_THROWS_AS(write_pack(source, dir / "pack"), Error);
  CHECK_THROWS_AS(write_pack(source, dir / "pack/config.json/x"), Error);
}
