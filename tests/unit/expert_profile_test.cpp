#include "libcore/engine/expert_profile.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include <csignal>
#include <functional>

#include "kernels/error.h"
#include "tests/support/routing.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;
namespace fs = std::filesystem;

namespace {

// One run that chooses `expert` `times` times in layer 1.
void run_once(const fs::path& folder, const ExpertIdentity& id, int32_t expert, int times) {
  ProfileRun run(folder, id);
  run.count(1, std::vector<int32_t>(times, expert));
  run.save();
}

void refused(const fs::path& file, const std::string& words) {
  CAPTURE(words);
  const std::string before = read_file(file);
  CHECK_THROWS_WITH_AS(ExpertProfile::load(file), doctest::Contains(words.c_str()), Error);
  CHECK_THROWS_WITH_AS(ExpertProfile::load(file), doctest::Contains(file.filename().c_str()), Error);
  CHECK(read_file(file) == before);
}

}  // namespace

TEST_CASE("expert_profile: adds each run once, decays the earlier ones once, and keeps layers that a run left alone") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  {
    ProfileRun run(dir.path(), id);
    run.count(0, std::vector<int32_t>{7, 7, 7});
    run.count(1, std::vector<int32_t>(1000, 2));
    run.save();
    CHECK_THROWS_WITH_AS(run.save(), doctest::Contains("twice"), Error);
  }
  run_once(dir.path(), id, 3, 50);
  const ProfileRun now(dir.path(), id);
  CHECK(now.start().runs == 2);
  CHECK(now.start().layer(1)[2] == 900);
  CHECK(now.start().layer(1)[3] == 50);
  CHECK(now.start().layer(0)[7] == 3);
  CHECK(now.start().total(1) == 950);
}

TEST_CASE(
    "expert_profile: is one private file named after model and rank, and absent after a run that counted nothing") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  ProfileRun(dir / "new", id).save();
  CHECK(fs::is_empty(dir / "new"));
  run_once(dir / "new", id, 1, 1);
  const fs::path file = dir / "new/0123456789abcdef-rank0of1.fnxprofile";
  struct stat status {};
  REQUIRE(::stat(file.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
  CHECK(std::distance(fs::directory_iterator(dir / "new"), {}) == 1);
}

TEST_CASE("expert_profile: two runs that overlap both count, with the earlier counts decayed once") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  run_once(dir.path(), id, 0, 1000);
  ProfileRun a(dir.path(), id), b(dir.path(), id);
  a.count(1, std::vector<int32_t>(10, 4));
  b.count(1, std::vector<int32_t>(20, 5));
  b.save();
  a.save();
  const ExpertProfile now = ExpertProfile::load(a.file());
  CHECK(now.layer(1)[0] == 900);
  CHECK(now.layer(1)[4] == 10);
  CHECK(now.layer(1)[5] == 20);
  CHECK(now.runs == 3);
}

TEST_CASE("expert_profile: processes that save at the same time lose no run") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  std::vector<pid_t> children;
  for (int32_t c = 0; c < 3; ++c) {
    const pid_t pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      try {
        for (int i = 0; i < 15; ++i) run_once(dir.path(), id, c, 1);
      } catch (...) {
        ::_exit(1);
      }
      ::_exit(0);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = 0;
    REQUIRE(::waitpid(pid, &status, 0) == pid);
    CHECK(status == 0);
  }
  CHECK(ProfileRun(dir.path(), id).start().runs == 45);
}

TEST_CASE("expert_profile: is the old file or the new one when the process is killed during a save") {
  const TempDir dir;
  const ExpertIdentity id = make_identity(48, 512, 10);
  run_once(dir.path(), id, 0, 1);
  int64_t runs = 1, moved = 0;
  for (int round = 0; round < 60; ++round) {
    const pid_t pid = ::fork();
    REQUIRE(pid >= 0);
    if (pid == 0)
      while (true) run_once(dir.path(), id, 1, 1);
    ::usleep(static_cast<useconds_t>(random_bits(1, 2, round) % 12000));
    REQUIRE(::kill(pid, SIGKILL) == 0);
    REQUIRE(::waitpid(pid, nullptr, 0) == pid);
    const ExpertProfile now = ProfileRun(dir.path(), id).start();
    CHECK(now.runs >= runs);
    moved += now.runs > runs ? 1 : 0;
    runs = now.runs;
  }
  MESSAGE(runs, " runs saved by 60 killed processes, ", moved, " of which saved one");
  CHECK(runs > 1);
}

