// One step of generation: the logits behind one new token a row, for a model whose layers are standard or exclusive.
//
// A step of few rows is bound by memory: each weight is read once and used ``rows`` times. So weights are packed once a
// generation, as panels of 32 outputs that are read from front to back, and the whole step is one call: what lies
// between the products is small, and PyTorch's own cost of an operation would be most of it.
//
// A product holds the sums of a block of rows × 32 to 128 outputs in registers. Per word of a panel (one float32, or two
// neighbouring bfloat16) a row's own word is spread over a register and multiplied in. Every sum runs over k in order,
// whatever the block: a row's numbers do not depend on the rows beside it, nor on threads.
//
// Bounds, depth 6 × 384 with a vocabulary of 8,192: 27 MB of bfloat16 a step (float32: 55 MB), at 16 rows 0.44 GFLOP.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "tiles.h"

namespace xsalab {
namespace {

using at::Tensor;
using std::optional;
using xsalab::load;
using xsalab::store;

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }

// ---- products

// sum += (what one word holds of a row) · (the same of 16 outputs)
inline __m512 multiply(__m512 sum, __m512i word, __m512i weights, const float*) {
  return _mm512_fmadd_ps((__m512)word, (__m512)weights, sum);
}
inline __m512 multiply(__m512 sum, __m512i word, __m512i weights, const bf16*) {
  return _mm512_dpbf16_ps(sum, (__m512bh)word, (__m512bh)weights);
}

// y (ROWS × 32 · PANELS, rows ``ldy`` apart) = or += x (ROWS × k, rows ``ldx`` apart) · PANELS panels, one after another.
// ``ahead``: how many bytes further on memory is asked for.
template <class T, int ROWS, int PANELS>
void block(const T* x, long ldx, const T* panels, long k, float* y, long ldy, bool add, long ahead) {
  constexpr int WORD = 4 / sizeof(T), HALVES = 2 * PANELS;
  __m512 sum[ROWS][HALVES];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int h = 0; h < HALVES; h++) sum[r][h] = add ? load(y + r * ldy + h * 16) : _mm512_setzero_ps();
  for (long p = 0; p < k; p += WORD) {
    __m512i weights[HALVES];
#pragma GCC unroll 8
    for (int h = 0; h < HALVES; h++) {
      const T* at = panels + h / 2 * TILE * k + p * TILE + h % 2 * 16 * WORD;
      _mm_prefetch((const char*)at + ahead, _MM_HINT_T0);
      weights[h] = _mm512_loadu_si512(at);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      int32_t word;
      std::memcpy(&word, x + r * ldx + p, 4);
      const __m512i spread = _mm512_set1_epi32(word);
#pragma GCC unroll 8
      for (int h = 0; h < HALVES; h++) sum[r][h] = multiply(sum[r][h], spread, weights[h], x);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int h = 0; h < HALVES; h++) store(y + r * ldy + h * 16, sum[r][h]);
}

constexpr int MOST = 12;  // rows of a block: 24 of 32 registers hold sums

// Sums at work at a time, 8 or more: a multiplication takes 4 to 6 cycles and one begins in each.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 6 ? 2 : 1; }

template <class T, int ROWS>
void panels_of_block(const T* x, long ldx, const T* panels, long count, long k, float* y, long ldy, bool add, long ahead) {
  constexpr int STEP = panels_at_once(ROWS);
  long i = 0;
  for (; i + STEP <= count; i += STEP)
    block<T, ROWS, STEP>(x, ldx, panels + i * TILE * k, k, y + i * TILE, ldy, add, ahead);
  for (; i < count; i++) block<T, ROWS, 1>(x, ldx, panels + i * TILE * k, k, y + i * TILE, ldy, add, ahead);
}

// y (rows × 32 · count) = or += x (rows × k) · panels. Where the rows need several blocks, panels are taken in groups that
// stay in the second-level cache for all of them, and the last block asks for the next group: the first one then waits
// for memory no longer than the others.
template <class T>
void product(const T* x, long ldx, long rows, const T* panels, long count, long k, float* y, long ldy, bool add) {
  using Block = void (*)(const T*, long, const T*, long, long, float*, long, bool, long);
  static constexpr Block blocks[MOST] = {
      panels_of_block<T, 1>, panels_of_block<T, 2>,  panels_of_block<T, 3>,  panels_of_block<T, 4>,
      panels_of_block<T, 5>, panels_of_block<T, 6>,  panels_of_block<T, 7>,  panels_of_block<T, 8>,
      panels_of_block<T, 9>, panels_of_block<T, 10>, panels_of_block<T, 11>, panels_of_block<T, 12>};
  constexpr long PAGE_ENDS = 2048, GROUP = 256 << 10;  // bytes; the processor's own prefetch stops at the end of a page
  const long parts = (rows + MOST - 1) / MOST, bytes = TILE * k * long(sizeof(T));
  const long group = parts == 1 ? count : std::max(1L, GROUP / bytes);
  for (long i = 0; i < count; i += group)
    for (long part = 0; part < parts; part++) {
      const long from = part * rows / parts, to = (part + 1) * rows / parts;
      const long ahead = part + 1 < parts || parts == 1 ? PAGE_ENDS : group * bytes;
      blocks[to - from - 1](x + from * ldx, ldx, panels + i * TILE * k, std::min(group, count - i), k,
                            y + from * ldy + i * TILE, ldy, add, ahead);
    }
}

// ---- what lies between them; lengths are multiples of 16

inline float dot(const float* a, const float* b, long n) {
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < n; i += 16) sum = _mm512_fmadd_ps(load(a + i), load(b + i), sum);
  return _mm512_reduce_add_ps(sum);
}

