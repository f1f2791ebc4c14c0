// Exclusive self-attention on attention's output: z = y − α c v with c = ⟨y, v⟩ / ⟨v, v⟩, and its gradients.
//
// One pass over memory each way, one row of a head at a time: a row of v stays in registers while the query heads that
// share it pass by. The bound is memory traffic: forward reads y and v and writes z, backward reads y, v and the
// gradient and writes two gradients (and z, where the caller has not kept it). From STREAMED bytes on, outputs go past
// the cache: storing them there would first read lines that nobody wants, and push out the inputs.
//
// All sums are float32. None crosses a row but those over the query heads of a group, in order, and those for ∂L/∂α,
// over fixed blocks of tokens: the result does not depend on the number of threads. Numbers below float32's smallest
// normal are written as 0.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "tiles.h"

namespace {

using namespace xsalab;
using at::Tensor;

constexpr long WIDEST = 256;        // largest head size
constexpr long STREAMED = 6000000;  // bytes of z from which outputs go past the cache
constexpr long BLOCK = 64;          // tokens whose parts of ∂L/∂α are summed first
constexpr long AHEAD = 16;          // tokens between the one whose v is asked for and the one at work
constexpr long ENOUGH = 32768;      // elements of y that are worth a thread
constexpr float TINY = std::numeric_limits<float>::min();

// A (b, t, heads, d) tensor of bfloat16 with rows of d numbers in a piece, anywhere apart.
struct Heads {
  bf16* data;
  long b, t, h;  // distances in elements

  explicit Heads(const Tensor& x) : data((bf16*)x.data_ptr()), b(x.stride(0)), t(x.stride(1)), h(x.stride(2)) {}
  bf16* row(long batch, long token, long head) const { return data + batch * b + token * t + head * h; }
};

// A row of 32 · N numbers in registers.
template <int N>
struct Row {
  __m512 x[2 * N];

  void read(const bf16* p) {
#pragma GCC unroll 16
    for (int i = 0; i < 2 * N; i++) x[i] = load(p + 16 * i);
  }

  void write(bf16* p, bool stream) const {
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x[2 * i + 1], x[2 * i]);
      if (stream)
        _mm512_stream_si512((__m512i*)(p + 32 * i), both);
      else
        _mm512_storeu_si512(p + 32 * i, both);
    }
  }

  // this − factor · other
  Row minus(float factor, const Row& other) const {
    Row result;
#pragma GCC unroll 16
    for (int i = 0; i < 2 * N; i++) result.x[i] = _mm512_fnmadd_ps(set1(factor), other.x[i], x[i]);
    return result;
  }
};

