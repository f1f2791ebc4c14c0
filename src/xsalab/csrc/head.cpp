// The output head and its loss: nats = −ln softmax(cap · tanh(x Wᵀ / cap))[target], with both gradients on the way.
//
// Three products of tokens × vocabulary × width are the bound; the exponentials, two an entry, are the rest. No tensor
// of tokens × vocabulary exists: tokens go through in blocks, and of one block's entries one copy is kept in bfloat16.
//   1  by vocabulary, a piece a thread: Sᵀ = W xᵀ, 32 × 32 entries at a time; of each z = S
//        q = 1 / (1 + exp(2 z / cap)),   cap · tanh(z / cap) = cap · (1 − 2 q),   1 − tanh² = 4 (q − q²)
//        e = exp(cap − 2 cap q), summed;   u = e · (q − q²), kept;   dx += u W, of this piece's vocabulary
//   2  by tokens: S = Σ e over the pieces, so that the gradient by z is scale · (4 u / S − [target] (1 − tanh²))
//      4 scale / S goes into dx and into a copy of x: u itself is never touched again
//   3  by vocabulary: dW += uᵀ (4 scale / S · x)
// The cap bounds the logits, so that no maximum is taken off: exp(±LARGEST_CAP) and its sums stay well within the range
// of float32 and bfloat16. The target's own entry is taken out of the bfloat16 sums and put in again in float32:
// where the model is sure, p − 1 is small, and the rounding of p would drown it.
//
// Blocking: of W 128 rows are narrowed and packed at a time (64 KB each at width 256) and meet all tokens of the block,
// whose panels (256 KB) and dx (512 KB in float32) stay in a core's second cache where they can. A block has as many
// tokens as KEPT_BYTES hold, at most 512: each block reads W once and reads and writes dW once.
// The result is the same from run to run with the same number of threads; another number adds in another order.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "tiles.h"

namespace {

using namespace xsalab;
using at::Tensor;

constexpr double LARGEST_CAP = 64;
constexpr long ROWS = 128;              // of W at a time
constexpr long LARGEST_BLOCK = 512;     // tokens
constexpr long KEPT_BYTES = 16L << 20;  // of u for one block of tokens
constexpr long SUMS_BYTES = 8L << 20;   // of dx in float32, all pieces together
constexpr float LOG2E = 1.44269504f;

// One tile, ``s`` (32 words × 32 tokens) of products: adds e to the tokens' sums; writes u as it is to ``by_word``
// (rows ``distance`` apart), and turned over to ``by_token`` (rows ROWS apart). From ``words`` on it is padding: u = 0.
template <bool GRADIENTS>
void entries(const float* s, long words, float cap, float* sums, bf16* by_word, long distance, bf16* by_token) {
  const __m512 to_power = set1(2 * LOG2E / cap), a = set1(cap * LOG2E), b = set1(-2 * cap * LOG2E), one = set1(1);
  const __m512 low = set1(-40), high = set1(40);  // tanh is ±1 in float32 long before; NaN passes as second operand
  // a0 … a15 b0 … b15 to pairs a0 b0 … a15 b15
  const __m512i beside = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (long half = 0; half < TILE; half += 16) {
    __m512 sum = _mm512_loadu_ps(sums + half);
    __m512i pair[16];
    for (long i = 0; i < TILE; i += 2) {
      __m512 u[2];
#pragma GCC unroll 2
      for (long j = 0; j < 2; j++) {
        const __mmask16 there = i + j < words ? 0xffff : 0;
        const __m512 z = _mm512_mul_ps(_mm512_loadu_ps(s + (i + j) * TILE + half), to_power);
        const __m512 d = _mm512_add_ps(exp2(_mm512_min_ps(high, _mm512_max_ps(low, z))), one);
        __m512 q = _mm512_rcp14_ps(d);
        q = _mm512_fmadd_ps(_mm512_fnmadd_ps(d, q, one), q, q);  // Newton: 14 bits to 24
        const __m512 e = _mm512_maskz_mov_ps(there, exp2(_mm512_fmadd_ps(b, q, a)));
        sum = _mm512_add_ps(sum, e);
        u[j] = _mm512_mul_ps(e, _mm512_fnmadd_ps(q, q, q));
      }
      if constexpr (GRADIENTS) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(u[1], u[0]);
        _mm256_storeu_si256((__m256i*)(by_word + i * distance + half), _mm512_castsi512_si256(both));
        _mm256_storeu_si256((__m256i*)(by_word + (i + 1) * distance + half), _mm512_extracti64x4_epi64(both, 1));
        pair[i / 2] = _mm512_permutexvar_epi16(beside, both);
      }
    }
    _mm512_storeu_ps(sums + half, sum);
    if constexpr (GRADIENTS) {
      transpose(pair);
      for (long i = 0; i < 16; i++) _mm512_storeu_si512(by_token + (half + i) * ROWS, pair[i]);
    }
  }
}

