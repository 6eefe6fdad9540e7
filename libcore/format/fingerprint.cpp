#include "libcore/format/fingerprint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>

#include "kernels/error.h"
#include "libcore/base/parallel.h"
#include "libcore/format/fingerprint_cache.h"
#include "libcore/format/tensor_names.h"

namespace fnx {
namespace {

constexpr size_t kReadBytes = size_t{1} << 20;        // per read: stays in the second-level cache while it is hashed
constexpr uint64_t kBatchBytes = uint64_t{32} << 20;  // of tensors that a thread takes at once
constexpr size_t kBatchTensors = 4096;
constexpr size_t kSampleEvery = 64;
constexpr uint64_t kSampleBytes = 4096;

// A file opened for plain reading: unlike a mapping, a failing disk gives an error and no signal.
class ReadFile {
 public:
  explicit ReadFile(const std::filesystem::path& path) : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) fail(errno);
    (void)::posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
  }
  ~ReadFile() { ::close(fd_); }
  ReadFile(const ReadFile&) = delete;
  ReadFile& operator=(const ReadFile&) = delete;

  void read(void* to, size_t bytes, uint64_t offset) const {
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = ::pread(fd_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(errno);
      if (n == 0)
        throw Error(ErrorKind::Input,
                    fmt::format("{}: ends at byte {}, before byte {}", path_.string(), offset + done, offset + bytes));
      done += static_cast<size_t>(n);
    }
  }

 private:
  [[noreturn]] void fail(int error) const {
    throw Error(ErrorKind::Input, path_.string() + ": cannot be read: " + std::strerror(error));
  }
  std::filesystem::path path_;
  int fd_;
};

std::string hex(XXH128_hash_t hash) { return fmt::format("{:016x}{:016x}", hash.high64, hash.low64); }

// XXH3-128 of records that are added one by one.
class RecordHash {
 public:
  RecordHash() : state_(XXH3_createState(), XXH3_freeState) {
    if (!state_) throw std::bad_alloc();
    XXH3_128bits_reset(state_.get());
  }
  void add(std::string_view record) { XXH3_128bits_update(state_.get(), record.data(), record.size()); }
  std::string digest() const { return hex(XXH3_128bits_digest(state_.get())); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

std::string record_head(const TensorInfo& t) {
  return fmt::format("{} {} [{}]", t.name, t.dtype_text, fmt::join(t.shape, ","));
}

int thread_count(const FingerprintOptions& options) {
  return options.threads > 0 ? options.threads : default_threads();
}

// Counts bytes, reports them, and ends the work when asked to.
class Meter {
 public:
  Meter(const FingerprintOptions& options, uint64_t total) : options_(options), total_(total) {}
  void add(uint64_t bytes) {
    const uint64_t done = done_ += bytes;
    if (options_.progress) options_.progress(done, total_);
    if (options_.stopping && options_.stopping()) throw Error(ErrorKind::Output, "stopped before the end");
  }

 private:
  const FingerprintOptions& options_;
  uint64_t total_;
  std::atomic<uint64_t> done_{0};
};

std::vector<std::unique_ptr<ReadFile>> open_files(const Checkpoint& checkpoint) {
  std::vector<std::unique_ptr<ReadFile>> out;
  for (const SourceFile& file : checkpoint.files())
    out.push_back(std::make_unique<ReadFile>(checkpoint.folder() / file.name));
  return out;
}

// Digests of all tensors, in the order of tensors().
std::vector<XXH128_hash_t> hash_tensors(const Checkpoint& checkpoint, const FingerprintOptions& options) {
  const std::span<const TensorInfo> tensors = checkpoint.tensors();
  const auto files = open_files(checkpoint);
  struct Batch {
    size_t first = 0, last = 0;  // tensors [first, last)
    uint64_t bytes = 0;
  };
  std::vector<Batch> batches;
  uint64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t bytes = tensors[i].bytes;
    total += bytes;
    if (batches.empty() || batches.back().bytes + bytes > kBatchBytes || i - batches.back().first == kBatchTensors)
      batches.push_back({i, i, 0});
    batches.back().last = i + 1;
    batches.back().bytes += bytes;
  }
  // One thread hashes a tensor: the largest, such as the n-gram table, start first; the rest follow in file order.
  std::stable_sort(batches.begin(), batches.end(), [](const Batch& a, const Batch& b) {
    return std::max(a.bytes, kBatchBytes) > std::max(b.bytes, kBatchBytes);
  });

  std::vector<XXH128_hash_t> hashes(tensors.size());
  Meter meter(options, total);
  in_parallel(thread_count(options), batches.size(), [&](size_t b) {
    thread_local std::vector<char> buffer(kReadBytes);
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
    if (!state) throw std::bad_alloc();
    for (size_t i = batches[b].first; i < batches[b].last; ++i) {
      const TensorInfo& t = tensors[i];
      XXH3_128bits_reset(state.get());
      for (uint64_t at = 0; at < t.bytes; at += kReadBytes) {
        const size_t n = static_cast<size_t>(std::min<uint64_t>(kReadBytes, t.bytes - at));
        files[t.file]->read(buffer.data(), n, t.offset + at);
        XXH3_128bits_update(state.get(), buffer.data(), n);
        meter.add(n);
      }
      hashes[i] = XXH3_128bits_digest(state.get());
    }
  });
  return hashes;
}

std::vector<size_t> name_order(std::span<const TensorInfo> tensors) {
  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tensors[a].name < tensors[b].name; });
  return order;
}

