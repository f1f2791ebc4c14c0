// Causal attention within a window, forward and backward, exclusive where a strength α is given.
//
//     y_i = Σ_j softmax_j(q_i·k_j / √D) v_j        j from i − window to i
//     z_i = y_i − α c_i v_i,  c_i = ⟨y_i, v_i⟩ / ⟨v_i, v_i⟩        (model/xsa.py, THE OPERATION)
//
// A task is a key/value head of one row of the batch: keys and values are packed once for all query heads it serves,
// and their gradients are summed in order. Within it, blocks of 32 queries meet blocks of 32 keys; blocks that the
// mask empties are skipped, and only blocks on its edges look at it. What is alive at a time stays in the L2 cache at
// any context: forward 32 queries × 512 keys of scores (online softmax beyond), backward 128 keys × 512 queries.
//
// The exclusion happens while y is still in registers, so it reads v once more and writes nothing more. For backward
// only z is kept, which the output projection keeps anyway: y = z + α c v.
//
// Bound: 2 products forward, 5 backward, each T² D operations a head (half of it masked). At T = 512, D = 64 on one
// Zen 4 core: 0.18 + 0.45 ms of vdpbf16ps a head; exponentials and the rest are about a fifth of that.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "tiles.h"

namespace {

using namespace xsalab;
using at::Tensor;

constexpr long KEYS = 512;         // scores of 32 queries alive in forward
constexpr long KEY_BLOCK = 128;    // keys whose gradients are summed at a time in backward
constexpr long QUERY_BLOCK = 512;  // over so many queries
constexpr float LOG2E = 1.44269504f;
constexpr float TINY = std::numeric_limits<float>::min();

// One head of one row: entry (t, d) lies at data[t * stride + d].
struct Head {
  bf16* data;
  long stride;
  bf16* row(long t) const { return data + t * stride; }
};

Head head_of(const Tensor& x, long b, long h) {
  return {(bf16*)x.data_ptr() + b * x.stride(0) + h * x.stride(2), x.stride(1)};
}

struct Shape {
  long batch, queries, keys, heads, groups, size, window;
  long first;  // the position of query 0: the last query stands at the last key
  long serves() const { return heads / groups; }
};

Shape shape_of(const Tensor& q, const Tensor& k, const Tensor& v, int64_t window) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.sizes() == k.sizes(), "q is (b, t, h, d), k and v (b, s, g, d)");
  for (const Tensor* x : {&q, &k, &v})
    TORCH_CHECK(x->scalar_type() == at::kBFloat16 && x->stride(3) == 1, "bfloat16, last dimension contiguous");
  Shape n{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), window, k.size(1) - q.size(1)};
  TORCH_CHECK(k.size(0) == n.batch && k.size(3) == n.size && n.heads % n.groups == 0 && n.first >= 0, "shapes differ");
  TORCH_CHECK(n.size % TILE == 0 && window >= 1, "the head size is a multiple of 32, the window at least 1");
  return n;
}

// ``rows`` rows of a head, one behind the other, zeros up to ``padded``.
void gather(Head x, long rows, long padded, long size, bf16* out) {
  for (long t = 0; t < rows; t++) std::memcpy(out + t * size, x.row(t), size * 2);
  std::memset(out + rows * size, 0, (padded - rows) * size * 2);
}

// Xᵀ (size, padded) of padded rows of x that lie one behind the other.
void transposed(const bf16* x, long padded, long size, bf16* out, long out_stride) {
  __m512i r[16];
  for (long t = 0; t < padded; t += 32)
    for (long d = 0; d < size; d += 16) {
      for (long i = 0; i < 16; i++) {
        const bf16* p = x + (t + 2 * i) * size + d;
        r[i] = pairs(_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + size)));
      }
      transpose(r);
      for (long i = 0; i < 16; i++) _mm512_storeu_si512(out + (d + i) * out_stride + t, r[i]);
    }
}

// Panels of all 32 columns of x: column block c at out + c * padded * 32.
void pack_all_columns(const bf16* x, long padded, long size, bf16* out) {
  for (long c = 0; c < size; c += TILE) pack_columns(x + c, size, padded, padded, out + c * padded);
}

float dot(const bf16* a, const bf16* b, long size) {
  __m512 sum = _mm512_setzero_ps();
  for (long d = 0; d < size; d += 16) sum = _mm512_fmadd_ps(load(a + d), load(b + d), sum);
  return _mm512_reduce_add_ps(sum);
}