// ⟨a, b⟩, always in the same order: ⟨y, v⟩ = ⟨v, v⟩ exactly where y = v.
template <int N>
inline float dot(const Row<N>& a, const Row<N>& b) {
  __m512 even = _mm512_mul_ps(a.x[0], b.x[0]), odd = _mm512_mul_ps(a.x[1], b.x[1]);
#pragma GCC unroll 8
  for (int i = 1; i < N; i++) {
    even = _mm512_fmadd_ps(a.x[2 * i], b.x[2 * i], even);
    odd = _mm512_fmadd_ps(a.x[2 * i + 1], b.x[2 * i + 1], odd);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}

// Asks for the rows of v of a token some way ahead: they lie in a product of q, k and v together, and jumps from one
// token's v to the next are not foreseen by the processor. (GCC 12 takes a function that only prefetches for one that
// does nothing and drops the call, unless it is inlined first.)
[[gnu::always_inline]] inline void ask_ahead(const Heads& v, long tokens, long i, long end, long bytes) {
  const long ahead = std::min(i + AHEAD, end - 1);
  const char* p = (const char*)v.row(ahead / tokens, ahead % tokens, 0);
  for (long byte = 0; byte < bytes; byte += 64) _mm_prefetch(p + byte, _MM_HINT_T1);
}

// What both passes are told. ``alpha`` holds one number a query head.
struct Problem {
  long batch, tokens, heads, groups, size;
  const float* alpha;
  bool stream;  // outputs go past the cache

  long blocks() const { return (batch * tokens + BLOCK - 1) / BLOCK; }
};

// z of the tokens ``begin`` to ``end``, counted through the whole batch.
template <int N>
void forward(const Problem& p, const Heads& y, const Heads& v, const Heads& z, long begin, long end) {
  const long shared = p.heads / p.groups;
  for (long i = begin; i < end; i++) {
    ask_ahead(v, p.tokens, i, p.batch * p.tokens, p.groups * p.size * 2);
    for (long g = 0; g < p.groups; g++) {
      const long batch = i / p.tokens, token = i % p.tokens;
      Row<N> value, mixed;
      value.read(v.row(batch, token, g));
      const float norm = std::max(dot(value, value), TINY);
      for (long h = g * shared; h < (g + 1) * shared; h++) {
        mixed.read(y.row(batch, token, h));
        const float c = dot(mixed, value) / norm;
        mixed.minus(p.alpha[h] * c, value).write(z.row(batch, token, h), p.stream);
      }
    }
  }
}

struct Gradients {
  Heads y, v;
  const Heads* z;  // written too where it is there
};

// Gradients of the tokens ``begin`` to ``end``; ``along`` (heads) gets −Σ c ⟨g, v⟩ over them, each head's ∂L/∂α.
//     d = ⟨g, v⟩ / n;  ∂L/∂y = g − α d v;  ∂L/∂v = −α (d y + c (g − 2 d v)), summed over the heads of a group
template <int N>
void backward(const Problem& p, const Heads& grad, const Heads& y, const Heads& v, const Gradients& out, long begin,
              long end, float* along) {
  const long shared = p.heads / p.groups;
  std::fill(along, along + p.heads, 0.f);
  for (long i = begin; i < end; i++) {
    ask_ahead(v, p.tokens, i, p.batch * p.tokens, p.groups * p.size * 2);
    for (long group = 0; group < p.groups; group++) {
      const long batch = i / p.tokens, token = i % p.tokens;
      Row<N> value, mixed, g, sum;
      for (auto& x : sum.x) x = _mm512_setzero_ps();
      value.read(v.row(batch, token, group));
      const float square = dot(value, value), norm = std::max(square, TINY);
      for (long h = group * shared; h < (group + 1) * shared; h++) {
        g.read(grad.row(batch, token, h));
        mixed.read(y.row(batch, token, h));
        const float gv = dot(g, value), alpha = p.alpha[h];
        const float c = dot(mixed, value) / norm, d = gv / norm;
        along[h] -= c * gv;
        g.minus(alpha * d, value).write(out.y.row(batch, token, h), p.stream);
        if (out.z) mixed.minus(alpha * c, value).write(out.z->row(batch, token, h), p.stream);
        // Below the floor n is a constant, and 2 d v, its derivative, is 0. c (d v) in this order stays finite.
        sum = sum.minus(alpha * c, g.minus(square > TINY ? 2 * d : 0.f, value)).minus(alpha * d, mixed);
      }
      sum.write(out.v.row(batch, token, group), p.stream);
    }
  }
}

// Calls body with the head size in units of 32 as a constant.
template <class Body>
void with_size(long size, Body body) {
  switch (size / 32) {
    case 1: return body.template operator()<1>();
    case 2: return body.template operator()<2>();
    case 3: return body.template operator()<3>();
    case 4: return body.template operator()<4>();
    case 5: return body.template operator()<5>();
    case 6: return body.template operator()<6>();
    case 7: return body.template operator()<7>();
    case 8: return body.template operator()<8>();
  }
}

void check_heads(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 4 && x.scalar_type() == at::kBFloat16 && (x.stride(3) == 1 || x.size(3) == 1),
              name, " is bfloat16 (b, t, heads, d) with d in a piece; got ", x.scalar_type(), " ", x.sizes(),
              ", strides ", x.strides());
}

