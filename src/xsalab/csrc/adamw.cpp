// One step of AdamW on a list of parameters in one pass: float32 moments, parameters and gradients in float32 or bfloat16.
//
// Memory is the bound: 28 bytes an entry in float32, 22 in bfloat16, where PyTorch's own fused step wants moments in
// bfloat16 too. The arithmetic is float32 throughout; a bfloat16 parameter is rounded once, when it is written back.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>

#include "tiles.h"

namespace {

using namespace xsalab;

struct Step {
  float beta1, beta2, eps;
  float keep;   // 1 − rate · decay
  float scale;  // √(1 − beta2^steps)
  float size;   // rate / (1 − beta1^steps)
};

__m512 read(const float* p, __mmask16 there) { return _mm512_maskz_loadu_ps(there, p); }

__m512 read(const bf16* p, __mmask16 there) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, p)), 16));
}

void write(float* p, __mmask16 there, __m512 x) { _mm512_mask_storeu_ps(p, there, x); }

void write(bf16* p, __mmask16 there, __m512 x) { _mm256_mask_storeu_epi16(p, there, narrow(x)); }

template <class T>
void update(T* parameter, const T* gradient, float* means, float* squares, long count, const Step& step) {
  at::parallel_for(0, (count + 15) / 16, 2048, [&](int64_t begin, int64_t end) {
    const __m512 share1 = set1(1 - step.beta1), share2 = set1(1 - step.beta2), beta2 = set1(step.beta2);
    for (int64_t i = begin * 16; i < end * 16; i += 16) {
      const __mmask16 there = count - i >= 16 ? 0xffff : (1 << (count - i)) - 1;
      const __m512 g = read(gradient + i, there);
      __m512 mean = read(means + i, there), square = read(squares + i, there);
      mean = _mm512_fmadd_ps(share1, _mm512_sub_ps(g, mean), mean);
      square = _mm512_fmadd_ps(_mm512_mul_ps(share2, g), g, _mm512_mul_ps(beta2, square));
      write(means + i, there, mean);
      write(squares + i, there, square);
      const __m512 denominator = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(square), set1(step.scale)), set1(step.eps));
      const __m512 kept = _mm512_mul_ps(set1(step.keep), read(parameter + i, there));
      write(parameter + i, there, _mm512_fnmadd_ps(set1(step.size), _mm512_div_ps(mean, denominator), kept));
    }
  });
}

// ``steps`` counts each parameter's updates, this one included.
void adamw_(at::TensorList parameters, at::TensorList gradients, at::TensorList means, at::TensorList squares,
            at::IntArrayRef steps, double rate, double beta1, double beta2, double eps, double decay) {
  const size_t count = parameters.size();
  TORCH_CHECK(gradients.size() == count && means.size() == count && squares.size() == count && steps.size() == count,
              "adamw_: lists of different lengths");
  for (size_t i = 0; i < count; i++) {
    const at::Tensor &parameter = parameters[i], &gradient = gradients[i];
    const bool half = parameter.scalar_type() == at::kBFloat16;
    TORCH_CHECK(half || parameter.scalar_type() == at::kFloat, "adamw_: float32 or bfloat16, not ", parameter.scalar_type());
    TORCH_CHECK(gradient.scalar_type() == parameter.scalar_type() && means[i].scalar_type() == at::kFloat &&
                    squares[i].scalar_type() == at::kFloat, "adamw_: gradient as the parameter, moments float32");
    for (const at::Tensor* tensor : {&parameter, &gradient, &means[i], &squares[i]})
      TORCH_CHECK(tensor->is_contiguous() && tensor->sizes() == parameter.sizes(), "adamw_: contiguous, of one shape");
    const double scale = std::sqrt(1 - std::pow(beta2, double(steps[i])));
    const double size = rate / (1 - std::pow(beta1, double(steps[i])));
    const Step step{float(beta1), float(beta2), float(eps), float(1 - rate * decay), float(scale), float(size)};
    float *mean = means[i].mutable_data_ptr<float>(), *square = squares[i].mutable_data_ptr<float>();
    if (half)
      update((bf16*)parameter.mutable_data_ptr(), (const bf16*)gradient.const_data_ptr(), mean, square, parameter.numel(), step);
    else
      update(parameter.mutable_data_ptr<float>(), gradient.const_data_ptr<float>(), mean, square, parameter.numel(), step);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def(
      "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] squares, int[] steps, "
      "float rate, float beta1, float beta2, float eps, float decay) -> ()");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) { m.impl("adamw_", adamw_); }
