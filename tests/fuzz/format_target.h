// Fuzz target of the readers of foreign bytes: safetensors headers, the index and config.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fnx::fuzz {

// The first byte of an input picks the reader.
enum class Reader : uint8_t { File, Header, Index, Config, kCount };

// Runs one input and says what came of it: "accepted" or the error's message. Aborts when a reader breaks its promises;
// exceptions other than an Input error escape.
std::string run_format_input(const uint8_t* data, size_t size);

}  // namespace fnx::fuzz
