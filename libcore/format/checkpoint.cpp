#include "libcore/format/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <unordered_map>

#include "kernels/error.h"
#include "libcore/format/checkpoint_index.h"
#include "libcore/format/json_text.h"
#include "libcore/format/mapped_file.h"
#include "libcore/format/safetensors.h"

namespace fnx {
namespace fs = std::filesystem;
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::Input, what); }

// "a, b, c and 9 more".
std::string short_list(const std::vector<std::string>& items) {
  constexpr size_t kShown = 8;
  const size_t n = std::min(items.size(), kShown);
  std::string text = fmt::format("{}", fmt::join(items.begin(), items.begin() + static_cast<ptrdiff_t>(n), ", "));
  return items.size() > n ? text + fmt::format(" and {} more", items.size() - n) : text;
}

// What the folder holds, names sorted.
struct Listing {
  std::set<std::string> tensor_files;  // *.safetensors
  std::vector<std::string> partial;    // left by a download that has not finished
  bool index = false, config = false;
};

Listing list_folder(const fs::path& folder) {
  Listing listing;
  try {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with('.')) continue;
      if (name.ends_with(".part") || name.ends_with(".incomplete")) listing.partial.push_back(name);
      // A link to nowhere counts as absent.
      if (!entry.exists() || entry.is_directory()) continue;
      if (name.ends_with(".safetensors")) listing.tensor_files.insert(name);
      listing.index |= name == kIndexName;
      listing.config |= name == "config.json";
    }
  } catch (const fs::filesystem_error& e) {
    fail(fmt::format("cannot list {}: {}", folder.string(), e.code().message()));
  }
  std::sort(listing.partial.begin(), listing.partial.end());
  return listing;
}

// Names of shards that "x-00002-of-00007.safetensors" and the like imply, but that are absent.
std::set<std::string> absent_of_series(const std::set<std::string>& names) {
  constexpr std::string_view kOf = "-of-", kEnd = ".safetensors";
  constexpr int kMostShards = 10000;
  std::set<std::string> absent;
  for (const std::string& name : names) {
    const size_t of = name.rfind(kOf);
    if (of == std::string::npos || of == 0) continue;
    const size_t dash = name.rfind('-', of - 1);
    if (dash == std::string::npos || name.size() < of + kOf.size() + kEnd.size()) continue;
    const std::string_view number(name.data() + dash + 1, of - dash - 1);
    const std::string_view count(name.data() + of + kOf.size(), name.size() - of - kOf.size() - kEnd.size());
    const auto value = [](std::string_view digits) {
      int v = -1;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), v);
      return error == std::errc{} && end == digits.data() + digits.size() ? v : -1;
    };
    if (value(number) < 0 || value(count) > kMostShards) continue;
    for (int i = 1; i <= value(count); ++i) {
      std::string other = fmt::format("{}-{:0{}}{}{}{}", name.substr(0, dash), i, number.size(), kOf, count, kEnd);
      if (!names.contains(other)) absent.insert(std::move(other));
    }
  }
  return absent;
}

}  // namespace

struct Checkpoint::Impl {
  fs::path folder;
  std::vector<std::string> problems;
  std::vector<SourceFile> files;
  std::vector<std::shared_ptr<const MappedFile>> maps;  // one a file
  std::vector<TensorInfo> tensors;
  std::unordered_map<std::string_view, uint32_t> by_name;  // views into `tensors`

  // Reads the header of one file; returns how it is cut short, or an empty text.
  std::string add_file(const std::string& name, bool in_index) {
    const auto number = static_cast<uint32_t>(files.size());
    maps.push_back(MappedFile::open(folder / name));
    const auto bytes = maps.back()->bytes();
    files.push_back({name, bytes.size(), in_index});
    SafetensorsHeader header = parse_safetensors(bytes, (folder / name).string());
    for (TensorInfo& t : header.tensors) {
      t.file = number;
      tensors.push_back(std::move(t));
    }
    return header.incomplete;
  }

