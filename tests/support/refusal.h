// What bad input is refused with.
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <string_view>

#include "kernels/error.h"

namespace fnx::test {

// The message of the Input error that `call` ends in; empty when it does not.
template <class F>
std::string refusal_of(F&& call) {
  try {
    call();
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::Input);
    return e.what();
  }
  return "";
}

inline bool has(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace fnx::test
