// Products of bfloat16 tiles with float32 sums, and the vector helpers that the kernels share.
//
// A product of 32 × 32 outputs is the unit of every kernel here. Its left operand lies in memory as it is, row by row.
// Its right operand is a panel: 32 columns, two neighbouring k beside each other, [k / 2][32][2], the order in which
// both AVX512-BF16 (vdpbf16ps) and AMX (tdpbf16ps) take pairs. A panel is packed once and used by many products.
//
// Two forms of the product, chosen when the process starts:
//   AMX          2 × 2 tiles of 16 × 16 sums, k in steps of 32: 1,024 multiplications an instruction
//   AVX512-BF16  11, 11 and 10 rows × 2 registers: 22 of 32 registers hold sums, and 13 loads feed 22 instructions, so
//                that the multiplier, one vdpbf16ps a cycle on Zen 4, stays the bound
// Both add in another order than a plain loop; the result of one form does not depend on threads.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace xsalab {

using bf16 = uint16_t;
constexpr long TILE = 32;

inline long up_to_tiles(long size) { return (size + TILE - 1) / TILE * TILE; }

// ---- vectors of 16

inline __m512 load(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}

inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

inline void store(bf16* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }

inline __m512 set1(float x) { return _mm512_set1_ps(x); }

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 2^x to 1e-7 relative for −126 ≤ x ≤ 127: x = n + f with |f| ≤ 1/2, a polynomial of degree 5 in f with the smallest
// largest error, exactly 1 at 0, and n added to the exponent. The caller clamps.
inline __m512 exp2(__m512 x) {
  const __m512 shift = set1(12582912.f);  // 1.5 · 2^23: adding it rounds to a whole number
  __m512 n = _mm512_add_ps(x, shift);
  __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(n, shift));
  __m512 p = set1(1.3276472e-3f);
  p = _mm512_fmadd_ps(p, f, set1(9.6755413e-3f));
  p = _mm512_fmadd_ps(p, f, set1(5.5507133e-2f));
  p = _mm512_fmadd_ps(p, f, set1(2.4022120e-1f));
  p = _mm512_fmadd_ps(p, f, set1(6.9314697e-1f));
  p = _mm512_fmadd_ps(p, f, set1(1.f));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}

// Rows a and b of 16 numbers to 16 pairs.
inline __m512i pairs(__m256i a, __m256i b) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

// 16 × 16 words of 32 bits, in place.
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// ---- panels. ``stride`` is the distance of x's rows in elements; rows and columns that are not there come out as zeros.

// The panel of Xᵀ: ``rows`` ≤ 32 rows of x become columns, their ``k`` entries (a multiple of 32) run down.
inline void pack_rows(const bf16* x, long stride, long rows, long k, bf16* panel) {
  __m512i r[16];
  for (long half = 0; half < TILE; half += 16)
    for (long c = 0; c < k; c += 32) {
      for (long i = 0; i < 16; i++)
        r[i] = half + i < rows ? _mm512_loadu_si512(x + (half + i) * stride + c) : _mm512_setzero_si512();
      transpose(r);
      for (long i = 0; i < 16; i++) _mm512_storeu_si512(panel + (c / 2 + i) * 64 + half * 2, r[i]);
    }
}

// The panel of X itself: 32 columns of x, its ``rows`` run down; filled with zeros to ``k``, a multiple of 32.
inline void pack_columns(const bf16* x, long stride, long rows, long k, bf16* panel) {
  const __m256i zero = _mm256_setzero_si256();
  for (long i = 0; i < k; i += 2)
    for (long half = 0; half < TILE; half += 16) {
      const bf16* p = x + i * stride + half;
      __m256i a = i < rows ? _mm256_loadu_si256((const __m256i*)p) : zero;
      __m256i b = i + 1 < rows ? _mm256_loadu_si256((const __m256i*)(p + stride)) : zero;
      _mm512_storeu_si512(panel + i * 32 + half * 2, pairs(a, b));
    }
}

// ---- AMX

#if defined(XSALAB_EMULATE_AMX)  // tests/csrc: the same program of tile instructions, carried out in C
struct EmulatedTiles {
  alignas(64) uint8_t tile[8][16][64];
};
inline EmulatedTiles& emulated() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}
inline void emulate_load(int t, const void* p, long stride) {
  for (int i = 0; i < 16; i++) std::memcpy(emulated().tile[t][i], (const uint8_t*)p + i * stride, 64);
}
inline void emulate_store(int t, void* p, long stride) {
  for (int i = 0; i < 16; i++) std::memcpy((uint8_t*)p + i * stride, emulated().tile[t][i], 64);
}
inline void emulate_product(int c, int a, int b) {
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n++) {
        float* sum = (float*)emulated().tile[c][m] + n;
        const bf16 *left = (bf16*)emulated().tile[a][m] + 2 * k, *right = (bf16*)emulated().tile[b][k] + 2 * n;
        *sum += widen(left[0]) * widen(right[0]) + widen(left[1]) * widen(right[1]);
      }
}
#define TILE_ZERO(t) std::memset(emulated().tile[t], 0, 1024)
#define TILE_LOAD(t, p, stride) emulate_load(t, p, stride)
#define TILE_STORE(t, p, stride) emulate_store(t, p, stride)
#define TILE_PRODUCT(c, a, b) emulate_product(c, a, b)
#else
// Inline assembly: GCC 12's intrinsics do not tell the compiler that they read and write memory. The compiler itself
// never touches tile registers, so there is nothing to declare for them.
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::: "memory")
#define TILE_LOAD(t, p, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void*)(p)), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void*)(p)), "r"((long)(stride)) : "memory")
#define TILE_PRODUCT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")
#endif