// to = scale · x / √(mean x² + eps)
template <class T>
void rms_norm(const float* x, long n, float eps, float scale, T* to) {
  const __m512 factor = set1(scale / std::sqrt(dot(x, x, n) / float(n) + eps));
  for (long i = 0; i < n; i += 16) store(to + i, _mm512_mul_ps(load(x + i), factor));
}

// The halves (a, b) of x become (a cos + b sin, b cos − a sin).
void rotate(float* x, const float* cos, const float* sin, long half) {
  for (long i = 0; i < half; i += 16) {
    const __m512 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, _mm512_fmadd_ps(b, s, _mm512_mul_ps(a, c)));
    store(x + half + i, _mm512_fnmadd_ps(a, s, _mm512_mul_ps(b, c)));
  }
}

template <class From, class To>
void copy(const From* x, long n, To* to) {
  for (long i = 0; i < n; i += 16) store(to + i, load(x + i));
}

template <class T>
float gate_of(const T* x, const float* weight, long channels) {
  float sum = 0;
  for (long i = 0; i < channels; i++) {
    if constexpr (sizeof(T) == 2)
      sum += widen(x[i]) * weight[i];
    else
      sum += x[i] * weight[i];
  }
  return 1 / (1 + std::exp(-sum));
}

template <class T, int VECTORS>
void mix(const float* weights, const T* values, long count, long size, __m512 scale, float* y) {
  __m512 sum[2][VECTORS] = {};
  for (long s = 0; s < count; s++) {
    const __m512 weight = set1(weights[s]);
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; c++) sum[0][c] = _mm512_fmadd_ps(weight, load(values + s * size + c * 16), sum[0][c]);
    if (++s == count) break;
    const __m512 next = set1(weights[s]);
#pragma GCC unroll 4
    for (int c = 0; c < VECTORS; c++) sum[1][c] = _mm512_fmadd_ps(next, load(values + s * size + c * 16), sum[1][c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < VECTORS; c++) store(y + c * 16, _mm512_mul_ps(_mm512_add_ps(sum[0][c], sum[1][c]), scale));
}

// y = softmax₂(q · keys) · values over the keys ``first`` to ``last``; q holds log₂e / √D already. keys and values
// (capacity, size), capacity a multiple of 16: 16 keys at a time, from a multiple of 16 on. ``weights``: as many floats.
template <class T>
void attend(const float* q, const T* keys, const T* values, long first, long last, long size, float* weights, float* y) {
  const long begin = first / 16 * 16;
  const __m512 never = set1(-std::numeric_limits<float>::infinity());
  __m512 top = never;
  for (long s = begin; s <= last; s += 16) {
    __m512 sums[16] = {};
    for (long c = 0; c < size; c += 16) {
      const __m512 part = load(q + c);
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) sums[j] = _mm512_fmadd_ps(load(keys + (s + j) * size + c), part, sums[j]);
    }
    for (long c = 0; c < 16 * size; c += 64 / long(sizeof(T))) {
      _mm_prefetch((const char*)(keys + (s + 32) * size + c), _MM_HINT_T0);
      _mm_prefetch((const char*)(values + s * size + c), _MM_HINT_T1);  // wanted once all scores are there
    }
    transpose((__m512i*)sums);
    for (int step = 8; step; step /= 2)
      for (int j = 0; j < step; j++) sums[j] = _mm512_add_ps(sums[j], sums[j + step]);
    const long from = std::max(first - s, 0L), to = std::min(last - s, 15L);  // memory elsewhere may hold anything
    const __mmask16 seen = __mmask16((2u << to) - (1u << from));
    const __m512 scores = _mm512_mask_mov_ps(never, seen, sums[0]);
    top = _mm512_max_ps(top, scores);
    store(weights + s - begin, scores);
  }
  const __m512 largest = set1(_mm512_reduce_max_ps(top)), lowest = set1(-126.f);
  __m512 total = _mm512_setzero_ps();
  for (long s = 0; s <= last - begin; s += 16) {
    const __m512 score = load(weights + s);
    const __mmask16 seen = _mm512_cmp_ps_mask(score, never, _CMP_GT_OQ);
    const __m512 weight = _mm512_maskz_mov_ps(seen, exp2(_mm512_max_ps(_mm512_sub_ps(score, largest), lowest)));
    total = _mm512_add_ps(total, weight);
    store(weights + s, weight);
  }
  const __m512 scale = set1(1 / _mm512_reduce_add_ps(total));
  const long count = last - first + 1;
  weights += first - begin, values += first * size;
  long c = 0;
  for (; c + 64 <= size; c += 64) mix<T, 4>(weights, values + c, count, size, scale, y + c);
  if (c < size) mix<T, 2>(weights, values + c, count, size, scale, y + c);
}

