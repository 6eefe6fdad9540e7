// Included by one source per instruction set, which defines the vector traits V: Reg, kLanes, zero, set1, fma, store,
// load(const float*), load(const uint16_t*). No other header may be included here: these units have special flags.

namespace {

// kCols outputs of a panel at once, so that the accumulators fit the registers.
template <class V, class T, int kRows, int kCols>
inline void panel_block(const T* panel, int64_t in, const float* x, int64_t stride, double* acc) {
  constexpr int kVecs = kCols / V::kLanes;
  typename V::Reg sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) sum[r][v] = V::zero();
  for (int64_t k = 0; k < in; ++k) {
    typename V::Reg w[kVecs];
    for (int v = 0; v < kVecs; ++v) w[v] = V::load(panel + k * kPanel + v * V::kLanes);
    for (int r = 0; r < kRows; ++r) {
      const typename V::Reg xv = V::set1(x[r * stride + k]);
      for (int v = 0; v < kVecs; ++v) sum[r][v] = V::fma(xv, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVecs; ++v) V::store(acc + r * kPanel + v * V::kLanes, sum[r][v]);
}

template <class V, class T>
void panel(const void* data, int64_t in, const float* x, int64_t stride, int rows, double* acc) {
  const T* w = static_cast<const T*>(data);
  constexpr int kCols = V::kPanelColumns;
  for (int c = 0; c < kPanel; c += kCols) {
    switch (rows) {
      case 1:
        panel_block<V, T, 1, kCols>(w + c, in, x, stride, acc + c);
        break;
      case 2:
        panel_block<V, T, 2, kCols>(w + c, in, x, stride, acc + c);
        break;
      case 3:
        panel_block<V, T, 3, kCols>(w + c, in, x, stride, acc + c);
        break;
      default:
        panel_block<V, T, 4, kCols>(w + c, in, x, stride, acc + c);
        break;
    }
  }
}

}  // namespace
