#include "libcore/format/tensor_source.h"

#include <fmt/format.h>

#include "kernels/error.h"

namespace fnx {

const TensorInfo& TensorSource::require(std::string_view name) const {
  const TensorInfo* info = find(name);
  if (info == nullptr) throw Error(ErrorKind::Input, fmt::format("tensor {} is missing from the checkpoint", name));
  if (!info->dtype)
    throw Error(ErrorKind::Input, fmt::format("tensor {} in {} has the unknown dtype {}", name,
                                              files()[info->file].name, info->dtype_text));
  return *info;
}

uint64_t TensorSource::file_bytes() const {
  uint64_t bytes = 0;
  for (const SourceFile& f : files()) bytes += f.bytes;
  return bytes;
}

}  // namespace fnx