// y −= α (⟨y,v⟩ / ⟨v,v⟩) v. One function for both products: ⟨y,v⟩ = ⟨v,v⟩ exactly where y = v.
void exclude(float* y, const float* v, float alpha, long size) {
  const float share = dot(y, v, size) / std::max(dot(v, v, size), std::numeric_limits<float>::min());
  const __m512 factor = set1(alpha * share);
  for (long i = 0; i < size; i += 16) store(y + i, _mm512_fnmadd_ps(factor, load(v + i), load(y + i)));
}

// cap · tanh(x / cap), to 1e-7 of the cap: tanh z = 1 − 2 / (1 + e^{2z}), and beyond 9 it rounds to 1.
void soft_cap(float* x, long n, float cap) {
  const __m512 inner = set1(2 * 1.44269504f / cap), most = set1(2 * 1.44269504f * 10), one = set1(1), limit = set1(cap);
  for (long i = 0; i < n; i += 16) {
    __m512 z = _mm512_mul_ps(load(x + i), inner);
    z = _mm512_max_ps(_mm512_min_ps(z, most), _mm512_sub_ps(_mm512_setzero_ps(), most));
    const __m512 part = _mm512_div_ps(set1(2), _mm512_add_ps(one, exp2(z)));
    store(x + i, _mm512_mul_ps(limit, _mm512_sub_ps(one, part)));
  }
}

