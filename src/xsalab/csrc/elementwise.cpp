// Sums with their RMS norm, and smearing: forward and backward in one pass each, bfloat16 in memory, float32 in
// registers. Widths are multiples of 32; Python asks.
#include <torch/library.h>

#include <tuple>

#include "rows.h"

namespace {

using namespace xsalab;

// As it will be read again: rounded to bfloat16.
inline __m512 store_rounded(bf16* p, __m512 x) {
  const __m256i low = narrow(x);
  _mm256_storeu_si256((__m256i*)p, low);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}

// ---- norms

// scale · x · factor over the last axis, and the factors.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& given, double eps, double scale) {
  check(given, "x");
  const Tensor x = given.contiguous();
  const long width = width_of(x), rows = x.numel() / width;
  Tensor y = at::empty_like(x), factors = row_factors(x);
  const bf16* from = in(x);
  bf16* to = out(y);
  float* factor = factors.mutable_data_ptr<float>();
  over_blocks(rows, [&](long, long first, long last) {
    for (long r = first; r < last; r++) {
      factor[r] = factor_of(squares_of(from + r * width, width), width, eps);
      scale_row(from + r * width, width, float(scale) * factor[r], to + r * width);
    }
  });
  return {y, factors};
}

// r x + b y, 1 where r or b is none, and its norm: (sum, norm of the sum as it is rounded, factors).
std::tuple<Tensor, Tensor, Tensor> mix_norm(const Tensor& given_x, const Tensor& given_y, const optional<Tensor>& r,
                                            const optional<Tensor>& b, double eps) {
  check(given_x, "x");
  check_like(given_y, given_x, "y");
  const Tensor x = given_x.contiguous(), y = given_y.contiguous();
  const long width = width_of(x), rows = x.numel() / width;
  Tensor mixed = at::empty_like(x), normed = at::empty_like(x), factors = row_factors(x);
  const bf16 *px = in(x), *py = in(y);
  bf16 *pm = out(mixed), *pn = out(normed);
  float* factor = factors.mutable_data_ptr<float>();
  const __m512 of_x = set1(number(r, 1)), of_y = set1(number(b, 1));
  over_blocks(rows, [&](long, long first, long last) {
    for (long row = first; row < last; row++) {
      const long at = row * width;
      __m512 squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      for (long i = at; i < at + width; i += 32)
        for (long half = 0; half < 2; half++) {
          const __m512 part = _mm512_mul_ps(load(px + i + 16 * half), of_x);
          const __m512 m = store_rounded(pm + i + 16 * half, _mm512_fmadd_ps(load(py + i + 16 * half), of_y, part));
          squares[half] = square(m, squares[half]);
        }
      factor[row] = factor_of(sum(_mm512_add_ps(squares[0], squares[1])), width, eps);
      scale_row(pm + at, width, factor[row], pn + at);
    }
  });
  return {mixed, normed, factors};
}

// The gradient of x, with ``added`` to it, from what rms_norm gave.
Tensor rms_norm_backward(const Tensor& given, const optional<Tensor>& given_added, const Tensor& y,
                         const Tensor& factors, double scale) {
  check_like(given, y, "grad");
  if (given_added) check_like(*given_added, y, "added");
  const Tensor grad = given.contiguous(), added = given_added ? given_added->contiguous() : Tensor();
  const long width = width_of(y), rows = y.numel() / width;
  TORCH_CHECK(y.is_contiguous() && factors.numel() == rows, "y and factors are those that the forward pass gave");
  Tensor dx = at::empty_like(y);
  const bf16 *pg = in(grad), *py = in(y), *pa = added.defined() ? in(added) : nullptr;
  bf16* to = out(dx);
  const float* factor = floats(factors);
  const float unscale = 1.f / (float(scale) * float(scale) * float(width));
  over_blocks(rows, [&](long, long first, long last) {
    for (long r = first; r < last; r++) {
      const long at = r * width;
      const __m512 along = set1(dot(pg + at, py + at, width) * unscale), by = set1(float(scale) * factor[r]);
      for (long i = at; i < at + width; i += 16) {
        const __m512 across = _mm512_fnmadd_ps(along, load(py + i), load(pg + i));
        store(to + i, pa ? _mm512_fmadd_ps(by, across, load(pa + i)) : _mm512_mul_ps(by, across));
      }
    }
  });
  return dx;
}