// ``rows`` rows of the float32 weights in bfloat16, filled with zeros to ``filled`` rows.
void narrow_rows(const float* weight, long rows, long filled, long width, bf16* out) {
  for (long i = 0; i < rows * width; i += 16) store(out + i, _mm512_loadu_ps(weight + i));
  std::fill(out + rows * width, out + filled * width, bf16(0));
}

// 16 of the weights, rounded as in the products.
__m512 rounded(const float* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(_mm512_loadu_ps(p))), 16));
}

// What one call works on, and its scratch. Tokens that count are numbered 0 to ``count``; token[i] is their row of x.
struct Head {
  const bf16* x;
  const float* weight;
  const int64_t* targets;
  const float* scale;  // of each row's gradient; none: 1
  const std::vector<long>& token;
  float cap;
  long width, vocabulary, pieces, block;
  float* nats;
  bf16* grad_x;  // none: no gradients
  float* grad_weight;

  const long kept_row = block + TILE;  // no power of two: the 32 rows of a tile lie in different sets of the cache
  Scratch<bf16> rows{block * width};    // the block's tokens
  Scratch<bf16> panels{block * width};  // of xᵀ for the logits, 32 tokens each
  Scratch<float> sums{pieces * block};  // Σ e
  Scratch<bf16> kept{grad_x ? up_to_tiles(vocabulary) * kept_row : 0};  // u, word by word
  Scratch<float> sums_x{grad_x ? pieces * block * width : 0};  // u W, in tiles of 32 tokens × 32 columns
  Scratch<bf16> scaled{grad_x ? block * width : 0};            // 4 scale / S · x
  Scratch<bf16> scaled_panels{grad_x ? block * width : 0};     // of it for dW, 32 columns each
  Scratch<float> wanted{grad_x ? block : 0};                   // scale · (p − 1) (1 − tanh²) of the target

  // The tile of one piece's sums for dx where token t0 and column c begin.
  float* tile_x(long piece, long t0, long c) { return sums_x + (piece * block + t0) * width + c * TILE; }

  std::pair<long, long> words_of(long piece) const {
    const long tiles = up_to_tiles(vocabulary) / TILE;
    return {tiles * piece / pieces * TILE, tiles * (piece + 1) / pieces * TILE};
  }

  // Calls f(0) … f(n − 1), a fixed share a thread.
  template <class F>
  static void parallel(long n, const F& f) {
    at::parallel_for(0, n, 1, [&](long begin, long end) {
      Tiles tiles;
      for (long i = begin; i < end; i++) f(i);
    });
  }

  void run() {
    for (long first = 0; first < long(token.size()); first += block) {
      const long count = std::min(block, long(token.size()) - first), groups = up_to_tiles(count) / TILE;
      parallel(groups, [&](long group) { gather(first, count, group * TILE); });
      parallel(pieces, [&](long piece) { grad_x ? logits<true>(count, piece) : logits<false>(count, piece); });
      parallel(groups, [&](long group) { finish(first, count, group * TILE); });
      if (grad_x) parallel(pieces, [&](long piece) { add_weight(first, count, piece); });
    }
  }

  // The tokens of one group of 32, beside each other, and their panel.
  void gather(long first, long count, long t0) {
    const long n = std::min(TILE, count - t0);
    for (long t = t0; t < t0 + n; t++)
      std::memcpy(rows + t * width, x + token[first + t] * width, width * sizeof(bf16));
    pack_rows(rows + t0 * width, width, n, width, panels + t0 * width);
  }