// The token at which the summed probabilities of softmax(logits / temperature) pass a row's chance, a number in [0, 1):
// logits (rows, vocabulary) in float32, chances (rows,) in float64. Sums by blocks of 128 tokens first, in float64.
Tensor decode_pick(const Tensor& logits, double temperature, const Tensor& chances) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1 && logits.size(1) > 0,
              "logits (rows, vocabulary) in float32, a row's beside each other");
  TORCH_CHECK(chances.scalar_type() == at::kDouble && chances.is_contiguous() && chances.numel() == logits.size(0),
              "a chance in float64 for each row");
  constexpr long BLOCK = 128;
  const long rows = logits.size(0), n = logits.size(1), count = (n + BLOCK - 1) / BLOCK;
  Tensor picked = at::empty({rows}, at::kLong);
  at::parallel_for(0, rows, 1, [&](long begin, long end) {
    Scratch<float> scratch(count * BLOCK);
    Scratch<double> sums(count);
    float* weights = scratch;
    const __m512 never = set1(-std::numeric_limits<float>::infinity()), lowest = set1(-126.f);
    for (long r = begin; r < end; r++) {
      const float* x = logits.const_data_ptr<float>() + r * logits.stride(0);
      __m512 top = never;
      for (long i = 0; i < count * BLOCK; i += 16) {
        const __mmask16 there = __mmask16((1u << std::clamp(n - i, 0L, 16L)) - 1);
        const __m512 part = _mm512_mask_loadu_ps(never, there, x + i);
        top = _mm512_max_ps(top, part);
        store(weights + i, part);
      }
      // the largest at 0 first: a tiny temperature then gives −∞ for the rest, never ∞ − ∞
      const __m512 largest = set1(_mm512_reduce_max_ps(top)), heat = set1(float(temperature)), unit = set1(1.44269504f);
      double total = 0;
      for (long b = 0; b < count; b++) {
        __m512d sum = _mm512_setzero_pd();
        for (long i = b * BLOCK; i < (b + 1) * BLOCK; i += 16) {
          const __m512 z = _mm512_mul_ps(_mm512_div_ps(_mm512_sub_ps(load(weights + i), largest), heat), unit);
          const __m512 weight = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(z, lowest, _CMP_GE_OQ), exp2(_mm512_max_ps(z, lowest)));
          store(weights + i, weight);
          sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(weight)));
          sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(weight, 1)));
        }
        total += sums[b] = _mm512_reduce_add_pd(sum);
      }
      const double target = chances.const_data_ptr<double>()[r] * total;
      double passed = 0;
      long b = 0;
      while (b + 1 < count && passed + sums[b] <= target) passed += sums[b++];
      long token = 0;
      for (long i = b * BLOCK; i < (b + 1) * BLOCK && passed <= target; i++)
        if (weights[i] > 0) passed += weights[i], token = i;  // rounding may leave the last one a hair below
      picked.mutable_data_ptr<int64_t>()[r] = token;
    }
  });
  return picked;
}

// ---- the model

// ``rows`` ≤ 32 rows of x, in another dtype by way of ``scratch`` (32 × k).
template <class From, class To>
void pack_panel(const From* x, long rows, long k, To* scratch, To* panel) {
  constexpr long WORD = 4 / sizeof(To);  // a panel is made of 32-bit words, whatever they hold
  const To* from = scratch;
  if constexpr (sizeof(From) == sizeof(To))
    from = x;
  else
    copy(x, rows * k, scratch);
  pack_rows((const bf16*)from, k * 2 / WORD, rows, k * 2 / WORD, (bf16*)panel);
}

// The rows of several matrices (outputs, k), one after another, as panels (outputs / 32, 32 · k): see tiles.h. The last
// panel is filled up with zeros.
Tensor decode_panels(at::TensorList weights, at::ScalarType dtype) {
  const bool narrow = dtype == at::kBFloat16, wide = weights[0].scalar_type() == at::kFloat;
  TORCH_CHECK(narrow || dtype == at::kFloat, "panels of float32 or bfloat16");
  const long k = weights[0].size(1);
  TORCH_CHECK(k % TILE == 0, "inputs in multiples of 32");
  std::vector<const void*> from;
  std::vector<long> counts;
  for (const Tensor& weight : weights) {
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == k && weight.is_contiguous() && weight.device().is_cpu(),
                "contiguous matrices on the CPU with as many inputs");
    TORCH_CHECK(weight.scalar_type() == (wide ? at::kFloat : at::kBFloat16), "matrices of float32 or of bfloat16");
    const long rows = weight.size(0);
    TORCH_CHECK(rows % TILE == 0 || weights.size() == 1, "outputs in multiples of 32 where matrices are joined");
    for (long i = 0; i < rows; i += TILE) {
      from.push_back((const char*)weight.const_data_ptr() + i * k * weight.element_size());
      counts.push_back(std::min(TILE, rows - i));
    }
  }
  Tensor packed = at::empty({long(from.size()), TILE * k}, weights[0].options().dtype(dtype));
  void* to = packed.mutable_data_ptr();
  at::parallel_for(0, long(from.size()), 1, [&](long begin, long end) {
    Scratch<float> scratch(TILE * k);
    for (long i = begin; i < end; i++) {
      float *here = scratch, *floats = (float*)to + i * TILE * k;
      bf16* halves = (bf16*)to + i * TILE * k;
      if (narrow && wide) pack_panel((const float*)from[i], counts[i], k, (bf16*)here, halves);
      if (narrow && !wide) pack_panel((const bf16*)from[i], counts[i], k, (bf16*)here, halves);
      if (!narrow && wide) pack_panel((const float*)from[i], counts[i], k, here, floats);
      if (!narrow && !wide) pack_panel((const bf16*)from[i], counts[i], k, here, floats);
    }
  });
  return packed;
}