// The gradients of x, y, r and b from those of both results of mix_norm: (dx, dy, [dr, db]).
std::tuple<Tensor, Tensor, Tensor> mix_norm_backward(const Tensor& given_added, const Tensor& given,
                                                     const Tensor& normed, const Tensor& factors,
                                                     const optional<Tensor>& given_x, const Tensor& given_y,
                                                     const optional<Tensor>& r, const optional<Tensor>& b) {
  check_like(given_added, normed, "the sum's gradient");
  check_like(given, normed, "the norm's gradient");
  check_like(given_y, normed, "y");
  if (given_x) check_like(*given_x, normed, "x");
  TORCH_CHECK(given_x || !r, "the gradient of r needs x");
  const Tensor added = given_added.contiguous(), grad = given.contiguous();
  const Tensor y = given_y.contiguous(), x = given_x ? given_x->contiguous() : y;  // any: dr is then not asked for
  const long width = width_of(normed), rows = normed.numel() / width;
  TORCH_CHECK(normed.is_contiguous() && factors.numel() == rows, "norm and factors are those of the forward pass");
  Tensor dx = at::empty_like(normed), dy = at::empty_like(normed), totals = at::zeros({2}, factors.options());
  const bf16 *pa = in(added), *pg = in(grad), *pn = in(normed), *px = in(x), *py = in(y);
  bf16 *to_x = out(dx), *to_y = out(dy);
  const float* factor = floats(factors);
  const __m512 of_x = set1(number(r, 1)), of_y = set1(number(b, 1));
  Scratch<float> parts((rows + ROWS - 1) / ROWS * 2);
  float* part = parts;
  over_blocks(rows, [&](long block, long first, long last) {
    __m512 sum_r = _mm512_setzero_ps(), sum_b = sum_r;
    for (long row = first; row < last; row++) {
      const long at = row * width;
      const __m512 along = set1(dot(pg + at, pn + at, width) / float(width)), by = set1(factor[row]);
      for (long i = at; i < at + width; i += 16) {
        const __m512 across = _mm512_fnmadd_ps(along, load(pn + i), load(pg + i));
        const __m512 d = _mm512_fmadd_ps(by, across, load(pa + i));
        sum_r = _mm512_fmadd_ps(d, load(px + i), sum_r);
        sum_b = _mm512_fmadd_ps(d, load(py + i), sum_b);
        store(to_x + i, _mm512_mul_ps(d, of_x));
        store(to_y + i, _mm512_mul_ps(d, of_y));
      }
    }
    part[2 * block] = sum(sum_r), part[2 * block + 1] = sum(sum_b);
  });
  double sums[2] = {0, 0};
  for (long i = 0; i < (rows + ROWS - 1) / ROWS * 2; i++) sums[i % 2] += part[i];
  for (long i = 0; i < 2; i++) totals.mutable_data_ptr<float>()[i] = float(sums[i]);
  return {dx, dy, totals};
}

// ---- smearing

struct Smear {
  Tensor x, weight;
  long length, width, rows, channels;
  float strength;
};

Smear smear_of(const Tensor& x, const Tensor& weight, const Tensor& strength) {
  check(x, "x");
  check(weight, "weight");
  TORCH_CHECK(x.dim() == 3 && weight.numel() <= x.size(2), "x (b, t, c) and at most c weights are needed");
  const long length = x.size(1), rows = x.size(0) * length, channels = weight.numel();
  return {x.contiguous(), weight.contiguous(), length, width_of(x), rows, channels, number(strength, 0)};
}

inline float gate_of(const bf16* x, const bf16* weight, long channels) {
  __m512 total = _mm512_setzero_ps();
  for (long i = 0; i < channels; i += 16)
    total = _mm512_fmadd_ps(load_some(x + i, channels - i), load_some(weight + i, channels - i), total);
  return _mm512_cvtss_f32(sigmoid(set1(sum(total))));
}

