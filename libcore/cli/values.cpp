#include <charconv>
#include <limits>

#include "kernels/error.h"
#include "libcore/cli/tool.h"

namespace fnx {
namespace {

constexpr size_t kMaxListNumbers = size_t{1} << 20;

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw Error(ErrorKind::Usage, "'" + std::string(text) + "' " + why);
}

// Takes an integer off the front of `rest`; false when there is none or it does not fit.
template <class T>
bool take_integer(std::string_view& rest, T& value) {
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (error != std::errc()) return false;
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  return true;
}

}  // namespace

uint64_t parse_size(std::string_view text) {
  static constexpr const char* kHow = "is no size: give bytes or a whole number of KiB, MiB, GiB or TiB, like 16GiB";
  std::string_view unit = text;
  uint64_t count = 0;
  if (!take_integer(unit, count)) refuse(text, kHow);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  int shift = 0;
  if (unit == "KiB")
    shift = 10;
  else if (unit == "MiB")
    shift = 20;
  else if (unit == "GiB")
    shift = 30;
  else if (unit == "TiB")
    shift = 40;
  else if (!unit.empty() && unit != "B")
    refuse(text, kHow);
  if (count > std::numeric_limits<uint64_t>::max() >> shift) refuse(text, "is more than 2^64 bytes");
  return count << shift;
}

std::vector<int64_t> parse_list(std::string_view text) {
  static constexpr const char* kHow = "is no list: give numbers and ranges like 1,2,8-64*2,100-400+100";
  std::vector<int64_t> out;
  const auto add = [&](int64_t value) {
    if (out.size() == kMaxListNumbers) refuse(text, "lists more than 1048576 numbers");
    out.push_back(value);
  };
  std::string_view rest = text;
  for (bool more = true; more;) {
    int64_t first = 0, last = 0, by = 1;
    if (!take_integer(rest, first)) refuse(text, kHow);
    if (rest.starts_with('-')) {
      rest.remove_prefix(1);
      if (!take_integer(rest, last)) refuse(text, kHow);
      char step = '+';
      if (rest.starts_with('*') || rest.starts_with('+')) {
        step = rest.front();
        rest.remove_prefix(1);
        if (!take_integer(rest, by)) refuse(text, kHow);
      }
      if (last < first) refuse(text, "has a range that runs downwards");
      if (step == '*' ? by < 2 || first < 1 : by < 1) refuse(text, "has a range whose step does not advance");
      for (int64_t value = first;;) {
        add(value);
        int64_t next = 0;
        const bool overflow =
            step == '*' ? __builtin_mul_overflow(value, by, &next) : __builtin_add_overflow(value, by, &next);
        if (overflow || next > last) break;
        value = next;
      }
    } else {
      add(first);
    }
    more = rest.starts_with(',');
    if (more) rest.remove_prefix(1);
  }
  if (!rest.empty()) refuse(text, kHow);
  return out;
}

}  // namespace fnx