float dot(const float* a, const bf16* b, long size) {
  __m512 sum = _mm512_setzero_ps();
  for (long d = 0; d < size; d += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + d), load(b + d), sum);
  return _mm512_reduce_add_ps(sum);
}

// Lanes of 16 neighbouring positions from ``position`` on that lie within [low, high].
__mmask16 lanes(long position, long low, long high) {
  const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(int(position)),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(int(std::max(low, -1L)))) &
         _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(int(high)));
}

// ---- forward

// 32 queries, those from ``start`` on, of one head. ``key_panels`` and ``value_panels`` are those of its keys.
void attend_block(const Shape& n, long start, Head q, const bf16* key_panels, const bf16* value_panels, Head v,
                  const float* alpha, Head z, float* log_total, float* ratio, bf16* query, float* score, bf16* weight,
                  float* y) {
  const long size = n.size, padded = up_to_tiles(n.keys), rows = std::min(TILE, n.queries - start);
  const long first = n.first + start, last = first + rows - 1;  // positions
  const float scale = LOG2E / std::sqrt(float(size));
  const long from = std::max(0L, first - n.window) / TILE * TILE, to = std::min(padded, up_to_tiles(last + 1));
  gather({q.row(start), q.stride}, rows, TILE, size, query);
  float top[TILE], total[TILE];
  std::fill(top, top + TILE, -INFINITY);
  std::fill(total, total + TILE, 0.f);
  for (long chunk = from; chunk < to; chunk += KEYS) {
    const long end = std::min(chunk + KEYS, to), width = end - chunk;
    for (long j = chunk; j < end; j += TILE)
      product(query, size, key_panels + j * size, size, score + (j - chunk), KEYS, false);
    for (long r = 0; r < rows; r++) {
      float* s = score + r * KEYS;
      bf16* w = weight + r * (KEYS + 32);
      const long high = first + r, low = high - n.window;
      __m512 largest = set1(-INFINITY);
      auto hide = [&](long j) {
        const __mmask16 seen = lanes(chunk + j, low, high);
        _mm512_storeu_ps(s + j, _mm512_mask_blend_ps(seen, set1(-INFINITY), _mm512_loadu_ps(s + j)));
      };
      for (long j = 0; j < std::min(low - chunk, width); j += 16) hide(j);
      for (long j = std::max(0L, (high + 1 - chunk) / 16 * 16); j < width; j += 16) hide(j);
      for (long j = 0; j < width; j += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(s + j));
      const float before = top[r], now = std::max(before, _mm512_reduce_max_ps(largest) * scale);
      const __m512 shift = set1(now == -INFINITY ? 0.f : now), factor = set1(scale), floor = set1(-126.f);
      __m512 sum = _mm512_setzero_ps();
      for (long j = 0; j < width; j += 16) {
        // multiplied, then subtracted, as the maximum was: the largest has exponent 0 and weight 1 exactly
        const __m512 exponent = _mm512_sub_ps(_mm512_mul_ps(_mm512_loadu_ps(s + j), factor), shift);
        // weights below 2^-126 become 0, not a small number: what is masked must not be multiplied with
        const __m512 e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(exponent, floor, _CMP_GT_OQ),
                                             exp2(_mm512_max_ps(exponent, floor)));
        sum = _mm512_add_ps(sum, e);
        store(w + j, e);
      }
      const float shrink = before == -INFINITY ? 0.f : std::exp2(before - now);
      total[r] = total[r] * shrink + _mm512_reduce_add_ps(sum);
      top[r] = now;
      if (chunk > from && shrink != 1.f)
        for (long d = 0; d < size; d += 16)
          _mm512_storeu_ps(y + r * size + d, _mm512_mul_ps(set1(shrink), _mm512_loadu_ps(y + r * size + d)));
    }
    for (long c = 0; c < size; c += TILE)
      product(weight, KEYS + 32, value_panels + c * padded + chunk * TILE, width, y + c, size, chunk > from);
  }
  for (long r = 0; r < rows; r++) {
    float* mine = y + r * size;
    const bf16* own = v.row(first + r);
    const __m512 inverse = set1(1.f / total[r]);
    for (long d = 0; d < size; d += 16) _mm512_storeu_ps(mine + d, _mm512_mul_ps(inverse, _mm512_loadu_ps(mine + d)));
    log_total[start + r] = top[r] + std::log2(total[r]);
    float c = 0, strength = 0;
    if (alpha) {
      c = dot(mine, own, size) / std::max(dot(own, own, size), TINY);
      ratio[start + r] = c, strength = *alpha * c;
    }
    for (long d = 0; d < size; d += 16)
      store(z.row(start + r) + d, _mm512_fnmadd_ps(set1(strength), load(own + d), _mm512_loadu_ps(mine + d)));
  }
}

