// Files that are nobody else's business.
#pragma once

#include <filesystem>
#include <string_view>

namespace fnx {

// As write_file_atomic (libcore/receipt/receipt.h), readable and writable by the owner alone.
void write_private_file_atomic(const std::filesystem::path& file, std::string_view bytes);

}  // namespace fnx
