// Element types of tensors, in files and in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fnx {

enum class DType : uint8_t { Bool, U8, I8, F8E4M3, F8E5M2, U16, I16, F16, BF16, U32, I32, F32, U64, I64, F64 };

// Bytes of one element.
constexpr size_t dtype_size(DType t) {
  switch (t) {
    case DType::Bool:
    case DType::U8:
    case DType::I8:
    case DType::F8E4M3:
    case DType::F8E5M2:
      return 1;
    case DType::U16:
    case DType::I16:
    case DType::F16:
    case DType::BF16:
      return 2;
    case DType::U32:
    case DType::I32:
    case DType::F32:
      return 4;
    case DType::U64:
    case DType::I64:
    case DType::F64:
      return 8;
  }
  return 0;
}

// The safetensors spelling, "F8_E4M3" and the like.
constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::Bool:
      return "BOOL";
    case DType::U8:
      return "U8";
    case DType::I8:
      return "I8";
    case DType::F8E4M3:
      return "F8_E4M3";
    case DType::F8E5M2:
      return "F8_E5M2";
    case DType::U16:
      return "U16";
    case DType::I16:
      return "I16";
    case DType::F16:
      return "F16";
    case DType::BF16:
      return "BF16";
    case DType::U32:
      return "U32";
    case DType::I32:
      return "I32";
    case DType::F32:
      return "F32";
    case DType::U64:
      return "U64";
    case DType::I64:
      return "I64";
    case DType::F64:
      return "F64";
  }
  return "?";
}

}  // namespace fnx
