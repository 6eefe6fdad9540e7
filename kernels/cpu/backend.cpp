// Memory, copies and the element-wise operations of the cpu backend.
#include "kernels/cpu/backend.h"

#include <sys/sysinfo.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/cpu/math.h"
#include "kernels/error.h"
#include "kernels/float16.h"

namespace fnx {

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
  return std::make_unique<cpu::CpuBackend>(options);
}

namespace cpu {

namespace {
uint64_t physical_memory() {
  struct sysinfo info {};
  return sysinfo(&info) == 0 ? uint64_t{info.totalram} * info.mem_unit : uint64_t{1} << 32;
}
int thread_count(int asked) {
  return asked > 0 ? asked : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}
}  // namespace

CpuBackend::CpuBackend(const CpuOptions& options) : pool_(thread_count(options.threads)) {
  budget_.limit = options.decoded_cache_bytes != 0 ? options.decoded_cache_bytes : physical_memory() / 2;
}

void CpuBackend::each(int64_t count, int64_t work_per_item, const std::function<void(int64_t)>& fn) {
  if (count * work_per_item < 16384)
    for (int64_t i = 0; i < count; ++i) fn(i);
  else
    pool_.run(count, fn);
}

Buffer CpuBackend::allocate(size_t bytes, Space) {
  void* data = std::calloc(std::max<size_t>(bytes, 1), 1);
  if (data == nullptr)
    throw Error(ErrorKind::Unsupported, "cannot allocate " + std::to_string(bytes) +
                                            " bytes of memory; this machine has " + std::to_string(physical_memory()) +
                                            "; lower --parallel or the context");
  return Buffer(static_cast<std::byte*>(data), bytes, Space::Host, [](std::byte* p) { std::free(p); });
}

void CpuBackend::copy(Stream&, View dst, View src) {
  if (dst.bytes() != src.bytes())
    throw Error(ErrorKind::Internal,
                "copy of " + std::to_string(src.bytes()) + " bytes into " + std::to_string(dst.bytes()));
  if (dst.bytes() > 0) std::memmove(dst.data, src.data, dst.bytes());
}

void CpuBackend::clear(Stream&, View dst) { std::memset(dst.data, 0, dst.bytes()); }

void CpuBackend::gather(Stream&, View ids, View from, View to, const RowCopies& copies) {
  const int64_t bytes = to.row_size() * static_cast<int64_t>(dtype_size(to.dtype));
  each(ids.size(), bytes / 4, [&](int64_t i) {
    const int64_t row = ids.as<int32_t>()[i], place = copies ? copies.places.as<int32_t>()[i] : -1;
    if (row < 0) return;
    std::memcpy(to.data + i * bytes, from.data + row * bytes, bytes);
    if (place >= 0) std::memcpy(copies.to.data + place * bytes, from.data + row * bytes, bytes);
  });
}

void CpuBackend::embed(Stream&, View tokens, View table, View out) {
  const int64_t rows = tokens.size(), copies = out.shape[1], width = out.shape[2];
  const int32_t* ids = tokens.as<int32_t>();
  each(rows, copies * width, [&](int64_t r) {
    float* to = out.as<float>() + r * copies * width;
    const int64_t at = int64_t{ids[r]} * width;
    for (int64_t i = 0; i < width; ++i) switch (table.dtype) {
        case DType::F32:
          to[i] = table.as<float>()[at + i];
          break;
        case DType::F16:
          to[i] = f16_to_f32(table.as<uint16_t>()[at + i]);
          break;
        default:
          to[i] = bf16_to_f32(table.as<uint16_t>()[at + i]);
      }
    for (int64_t c = 1; c < copies; ++c) std::copy_n(to, width, to + c * width);
  });
}

void CpuBackend::grouped_norm(Stream&, const NormWeights& w, int64_t group, View x, View out) {
  const int64_t width = w.weight.size(), rows = x.size() / width;
  each(rows, width, [&](int64_t r) {
    for (int64_t g = 0; g < width; g += group) {
      const float* from = x.as<float>() + r * width + g;
      scale_centred(from, w.weight.as<float>() + g, inverse_rms(from, group, w.eps), group,
                    out.as<float>() + r * width + g);
    }
  });
}

void CpuBackend::add(Stream&, int64_t repeat, View a, View b, View out) {
  const int64_t rows = a.shape[0], width = a.row_size();
  each(rows, width, [&](int64_t r) {
    const float* x = a.as<float>() + r * width;
    const float* y = b.as<float>() + r / repeat * width;
    float* to = out.as<float>() + r * width;
    for (int64_t i = 0; i < width; ++i) to[i] = x[i] + y[i];
  });
}

void CpuBackend::hc_mix(Stream& stream, const HcWeights& w, const Injection& lacking, View stack, View u, View inj) {
  if (lacking) hc_inject(stream, lacking, stack);
  auto& s = static_cast<CpuStream&>(stream);
  const int64_t rows = stack.shape[0], n = stack.shape[1], hidden = stack.shape[2], wide = n * hidden;
  const int64_t rank = w.down->out;
  const auto scratch = [&](int i, int64_t width) {
    return View{reinterpret_cast<std::byte*>(s.scratch(i, rows * width)), DType::F32, Space::Host, 2, {rows, width}};
  };
  const View xn = scratch(0, wide), low = scratch(1, rank), mix = scratch(2, wide);
  grouped_norm(stream, w.norm, hidden, stack, xn);
  linear(stream, *w.down, xn, low);
  float* l = low.as<float>();
  for (int64_t i = 0; i < rows * rank; ++i) l[i] = static_cast<float>(silu(double{l[i]} / static_cast<double>(n)));
  linear(stream, *w.up, low, mix);
  each(rows, wide * 8, [&](int64_t r) {
    const float* x = xn.as<float>() + r * wide;
    const float* m = mix.as<float>() + r * wide;
    for (int64_t h = 0; h < hidden; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < n; ++t) sum += sigmoid(m[t * hidden + h]) * x[t * hidden + h];
      u.as<float>()[r * hidden + h] = static_cast<float>(sum / static_cast<double>(n));
    }
  });
  if (w.inject == nullptr) return;
  linear(stream, *w.inject, xn, inj);
  float* to = inj.as<float>();
  for (int64_t i = 0; i < rows * n; ++i)
    to[i] = static_cast<float>(2.0 * sigmoid(double{to[i]} / static_cast<double>(n)));
}

void CpuBackend::hc_inject(Stream&, const Injection& lacking, View stack) {
  const int64_t rows = stack.shape[0], n = stack.shape[1], hidden = stack.shape[2];
  each(rows, n * hidden, [&](int64_t r) {
    for (int64_t t = 0; t < n; ++t) {
      const double g = lacking.inj.as<float>()[r * n + t];
      const float* from = lacking.y.as<float>() + r * hidden;
      float* to = stack.as<float>() + (r * n + t) * hidden;
      for (int64_t h = 0; h < hidden; ++h) to[h] = static_cast<float>(to[h] + g * from[h]);
    }
  });
}

}  // namespace cpu
}  // namespace fnx
