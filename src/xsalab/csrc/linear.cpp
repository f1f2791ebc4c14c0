// The products of a linear map for many rows: y = x Wᵀ, its gradients g W and gᵀ x, with relu(·)² where a hidden layer
// follows. bfloat16 in, float32 sums, bfloat16 out, but the weight's gradient, which stays float32 as its master is.
//
// y and g W: W is packed once a call into panels of 32 outputs, x is read as it lies. A block of ROWS rows meets one
// panel after the other: rows from the second cache (ROWS · k · 2 bytes, 64 kB at k = 256), the panel from the first.
// gᵀ x: a chunk of CHUNK tokens at a time; 32 columns of g are turned, so that tokens run along rows, x is packed into
// panels that stay in the second cache (512 kB at 1,024 columns). Threads share the outputs, so each packs x for
// itself: made for a few threads. The bound of all three is the multiplier; the packing costs 2 to 6 %.
// Each output is the work of one thread in one order: results do not depend on the number of threads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "tiles.h"

namespace {

using namespace xsalab;
using at::Tensor;

constexpr long ROWS = 128, CHUNK = 256;

void check(const Tensor& x, const char* name) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kBFloat16 && x.dim() == 2 && x.size(1) % TILE == 0 &&
                  x.size(1) > 0,
              name, ": a bfloat16 matrix of the CPU with a multiple of 32 columns is needed, not ", x.sizes());
}

const bf16* in(const Tensor& x) { return (const bf16*)x.const_data_ptr(); }

// body(tile (32 × 32 floats), row, rows that are there, column) for all tiles of x (n × k) · panels (m / 32 of them).
template <class Body>
void over_tiles(const bf16* x, long n, long k, const bf16* panels, long m, Body body) {
  at::parallel_for(0, (n + ROWS - 1) / ROWS, 1, [&](long begin, long end) {
    Tiles tiles;
    alignas(64) float tile[TILE * TILE];
    Scratch<bf16> last(TILE * k);  // the rows of a block that is not full, filled with zeros
    for (long block = begin; block < end; block++) {
      const long first = block * ROWS, stop = std::min(n, first + ROWS);
      if (stop % TILE && stop == n) {
        const long start = stop / TILE * TILE;
        std::memcpy(last, x + start * k, (stop - start) * k * sizeof(bf16));
        std::memset(last + (stop - start) * k, 0, (start + TILE - stop) * k * sizeof(bf16));
      }
      for (long column = 0; column < m; column += TILE)
        for (long row = first; row < stop; row += TILE) {
          const bf16* rows = row + TILE <= n ? x + row * k : (const bf16*)last;
          product(rows, k, panels + column * k, k, tile, TILE, false);
          body((const float*)tile, row, std::min(TILE, n - row), column);
        }
    }
  });
}

// x (n, k) · Wᵀ, W (m, k), and relu(·)² of it where ``squared``.
Tensor linear(const Tensor& given_x, const Tensor& given_w, bool squared) {
  const Tensor x = given_x.contiguous(), w = given_w.contiguous();
  check(x, "x");
  check(w, "weight");
  const long n = x.size(0), k = x.size(1), m = w.size(0);
  TORCH_CHECK(w.size(1) == k && m % TILE == 0, "weight: (m, ", k, "), m a multiple of 32, is needed, not ", w.sizes());
  Tensor y = at::empty({n, m}, x.options());
  Scratch<bf16> panels(m * k);
  bf16 *packed = panels, *out = (bf16*)y.mutable_data_ptr();
  const bf16* weight = in(w);
  at::parallel_for(0, m / TILE, 1, [&](long begin, long end) {
    for (long p = begin; p < end; p++) pack_rows(weight + p * TILE * k, k, TILE, k, packed + p * TILE * k);
  });
  over_tiles(in(x), n, k, packed, m, [&](const float* tile, long row, long rows, long column) {
    for (long r = 0; r < rows; r++)
      for (long half = 0; half < TILE; half += 16) {
        __m512 v = _mm512_load_ps(tile + r * TILE + half);
        if (squared) v = _mm512_max_ps(v, _mm512_setzero_ps()), v = _mm512_mul_ps(v, v);
        store(out + (row + r) * m + column + half, v);
      }
  });
  return y;
}

