// One step of Muon on a list of matrices: float32 weights, gradients and state, bfloat16 within the polar factor.
//
// Beside the products of polar.h a step reads gradient, momentum and weight once and writes momentum and weight once.
// A matrix goes from beginning to end in one thread's cache:
//   before   momentum and Nesterov's direction, the rows' sizes, the rows scaled and rounded, laid wide
//   between  the polar factor
//   after    the sums of squares along rows or columns give every factor of renormalisation and variance reduction;
//            one pass applies them, the decay and the update
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "polar.h"

namespace {

using namespace xsalab;

struct Settings {
  float rate, decay, momentum, beta2, safety, floor;
  at::ArrayRef<double> coefficients;
};

// Momentum (in place) and Nesterov's direction u of it, laid wide into x. Returns the factor that brings x to the start
// of the iteration. ``by_row``: every row is scaled to the rows' root-mean-square size first.
float before(float* momentum, const float* gradient, const Shape& shape, const Settings& set, bool by_row, bf16* x) {
  const long width = up_to_tiles(shape.columns);
  std::vector<double> squares(up_to_tiles(shape.rows)), scaled(up_to_tiles(shape.rows));
  for_blocks(shape, [&](long first, float* rows) {
    const __m512 share = set1(1 - set.momentum);
    for (long r = 0; r < BLOCK; r++) {
      __m512 sum = set1(0);
      float* row = rows + r * width;
      for (long j = 0; j < width; j += 16) {
        const __mmask16 there = first + r < shape.rows ? lanes(shape.columns - j) : 0;
        const long at = (first + r) * shape.columns + j;
        const __m512 g = _mm512_maskz_loadu_ps(there, gradient + at), old = _mm512_maskz_loadu_ps(there, momentum + at);
        const __m512 now = _mm512_fmadd_ps(share, _mm512_sub_ps(g, old), old);
        const __m512 u = _mm512_fnmadd_ps(share, _mm512_sub_ps(now, g), now);
        _mm512_mask_storeu_ps(momentum + at, there, now);
        _mm512_storeu_ps(row + j, u);
        sum = _mm512_fmadd_ps(u, u, sum);
      }
      squares[first + r] = scaled[first + r] = _mm512_reduce_add_ps(sum);
      if (!by_row) continue;
      const float factor = 1 / std::max(std::sqrt((float)squares[first + r]), 1e-6f);
      for (long j = 0; j < width; j += 16) _mm512_storeu_ps(row + j, _mm512_mul_ps(set1(factor), _mm512_loadu_ps(row + j)));
      scaled[first + r] *= double(factor) * factor;
    }
    place(rows, shape, first, x);
  });
  // Added in one order whatever the threads. x holds u's rows at size 1 where by_row: their common size comes back here.
  const double norm = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
  const double common = by_row ? norm / std::sqrt(double(shape.rows)) : 1;
  const double size = common * std::sqrt(std::accumulate(scaled.begin(), scaled.end(), 0.0));
  return common / (set.safety * size + set.floor);
}

// Sums of squares of x (m × n) along its rows, or down its columns.
void square_sums(const bf16* x, long m, long n, bool rows, float* sums) {
  at::parallel_for(0, rows ? m : n / 16, 8, [&](int64_t begin, int64_t end) {
    if (rows) {
      for (int64_t i = begin; i < end; i++) {
        __m512 sum = set1(0);
        for (long j = 0; j < n; j += 16) sum = _mm512_fmadd_ps(load(x + i * n + j), load(x + i * n + j), sum);
        sums[i] = _mm512_reduce_add_ps(sum);
      }
    } else {
      std::fill(sums + begin * 16, sums + end * 16, 0.f);
      for (long i = 0; i < m; i++)
        for (long j = begin * 16; j < end * 16; j += 16) {
          const __m512 value = load(x + i * n + j);
          _mm512_storeu_ps(sums + j, _mm512_fmadd_ps(value, value, _mm512_loadu_ps(sums + j)));
        }
    }
  });
}

// Renormalisation and variance reduction as one factor for each of max(rows, columns) lines: the rows of the stored
// matrix where rows ≥ columns, its columns otherwise. ``variance`` goes on by one step.
void reduce(const bf16* x, const Shape& shape, float beta2, float* variance, float* factors) {
  const long lines = std::max(shape.rows, shape.columns), across = std::min(shape.rows, shape.columns);
  square_sums(x, shape.m(), shape.n(), shape.rows == shape.columns, factors);
  double all = 0, reduced = 0;
  for (long k = 0; k < lines; k++) all += factors[k];
  const double norm = std::sqrt(all), renormal = std::sqrt(double(across)) / std::max(norm, 1e-10);
  for (long k = 0; k < lines; k++) {
    const double square = renormal * renormal * factors[k];
    variance[k] += (1 - beta2) * (float(square / across) - variance[k]);
    const double factor = 1 / std::sqrt(std::max((double)variance[k], 1e-10));
    factors[k] = renormal * factor;
    reduced += square * factor * factor;
  }
  const double keep = renormal * norm / std::max(std::sqrt(reduced), 1e-10);  // the norm stays what it was
  for (long k = 0; k < lines; k++) factors[k] *= keep;
}

// W ← W · keep − rate · u. With ``factors`` (of reduce) the decay is cautious: keep is 1 − rate · decay where u · W ≥ 0 and 1
// elsewhere. Without, it is torch.optim.Muon's: 1 − decay at the rate before the factor of the shape.
void after(float* weight, const bf16* x, const Shape& shape, const Settings& set, const float* factors) {
  const long width = up_to_tiles(shape.columns);
  const float rate = set.rate * std::sqrt(std::max(1.0, double(shape.rows) / shape.columns));
  const __m512 one = set1(1), keep = set1(1 - (factors ? rate : set.rate) * set.decay);
  for_blocks(shape, [&](long first, float* rows) {
    take(x, shape, first, rows);
    for (long r = 0; r < std::min(BLOCK, shape.rows - first); r++)
      for (long j = 0; j < shape.columns; j += 16) {
        const __mmask16 there = lanes(shape.columns - j);
        float* at = weight + (first + r) * shape.columns + j;
        const __m512 w = _mm512_maskz_loadu_ps(there, at);
        __m512 u = _mm512_loadu_ps(rows + r * width + j), kept = keep;
        if (factors) {
          u = _mm512_mul_ps(u, shape.rows >= shape.columns ? set1(factors[first + r]) : _mm512_loadu_ps(factors + j));
          kept = _mm512_mask_mov_ps(one, _mm512_cmp_ps_mask(_mm512_mul_ps(u, w), _mm512_setzero_ps(), _CMP_GE_OQ), keep);
        }
        _mm512_mask_storeu_ps(at, there, _mm512_fnmadd_ps(set1(rate), u, _mm512_mul_ps(w, kept)));
      }
  });
}

void check(const at::Tensor& tensor, at::IntArrayRef sizes, const char* what) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.sizes() == sizes, "muon_: ", what, " ",
              tensor.sizes(), " ", tensor.scalar_type(), ", want contiguous float32 ", sizes);
}

