// The polar factor of one matrix by Newton-Schulz steps in bfloat16: X ← aX + (bA + cA²)X with A = XXᵀ.
//
// X lies wide (m ≤ n) and padded with zeros to multiples of 32. A and bA + cA² are symmetric: only the tiles on and above
// the diagonal are multiplied, then mirrored, so that a step costs m²n/2 + m³/2 + m²n multiplications instead of
// m²n + m³ + m²n. That is the bound: 0.67 of the plain work where m = n and 0.72 where n = 4m, a little more as the tiles
// on the diagonal are whole (0.69 and 0.75 at m = 384).
//
// All three products run block column by block column. The 32 columns of the right operand are packed once, in pieces of
// 512 rows (32 KB, the level-1 cache); every piece meets all rows of the left operand, which streams from level 2; the sums
// of the whole block column (m × 32 float32) wait beside them. X is overwritten in place: a block column of X
// depends on itself alone, and is packed before it is written.
//
// Sums are float32 and each of the three results is rounded to bfloat16 once, as torch.baddbmm does. A tile's arithmetic
// does not depend on which thread computes it, so neither does the result.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tiles.h"

namespace xsalab {

constexpr long PIECE = 512;  // rows of a panel that are packed at once

// A matrix as it is stored, and the sizes of its wide, padded form.
struct Shape {
  long rows, columns;
  bool tall() const { return rows > columns; }
  long m() const { return up_to_tiles(std::min(rows, columns)); }
  long n() const { return up_to_tiles(std::max(rows, columns)); }
  double cost() const { return double(m()) * m() * (1.5 * n() + 0.5 * m()); }
};

// What one matrix at a time works in; sizes are padded.
struct PolarSpace {
  Scratch<bf16> x, square, polynomial;
  PolarSpace(long m, long n) : x(m * n), square(m * m), polynomial(m * m) {}
};

// One thread's share of it: a piece of a panel and the sums of a block column.
struct ColumnSpace {
  Tiles tiles;
  Scratch<bf16> panel;
  Scratch<float> sums;
  explicit ColumnSpace(long m) : panel(PIECE * TILE), sums(m * TILE) {}
};

// sums (blocks · 32 × 32) = left (blocks · 32 × k) · right, whose rows from to from + size ``pack(from, size, panel)`` packs.
template <class Pack>
inline void block_column(const bf16* left, long blocks, long k, ColumnSpace& space, const Pack& pack) {
  for (long from = 0; from < k; from += PIECE) {
    const long size = std::min(PIECE, k - from);
    pack(from, size, space.panel);
    for (long i = 0; i < blocks; i++)
      product(left + i * TILE * k + from, k, space.panel, size, space.sums + i * TILE * TILE, TILE, from > 0);
  }
}

// Writes factor · sums + share · old to the tile (i, j) of out (m × m) and its mirror image to (j, i). ``old`` is A.
inline void store_symmetric(const float* sums, float factor, const bf16* old, float share, bf16* out, long m, long i, long j) {
  for (long top = 0; top < TILE; top += 16)
    for (long left = 0; left < TILE; left += 16) {
      const long row = i * TILE + top, column = j * TILE + left;
      __m512i values[16];
      for (long r = 0; r < 16; r++) {
        __m512 value = _mm512_mul_ps(set1(factor), _mm512_load_ps(sums + (top + r) * TILE + left));
        if (old) value = _mm512_fmadd_ps(set1(share), load(old + (row + r) * m + column), value);
        store(out + (row + r) * m + column, value);
        values[r] = _mm512_castps_si512(value);
      }
      if (i == j) continue;  // the tile is symmetric itself, to the bit: its products only change places
      transpose(values);
      for (long r = 0; r < 16; r++) store(out + (column + r) * m + row, _mm512_castsi512_ps(values[r]));
    }
}

// body(j, space) for every block column j of ``blocks`` where column j costs j + 1 tiles: threads take j from both ends.
template <class Body>
inline void for_triangle(long blocks, long m, const Body& body) {
  at::parallel_for(0, (blocks + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    ColumnSpace space(m);
    for (int64_t j = begin; j < end; j++) {
      body(j, space);
      if (blocks - 1 - j != j) body(blocks - 1 - j, space);
    }
  });
}

// ``scale`` times space.x (m × n, padded, m ≤ n) becomes its polar factor, a step for each (a, b, c) of ``coefficients``.
inline void polar_factor(PolarSpace& space, long m, long n, float scale, at::ArrayRef<double> coefficients) {
  bf16 *x = space.x, *square = space.square, *polynomial = space.polynomial;
  const long blocks = m / TILE;
  for (size_t step = 0; step < coefficients.size(); step += 3) {
    const float a = coefficients[step], b = coefficients[step + 1], c = coefficients[step + 2];
    // The scale is worked into the first step, so that x is rounded once less: A = scale² xxᵀ, X = scale (ax + Px).
    const float once = step ? 1.f : scale;
    for_triangle(blocks, m, [&](long j, ColumnSpace& own) {
      block_column(x, j + 1, n, own, [&](long from, long size, bf16* panel) {
        pack_rows(x + j * TILE * n + from, n, TILE, size, panel);
      });
      for (long i = 0; i <= j; i++) store_symmetric(own.sums + i * TILE * TILE, once * once, nullptr, 0, square, m, i, j);
    });
    for_triangle(blocks, m, [&](long j, ColumnSpace& own) {
      block_column(square, j + 1, m, own, [&](long from, long size, bf16* panel) {
        pack_columns(square + from * m + j * TILE, m, size, size, panel);
      });
      for (long i = 0; i <= j; i++) store_symmetric(own.sums + i * TILE * TILE, c, square, b, polynomial, m, i, j);
    });
    at::parallel_for(0, n / TILE, 1, [&](int64_t begin, int64_t end) {
      ColumnSpace own(m);
      for (int64_t j = begin; j < end; j++) {
        bf16* column = x + j * TILE;
        block_column(polynomial, blocks, m, own, [&](long from, long size, bf16* panel) {
          pack_columns(column + from * n, n, size, size, panel);
        });
        for (long row = 0; row < m; row++)
          for (long half = 0; half < TILE; half += 16) {
            __m512 sum = _mm512_load_ps(own.sums + row * TILE + half);
            __m512 value = _mm512_fmadd_ps(set1(a), load(column + row * n + half), sum);
            store(column + row * n + half, _mm512_mul_ps(set1(once), value));
          }
      }
    });
  }
}

// ---- to the wide form and back, 16 rows of the stored matrix at a time: ``rows`` is 16 × up_to_tiles(columns) float32

constexpr long BLOCK = 16;

// Rows first to first + 15, where those that are not there are zero, go to x.
inline void place(const float* rows, const Shape& shape, long first, bf16* x) {
  const long width = up_to_tiles(shape.columns), n = shape.n();
  for (long j = 0; j < width; j += 16) {
    __m512i values[16];
    for (long r = 0; r < 16; r++) values[r] = _mm512_loadu_si512(rows + r * width + j);
    if (shape.tall()) transpose(values);
    bf16* corner = shape.tall() ? x + j * n + first : x + first * n + j;
    for (long r = 0; r < 16; r++) store(corner + r * n, _mm512_castsi512_ps(values[r]));
  }
}

inline void take(const bf16* x, const Shape& shape, long first, float* rows) {
  const long width = up_to_tiles(shape.columns), n = shape.n();
  for (long j = 0; j < width; j += 16) {
    __m512i values[16];
    const bf16* corner = shape.tall() ? x + j * n + first : x + first * n + j;
    for (long r = 0; r < 16; r++) values[r] = _mm512_castps_si512(load(corner + r * n));
    if (shape.tall()) transpose(values);
    for (long r = 0; r < 16; r++) _mm512_storeu_si512(rows + r * width + j, values[r]);
  }
}

// body(first, rows) for every block of 16 rows of the padded matrix.
template <class Body>
inline void for_blocks(const Shape& shape, const Body& body) {
  at::parallel_for(0, up_to_tiles(shape.rows) / BLOCK, 8, [&](int64_t begin, int64_t end) {
    Scratch<float> rows(BLOCK * up_to_tiles(shape.columns));
    for (int64_t block = begin; block < end; block++) body(block * BLOCK, rows);
  });
}

// The first ``count`` (≤ 16) of 16 lanes; none where it is negative.
inline __mmask16 lanes(long count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

// ---- many matrices over threads

// body(index, space) once for every matrix. Whole matrices go to threads, each to the one with the least work so far,
// the largest first; where there are too few of them for that, one after the other, and the threads share each one's
// block columns. (A parallel_for within a parallel_for runs in its own thread, so body is the same for both.)
template <class Body>
inline void for_matrices(const std::vector<Shape>& shapes, const Body& body) {
  if (shapes.empty()) return;
  const long threads = at::get_num_threads();
  std::vector<long> order(shapes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return shapes[a].cost() > shapes[b].cost(); });
  std::vector<std::vector<long>> shares(threads);
  std::vector<double> loads(threads, 0.0);
  double shared = 0;  // time of the other way
  for (long index : order) {
    const long least = std::min_element(loads.begin(), loads.end()) - loads.begin();
    shares[least].push_back(index);
    loads[least] += shapes[index].cost();
    shared += shapes[index].cost() / std::min(threads, std::max(1L, shapes[index].m() / TILE / 2));
  }
  auto run = [&](const std::vector<long>& share) {
    long wide = 0, square = 0;  // an allocation for the largest of a share, not one for each matrix
    for (long index : share) {
      wide = std::max(wide, shapes[index].m() * shapes[index].n());
      square = std::max(square, shapes[index].m());
    }
    if (share.empty()) return;
    PolarSpace space(square, (wide + square - 1) / square);
    for (long index : share) body(index, space);
  };
  if (threads == 1 || shared < *std::max_element(loads.begin(), loads.end())) return run(order);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++) run(shares[thread]);
  });
}

}  // namespace xsalab