// g (n, m) · W, W (m, k); times 2 √hidden where given, hidden (n, k) = relu(x)²: then it is the gradient of x. The root
// by rsqrt to 2^-14, well below a rounding to bfloat16.
Tensor linear_input_gradient(const Tensor& given_g, const Tensor& given_w, const std::optional<Tensor>& hidden) {
  const Tensor g = given_g.contiguous(), w = given_w.contiguous();
  check(g, "grad");
  check(w, "weight");
  const long n = g.size(0), m = g.size(1), k = w.size(1);
  TORCH_CHECK(w.size(0) == m, "weight: (", m, ", k) is needed, not ", w.sizes());
  if (hidden) {
    check(*hidden, "hidden");
    TORCH_CHECK(hidden->size(0) == n && hidden->size(1) == k && hidden->is_contiguous(), "hidden: contiguous, (n, k)");
  }
  Tensor dx = at::empty({n, k}, g.options());
  Scratch<bf16> panels(m * k);
  bf16 *packed = panels, *out = (bf16*)dx.mutable_data_ptr();
  const bf16 *weight = in(w), *squares = hidden ? in(*hidden) : nullptr;
  at::parallel_for(0, k / TILE, 1, [&](long begin, long end) {
    for (long p = begin; p < end; p++) pack_columns(weight + p * TILE, k, m, m, packed + p * TILE * m);
  });
  over_tiles(in(g), n, m, packed, k, [&](const float* tile, long row, long rows, long column) {
    for (long r = 0; r < rows; r++)
      for (long half = 0; half < TILE; half += 16) {
        const long at = (row + r) * k + column + half;
        __m512 v = _mm512_load_ps(tile + r * TILE + half);
        if (squares) {
          const __m512 square = load(squares + at);
          const __mmask16 positive = _mm512_cmp_ps_mask(square, _mm512_setzero_ps(), _CMP_GT_OQ);
          const __m512 root = _mm512_mul_ps(square, _mm512_maskz_rsqrt14_ps(positive, square));
          v = _mm512_mul_ps(v, _mm512_add_ps(root, root));
        }
        store(out + at, v);
      }
  });
  return dx;
}

// 32 columns of x turned: column i becomes row i of ``turned``, its ``rows`` entries filled with zeros to ``k``.
void turn_columns(const bf16* x, long stride, long rows, long k, bf16* turned) {
  const __m256i zero = _mm256_setzero_si256();
  __m512i r[16];
  for (long half = 0; half < TILE; half += 16)
    for (long start = 0; start < k; start += 32) {
      for (long i = 0; i < 16; i++) {
        const long row = start + 2 * i;
        const bf16* p = x + row * stride + half;
        r[i] = pairs(row < rows ? _mm256_loadu_si256((const __m256i*)p) : zero,
                     row + 1 < rows ? _mm256_loadu_si256((const __m256i*)(p + stride)) : zero);
      }
      transpose(r);
      for (long i = 0; i < 16; i++) _mm512_storeu_si512(turned + (half + i) * k + start, r[i]);
    }
}

// gᵀ x in float32: g (n, m), x (n, k) -> (m, k).
Tensor linear_weight_gradient(const Tensor& given_g, const Tensor& given_x) {
  const Tensor g = given_g.contiguous(), x = given_x.contiguous();
  check(g, "grad");
  check(x, "x");
  const long n = g.size(0), m = g.size(1), k = x.size(1);
  TORCH_CHECK(x.size(0) == n, "grad and x have as many rows, not ", n, " and ", x.size(0));
  Tensor dw = n ? at::empty({m, k}, g.options().dtype(at::kFloat)) : at::zeros({m, k}, g.options().dtype(at::kFloat));
  float* out = dw.mutable_data_ptr<float>();
  const bf16 *grad = in(g), *from = in(x);
  at::parallel_for(0, m / TILE, 1, [&](long begin, long end) {
    Tiles tiles;
    Scratch<bf16> panels(CHUNK * k), turned(CHUNK * TILE);
    for (long start = 0; start < n; start += CHUNK) {
      const long rows = std::min(CHUNK, n - start), depth = (rows + TILE - 1) / TILE * TILE;
      for (long c = 0; c < k; c += TILE) pack_columns(from + start * k + c, k, rows, depth, panels + c * depth);
      for (long p = begin; p < end; p++) {
        turn_columns(grad + start * m + p * TILE, m, rows, depth, turned);
        for (long c = 0; c < k; c += TILE)
          product(turned, depth, panels + c * depth, depth, out + p * TILE * k + c, k, start > 0);
      }
    }
  });
  return dw;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def("linear(Tensor x, Tensor weight, bool squared) -> Tensor");
  m.def("linear_input_gradient(Tensor grad, Tensor weight, Tensor? hidden) -> Tensor");
  m.def("linear_weight_gradient(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("linear", linear);
  m.impl("linear_input_gradient", linear_input_gradient);
  m.impl("linear_weight_gradient", linear_weight_gradient);
}