Fingerprint full_fingerprint(const Checkpoint& checkpoint, const FingerprintOptions& options) {
  const std::vector<XXH128_hash_t> hashes = hash_tensors(checkpoint, options);
  const std::span<const TensorInfo> tensors = checkpoint.tensors();
  struct FamilyState {
    FamilyDigest digest;
    RecordHash hash;
  };
  std::map<std::string, FamilyState> families;
  RecordHash root;
  Fingerprint out;
  for (size_t i : name_order(tensors)) {
    const std::string digest = hex(hashes[i]);
    const std::string record = record_head(tensors[i]) + " " + digest + "\n";
    root.add(record);
    FamilyState& family = families[family_name(tensors[i].name)];
    family.hash.add(record);
    family.digest.tensors += 1;
    family.digest.bytes += tensors[i].bytes;
    out.bytes += tensors[i].bytes;
    if (options.per_tensor) out.details.push_back({tensors[i].name, digest});
  }
  out.tensors = tensors.size();
  out.digest = root.digest();
  for (auto& [name, family] : families) {
    family.digest.name = name;
    family.digest.digest = family.hash.digest();
    out.families.push_back(std::move(family.digest));
  }
  return out;
}

// Record of a whole small file.
std::string file_record(const std::filesystem::path& folder, const FileStamp& stamp) {
  std::string bytes(stamp.bytes, '\0');
  ReadFile(folder / stamp.name).read(bytes.data(), bytes.size(), 0);
  return fmt::format("{} [{}] {}\n", stamp.name, stamp.bytes, xxh3_hex(bytes.data(), bytes.size()));
}

Fingerprint advisory_fingerprint(const Checkpoint& checkpoint, const std::vector<FileStamp>& stamps,
                                 const FingerprintOptions& options) {
  const std::span<const TensorInfo> tensors = checkpoint.tensors();
  const auto files = open_files(checkpoint);
  RecordHash root;
  Fingerprint out;
  for (const FileStamp& stamp : stamps) {
    if (!stamp.name.ends_with(".json")) continue;
    root.add(file_record(checkpoint.folder(), stamp));
    out.bytes += stamp.bytes;
  }
  Meter meter(options, tensors.size() / kSampleEvery * kSampleBytes);
  std::vector<char> sample(kSampleBytes);
  for (size_t i : name_order(tensors)) {
    const TensorInfo& t = tensors[i];
    if (t.name.find(".mlp.experts.") == std::string::npos || !t.name.ends_with(".trellis")) continue;
    std::string record = record_head(t);
    if (out.tensors++ % kSampleEvery == 0) {
      const size_t n = static_cast<size_t>(std::min(kSampleBytes, t.bytes));
      files[t.file]->read(sample.data(), n, t.offset);
      record += " " + xxh3_hex(sample.data(), n);
      out.bytes += n;
      meter.add(n);
    }
    root.add(record + "\n");
  }
  out.digest = root.digest();
  return out;
}

}  // namespace

const char* fingerprint_kind_name(FingerprintKind kind) { return kind == FingerprintKind::Full ? "full" : "advisory"; }

Json Fingerprint::subject() const { return make_fingerprint(fingerprint_kind_name(kind), "xxh3-128", digest, cached); }

Fingerprint fingerprint(const Checkpoint& checkpoint, FingerprintKind kind, const FingerprintOptions& options) {
  const std::vector<FileStamp> stamps = stamp_files(checkpoint);
  if (options.cache && !options.per_tensor)
    if (std::optional<Fingerprint> cached = cached_fingerprint(checkpoint, kind, stamps)) return *cached;
  Fingerprint out = kind == FingerprintKind::Full ? full_fingerprint(checkpoint, options)
                                                  : advisory_fingerprint(checkpoint, stamps, options);
  out.kind = kind;
  const std::vector<FileStamp> now = stamp_files(checkpoint);
  for (size_t i = 0; i < stamps.size(); ++i)
    if (now.size() != stamps.size() || now[i] != stamps[i])
      throw Error(ErrorKind::Input, stamps[i].name + " changed while it was read; run again when nothing writes to it");
  if (options.cache) cache_fingerprint(checkpoint, out, stamps);
  return out;
}

std::vector<std::string> sha256_of_files(const Checkpoint& checkpoint, const FingerprintOptions& options) {
  const std::span<const SourceFile> files = checkpoint.files();
  std::vector<std::string> out(files.size());
  Meter meter(options, checkpoint.file_bytes());
  in_parallel(thread_count(options), files.size(), [&](size_t i) {
    out[i] = sha256_file(checkpoint.folder() / files[i].name);
    meter.add(files[i].bytes);
  });
  return out;
}

}  // namespace fnx