struct Layer {
  double residual, x0;  // x ← residual · x + x0 · x⁰
  int64_t window;
  Tensor qkv, out, up, down;           // panels
  optional<Tensor> table, gate;        // value embedding (vocabulary, groups · size), its gate (groups, channels)
  optional<Tensor> alpha;              // (heads,) in float32; none: nothing is excluded
  bool projected;                      // excluded along W_v x alone, else along what attention mixes
};

struct Decoder : torch::CustomClassHolder {
  int64_t heads, groups, size, vocabulary, middle;  // middle: the layer whose output the last norm leaves ``backout`` of out
  double eps, qk_scale, gate_range, cap, smear, backout;  // qk_scale 0: no norm of q and k; cap 0: none
  Tensor embedding, head;                                 // (vocabulary, width); panels
  optional<Tensor> smear_gate;                            // (channels,) in float32; none: no smear
  std::vector<Layer> layers;

  Decoder(int64_t heads, int64_t groups, int64_t size, int64_t vocabulary, int64_t middle, double eps, double qk_scale,
          double gate_range, double cap, double smear, double backout, Tensor embedding, Tensor head,
          optional<Tensor> smear_gate)
      : heads(heads), groups(groups), size(size), vocabulary(vocabulary), middle(middle), eps(eps), qk_scale(qk_scale),
        gate_range(gate_range), cap(cap), smear(smear), backout(backout), embedding(embedding), head(head),
        smear_gate(smear_gate) {
    TORCH_CHECK(size % TILE == 0 && embedding.size(1) % TILE == 0 && heads % groups == 0, "multiples of 32 alone");
  }

  void add_layer(double residual, double x0, int64_t window, Tensor qkv, Tensor out, Tensor up, Tensor down,
                 optional<Tensor> table, optional<Tensor> gate, optional<Tensor> alpha, bool projected) {
    for (const Tensor& x : {qkv, out, up, down})
      TORCH_CHECK(x.scalar_type() == embedding.scalar_type(), "panels in the dtype of the embedding");
    TORCH_CHECK(!table || table->scalar_type() == embedding.scalar_type(), "value embeddings in the same dtype");
    layers.push_back({residual, x0, window, qkv, out, up, down, table, gate, alpha, projected});
  }

