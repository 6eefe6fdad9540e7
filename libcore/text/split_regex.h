// The pattern that cuts text into pieces before byte-pair encoding, compiled with PCRE2 (UTF, UCP, JIT).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace fnx {

// Immutable after construction; threads may share one.
class SplitRegex {
 public:
  // Throws Input with the offset when the pattern does not compile, or uses a construct that PCRE2 reads otherwise than
  // the engine such patterns are written for (Oniguruma).
  explicit SplitRegex(std::string_view pattern);

  // Calls `piece` with every match and every stretch between matches, in order, none of them empty. `text` is UTF-8.
  void split(std::string_view text, const std::function<void(std::string_view)>& piece) const;

 private:
  std::shared_ptr<const void> code_;
};

}  // namespace fnx
