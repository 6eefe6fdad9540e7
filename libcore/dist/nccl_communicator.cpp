#include "libcore/dist/communicator.h"

#ifdef FNX_HAS_NCCL
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <thread>

#include "kernels/cuda/stream.h"

namespace fnx {

namespace {

// The library, loaded when first asked for: runs of one rank do without.
struct Nccl {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  std::string problem;

  Nccl() {
    void* library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      problem = ::dlerror();
      return;
    }
    const auto take = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(library, name));
      if (function == nullptr) problem = std::string("libnccl.so.2 has no ") + name;
    };
    take("ncclGetVersion", get_version), take("ncclGetErrorString", error_string);
    take("ncclGetUniqueId", get_unique_id), take("ncclCommInitRankConfig", init_rank);
    take("ncclCommFinalize", finalize), take("ncclCommDestroy", destroy), take("ncclCommAbort", abort);
    take("ncclAllGather", all_gather), take("ncclBroadcast", broadcast);
  }
  static const Nccl& get() {
    static const Nccl nccl;
    if (!nccl.problem.empty())
      throw Error(ErrorKind::Unsupported, "ranks on GPUs need NCCL: " + nccl.problem + "; use --tp 1");
    return nccl;
  }
};

constexpr auto kSetupLimit = std::chrono::seconds(120);

void check_nccl(ncclResult_t code, const char* what) {
  if (code != ncclSuccess) throw Error(ErrorKind::Device, std::string(what) + ": " + Nccl::get().error_string(code));
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(HostChannel& channel) : Communicator(channel) {
    ncclUniqueId id;
    std::string mine;
    if (rank() == 0) {
      check_nccl(nccl_.get_unique_id(&id), "ncclGetUniqueId");
      mine.assign(id.internal, sizeof id.internal);
    }
    const std::string first = channel.exchange(mine)[0];
    std::memcpy(id.internal, first.data(), sizeof id.internal);
    start(id);
  }
  ~NcclCommunicator() override {
    if (aborted_ || channel().failure()) {
      abort();
      return;
    }
    nccl_.finalize(handle_);
    nccl_.destroy(handle_);
  }

  void all_gather(Stream& stream, View own, View all) override {
    if (all.bytes() != own.bytes() * world())
      throw Error(ErrorKind::Internal,
                  "ranks gather " + std::to_string(own.bytes()) + " bytes each into " + std::to_string(all.bytes()));
    call("ncclAllGather", [&] {
      return nccl_.all_gather(own.data, all.data, static_cast<size_t>(own.bytes()), ncclInt8, handle_,
                              cuda::stream_handle(stream));
    });
  }
  void broadcast(Stream& stream, View data, int root) override {
    call("ncclBroadcast", [&] {
      return nccl_.broadcast(data.data, data.data, static_cast<size_t>(data.bytes()), ncclInt8, root, handle_,
                             cuda::stream_handle(stream));
    });
  }
  void abort() override {
    if (!aborted_.exchange(true) && handle_ != nullptr) nccl_.abort(handle_);
  }

 private:
  template <class F>
  void call(const char* what, F f) {
    check();
    if (aborted_) throw Error(ErrorKind::Device, std::string(what) + " after the ranks' work was ended");
    check_nccl(f(), what);
  }
  // On a thread of its own, which is left behind when a rank ends meanwhile or never comes.
  void start(const ncclUniqueId& id) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) throw Error(ErrorKind::Device, "ranks need a current device");
    struct Setup {
      std::promise<ncclResult_t> done;
      ncclComm_t handle = nullptr;
    };
    const auto setup = std::make_shared<Setup>();
    std::future<ncclResult_t> done = setup->done.get_future();
    std::thread([setup, id, device, world = world(), rank = rank(), init = nccl_.init_rank] {
      cudaSetDevice(device);
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      setup->done.set_value(init(&setup->handle, world, id, rank, &config));
    }).detach();
    const auto until = std::chrono::steady_clock::now() + kSetupLimit;
    while (done.wait_for(std::chrono::milliseconds(5)) != std::future_status::ready) {
      check();
      if (std::chrono::steady_clock::now() > until)
        throw Error(ErrorKind::Device, "ncclCommInitRank: the ranks did not meet within two minutes");
    }
    check_nccl(done.get(), "ncclCommInitRank");
    handle_ = setup->handle;
  }

  const Nccl& nccl_ = Nccl::get();
  ncclComm_t handle_ = nullptr;
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(HostChannel& channel) {
  return std::make_unique<NcclCommunicator>(channel);
}

std::string nccl_runtime_version() {
  int v = 0;
  Nccl::get().get_version(&v);
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

}  // namespace fnx

#else

namespace fnx {

std::unique_ptr<Communicator> make_nccl_communicator(HostChannel&) {
  throw Error(ErrorKind::Unsupported, "ranks on GPUs need NCCL, which this build lacks; use --tp 1 or --backend cpu");
}

std::string nccl_runtime_version() { return "none"; }

}  // namespace fnx
#endif