  void index_names() {
    by_name.reserve(tensors.size());
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      const TensorInfo& t = tensors[i];
      const auto [it, fresh] = by_name.emplace(t.name, i);
      if (fresh) continue;
      const TensorInfo& first = tensors[it->second];
      fail(fmt::format("tensor {} stands in two files of {}: {} (bytes {} .. {}) and {} (bytes {} .. {})",
                       printable(t.name), folder.string(), files[first.file].name, first.offset,
                       first.offset + first.bytes, files[t.file].name, t.offset, t.offset + t.bytes));
    }
  }

  // Compares weight_map with the headers. `harmless` gets what does not keep the pack from being used.
  void compare(const CheckpointIndex& index, const std::set<std::string>& absent, std::vector<std::string>& harmless) {
    std::map<std::string_view, uint32_t> file_numbers;
    for (uint32_t f = 0; f < files.size(); ++f) file_numbers[files[f].name] = f;
    std::vector<std::string> missing, misplaced, unlisted;
    for (const auto& [name, shard_number] : index.weight_map) {
      const std::string& shard = index.shards[shard_number];
      const TensorInfo* t = find(name);
      if (t == nullptr && !absent.contains(shard))
        missing.push_back(fmt::format("{} ({})", printable(name), printable(shard)));
      if (t != nullptr && files[t->file].name != shard)
        misplaced.push_back(
            fmt::format("{} (index: {}, found in {})", printable(name), printable(shard), files[t->file].name));
    }
    for (const TensorInfo& t : tensors)
      if (files[t.file].in_index && !index.weight_map.contains(t.name))
        unlisted.push_back(fmt::format("{} ({})", printable(t.name), files[t.file].name));
    std::sort(missing.begin(), missing.end());
    std::sort(misplaced.begin(), misplaced.end());
    if (!missing.empty())
      problems.push_back(
          fmt::format("{} names {} tensors that no shard holds: {}", kIndexName, missing.size(), short_list(missing)));
    if (!misplaced.empty())
      problems.push_back(
          fmt::format("{} places {} tensors wrongly: {}", kIndexName, misplaced.size(), short_list(misplaced)));
    if (!unlisted.empty())
      harmless.push_back(
          fmt::format("weight_map lacks {} tensors that are present: {}", unlisted.size(), short_list(unlisted)));
  }

  const TensorInfo* find(std::string_view name) const {
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : &tensors[it->second];
  }

  void open_folder(bool strict) {
    Listing listing = list_folder(folder);
    if (listing.tensor_files.empty() && listing.partial.empty() && !listing.index)
      fail(fmt::format("{} holds no *.safetensors file; give the folder of a checkpoint", folder.string()));

    CheckpointIndex index;
    if (listing.index) {
      const fs::path path = folder / kIndexName;
      index = parse_checkpoint_index(MappedFile::open(path)->bytes(), path.string());
    }
    std::vector<std::string> shards = index.shards;
    if (!listing.index) shards.assign(listing.tensor_files.begin(), listing.tensor_files.end());
    std::sort(shards.begin(), shards.end());

    std::vector<std::string> lacks, cut, harmless;
    if (!listing.config) lacks.push_back("config.json");
    std::set<std::string> absent;
    if (!listing.index) absent = absent_of_series(listing.tensor_files);
    const auto add = [&](const std::string& name, bool in_index) {
      if (std::string how = add_file(name, in_index); !how.empty()) cut.push_back(std::move(how));
    };
    for (const std::string& shard : shards) {
      std::error_code error;
      if (fs::is_regular_file(folder / shard, error))
        add(shard, true);
      else
        absent.insert(shard);
      listing.tensor_files.erase(shard);
    }
    for (const std::string& side : listing.tensor_files) add(side, false);
    for (const std::string& shard : absent) lacks.push_back(printable(shard));

    if (!lacks.empty()) problems.push_back(fmt::format("incomplete: missing {}", fmt::join(lacks, ", ")));
    for (const std::string& how : cut) problems.push_back("incomplete: " + how);
    if (!listing.partial.empty())
      problems.push_back(
          fmt::format("incomplete: unfinished downloads {}; finish or delete them", fmt::join(listing.partial, ", ")));
    index_names();
    if (listing.index) compare(index, absent, harmless);
    if (strict && !problems.empty())
      fail(fmt::format("checkpoint {} is not usable: {}", folder.string(), fmt::join(problems, "; ")));
    problems.insert(problems.end(), harmless.begin(), harmless.end());
  }
};

Checkpoint::Checkpoint(const fs::path& path, const CheckpointOptions& options) : impl_(std::make_unique<Impl>()) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail(fmt::format("checkpoint folder {} does not exist", path.string()));
  if (fs::is_directory(status)) {
    impl_->folder = path;
    impl_->open_folder(options.strict);
    return;
  }
  if (options.strict) fail(fmt::format("{} is a file; give the folder of the checkpoint", path.string()));
  impl_->folder = path.parent_path();
  if (std::string how = impl_->add_file(path.filename().string(), true); !how.empty())
    impl_->problems.push_back("incomplete: " + how);
  impl_->index_names();
}

Checkpoint::~Checkpoint() = default;

const fs::path& Checkpoint::folder() const { return impl_->folder; }
const std::vector<std::string>& Checkpoint::problems() const { return impl_->problems; }
std::span<const SourceFile> Checkpoint::files() const { return impl_->files; }
std::span<const TensorInfo> Checkpoint::tensors() const { return impl_->tensors; }
const TensorInfo* Checkpoint::find(std::string_view name) const { return impl_->find(name); }

TensorData Checkpoint::read(const TensorInfo& t) const {
  const auto& map = impl_->maps.at(t.file);
  const auto file = map->bytes();
  if (t.offset > file.size() || t.bytes > file.size() - t.offset)
    fail(fmt::format("incomplete: tensor {} ends at byte {} of {}, which has {}", printable(t.name), t.offset + t.bytes,
                     impl_->files[t.file].name, file.size()));
  const auto bytes = file.subspan(t.offset, t.bytes);
  const size_t element = t.dtype ? dtype_size(*t.dtype) : 1;
  if (t.offset % element == 0) return {bytes, map};
  // Header lengths are arbitrary, so a data area may start at an odd address.
  constexpr std::align_val_t kAlign{64};
  std::shared_ptr<std::byte> copy(static_cast<std::byte*>(::operator new(t.bytes, kAlign)),
                                  [](std::byte* p) { ::operator delete(p, kAlign); });
  if (t.bytes > 0) std::memcpy(copy.get(), bytes.data(), t.bytes);
  return {{copy.get(), t.bytes}, copy};
}

}  // namespace fnx