TEST_CASE("expert_profile: refuses a profile of another checkpoint, rank, world or shape and leaves it as it is") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  run_once(dir.path(), id, 0, 1);
  const fs::path file = ProfileRun(dir.path(), id).file();
  const std::string before = read_file(file);
  const auto other = [&](const char* words, const std::function<void(ExpertIdentity&)>& change) {
    CAPTURE(words);
    ExpertIdentity wanted = id;
    change(wanted);
    // A file that was copied to the name which that run would use.
    const fs::path name =
        dir / fmt::format("{}-rank{}of{}.fnxprofile", wanted.checkpoint.substr(0, 16), wanted.rank, wanted.world);
    if (name != file) fs::copy_file(file, name);
    CHECK_THROWS_WITH_AS(ProfileRun(dir.path(), wanted), doctest::Contains(words), Error);
    CHECK_THROWS_WITH_AS(ProfileRun(dir.path(), wanted), doctest::Contains(name.filename().c_str()), Error);
    CHECK(read_file(name) == before);
  };
  other("checkpoint 0123456789abcdef0123456789abcdef, not ff",
        [](ExpertIdentity& i) { i.checkpoint = "ff34567890123456"; });
  other("world 1, not 2", [](ExpertIdentity& i) { i.world = 2; });
  other("rank 0, not 1", [](ExpertIdentity& i) { i.world = 2, i.rank = 1; });
  other("layers 3, not 4", [](ExpertIdentity& i) { i.layers = 4; });
  other("draft_layers 1, not 0", [](ExpertIdentity& i) { i.draft_layers = 0; });
  other("experts 8, not 16", [](ExpertIdentity& i) { i.experts = 16; });
  other("experts_per_token 2, not 3", [](ExpertIdentity& i) { i.experts_per_token = 3; });
  ExpertProfile slow(id);
  slow.decay_percent = 5;
  slow.save(file);
  CHECK_THROWS_WITH_AS(ProfileRun(dir.path(), id), doctest::Contains("decay_percent 5, not 10"), Error);
}

TEST_CASE("expert_profile: a run whose profile was damaged meanwhile fails and leaves it as it is") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  ProfileRun run(dir.path(), id);
  run.count(0, std::vector<int32_t>{1});
  write_file(run.file(), "something else");
  CHECK_THROWS_WITH_AS(run.save(), doctest::Contains("no expert profile"), Error);
  CHECK(read_file(run.file()) == "something else");
}

TEST_CASE("expert_profile: refuses empty, foreign, cut and damaged files by name") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  ExpertProfile p(id);
  p.count(2, std::vector<int32_t>{1, 2, 3});
  const fs::path good = dir / "good", bad = dir / "bad";
  p.save(good);
  const std::string bytes = read_file(good);
  CHECK(ExpertProfile::load(good).counts == p.counts);

  write_file(bad, "");
  refused(bad, "is empty");
  write_file(bad, "no profile at all, whatever its length may be");
  refused(bad, "is no expert profile");
  std::string changed = bytes;
  changed[8] = 2;
  write_file(bad, changed);
  refused(bad, "of version 2, this build reads version 1");
  for (size_t cut = 1; cut < bytes.size(); ++cut) {
    write_file(bad, std::string_view(bytes).substr(0, cut));
    REQUIRE_THROWS_WITH_AS(ExpertProfile::load(bad), doctest::Contains("is cut short"), Error);
  }
  write_file(bad, bytes + "x");
  refused(bad, "is cut short or damaged");
  for (size_t at = 0; at < bytes.size(); ++at) {
    changed = bytes;
    changed[at] ^= 0x10;
    write_file(bad, changed);
    REQUIRE_THROWS_AS(ExpertProfile::load(bad), Error);
  }
  CHECK_THROWS_WITH_AS(ExpertProfile::load(dir / "none"), doctest::Contains("none"), Error);
  CHECK_THROWS_AS(ExpertProfile::load(dir.path()), Error);
}

TEST_CASE("expert_profile: merges profiles of one kind and decays by whole counts, however large") {
  ExpertProfile a(make_identity()), b(make_identity());
  a.runs = 2, b.runs = 3;
  a.layer(0)[0] = UINT64_MAX / 2, a.layer(0)[1] = 199, a.layer(0)[2] = 1;
  b.layer(0)[1] = 1;
  a.merge(b);
  CHECK(a.runs == 5);
  CHECK(a.layer(0)[1] == 200);
  a.decay(0, 10);
  CHECK(a.layer(0)[0] == static_cast<uint64_t>(static_cast<unsigned __int128>(UINT64_MAX / 2) * 90 / 100));
  CHECK(a.layer(0)[1] == 180);
  CHECK(a.layer(0)[2] == 0);
  ExpertProfile other(make_identity(3, 9));
  CHECK_THROWS_WITH_AS(a.merge(other), doctest::Contains("experts 9, not 8"), Error);
  CHECK_THROWS_AS(a.count(4, std::vector<int32_t>{0}), Error);
  CHECK_THROWS_AS(a.count(0, std::vector<int32_t>{8}), Error);
}