// Changes weights, momenta and variances. Without variances it is torch.optim.Muon's step.
void muon_(at::TensorList weights, at::TensorList gradients, at::TensorList momenta, at::TensorList variances, double rate,
           double decay, double inertia, double beta2, at::ArrayRef<double> coefficients, double safety, double floor) {
  const bool hybrid = !variances.empty();
  TORCH_CHECK(!coefficients.empty() && coefficients.size() % 3 == 0, "muon_: three coefficients for each step");
  TORCH_CHECK(weights.size() == gradients.size() && weights.size() == momenta.size() &&
                  (!hybrid || weights.size() == variances.size()), "muon_: lists of different lengths");
  std::vector<Shape> shapes;
  for (size_t i = 0; i < weights.size(); i++) {
    TORCH_CHECK(weights[i].dim() == 2 && weights[i].numel(), "muon_: weight ", i, " is no matrix");
    const long rows = weights[i].size(0), columns = weights[i].size(1);
    check(weights[i], weights[i].sizes(), "weight");
    check(gradients[i], weights[i].sizes(), "gradient");
    check(momenta[i], weights[i].sizes(), "momentum");
    if (hybrid && rows >= columns) check(variances[i], {rows, 1}, "variance");
    if (hybrid && rows < columns) check(variances[i], {1, columns}, "variance");
    shapes.push_back({rows, columns});
  }
  const Settings set{float(rate), float(decay), float(inertia), float(beta2), float(safety), float(floor), coefficients};
  for_matrices(shapes, [&](long i, PolarSpace& space) {
    const Shape& shape = shapes[i];
    float *momentum = momenta[i].mutable_data_ptr<float>(), *weight = weights[i].mutable_data_ptr<float>();
    const float scale = before(momentum, gradients[i].const_data_ptr<float>(), shape, set, hybrid, space.x);
    polar_factor(space, shape.m(), shape.n(), scale, coefficients);
    std::vector<float> factors(hybrid ? shape.n() : 0);
    if (hybrid) reduce(space.x, shape, set.beta2, variances[i].mutable_data_ptr<float>(), factors.data());
    after(weight, space.x, shape, set, hybrid ? factors.data() : nullptr);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def(
      "muon_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor(c!)[] variances, float rate, "
      "float decay, float momentum, float beta2, float[] coefficients, float safety, float floor) -> ()");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) { m.impl("muon_", muon_); }
