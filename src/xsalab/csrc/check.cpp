// What the build asks before the kernels are used: is the product of this processor right?
#include <torch/library.h>

#include <cmath>
#include <string>

#include "tiles.h"

namespace {

// Largest error of the 32 × 32 product against a plain loop, in units of the sum of absolute terms.
double product_error() {
  using namespace xsalab;
  constexpr long K = 96, LDA = K + 32, LDC = 48;
  Tiles tiles;
  Scratch<bf16> a(TILE * LDA), b(TILE * K), panel(TILE * K);
  Scratch<float> c(TILE * LDC);
  uint32_t state = 1;
  auto draw = [&] {  // a number of −1 to 1 in bfloat16
    state = state * 1664525u + 1013904223u;
    float x = float(int32_t(state)) / 2147483648.f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bf16(bits >> 16);
  };
  for (long i = 0; i < TILE * LDA; i++) a[i] = draw();
  for (long i = 0; i < TILE * K; i++) b[i] = draw();
  pack_rows(b, K, TILE, K, panel);
  product(a, LDA, panel, K, c, LDC, false);
  product(a, LDA, panel, K, c, LDC, true);  // twice: adding is part of what is checked
  double worst = 0;
  for (long i = 0; i < TILE; i++)
    for (long j = 0; j < TILE; j++) {
      double sum = 0, size = 0;
      for (long k = 0; k < K; k++) {
        double term = 2.0 * widen(a[i * LDA + k]) * widen(b[j * K + k]);
        sum += term, size += std::abs(term);
      }
      worst = std::max(worst, std::abs(c[i * LDC + j] - sum) / size);
    }
  return worst;
}

std::string instructions() { return xsalab::has_amx() ? "AMX" : "AVX512-BF16"; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def("product_error() -> float", product_error);
  m.def("instructions() -> str", instructions);
}