  // tokens and positions (rows,) int64: the new token of each row and how many are before it. cos, sin (positions,
  // size / 2) in float32. before (rows, width): the embedding of the token before, replaced. keys, values (depth, rows,
  // groups, capacity, size): the new ones are written at ``positions``. -> logits (rows, vocabulary) in float32.
  Tensor step(Tensor tokens, Tensor positions, Tensor cos, Tensor sin, Tensor before, Tensor keys, Tensor values) {
    const long rows = tokens.size(0), capacity = keys.size(3), *position = positions.const_data_ptr<int64_t>();
    TORCH_CHECK(keys.sizes() == values.sizes() && keys.size(0) == long(layers.size()) && keys.size(1) == rows &&
                    keys.size(2) == groups && keys.size(4) == size && capacity % 16 == 0,
                "keys and values (depth, rows, groups, a multiple of 16, size)");
    for (const Tensor& x : {keys, values, before, cos, sin, tokens, positions, embedding})
      TORCH_CHECK(x.is_contiguous(), "contiguous tensors");
    for (const Tensor& x : {keys, values, before})
      TORCH_CHECK(x.scalar_type() == embedding.scalar_type(), "keys, values and before in the model's dtype");
    for (long r = 0; r < rows; r++) {
      TORCH_CHECK(0 <= position[r] && position[r] < std::min(capacity, cos.size(0)), "a position without a place");
      const long token = tokens.const_data_ptr<int64_t>()[r];
      TORCH_CHECK(0 <= token && token < embedding.size(0), "a token outside the vocabulary");
    }
    return embedding.scalar_type() == at::kFloat ? run<float>(tokens, position, cos, sin, before, keys, values)
                                                 : run<bf16>(tokens, position, cos, sin, before, keys, values);
  }

  template <class T>
  static void multiply_all(const T* x, long rows, const Tensor& panels, float* y, long ldy, bool add) {
    const long k = panels.size(1) / TILE;
    at::parallel_for(0, panels.size(0), 4, [&](long begin, long end) {
      product(x, k, rows, (const T*)panels.const_data_ptr() + begin * TILE * k, end - begin, k, y + begin * TILE, ldy, add);
    });
  }

