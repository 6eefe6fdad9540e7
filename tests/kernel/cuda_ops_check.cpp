// Compares every CUDA operation with the cpu backend's and checks that a row's bits are its own.
#include "ops_check.h"

#include <algorithm>

#include "kernels/cuda/embed.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/norm_hc.h"

namespace fnx::check {

namespace {

void check_embed(Backend& cpu, Stream& stream) {
  const int64_t rows = 7, copies = 4, width = 2560, vocabulary = 301;
  std::vector<int32_t> tokens;
  for (int64_t r = 0; r < rows; ++r) tokens.push_back(static_cast<int32_t>(r * 97 % vocabulary));
  for (DType type : {DType::F16, DType::BF16, DType::F32}) {
    std::vector<uint16_t> half = halves(vocabulary * width, 1, type);
    std::vector<float> full = normal(vocabulary * width), ref(rows * copies * width);
    const bool wide = type == DType::F32;
    cpu.embed(stream, view(tokens, DType::I32, {rows}),
              wide ? view(full, {vocabulary, width}) : view(half, type, {vocabulary, width}),
              view(ref, {rows, copies, width}));
    Device<int32_t> ids(tokens);
    Device<uint16_t> h(half);
    Device<float> f(full), out(ref.size());
    const void* table = wide ? static_cast<void*>(f.get()) : h.get();
    cuda::embed({ids, table, type, out, rows, copies, width}, nullptr);
    same(std::string("embed ") + dtype_name(type), out.take(), ref);
  }
  std::vector<float> a = normal(12 * 100), b = normal(3 * 100), ref(a.size());
  cpu.add(stream, 4, view(a, {12, 100}), view(b, {3, 100}), view(ref, {12, 100}));
  Device<float> da(a), db(b), out(a.size()), gathered(3 * 100);
  cuda::add({da, db, out, 12, 100, 4}, nullptr);
  same("add repeat 4", out.take(), ref);
  Device<int32_t> ids(std::vector<int32_t>{11, 0, 5});
  cuda::move_rows({ids, out.get(), gathered.get(), 3, 400, false}, nullptr);
  std::vector<float> want;
  for (int r : {11, 0, 5}) want.insert(want.end(), ref.begin() + r * 100, ref.begin() + r * 100 + 100);
  same("move_rows gather", gathered.take(), want);
  cuda::move_rows({ids, gathered.get(), da.get(), 3, 400, true}, nullptr);
  std::vector<float> scattered = a;
  for (int r : {11, 0, 5}) std::copy_n(ref.begin() + r * 100, 100, scattered.begin() + r * 100);
  same("move_rows scatter", da.take(), scattered);
}

void check_norm(Backend& cpu, Stream& stream) {
  for (auto [groups, group] : {std::pair<int64_t, int64_t>{4, 256}, {4, 2560}, {1, 100}, {2, 8192}}) {
    const int64_t rows = 9, width = groups * group;
    std::vector<float> x = normal(rows * width, 3), w = normal(width, 0.1f), ref(x.size());
    cpu.grouped_norm(stream, {view(w, {width}), 1e-6f}, group, view(x, {rows, width}), view(ref, {rows, width}));
    Device<float> dx(x), dw(w), out(x.size()), alone(width);
    cuda::grouped_norm({dx, dw, out, rows, groups, group, 1e-6f}, nullptr);
    const std::string name = "grouped_norm " + std::to_string(groups) + " x " + std::to_string(group);
    near(name, out.take(), ref);
    cuda::grouped_norm({dx + 5 * width, dw, alone, 1, groups, group, 1e-6f}, nullptr);
    same(name + " row alone", alone.take(), slice(out.take(), 5 * width, width));
  }
}

void check_linear(Backend& cpu, Stream& stream) {
  struct Case {
    int64_t out, in;
    DType type;
    bool bias;
  };
  for (const Case& c : {Case{320, 10240, DType::F16, false},
                        {4, 10240, DType::F16, false},
                        {512, 2560, DType::F16, false},
                        {48, 2560, DType::F16, true},
                        {1, 2560, DType::F16, false},
                        {10240, 320, DType::F16, false},
                        {2560, 2560, DType::F16, true},
                        {33, 200, DType::F16, true},
                        {32, 256, DType::F16, false},
                        {40, 101, DType::F16, true},
                        {64, 512, DType::BF16, true},
                        {64, 500, DType::F32, false}}) {
    const int64_t rows = 1500, few = 4;
    const float sigma = 1.0f / std::sqrt(static_cast<float>(c.in));
    const bool wide = c.type == DType::F32;
    auto half = std::make_shared<std::vector<uint16_t>>(halves(c.out * c.in, sigma, c.type));
    auto full = std::make_shared<std::vector<float>>(normal(wide ? c.out * c.in : 1, sigma));
    std::vector<float> x = normal(rows * c.in), bias = normal(c.out), ref(few * c.out);
    LinearSource s;
    s.in = c.in, s.out = c.out, s.plain_dtype = c.type;
    s.plain = wide ? static_cast<void*>(full->data()) : half->data();
    if (c.bias) s.bias = bias;
    s.owner = {half, full};
    auto linear = cpu.load_linear(std::move(s));
    cpu.linear(stream, *linear, view(x, {rows, c.in}).rows(0, few), view(ref, {few, c.out}));

    Device<uint16_t> dh(*half);
    Device<float> df(*full), dx(x), db(bias), y(rows * c.out), part(rows * c.out),
        partials(cuda::plain_partials(rows, c.in, c.out));
    Device<uint32_t> counters(cuda::plain_counters(c.in, c.out));
    counters.zero();
    const auto run = [&](int64_t first, int64_t count, float* to) {
      cuda::PlainLinearParams p{wide ? static_cast<void*>(df.get()) : dh.get(),
                                c.type,
                                c.bias ? db.get() : nullptr,
                                dx + first * c.in,
                                to,
                                count,
                                c.in,
                                c.out,
                                {partials, counters}};
      cuda::plain_linear(p, nullptr);
    };
    run(0, rows, y);
    const std::vector<float> all = y.take();
    const std::string name =
        "linear [" + std::to_string(c.out) + ", " + std::to_string(c.in) + "] " + dtype_name(c.type);
    near(name, slice(all, 0, ref.size()), ref);
    bool equal = true;
    for (auto [first, count] : {std::pair<int64_t, int64_t>{0, 1},
                                {7, 1},
                                {3, 2},
                                {11, 8},
                                {20, 9},
                                {5, 16},
                                {100, 17},
                                {30, 64},
                                {2, 65},
                                {299, 1},
                                {1, 128},
                                {40, 1100}}) {
      part.poison();
      run(first, count, part);
      const std::vector<float> got = slice(part.take(), 0, count * c.out);
      equal = equal && std::memcmp(got.data(), all.data() + first * c.out, got.size() * 4) == 0;
    }
    report(equal, name + " windows of 1 to 128 rows", equal ? "same bits" : "other bits");
  }
}

void check_hc(Backend& cpu, Stream& stream) {
  for (auto [hidden, rank] : {std::pair<int64_t, int64_t>{256, 32}, {80, 24}, {80, 32}, {2560, 320}}) {
    const int64_t n = 4, rows = 300, few = 5, wide = n * hidden;
    std::vector<float> stack = normal(rows * wide, 2), w = normal(wide, 0.1f), u(few * hidden), inj(few * n),
                       y = normal(rows * hidden);
    const auto make = [&](int64_t out, int64_t in) {
      return std::make_shared<std::vector<uint16_t>>(halves(out * in, 2.0f / std::sqrt(static_cast<float>(in))));
    };
    auto down = make(rank, wide), up = make(wide, rank), inject = make(n, wide);
    const auto load = [&](auto& values, int64_t out, int64_t in) {
      LinearSource s;
      s.in = in, s.out = out, s.plain = values->data(), s.owner = {values};
      return cpu.load_linear(std::move(s));
    };
    auto ld = load(down, rank, wide), lu = load(up, wide, rank), li = load(inject, n, wide);
    HcWeights hw{{view(w, {wide}), 1e-6f}, ld.get(), lu.get(), li.get()};
    cpu.hc_mix(stream, hw, {}, view(stack, {rows, n, hidden}).rows(0, few), view(u, {few, hidden}),
               view(inj, {few, n}));

    Device<uint16_t> dd(*down), du(*up), di(*inject);
    Device<float> ds(stack), dw(w), ou(rows * hidden), oi(rows * n), normed(rows * wide), low(rows * rank),
        partials(cuda::hc_partials(rows, n, hidden, rank)), dy(y);
    Device<uint32_t> counters(cuda::hc_counters(n, hidden, rank));
    counters.zero();
    const auto run = [&](int64_t first, int64_t count) {
      ou.poison(), oi.poison();
      cuda::hc_mix({ds + first * wide,
                    dw,
                    1e-6f,
                    dd.get(),
                    du.get(),
                    di.get(),
                    ou,
                    oi,
                    count,
                    n,
                    hidden,
                    rank,
                    normed,
                    low,
                    {partials, counters}},
                   nullptr);
    };
    run(0, rows);
    const std::vector<float> all_u = ou.take(), all_i = oi.take();
    const std::string name = "hc_mix " + std::to_string(hidden);
    near(name + " u", slice(all_u, 0, u.size()), u);
    near(name + " inj", slice(all_i, 0, inj.size()), inj);
    for (auto [first, count] :
         {std::pair<int64_t, int64_t>{3, 1}, {21, 2}, {30, 8}, {10, 12}, {6, 64}, {3, 70}, {9, 290}}) {
      run(first, count);
      const std::string rows_name = name + " rows " + std::to_string(count);
      same(rows_name + " u", slice(ou.take(), 0, count * hidden), slice(all_u, first * hidden, count * hidden));
      same(rows_name + " inj", slice(oi.take(), 0, count * n), slice(all_i, first * n, count * n));
    }
    cpu.hc_inject(stream, {view(inj, {few, n}), view(y, {few, hidden})}, view(stack, {few, n, hidden}));
    Device<float> di2(inj);
    cuda::hc_inject({di2, dy, ds, few, n, hidden}, nullptr);
    near("hc_inject " + std::to_string(hidden), slice(ds.take(), 0, few * wide), slice(stack, 0, few * wide));
  }
}

void check_moe(Backend& cpu, Stream& stream) {
  for (auto [experts, k] : {std::pair<int64_t, int64_t>{512, 10}, {32, 4}, {1000, 32}, {5, 5}}) {
    const int64_t rows = 64;
    std::vector<float> logits = normal(rows * experts, 2), weights(rows * k);
    for (int64_t i = 0; i < experts; ++i) logits[i] = static_cast<float>(i % 3);  // ties
    for (int64_t i = 0; i < experts; ++i) logits[experts + i] = NAN;
    std::vector<int32_t> ids(rows * k);
    cpu.router(stream, true, view(logits, {rows, experts}), view(ids, DType::I32, {rows, k}), view(weights, {rows, k}));
    Device<float> dl(logits), dw(weights.size());
    Device<int32_t> di(ids.size());
    cuda::router({dl, di, dw, rows, experts, k, true}, nullptr);
    const std::string name = "router " + std::to_string(experts) + " top " + std::to_string(k);
    same(name + " ids", di.take(), ids);
    const std::vector<float> got = dw.take();
    report(std::isnan(got[k]) && std::isnan(weights[k]), name + " NaN row", "weights are NaN");
    std::vector<float> clean = got;
    std::fill_n(clean.begin() + k, k, 0.0f), std::fill_n(weights.begin() + k, k, 0.0f);
    near(name + " weights", clean, weights);
    Device<float> alone(k);
    Device<int32_t> alone_ids(k);
    cuda::router({dl + 9 * experts, alone_ids, alone, 1, experts, k, true}, nullptr);
    same(name + " row alone", alone.take(), slice(got, 9 * k, k));
  }
  const int64_t rows = 6, k = 10, hidden = 2560, width = 640;
  std::vector<float> gate = normal(rows * width, 2), up = normal(rows * width), act(gate.size());
  cpu.swiglu(stream, view(gate, {rows, width}), view(up, {rows, width}), view(act, {rows, width}));
  Device<float> dg(gate), du(up), da(act.size());
  cuda::swiglu({dg, du, da, rows * width}, nullptr);
  near("swiglu", da.take(), act);
  std::vector<float> slots = normal(rows * k * hidden), w = normal(rows * k), shared = normal(rows * hidden),
                     sg = normal(rows), y(rows * hidden);
  cpu.combine(stream, view(slots, {rows, k, hidden}), view(w, {rows, k}), view(shared, {rows, hidden}),
              view(sg, {rows, 1}), view(y, {rows, hidden}));
  Device<float> dslots(slots), dw(w), dshared(shared), dsg(sg), dy(y.size()), alone(hidden);
  cuda::combine({dslots, dw, dshared, dsg, dy, rows, k, hidden}, nullptr);
  near("combine", dy.take(), y);
  cuda::combine({dslots + 3 * k * hidden, dw + 3 * k, dshared + 3 * hidden, dsg + 3, alone, 1, k, hidden}, nullptr);
  same("combine row alone", alone.take(), slice(dy.take(), 3 * hidden, hidden));
}

}  // namespace

void check_dense(Backend& cpu) {
  auto stream = cpu.make_stream();
  check_embed(cpu, *stream);
  check_norm(cpu, *stream);
  check_linear(cpu, *stream);
  check_hc(cpu, *stream);
  check_moe(cpu, *stream);
}

}  // namespace fnx::check

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("not run: this machine has no CUDA device\n");
    return 77;
  }
  using namespace fnx::check;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string only = argc > 1 ? argv[1] : "";
  auto cpu = fnx::make_cpu_backend();
  if (only.empty() || only == "dense") check_dense(*cpu);
  if (only.empty() || only == "state") check_state(*cpu);
  if (only.empty() || only == "qsa") check_qsa(*cpu);
  if (only.empty() || only == "sample") check_sample(*cpu);
  cuda(cudaDeviceSynchronize(), "all launches");
  std::printf("%d/%d checks pass\n", checks - failures, checks);
  return failures == 0 && checks > 0 ? 0 : 1;
}