// Checks shapes; ``every`` keeps α as float32 of each head alive.
Problem problem(const Tensor& y, const Tensor& v, const Tensor& alpha, Tensor& every) {
  check_heads(y, "y");
  check_heads(v, "v");
  const long size = y.size(3);
  TORCH_CHECK(size % 32 == 0 && size > 0 && size <= WIDEST, "the head size is a multiple of 32 up to ", WIDEST,
              "; got ", size);
  TORCH_CHECK(y.size(0) == v.size(0) && y.size(1) == v.size(1) && size == v.size(3) && v.size(2) > 0 &&
                  y.size(2) % v.size(2) == 0,
              "v is (b, t, g, d) with g dividing y's heads; got ", y.sizes(), " and ", v.sizes());
  TORCH_CHECK(alpha.dim() == 0 || (alpha.dim() == 1 && alpha.size(0) == y.size(2)), "alpha is () or (heads,)");
  every = alpha.to(at::kFloat).expand({y.size(2)}).contiguous();
  return {y.size(0), y.size(1), y.size(2), v.size(2), size, every.const_data_ptr<float>(), y.numel() * 2 >= STREAMED};
}

long grain(const Problem& p) { return std::max(1l, ENOUGH / (p.heads * p.size)); }

// z (b, t, h, d), contiguous.
Tensor exclude(const Tensor& y, const Tensor& v, const Tensor& alpha) {
  Tensor every, z = at::empty(y.sizes(), y.options());
  const Problem p = problem(y, v, alpha, every);
  const Heads from(y), own(v), to(z);
  with_size(p.size, [&]<int N>() {
    at::parallel_for(0, p.batch * p.tokens, grain(p), [&](long begin, long end) {
      forward<N>(p, from, own, to, begin, end);
      if (p.stream) _mm_sfence();
    });
  });
  return z;
}

// Gradients of y, of v and of each head's α, (h,) in float32; and z again where ``with_z``, else an empty tensor.
std::tuple<Tensor, Tensor, Tensor, Tensor> exclude_backward(const Tensor& grad, const Tensor& y, const Tensor& v,
                                                            const Tensor& alpha, bool with_z) {
  Tensor every;
  const Problem p = problem(y, v, alpha, every);
  check_heads(grad, "grad");
  TORCH_CHECK(grad.sizes() == y.sizes(), "grad has y's shape; got ", grad.sizes(), " and ", y.sizes());
  Tensor grad_y = at::empty(y.sizes(), y.options()), grad_v = at::empty(v.sizes(), v.options());
  Tensor z = with_z ? at::empty(y.sizes(), y.options()) : at::empty({0}, y.options());
  const Heads g(grad), from(y), own(v);
  const Heads again(with_z ? z : grad_y);
  const Gradients out{Heads(grad_y), Heads(grad_v), with_z ? &again : nullptr};
  Tensor along = at::empty({p.blocks(), p.heads}, y.options().dtype(at::kFloat));
  float* parts = along.data_ptr<float>();
  with_size(p.size, [&]<int N>() {
    at::parallel_for(0, p.blocks(), (grain(p) + BLOCK - 1) / BLOCK, [&](long begin, long end) {
      for (long block = begin; block < end; block++)
        backward<N>(p, g, from, own, out, block * BLOCK, std::min((block + 1) * BLOCK, p.batch * p.tokens),
                            parts + block * p.heads);
      if (p.stream) _mm_sfence();
    });
  });
  Tensor grad_alpha = at::zeros({p.heads}, along.options());
  float* sums = grad_alpha.data_ptr<float>();
  for (long block = 0; block < p.blocks(); block++)
    for (long h = 0; h < p.heads; h++) sums[h] += parts[block * p.heads + h];
  return {grad_y, grad_v, grad_alpha, z};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def("exclude(Tensor y, Tensor v, Tensor alpha) -> Tensor");
  m.def(
      "exclude_backward(Tensor grad, Tensor y, Tensor v, Tensor alpha, bool with_z)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("exclude", exclude);
  m.impl("exclude_backward", exclude_backward);
}
