// From the joined product of queries, keys and values to heads, in one pass: rotary embedding, the norm of queries and
// keys, the gated value embedding; and back, in one pass to the gradient of the joined product. Head sizes are
// multiples of 32; Python asks.
#include <torch/library.h>

#include <tuple>

#include "rows.h"

namespace {

using namespace xsalab;

// A (b, t, h, d) tensor whose heads are contiguous.
struct Heads {
  Tensor kept;
  const bf16* data;
  long b, t, h;
  explicit Heads(const Tensor& x) : kept(x.stride(3) == 1 ? x : x.contiguous()), data(in(kept)) {
    b = kept.stride(0), t = kept.stride(1), h = kept.stride(2);
  }
  const bf16* at(long row, long place) const { return data + row * b + place * t; }
};

// cos or sin, (1 or b, t, 1, d / 2).
struct Table {
  Tensor kept;
  const float* data;
  long b, t;
  Table(const Tensor& x, long rows, long length, long half, const char* name) : kept(x) {
    check(x, name, at::kFloat);
    TORCH_CHECK(x.dim() == 4 && (x.size(0) == 1 || x.size(0) == rows) && x.size(1) == length && x.size(2) == 1 &&
                    x.size(3) == half && x.stride(3) == 1,
                name, ": (1 or ", rows, ", ", length, ", 1, ", half, ") is needed, not ", x.sizes());
    data = floats(x), b = x.size(0) == 1 ? 0 : x.stride(0), t = x.stride(1);
  }
  const float* at(long row, long place) const { return data + row * b + place * t; }
};

// by · (x1 cos + x2 sin, x2 cos − x1 sin), for the two halves of a head.
inline void turn(const bf16* x, const float* cos, const float* sin, long half, float by, bf16* y) {
  const __m512 factor = set1(by);
  for (long i = 0; i < half; i += 16) {
    const __m512 c = _mm512_mul_ps(_mm512_loadu_ps(cos + i), factor);
    const __m512 s = _mm512_mul_ps(_mm512_loadu_ps(sin + i), factor);
    const __m512 first = load(x + i), second = load(x + half + i);
    store(y + i, _mm512_fmadd_ps(first, c, _mm512_mul_ps(second, s)));
    store(y + half + i, _mm512_fmsub_ps(second, c, _mm512_mul_ps(first, s)));
  }
}

// From x Wᵀ (b, t, (h + 2g) d) the heads (b, t, h + 2g, d) of queries and keys, turned and, with ``norm``, scaled to
// ``scale`` (turning keeps lengths: the factor is taken before), and of values, to which range · σ(logits) · rows is
// added where given. logits (b, t, g), rows (b, t, g d). Second: the factors (b, t, h + g).
std::tuple<Tensor, Tensor> qkv(const Tensor& given, const Tensor& cos, const Tensor& sin,
                               const optional<Tensor>& given_logits, const optional<Tensor>& given_rows, int64_t heads,
                               int64_t groups, double range, double scale, double eps, bool norm) {
  check(given, "product");
  TORCH_CHECK(given.dim() == 3 && heads > 0 && groups > 0 && given.size(2) % (heads + 2 * groups) == 0,
              "product: (b, t, (h + 2g) d) is needed, not ", given.sizes());
  const Tensor product = given.contiguous();
  const long batch = product.size(0), length = product.size(1), turned = heads + groups, all = turned + groups;
  const long size = product.size(2) / all, half = size / 2;
  TORCH_CHECK(size % 32 == 0, "the head size is a multiple of 32, not ", size);
  const Table cosines(cos, batch, length, half, "cos"), sines(sin, batch, length, half, "sin");
  TORCH_CHECK(given_logits.has_value() == given_rows.has_value(), "logits and rows come together");
  Tensor logits, rows;
  if (given_logits) {
    logits = given_logits->contiguous(), rows = given_rows->contiguous();
    check(logits, "logits");
    check(rows, "rows");
    TORCH_CHECK(logits.numel() == batch * length * groups && rows.numel() == logits.numel() * size,
                "logits (b, t, g) and rows (b, t, g d) are needed, not ", logits.sizes(), " and ", rows.sizes());
  }
  Tensor y = at::empty({batch, length, all, size}, product.options());
  Tensor factors = at::empty({batch, length, norm ? turned : 0}, product.options().dtype(at::kFloat));
  const bf16 *from = in(product), *pl = logits.defined() ? in(logits) : nullptr, *pr = pl ? in(rows) : nullptr;
  bf16* to = out(y);
  float* factor = factors.mutable_data_ptr<float>();
  over_blocks(batch * length, [&](long, long first, long last) {
    alignas(64) float gate[16];
    for (long token = first; token < last; token++) {
      const float *c = cosines.at(token / length, token % length), *s = sines.at(token / length, token % length);
      const bf16* x = from + token * all * size;
      bf16* z = to + token * all * size;
      for (long h = 0; h < turned; h++) {
        float by = 1;
        if (norm) {
          by = factor[token * turned + h] = factor_of(squares_of(x + h * size, size), size, eps);
          by *= float(scale);
        }
        turn(x + h * size, c, s, half, by, z + h * size);
      }
      for (long g = 0; g < groups; g++) {
        const long at = (turned + g) * size;
        if (!pl) {
          std::memcpy(z + at, x + at, size * sizeof(bf16));
          continue;
        }
        if (g % 16 == 0)
          _mm512_store_ps(gate, _mm512_mul_ps(set1(range), sigmoid(load_some(pl + token * groups + g, groups - g))));
        const bf16* row = pr + (token * groups + g) * size;
        for (long i = 0; i < size; i += 16)
          store(z + at + i, _mm512_fmadd_ps(set1(gate[g % 16]), load(row + i), load(x + at + i)));
      }
    }
  });
  return {y, factors};
}

// The gradients of product, logits and rows (the last two empty where they were not given). ``projected`` is a gradient
// that the values before the embedding got of their own. q, k and factors are what the forward pass gave, none without
// norm: with q = scale · n, n of length √d, the norm's backward needs ⟨dq, q⟩ alone.
std::tuple<Tensor, Tensor, Tensor> qkv_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                                const optional<Tensor>& projected, const optional<Tensor>& q,
                                                const optional<Tensor>& k, const optional<Tensor>& factors,
                                                const Tensor& cos, const Tensor& sin,
                                                const optional<Tensor>& given_logits,
                                                const optional<Tensor>& given_rows, double range, double scale) {
  check(dq, "dq");
  TORCH_CHECK(dq.dim() == 4 && dk.dim() == 4, "gradients of heads, (b, t, h, d), are needed");
  check(dk, "dk");
  check_like(dv, dk, "dv");
  if (projected) check_like(*projected, dk, "projected");
  const long batch = dq.size(0), length = dq.size(1), heads = dq.size(2), size = dq.size(3), groups = dk.size(2);
  const long turned = heads + groups, all = turned + groups, half = size / 2;
  TORCH_CHECK(size % 32 == 0 && dk.size(0) == batch && dk.size(1) == length && dk.size(3) == size,
              "dq and dk do not fit: ", dq.sizes(), ", ", dk.sizes());
  const Table cosines(cos, batch, length, half, "cos"), sines(sin, batch, length, half, "sin");
  TORCH_CHECK(q.has_value() == factors.has_value() && k.has_value() == q.has_value(), "q, k and factors come together");
  if (q) {
    check_like(*q, dq, "q");
    check_like(*k, dk, "k");
    TORCH_CHECK(factors->numel() == batch * length * turned && factors->is_contiguous(), "factors: (b, t, h + g)");
  }
  const Heads of_q(dq), of_k(dk), of_v(dv), of_projected(projected.value_or(dv));
  const Heads made_q(q.value_or(dq)), made_k(k.value_or(dk));
  const float* factor = q ? floats(*factors) : nullptr;
  const bool gated = given_logits.has_value();
  Tensor logits, rows;
  if (gated) {
    logits = given_logits->contiguous(), rows = given_rows.value().contiguous();
    check(logits, "logits");
    check(rows, "rows");
    TORCH_CHECK(logits.numel() == batch * length * groups && rows.numel() == logits.numel() * size,
                "logits (b, t, g) and rows (b, t, g d) are needed, not ", logits.sizes(), " and ", rows.sizes());
  }
  Tensor dproduct = at::empty({batch, length, all * size}, dq.options());
  Tensor dlogits = at::empty({batch, length, gated ? groups : 0}, dq.options());
  Tensor drows = at::empty({batch, length, gated ? groups * size : 0}, dq.options());
  const bf16 *pl = gated ? in(logits) : nullptr, *pr = gated ? in(rows) : nullptr;
  bf16 *to = out(dproduct), *to_logits = out(dlogits), *to_rows = out(drows);
  const float unscale = 1.f / (float(scale) * float(scale) * float(size));

  // Turned back: (g1 cos − g2 sin, g2 cos + g1 sin), where g has lost its part along ``made``.
  auto turn_back = [&](const bf16* grad, const bf16* made, float along, float by, const float* c, const float* s,
                       bf16* z) {
    for (long i = 0; i < half; i += 16) {
      __m512 first = load(grad + i), second = load(grad + half + i);
      if (factor) {
        first = _mm512_fnmadd_ps(set1(along), load(made + i), first);
        second = _mm512_fnmadd_ps(set1(along), load(made + half + i), second);
      }
      const __m512 vc = _mm512_mul_ps(_mm512_loadu_ps(c + i), set1(by));
      const __m512 vs = _mm512_mul_ps(_mm512_loadu_ps(s + i), set1(by));
      store(z + i, _mm512_fmsub_ps(first, vc, _mm512_mul_ps(second, vs)));
      store(z + half + i, _mm512_fmadd_ps(second, vc, _mm512_mul_ps(first, vs)));
    }
  };

  over_blocks(batch * length, [&](long, long begin, long end) {
    alignas(64) float gate[16], slope[16];
    for (long token = begin; token < end; token++) {
      const long row = token / length, place = token % length;
      const float *c = cosines.at(row, place), *s = sines.at(row, place);
      bf16* z = to + token * all * size;
      for (long h = 0; h < turned; h++) {
        const bool key = h >= heads;
        const Heads &grads = key ? of_k : of_q, &makes = key ? made_k : made_q;
        const bf16* grad = grads.at(row, place) + (key ? h - heads : h) * grads.h;
        const bf16* made = makes.at(row, place) + (key ? h - heads : h) * makes.h;
        float along = 0, by = 1;
        if (factor) along = dot(grad, made, size) * unscale, by = float(scale) * factor[token * turned + h];
        turn_back(grad, made, along, by, c, s, z + h * size);
      }
      for (long g = 0; g < groups; g++) {
        const bf16* grad = of_v.at(row, place) + g * of_v.h;
        const bf16* more = of_projected.at(row, place) + g * of_projected.h;
        bf16* d = z + (turned + g) * size;
        if (projected)
          for (long i = 0; i < size; i += 16) store(d + i, _mm512_add_ps(load(grad + i), load(more + i)));
        else
          std::memcpy(d, grad, size * sizeof(bf16));
        if (!gated) continue;
        if (g % 16 == 0) {
          const __m512 sigma = sigmoid(load_some(pl + token * groups + g, groups - g));
          _mm512_store_ps(gate, _mm512_mul_ps(set1(range), sigma));
          _mm512_store_ps(slope, _mm512_mul_ps(_mm512_mul_ps(set1(range), sigma), _mm512_sub_ps(set1(1), sigma)));
        }
        const long at = (token * groups + g) * size;
        slope[g % 16] *= dot(grad, pr + at, size);
        scale_row(grad, size, gate[g % 16], to_rows + at);
        if (g % 16 == 15 || g == groups - 1)
          store_some(to_logits + token * groups + g / 16 * 16, _mm512_load_ps(slope), g % 16 + 1);
      }
    }
  });
  return {dproduct, dlogits, drows};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def(
      "qkv(Tensor product, Tensor cos, Tensor sin, Tensor? logits, Tensor? rows, int heads, int groups, float range, "
      "float scale, float eps, bool norm) -> (Tensor, Tensor)");
  m.def(
      "qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? projected, Tensor? q, Tensor? k, Tensor? factors, "
      "Tensor cos, Tensor sin, Tensor? logits, Tensor? rows, float range, float scale) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("qkv", qkv);
  m.impl("qkv_backward", qkv_backward);
}