// Whether this processor has AMX for bfloat16 and the kernel lets the process use it (asked once).
inline bool has_amx() {
#if defined(XSALAB_EMULATE_AMX)
  return true;
#else
  static const bool usable = [] {
    unsigned a = 7, b, c = 0, d;
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    bool present = (d >> 22 & 1) && (d >> 24 & 1);                            // AMX-BF16, AMX-TILE
    return present && !std::getenv("XSALAB_NO_AMX") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM
  }();
  return usable;
#endif
}

// One stands at the start of every parallel region: sets this thread's tiles to 16 rows of 64 bytes, and gives back at
// its end what oneDNN had set.
class Tiles {
#if !defined(XSALAB_EMULATE_AMX)
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  Config old_;

 public:
  Tiles() {
    if (!has_amx()) return;
    __asm__ volatile("sttilecfg %0" : "=m"(old_));
    Config config;
    std::memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() {
    if (!has_amx()) return;
    if (old_.palette)
      __asm__ volatile("ldtilecfg %0" ::"m"(old_));
    else
      __asm__ volatile("tilerelease");
  }
#else
 public:
  Tiles() {}
#endif
  Tiles(const Tiles&) = delete;
};

// ---- the product

inline void amx_product(const bf16* a, long lda, const bf16* panel, long k, float* c, long ldc, bool add) {
  const long bytes = ldc * 4;
  if (add) {
    TILE_LOAD(0, c, bytes);
    TILE_LOAD(1, c + 16, bytes);
    TILE_LOAD(2, c + 16 * ldc, bytes);
    TILE_LOAD(3, c + 16 * ldc + 16, bytes);
  } else {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (long p = 0; p < k; p += 32) {
    TILE_LOAD(4, a + p, lda * 2);
    TILE_LOAD(6, panel + p * 32, 128);
    TILE_PRODUCT(0, 4, 6);
    TILE_LOAD(7, panel + p * 32 + 32, 128);
    TILE_PRODUCT(1, 4, 7);
    TILE_LOAD(5, a + 16 * lda + p, lda * 2);
    TILE_PRODUCT(2, 5, 6);
    TILE_PRODUCT(3, 5, 7);
  }
  TILE_STORE(0, c, bytes);
  TILE_STORE(1, c + 16, bytes);
  TILE_STORE(2, c + 16 * ldc, bytes);
  TILE_STORE(3, c + 16 * ldc + 16, bytes);
}

template <int ROWS>
inline void avx512_rows(const bf16* a, long lda, const bf16* panel, long k, float* c, long ldc, bool add) {
  __m512 sum[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int h = 0; h < 2; h++) sum[r][h] = add ? _mm512_loadu_ps(c + r * ldc + h * 16) : _mm512_setzero_ps();
  for (long p = 0; p < k; p += 2) {
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(panel + p * 32), b1 = (__m512bh)_mm512_loadu_si512(panel + p * 32 + 32);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, a + r * lda + p, 4);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], both, b0);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], both, b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int h = 0; h < 2; h++) _mm512_storeu_ps(c + r * ldc + h * 16, sum[r][h]);
}

// c (32 × 32, rows ``ldc`` apart) = or += a (32 × k, rows ``lda`` apart) · panel (k × 32). k is a multiple of 32: AMX
// needs it, so that another k is an error here as well, and found on any machine.
inline void product(const bf16* a, long lda, const bf16* panel, long k, float* c, long ldc, bool add) {
  if (k % 32) std::abort();
  if (has_amx()) return amx_product(a, lda, panel, k, c, ldc, add);
  avx512_rows<11>(a, lda, panel, k, c, ldc, add);
  avx512_rows<11>(a + 11 * lda, lda, panel, k, c + 11 * ldc, ldc, add);
  avx512_rows<10>(a + 22 * lda, lda, panel, k, c + 22 * ldc, ldc, add);
}

// ---- scratch memory of one call: 64-byte aligned, not initialised, freed at the end of its scope

template <class T>
class Scratch {
  T* data_;

 public:
  explicit Scratch(long count) : data_((T*)std::aligned_alloc(64, (count * long(sizeof(T)) + 63) / 64 * 64 + 64)) {
    if (!data_) throw std::bad_alloc();
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  operator T*() { return data_; }
};

}  // namespace xsalab