std::tuple<Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t window,
                                             const std::optional<Tensor>& alpha) {
  const Shape n = shape_of(q, k, v, window);
  const auto floats = q.options().dtype(at::kFloat);
  Tensor z = at::empty({n.batch, n.queries, n.heads, n.size}, q.options());
  Tensor log_total = at::empty({n.batch, n.heads, n.queries}, floats);
  Tensor ratio = at::empty({alpha ? n.batch : 0, n.heads, n.queries}, floats);
  const float* strengths = alpha ? alpha->const_data_ptr<float>() : nullptr;
  float *totals = log_total.data_ptr<float>(), *ratios = ratio.data_ptr<float>();
  const long padded = up_to_tiles(n.keys), size = n.size;
  at::parallel_for(0, n.batch * n.groups, 1, [&](long begin, long end) {
    Tiles tiles;
    Scratch<bf16> rows(padded * size), key_panels(padded * size), value_panels(padded * size);
    Scratch<bf16> query(TILE * size), weight(TILE * (KEYS + 32));
    Scratch<float> score(TILE * KEYS), y(TILE * size);
    std::memset((bf16*)weight, 0, TILE * (KEYS + 32) * 2);  // rows that a last block does not have
    for (long task = begin; task < end; task++) {
      const long b = task / n.groups, g = task % n.groups;
      const Head value = head_of(v, b, g);
      gather(head_of(k, b, g), n.keys, padded, size, rows);
      for (long j = 0; j < padded; j += TILE) pack_rows(rows + j * size, size, TILE, size, key_panels + j * size);
      gather(value, n.keys, padded, size, rows);
      pack_all_columns(rows, padded, size, value_panels);
      for (long h = g * n.serves(); h < (g + 1) * n.serves(); h++) {
        const long place = (b * n.heads + h) * n.queries;
        for (long start = 0; start < n.queries; start += TILE)
          attend_block(n, start, head_of(q, b, h), key_panels, value_panels, value, strengths ? strengths + h : nullptr,
                       head_of(z, b, h), totals + place, ratios + place, query, score, weight, y);
      }
    }
  });
  return {z, log_total, ratio};
}

// ---- backward

// From ∂L/∂z to ∂L/∂y, into ``grad_y`` (padded, size), and ⟨∂L/∂y, y⟩ of each query, what the softmax's gradient needs.
// The exclusion's own part of ∂L/∂v is added to ``grad_v``. Returns ∂L/∂α of the head.
float before_exclusion(const Shape& n, Head grad, Head z, Head v, const float* alpha, const float* ratio, bf16* grad_y,
                       float* along, float* grad_v) {
  const long size = n.size;
  float grad_alpha = 0;
  for (long t = 0; t < n.queries; t++) {
    const bf16 *g = grad.row(t), *out = z.row(t), *own = v.row(n.first + t);
    float c = 0, d = 0, strength = 0, twice = 0;
    if (alpha) {
      const float square = dot(own, own, size), gv = dot(g, own, size);
      c = ratio[t], d = gv / std::max(square, TINY), strength = *alpha;
      twice = square > TINY ? 2 * d : 0.f;  // below the floor the norm is a constant
      grad_alpha -= c * gv;
    }
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16) {
      const __m512 vi = load(own + i), gi = load(g + i);
      const __m512 y = _mm512_fmadd_ps(set1(strength * c), vi, load(out + i));
      const __m512 gy = _mm512_fnmadd_ps(set1(strength * d), vi, gi);
      sum = _mm512_fmadd_ps(gy, y, sum);
      store(grad_y + t * size + i, gy);
      if (alpha) {  // −α (d y + c (g − 2 d v))
        float* gv = grad_v + (n.first + t) * size + i;
        const __m512 inner = _mm512_fnmadd_ps(set1(twice), vi, gi);
        __m512 total = _mm512_fnmadd_ps(set1(strength * d), y, _mm512_loadu_ps(gv));
        _mm512_storeu_ps(gv, _mm512_fnmadd_ps(set1(strength * c), inner, total));
      }
    }
    along[t] = _mm512_reduce_add_ps(sum);
  }
  return grad_alpha;
}