  // 1: entries and sums of one piece of the vocabulary.
  template <bool GRADIENTS>
  void logits(long count, long piece) {
    Scratch<bf16> w(ROWS * width), w_panels(GRADIENTS ? ROWS * width : 0), u(TILE * ROWS);
    Scratch<float> s(TILE * TILE);
    const auto [begin, end] = words_of(piece);
    float* total = sums + piece * block;
    std::fill(total, total + up_to_tiles(count), 0.f);
    for (long v0 = begin; v0 < end; v0 += ROWS) {
      const long filled = std::min(ROWS, end - v0), words = std::min(filled, vocabulary - v0);
      narrow_rows(weight + v0 * width, words, filled, width, w);
      if constexpr (GRADIENTS)
        for (long c = 0; c < width; c += TILE) pack_columns(w + c, width, filled, filled, w_panels + c * ROWS);
      for (long t0 = 0; t0 < count; t0 += TILE) {
        for (long v = 0; v < filled; v += TILE) {
          product(w + v * width, width, panels + t0 * width, width, s, TILE, false);
          entries<GRADIENTS>(s, words - v, cap, total + t0, kept + (v0 + v) * kept_row + t0, kept_row, u + v);
        }
        if constexpr (GRADIENTS)
          for (long c = 0; c < width; c += TILE)
            product(u, ROWS, w_panels + c * ROWS, filled, tile_x(piece, t0, c), TILE, v0 > begin);
      }
    }
  }

  // 2: a group of 32 tokens: their nats, dx, and the scaled copy of x.
  void finish(long first, long count, long t0) {
    const long n = std::min(TILE, count - t0);
    for (long t = t0; t < t0 + n; t++) {
      const long row = token[first + t], target = targets[row];
      const float* w = weight + target * width;
      const bf16* xs = rows + t * width;
      float sum = 0;
      for (long piece = 0; piece < pieces; piece++) sum += sums[piece * block + t];
      __m512 z = _mm512_setzero_ps();
      for (long c = 0; c < width; c += 16) z = _mm512_fmadd_ps(load(xs + c), rounded(w + c), z);
      const float tanh = std::tanh(_mm512_reduce_add_ps(z) / cap), found = std::log(sum) - cap * tanh;
      nats[row] = found < 0 ? 0 : found;  // rounding alone goes below; NaN stays
      if (!grad_x) continue;
      const float factor = scale ? scale[row] : 1, by_sum = 4 * factor / sum;
      wanted[t] = factor * std::expm1(-nats[row]) * (1 - tanh * tanh);
      const float instead = wanted[t] - by_sum * widen(kept[target * kept_row + t]);
      for (long c = 0; c < width; c += 16) {
        __m512 all = _mm512_setzero_ps();
        for (long piece = 0; piece < pieces; piece++)
          all = _mm512_add_ps(all, _mm512_loadu_ps(tile_x(piece, t0, c & -TILE) + (t - t0) * TILE + c % TILE));
        all = _mm512_fmadd_ps(set1(by_sum), all, _mm512_mul_ps(set1(instead), rounded(w + c)));
        store(grad_x + row * width + c, all);
        store(scaled + t * width + c, _mm512_mul_ps(set1(by_sum), load(xs + c)));
      }
    }
    if (grad_x)
      for (long c = 0; c < width; c += TILE)
        pack_columns(scaled + t0 * width + c, width, n, TILE, scaled_panels + c * block + t0 * TILE);
  }

  // 3: the block's part of dW for one piece of the vocabulary.
  void add_weight(long first, long count, long piece) {
    Scratch<float> ragged(TILE * width);
    const auto [begin, end] = words_of(piece);
    for (long v = begin; v < end; v += TILE) {
      const bool whole = v + TILE <= vocabulary;
      float* out = whole ? grad_weight + v * width : ragged;
      for (long c = 0; c < width; c += TILE)
        product(kept + v * kept_row, kept_row, scaled_panels + c * block, up_to_tiles(count), out + c, width,
                whole && first);
      for (long i = 0; !whole && i < (vocabulary - v) * width; i++)
        grad_weight[v * width + i] = ragged[i] + (first ? grad_weight[v * width + i] : 0);
    }
    for (long t = 0; t < count; t++) {
      const long target = targets[token[first + t]];
      if (target < begin || target >= end) continue;
      const __m512 in = set1(wanted[t]), out = set1(-widen(kept[target * kept_row + t]));
      for (long c = 0; c < width; c += 16) {
        float* sum = grad_weight + target * width + c;
        __m512 all = _mm512_fmadd_ps(in, load(rows + t * width + c), _mm512_loadu_ps(sum));
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(out, load(scaled + t * width + c), all));
      }
    }
  }
};

