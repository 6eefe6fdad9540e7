// Whether a file's place takes one, asked ahead of the work that gives its bytes.
#pragma once

#include <filesystem>

namespace fnx {

// Throws Output where write_file_atomic (libcore/receipt/receipt.h) could not make the file.
void require_writable(const std::filesystem::path& file);

// Whether the path is a pipe or a device: what goes there once stays, and no file beside it belongs to it.
bool written_in_place(const std::filesystem::path& file);

}  // namespace fnx