// x_t + strength · σ(⟨weight, x_t[:k]⟩) · x_{t−1}; the first token of each row as it is. Second: σ (b, t).
std::tuple<Tensor, Tensor> smear(const Tensor& given, const Tensor& weight, const Tensor& strength) {
  const Smear a = smear_of(given, weight, strength);
  Tensor y = at::empty_like(a.x), gates = at::empty({a.rows}, a.x.options().dtype(at::kFloat));
  const bf16 *from = in(a.x), *w = in(a.weight);
  bf16* to = out(y);
  float* gate = gates.mutable_data_ptr<float>();
  over_blocks(a.rows, [&](long, long first, long last) {
    for (long r = first; r < last; r++) {
      const bf16* x = from + r * a.width;
      const bool alone = r % a.length == 0;
      gate[r] = alone ? 0 : gate_of(x, w, a.channels);
      if (alone) {
        std::memcpy(to + r * a.width, x, a.width * sizeof(bf16));
        continue;
      }
      const __m512 by = set1(a.strength * gate[r]);
      for (long i = 0; i < a.width; i += 16)
        store(to + r * a.width + i, _mm512_fmadd_ps(by, load(x - a.width + i), load(x + i)));
    }
  });
  return {y, gates};
}

// (dx, dweight in float32, dstrength).
std::tuple<Tensor, Tensor, Tensor> smear_backward(const Tensor& given, const Tensor& x, const Tensor& gates,
                                                  const Tensor& weight, const Tensor& strength) {
  const Smear a = smear_of(x, weight, strength);
  check_like(given, x, "grad");
  const Tensor grad = given.contiguous();
  TORCH_CHECK(gates.numel() == a.rows && gates.is_contiguous(), "gates are those of the forward pass");
  Tensor dx = at::empty_like(a.x);
  Tensor totals = at::zeros({a.channels + 1}, gates.options());
  const bf16 *from = in(a.x), *pg = in(grad), *w = in(a.weight);
  const float* gate = floats(gates);
  bf16* to = out(dx);
  const long padded = (a.channels + 15) / 16 * 16, stride = padded + 16, blocks = (a.rows + ROWS - 1) / ROWS;
  Scratch<float> parts(blocks * stride);  // of each block: dweight, dstrength
  float* part = parts;
  over_blocks(a.rows, [&](long block, long first, long last) {
    float* sums = part + block * stride;
    std::fill(sums, sums + stride, 0.f);
    for (long r = first; r < last; r++) {
      const long at = r * a.width;
      const bool alone = r % a.length == 0, ends = r % a.length == a.length - 1;
      const __m512 by = set1(ends ? 0.f : a.strength * gate[r + 1]);
      for (long i = at; i < at + a.width; i += 16)
        store(to + i, ends ? load(pg + i) : _mm512_fmadd_ps(by, load(pg + i + a.width), load(pg + i)));
      if (alone) continue;
      const float along = dot(pg + at, from + at - a.width, a.width);
      sums[padded] += along * gate[r];
      const __m512 slope = set1(along * a.strength * gate[r] * (1 - gate[r]));
      for (long i = 0; i < a.channels; i += 16) {
        const long some = a.channels - i;
        store_some(to + at + i, _mm512_fmadd_ps(slope, load_some(w + i, some), load_some(to + at + i, some)), some);
        _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(slope, load_some(from + at + i, some), _mm512_loadu_ps(sums + i)));
      }
    }
  });
  float* total = totals.mutable_data_ptr<float>();
  for (long i = 0; i <= a.channels; i++) {
    double whole = 0;
    for (long block = 0; block < blocks; block++) whole += part[block * stride + (i < a.channels ? i : padded)];
    total[i] = float(whole);
  }
  return {dx, totals.narrow(0, 0, a.channels).clone(), totals.narrow(0, a.channels, 1).clone()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def("rms_norm(Tensor x, float eps, float scale) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor grad, Tensor? added, Tensor y, Tensor factors, float scale) -> Tensor");
  m.def("mix_norm(Tensor x, Tensor y, Tensor? r, Tensor? b, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "mix_norm_backward(Tensor added, Tensor grad, Tensor normed, Tensor factors, Tensor? x, Tensor y, Tensor? r, "
      "Tensor? b) -> (Tensor, Tensor, Tensor)");
  m.def("smear(Tensor x, Tensor weight, Tensor strength) -> (Tensor, Tensor)");
  m.def(
      "smear_backward(Tensor grad, Tensor x, Tensor gates, Tensor weight, Tensor strength) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("mix_norm", mix_norm);
  m.impl("mix_norm_backward", mix_norm_backward);
  m.impl("smear", smear);
  m.impl("smear_backward", smear_backward);
}
