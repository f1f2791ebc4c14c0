// Polar factors of a stack of bfloat16 matrices; polar.h has the method.
#include "polar.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>

namespace {

using namespace xsalab;

// g (k, rows, columns) bfloat16 -> the polar factors of g / (safety · ‖g‖ + floor); three ``coefficients`` a step.
at::Tensor polar_stack(const at::Tensor& g, at::ArrayRef<double> coefficients, double safety, double floor) {
  TORCH_CHECK(g.dim() == 3 && g.scalar_type() == at::kBFloat16, "polar: a stack (k, rows, columns) of bfloat16");
  TORCH_CHECK(!coefficients.empty() && coefficients.size() % 3 == 0, "polar: three coefficients for each step");
  const at::Tensor source = g.contiguous(), result = at::empty_like(source);
  const Shape shape{source.size(1), source.size(2)};
  if (!source.numel()) return result;
  const bf16* from = (const bf16*)source.const_data_ptr();
  bf16* to = (bf16*)result.mutable_data_ptr();
  const long size = shape.rows * shape.columns, width = up_to_tiles(shape.columns);
  for_matrices(std::vector<Shape>(source.size(0), shape), [&](long index, PolarSpace& space) {
    std::vector<float> squares(up_to_tiles(shape.rows));  // of the rows: added in one order whatever the threads
    for_blocks(shape, [&](long first, float* rows) {
      for (long r = 0; r < BLOCK; r++) {
        __m512 sum = set1(0);
        for (long j = 0; j < width; j += 16) {
          const __mmask16 there = first + r < shape.rows ? lanes(shape.columns - j) : 0;
          const __m256i half = _mm256_maskz_loadu_epi16(there, from + index * size + (first + r) * shape.columns + j);
          const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
          _mm512_storeu_ps(rows + r * width + j, value);
          sum = _mm512_fmadd_ps(value, value, sum);
        }
        squares[first + r] = _mm512_reduce_add_ps(sum);
      }
      place(rows, shape, first, space.x);
    });
    const double norm = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
    polar_factor(space, shape.m(), shape.n(), 1 / (safety * norm + floor), coefficients);
    for_blocks(shape, [&](long first, float* rows) {
      take(space.x, shape, first, rows);
      for (long r = 0; r < std::min(BLOCK, shape.rows - first); r++)
        for (long j = 0; j < shape.columns; j += 16)
          _mm256_mask_storeu_epi16(to + index * size + (first + r) * shape.columns + j, lanes(shape.columns - j),
                                   narrow(_mm512_loadu_ps(rows + r * width + j)));
    });
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) { m.def("polar(Tensor g, float[] coefficients, float safety, float floor) -> Tensor"); }

TORCH_LIBRARY_IMPL(xsalab, CPU, m) { m.impl("polar", polar_stack); }
