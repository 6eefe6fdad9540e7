// The one exception type of the project. It lives at the bottom of the include order so that every layer can throw it.
#pragma once

#include <stdexcept>
#include <string>

namespace fnx {

// Values are the process exit codes (README, "Exit codes").
enum class ErrorKind : int {
  Gate = 1,         // a gate or comparison failed
  Usage = 2,        // the command line
  Input = 3,        // a file or prompt is wrong
  Unsupported = 4,  // not possible on this machine or for this model
  Device = 5,       // CUDA or NCCL failed
  Output = 6,       // a result or receipt could not be written
  Internal = 70,    // a bug in fnx
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace fnx
