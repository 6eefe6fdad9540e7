// Which architectures may run this build's CUDA kernels: files that fnx-kernel-contract --qualify leaves in the user's
// data folder, one an architecture and kernel library.
#pragma once

#include <string>

namespace fnx {

// Records that `architecture` ("sm_90") passed every gate; returns the file's name. Throws Output.
std::string write_qualification(const std::string& architecture, const std::string& summary);

// Why `architecture` may not run this build's kernels, with the command that changes it; empty when it may.
std::string qualification_problem(const std::string& architecture);

}  // namespace fnx
