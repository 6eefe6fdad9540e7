#include "libcore/format/float_values.h"

#include <fmt/format.h>

#include "kernels/error.h"
#include "kernels/float16.h"

namespace fnx {

std::vector<float> float_values(const TensorSource& source, const TensorInfo& t) {
  if (t.dtype != DType::F16 && t.dtype != DType::BF16 && t.dtype != DType::F32)
    throw Error(ErrorKind::Input, fmt::format("tensor {} in {}: dtype {} where F16, BF16 or F32 is needed", t.name,
                                              source.files()[t.file].name, t.dtype_text));
  const TensorData data = source.read(t);
  std::vector<float> values(data.bytes.size() / dtype_size(*t.dtype));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = t.dtype == DType::F32   ? data.as<float>()[i]
                : t.dtype == DType::F16 ? f16_to_f32(data.as<uint16_t>()[i])
                                        : bf16_to_f32(data.as<uint16_t>()[i]);
  return values;
}

}  // namespace fnx