  template <class T>
  Tensor run(const Tensor& tokens, const long* position, const Tensor& cos, const Tensor& sin, const Tensor& before,
             const Tensor& keys, const Tensor& values) {
    const long rows = tokens.size(0), width = embedding.size(1), capacity = keys.size(3), half = size / 2;
    const long joined = (heads + 2 * groups) * size, hidden = layers[0].up.size(0) * TILE, inner = heads * size;
    const long* token = tokens.const_data_ptr<int64_t>();
    Scratch<float> floats(rows * (3 * width + joined + hidden));
    Scratch<T> narrow(rows * (width + inner + hidden));
    float *x = floats, *first = x + rows * width, *kept = first + rows * width, *qkv = kept + rows * width;
    float* wide = qkv + rows * joined;
    T *normed = narrow, *mixed = normed + rows * width, *squared = mixed + rows * inner;

    for (long r = 0; r < rows; r++) {
      float* to = x + r * width;
      T* last = (T*)before.mutable_data_ptr() + r * width;
      copy((const T*)embedding.const_data_ptr() + token[r] * width, width, to);
      rms_norm(to, width, eps, 1, normed + r * width);
      copy(normed + r * width, width, to);
      if (smear_gate) {
        const float gate = smear * gate_of(normed + r * width, smear_gate->const_data_ptr<float>(), smear_gate->numel());
        for (long i = 0; i < width; i += 16) store(to + i, _mm512_fmadd_ps(set1(gate), load(last + i), load(to + i)));
        copy(normed + r * width, width, last);
      }
      copy(to, width, first + r * width);
    }
    auto norm_all = [&] {
      for (long r = 0; r < rows; r++) rms_norm(x + r * width, width, eps, 1, normed + r * width);
    };
    for (size_t number = 0; number < layers.size(); number++) {
      const Layer& layer = layers[number];
      for (long i = 0; i < rows * width; i += 16)
        store(x + i, _mm512_fmadd_ps(set1(layer.x0), load(first + i), _mm512_mul_ps(set1(layer.residual), load(x + i))));
      norm_all();
      multiply_all<T>(normed, rows, layer.qkv, qkv, joined, false);
      at::parallel_for(0, rows * groups, 1, [&](long begin, long end) {
        Scratch<float> scratch(capacity + 2 * size);
        float *weights = scratch, *mix_of = weights + capacity, *own = mix_of + size;
        for (long item = begin; item < end; item++) {
          const long r = item / groups, g = item % groups, place = position[r], group = heads / groups;
          const float *turn = cos.const_data_ptr<float>() + place * half, *side = sin.const_data_ptr<float>() + place * half;
          const long store_at = ((number * rows + r) * groups + g) * capacity * size;
          T *row_keys = (T*)keys.mutable_data_ptr() + store_at, *row_values = (T*)values.mutable_data_ptr() + store_at;
          float *q = qkv + r * joined + g * group * size, *k = qkv + r * joined + (heads + g) * size, *v = k + groups * size;
          T *new_key = row_keys + place * size, *new_value = row_values + place * size;
          rotate(k, turn, side, half);
          if (qk_scale)
            rms_norm(k, size, eps, qk_scale, new_key);
          else
            copy(k, size, new_key);
          copy(v, size, new_value);  // rounded, as attention and exclusion take it
          copy(new_value, size, own);
          if (layer.table) {
            const long channels = layer.gate->size(1);
            const float gate = gate_range * gate_of(normed + r * width, layer.gate->const_data_ptr<float>() + g * channels, channels);
            const T* row = (const T*)layer.table->const_data_ptr() + (token[r] * groups + g) * size;
            for (long i = 0; i < size; i += 16) store(v + i, _mm512_fmadd_ps(set1(gate), load(row + i), load(v + i)));
            copy(v, size, new_value);
          }
          if (!layer.projected) copy(new_value, size, own);
          for (long h = 0; h < group; h++, q += size) {
            rotate(q, turn, side, half);
            const float scale = 1.44269504f / std::sqrt(float(size));
            if (qk_scale)
              rms_norm(q, size, eps, qk_scale * scale, q);
            else
              for (long i = 0; i < size; i += 16) store(q + i, _mm512_mul_ps(load(q + i), set1(scale)));
            attend(q, row_keys, row_values, std::max(place - layer.window, 0L), place, size, weights, mix_of);
            if (layer.alpha) exclude(mix_of, own, layer.alpha->const_data_ptr<float>()[g * group + h], size);
            copy(mix_of, size, mixed + r * inner + (g * group + h) * size);
          }
        }
      });
      multiply_all<T>(mixed, rows, layer.out, x, width, true);
      norm_all();
      const long up = layer.up.size(0);
      at::parallel_for(0, up, 4, [&](long begin, long end) {
        product(normed, width, rows, (const T*)layer.up.const_data_ptr() + begin * TILE * width, end - begin, width,
                wide + begin * TILE, hidden, false);
        for (long r = 0; r < rows; r++)
          for (long i = r * hidden + begin * TILE; i < r * hidden + end * TILE; i += 16) {
            const __m512 positive = _mm512_max_ps(load(wide + i), _mm512_setzero_ps());
            store(squared + i, _mm512_mul_ps(positive, positive));
          }
      });
      multiply_all<T>(squared, rows, layer.down, x, width, true);
      if (long(number) == middle) copy(x, rows * width, kept);
    }
    if (backout)
      for (long i = 0; i < rows * width; i += 16)
        store(x + i, _mm512_fnmadd_ps(set1(backout), load(kept + i), load(x + i)));
    norm_all();
    const long padded = head.size(0) * TILE;
    Tensor logits = at::empty({rows, padded}, at::kFloat);
    float* to = logits.mutable_data_ptr<float>();
    at::parallel_for(0, head.size(0), 4, [&](long begin, long end) {
      product(normed, width, rows, (const T*)head.const_data_ptr() + begin * TILE * width, end - begin, width,
              to + begin * TILE, padded, false);
      for (long r = 0; cap && r < rows; r++) soft_cap(to + r * padded + begin * TILE, (end - begin) * TILE, cap);
    });
    return logits.narrow(1, 0, vocabulary);
  }
};

}  // namespace
}  // namespace xsalab

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  using xsalab::Decoder;
  using at::Tensor;
  m.def("decode_panels(Tensor[] weights, ScalarType dtype) -> Tensor");
  m.def("decode_pick(Tensor logits, float temperature, Tensor chances) -> Tensor");
  m.class_<Decoder>("Decoder")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, int64_t, double, double, double, double, double, double, Tensor,
                       Tensor, std::optional<Tensor>>())
      .def("add_layer", &Decoder::add_layer)
      .def("step", &Decoder::step);
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("decode_panels", xsalab::decode_panels);
  m.impl("decode_pick", xsalab::decode_pick);
}
