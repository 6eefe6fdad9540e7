// Unicode normalisation form C as the reference tokenizer library makes it.
#pragma once

#include <string>
#include <string_view>

namespace fnx {

// `utf8` is valid. Characters that came after Unicode 9 keep their places, as models were trained on.
std::string to_nfc(std::string_view utf8);

}  // namespace fnx
