#include <doctest/doctest.h>

#include "kernels/error.h"
#include "libcore/cli/gates.h"

using namespace fnx;

TEST_CASE("gates: a name means a whole figure or the end of several, and what is no gate or names nothing is refused") {
  const std::vector<std::string> names = {"decode/c1/ratio", "decode/c8/ratio", "decode/c1/floor_fraction"};
  const std::vector<GateLimit> gates =
      parse_gates({"ratio>=1.5", "decode/c1/floor_fraction<0.5", "c8/ratio==-1e3"}, names);
  CHECK(gates[2].limit == -1000);
  Receipt receipt;
  judge_gates(gates, {{names[0], "ratio", 2, ""}, {names[1], "ratio", 1, ""}, {names[2], "ratio", 0, "no ceilings"}},
              receipt);
  REQUIRE(receipt.gates.size() == 4);
  CHECK(receipt.gates[0]["name"] == names[0]);
  CHECK(receipt.gates[0]["outcome"] == "pass");
  CHECK(receipt.gates[1]["outcome"] == "fail");
  CHECK(receipt.gates[2]["outcome"] == "not_run");
  CHECK(receipt.gates[2]["reason"] == "no ceilings");
  CHECK(receipt.gates[3]["outcome"] == "fail");
  for (const char* wrong :
       {"ratio", ">=1", "ratio>=", "ratio=>1", "ratio>=x", "ratio>=1 ", "ratio>=nan", "atio>=1", "c2/ratio>=1"}) {
    CAPTURE(wrong);
    CHECK_THROWS_WITH_AS(parse_gates({wrong}, names), doctest::Contains(wrong), Error);
  }
}