// grad_x and grad_weight, where there are any, are written whole.
Tensor run(const Tensor& x, const Tensor& weight, const Tensor& targets, const std::optional<Tensor>& scale, double cap,
           long vocabulary, Tensor* grad_x, Tensor* grad_weight) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kBFloat16 && x.is_contiguous(),
              "x: (n, c) in bfloat16, contiguous");
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat && weight.is_contiguous(),
              "weight: (rows, c) in float32, contiguous");
  const long n = x.size(0), width = x.size(1);
  TORCH_CHECK(width == weight.size(1) && width > 0 && width % TILE == 0, "widths ", width, " of x and ", weight.size(1),
              " of weight: must be the same multiple of 32");
  TORCH_CHECK(targets.dim() == 1 && targets.size(0) == n && targets.scalar_type() == at::kLong &&
                  targets.is_contiguous(),
              "targets: (n,) in int64, contiguous");
  TORCH_CHECK(vocabulary > 0 && vocabulary <= weight.size(0), "vocabulary ", vocabulary, " of ", weight.size(0),
              " rows");
  TORCH_CHECK(cap > 0 && cap <= LARGEST_CAP, "cap ", cap, ": must be above 0 and at most ", LARGEST_CAP);
  TORCH_CHECK(!scale || (scale->dim() == 1 && scale->size(0) == n && scale->scalar_type() == at::kFloat &&
                         scale->is_contiguous()),
              "scale: (n,) in float32, contiguous");
  const int64_t* target = targets.const_data_ptr<int64_t>();
  std::vector<long> token;
  token.reserve(n);
  for (long i = 0; i < n; i++) {
    TORCH_CHECK(target[i] < vocabulary, "target ", target[i], " at ", i, ": the vocabulary has ", vocabulary);
    if (target[i] >= 0) token.push_back(i);
  }
  const long count = token.size();
  Tensor nats = at::zeros({n}, x.options().dtype(at::kFloat));
  if (grad_x) {
    if (count < n) grad_x->zero_();
    grad_weight->slice(0, count ? vocabulary : 0).zero_();
  }
  const long pieces = std::min<long>(at::get_num_threads(), up_to_tiles(vocabulary) / TILE);
  const long fits = std::min(KEPT_BYTES / (2 * up_to_tiles(vocabulary)), SUMS_BYTES / (4 * width * pieces)) / TILE * TILE;
  Head{
      .x = (const bf16*)x.const_data_ptr(),
      .weight = weight.const_data_ptr<float>(),
      .targets = target,
      .scale = scale ? scale->const_data_ptr<float>() : nullptr,
      .token = token,
      .cap = float(cap),
      .width = width,
      .vocabulary = vocabulary,
      .pieces = pieces,
      .block = std::clamp(std::min(fits, up_to_tiles(count)), TILE, LARGEST_BLOCK),
      .nats = nats.mutable_data_ptr<float>(),
      .grad_x = grad_x ? (bf16*)grad_x->mutable_data_ptr() : nullptr,
      .grad_weight = grad_weight ? grad_weight->mutable_data_ptr<float>() : nullptr,
  }
      .run();
  return nats;
}

Tensor nats_alone(const Tensor& x, const Tensor& weight, const Tensor& targets, double cap, int64_t vocabulary) {
  return run(x, weight, targets, {}, cap, vocabulary, nullptr, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> nats_and_gradients(const Tensor& x, const Tensor& weight, const Tensor& targets,
                                                      const std::optional<Tensor>& scale, double cap,
                                                      int64_t vocabulary) {
  Tensor grad_x = at::empty_like(x), grad_weight = at::empty_like(weight);
  Tensor nats = run(x, weight, targets, scale, cap, vocabulary, &grad_x, &grad_weight);
  return {nats, grad_x, grad_weight};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(xsalab, m) {
  m.def("token_nats(Tensor x, Tensor weight, Tensor targets, float cap, int vocabulary) -> Tensor");
  m.def(
      "token_nats_and_gradients(Tensor x, Tensor weight, Tensor targets, Tensor? scale, float cap, int vocabulary) -> "
      "(Tensor nats, Tensor grad_x, Tensor grad_weight)");
}

TORCH_LIBRARY_IMPL(xsalab, CPU, m) {
  m.impl("token_nats", nats_alone);
  m.impl("token_nats_and_gradients", nats_and_gradients);
}
