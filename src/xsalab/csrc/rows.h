// What the kernels that pass once over memory share: checks of their tensors, blocks of rows, parts of a row's work.
// A row is read once, worked on while it lies in the first cache, and written once: the bound is memory. Sums over all
// rows (gradients of scalars) are taken over blocks of ROWS rows and these added in order, so that no result depends on
// the number of threads.
//
// A norm keeps one float32 a row for its backward, factor = 1/√(mean x² + eps), and its own output, which the next
// product keeps anyway: with n = x · factor, ∂L/∂x = factor · (g − n · mean(g n)).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "tiles.h"

namespace xsalab {

using at::Tensor;
using std::optional;

constexpr long ROWS = 64;  // a block: 32 kB a tensor at width 256

// ---- tensors

inline void check(const Tensor& x, const char* name, at::ScalarType type = at::kBFloat16) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == type, name, ": a CPU tensor of ", type, " is needed");
}

inline void check_like(const Tensor& x, const Tensor& like, const char* name) {
  check(x, name);
  TORCH_CHECK(x.sizes() == like.sizes(), name, ": shape ", like.sizes(), " is needed, not ", x.sizes());
}

inline long width_of(const Tensor& x) {
  TORCH_CHECK(x.dim() && x.size(-1) > 0 && x.size(-1) % 32 == 0, "the last axis is a multiple of 32, not ", x.sizes());
  return x.size(-1);
}

inline const bf16* in(const Tensor& x) { return (const bf16*)x.const_data_ptr(); }
inline bf16* out(const Tensor& x) { return (bf16*)x.mutable_data_ptr(); }
inline const float* floats(const Tensor& x) { return x.const_data_ptr<float>(); }

inline float number(const optional<Tensor>& x, float otherwise) {
  if (!x) return otherwise;
  check(*x, "scalar", at::kFloat);
  TORCH_CHECK(x->numel() == 1, "one number is needed, not ", x->sizes());
  return *floats(*x);
}

// One float32 a row: x's shape with 1 at the end.
inline Tensor row_factors(const Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

// ---- rows

// body(first, last) over blocks of rows; ``number`` of the block for sums that are added in order afterwards.
template <class Body>
void over_blocks(long rows, Body body) {
  const long blocks = (rows + ROWS - 1) / ROWS;
  at::parallel_for(0, blocks, 1, [&](long first, long last) {
    for (long block = first; block < last; block++) body(block, block * ROWS, std::min(rows, block * ROWS + ROWS));
  });
}

inline float sum(__m512 x) { return _mm512_reduce_add_ps(x); }
inline __m512 square(__m512 x, __m512 to) { return _mm512_fmadd_ps(x, x, to); }

inline float factor_of(float squares, long width, float eps) { return 1.f / std::sqrt(squares / float(width) + eps); }

inline void scale_row(const bf16* x, long width, float by, bf16* y) {
  const __m512 factor = set1(by);
  for (long i = 0; i < width; i += 16) store(y + i, _mm512_mul_ps(load(x + i), factor));
}

inline float squares_of(const bf16* x, long width) {
  __m512 a = _mm512_setzero_ps(), b = a;
  for (long i = 0; i < width; i += 32) a = square(load(x + i), a), b = square(load(x + i + 16), b);
  return sum(_mm512_add_ps(a, b));
}

inline float dot(const bf16* x, const bf16* y, long width) {
  __m512 a = _mm512_setzero_ps(), b = a;
  for (long i = 0; i < width; i += 32) {
    a = _mm512_fmadd_ps(load(x + i), load(y + i), a);
    b = _mm512_fmadd_ps(load(x + i + 16), load(y + i + 16), b);
  }
  return sum(_mm512_add_ps(a, b));
}

inline __m512 sigmoid(__m512 x) {
  __m512 power = _mm512_mul_ps(x, set1(-1.44269504f));  // σ(x) = 1 / (1 + 2^(−x / ln 2))
  power = _mm512_max_ps(set1(-126), _mm512_min_ps(set1(126), power));
  return _mm512_div_ps(set1(1), _mm512_add_ps(set1(1), xsalab::exp2(power)));
}

inline __m512 load_some(const bf16* p, long count) {
  const __mmask16 mask = count >= 16 ? 0xffff : (1u << count) - 1;
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

inline void store_some(bf16* p, __m512 x, long count) {
  _mm256_mask_storeu_epi16(p, count >= 16 ? 0xffff : (1u << count) - 1, narrow(x));
}

}  // namespace xsalab