// Weights and gradients of scores of 32 keys × 32 queries, keys down. Both go to rows of ``weight`` and ``slope``
// (``stride`` apart); the slopes also to ``panel``, keys paired, for the product with the keys.
void block_slopes(const Shape& n, long key, long query, const float* score, const float* grad_weight,
                  const float* log_total, const float* along, bf16* weight, bf16* slope, long stride, bf16* panel) {
  const float scale = 1.f / std::sqrt(float(n.size));
  const long first = n.first + query;
  const bool whole = key + TILE - 1 <= first && key >= first + TILE - 1 - n.window;
  const __m512 floor = set1(-126.f);
  for (long half = 0; half < TILE; half += 16) {
    const __m512 shift = _mm512_loadu_ps(log_total + query + half), inner = _mm512_loadu_ps(along + query + half);
    __m256i even = _mm256_setzero_si256();
    for (long j = 0; j < TILE; j++) {
      const __mmask16 seen = whole ? 0xffff : lanes(first + half, key + j, key + j + n.window);
      const __m512 exponent = _mm512_fmsub_ps(_mm512_loadu_ps(score + j * TILE + half), set1(scale * LOG2E), shift);
      const __m512 p = _mm512_maskz_mov_ps(seen, exp2(_mm512_max_ps(exponent, floor)));
      const __m512 ds = _mm512_mul_ps(
          p, _mm512_mul_ps(set1(scale), _mm512_sub_ps(_mm512_loadu_ps(grad_weight + j * TILE + half), inner)));
      store(weight + j * stride + half, p);
      const __m256i low = narrow(ds);
      _mm256_storeu_si256((__m256i*)(slope + j * stride + half), low);
      if (j % 2)
        _mm512_storeu_si512(panel + (j / 2) * 64 + half * 2, pairs(even, low));
      else
        even = low;
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& grad_in, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor& z, const Tensor& log_total,
                                                              const Tensor& ratio, int64_t window,
                                                              const std::optional<Tensor>& alpha) {
  const Shape n = shape_of(q, k, v, window);
  const Tensor grad = grad_in.stride(3) == 1 ? grad_in : grad_in.contiguous();
  TORCH_CHECK(grad.scalar_type() == at::kBFloat16 && grad.sizes() == q.sizes(), "grad is like q");
  Tensor grad_q = at::empty({n.batch, n.queries, n.heads, n.size}, q.options());
  Tensor grad_k = at::empty({n.batch, n.keys, n.groups, n.size}, q.options()), grad_v = at::empty_like(grad_k);
  Tensor grad_alpha = at::zeros({n.batch, n.heads}, q.options().dtype(at::kFloat));
  const float* strengths = alpha ? alpha->const_data_ptr<float>() : nullptr;
  const float *totals = log_total.const_data_ptr<float>(), *ratios = ratio.const_data_ptr<float>();
  float* alphas = grad_alpha.data_ptr<float>();
  const long size = n.size, keys = up_to_tiles(n.keys), queries = up_to_tiles(n.queries);
  const long stride = QUERY_BLOCK + 32, across = keys + 32;
  at::parallel_for(0, n.batch * n.groups, 1, [&](long begin, long end) {
    Tiles tiles;
    Scratch<bf16> key(keys * size), value(keys * size), key_across(size * across), query(queries * size);
    Scratch<bf16> gy(queries * size), query_down(queries * size), query_along(queries * size);
    Scratch<bf16> gy_down(queries * size), gy_along(queries * size);
    Scratch<bf16> weight(TILE * stride), slope(TILE * stride), panel(KEY_BLOCK * QUERY_BLOCK);
    Scratch<float> sum_k(keys * size), sum_v(keys * size), sum_q(size * queries);
    Scratch<float> logs(queries), along(queries), score(TILE * TILE), grad_weight(TILE * TILE);
    for (long task = begin; task < end; task++) {
      const long b = task / n.groups, g = task % n.groups;
      const Head v_head = head_of(v, b, g);
      gather(head_of(k, b, g), n.keys, keys, size, key);
      gather(v_head, n.keys, keys, size, value);
      transposed(key, keys, size, key_across, across);
      std::memset((float*)sum_k, 0, keys * size * 4);
      std::memset((float*)sum_v, 0, keys * size * 4);
      for (long h = g * n.serves(); h < (g + 1) * n.serves(); h++) {
        const long place = (b * n.heads + h) * n.queries;
        gather(head_of(q, b, h), n.queries, queries, size, query);
        alphas[b * n.heads + h] =
            before_exclusion(n, head_of(grad, b, h), head_of(z, b, h), v_head, strengths ? strengths + h : nullptr,
                             ratios + place, gy, along, sum_v);
        // Queries that are not there have gradient 0 and a weight of nothing.
        std::memcpy((float*)logs, totals + place, n.queries * 4);
        std::fill(logs + n.queries, logs + queries, 1e30f);
        std::fill(along + n.queries, along + queries, 0.f);
        std::memset(gy + n.queries * size, 0, (queries - n.queries) * size * 2);
        for (long i = 0; i < queries; i += TILE) {
          pack_rows(query + i * size, size, TILE, size, query_down + i * size);
          pack_rows(gy + i * size, size, TILE, size, gy_down + i * size);
        }
        pack_all_columns(query, queries, size, query_along);
        pack_all_columns(gy, queries, size, gy_along);
        std::memset((float*)sum_q, 0, size * queries * 4);
        for (long qb = 0; qb < queries; qb += QUERY_BLOCK) {
          const long q_end = std::min(qb + QUERY_BLOCK, queries);
          // the keys that any of these queries sees
          const long low = std::max(0L, n.first + qb - n.window) / TILE * TILE;
          const long high = std::min(keys, up_to_tiles(n.first + q_end));
          for (long kb = low; kb < high; kb += KEY_BLOCK) {
            const long k_end = std::min(kb + KEY_BLOCK, high);
            // Keys outside, queries inside: the keys' rows stay in the L1 cache and the queries' panels stream past.
            for (long j = kb; j < k_end; j += TILE) {
              const long q_from = std::max(qb, std::max(0L, j - n.first) / TILE * TILE);
              const long q_to = std::min(q_end, up_to_tiles(j + TILE + n.window - n.first));
              for (long i = q_from; i < q_to; i += TILE) {
                product(key + j * size, size, query_down + i * size, size, score, TILE, false);
                product(value + j * size, size, gy_down + i * size, size, grad_weight, TILE, false);
                block_slopes(n, j, i, score, grad_weight, logs, along, weight + (i - qb), slope + (i - qb), stride,
                             panel + (i - qb) * KEY_BLOCK + (j - kb) * TILE);
              }
              for (long d = 0; d < size && q_from < q_to; d += TILE) {
                product(weight + (q_from - qb), stride, gy_along + d * queries + q_from * TILE, q_to - q_from,
                        sum_v + j * size + d, size, true);
                product(slope + (q_from - qb), stride, query_along + d * queries + q_from * TILE, q_to - q_from,
                        sum_k + j * size + d, size, true);
              }
            }
            for (long d = 0; d < size; d += TILE)
              for (long i = qb; i < q_end; i += TILE) {
                const long k_from = std::max(kb, std::max(0L, n.first + i - n.window) / TILE * TILE);
                const long k_to = std::min(k_end, up_to_tiles(n.first + i + TILE));
                if (k_from < k_to)
                  product(key_across + d * across + k_from, across,
                          panel + (i - qb) * KEY_BLOCK + (k_from - kb) * TILE, k_to - k_from, sum_q + d * queries + i,
                          queries, true);
              }
          }
        }
        const Head out = head_of(grad_q, b, h);
        __m512i r[16];
        for (long i = 0; i < n.queries; i += 16)
          for (long d = 0; d < size; d += 16) {
            for (long m = 0; m < 16; m++) r[m] = _mm512_loadu_si512(sum_q + (d + m) * queries + i);
            transpose(r);
            for (long m = 0; m < std::min(16L, n.queries - i); m++)
              store(out.row(i + m) + d, _mm512_castsi512_ps(r[m]));
          }
      }
      for (auto [sum, out] : {std::pair{(float*)sum_k, head_of(grad_k, b, g)}, {(float*)sum_v, head_of(grad_v, b, g)}})
        for (long t = 0; t < n.keys; t++)
          for (long d = 0; d < size; d += 16) store(out.row(t) + d, _mm512_loadu_ps(sum + t * size + d));
    }
  });
  return {grad_q, grad_k, grad_v, grad_alpha.sum(0)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, int window, Tensor? alpha) -> (Tensor, Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor z, Tensor log_total, Tensor ratio, "
      "int window, Tensor? alpha) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("attention", attention);
  m.impl("attention_backward", attention_backward);
}
