// The entries of the registry, one function a family.
#pragma once

#include "kernels/contract/kernel.h"

namespace fnx::contract {

void add_exl3_linear(KernelList& list);
void add_exl3_experts(KernelList& list);
void add_exl3_parts(KernelList& list);   // rotation, decoding
void add_moe(KernelList& list);          // router, swiglu, combine
void add_expert_pool(KernelList& list);  // plans, copies
void add_dense(KernelList& list);        // embed, add, move rows, grouped norm, HC injection
void add_plain(KernelList& list);        // plain linear, HC mix
void add_gdn(KernelList& list);
void add_ple(KernelList& list);
void add_sample(KernelList& list);
std::unique_ptr<Kernel> plan_experts_entry();
std::unique_ptr<Kernel> qsa_write_entry();
std::unique_ptr<Kernel> qsa_select_entry();
std::unique_ptr<Kernel> qsa_attend_entry();

}  // namespace fnx::contract
