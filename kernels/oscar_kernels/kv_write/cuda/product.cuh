// Rows times the matrix of a side: the one statement of the order of its sums.
#pragma once

#include "types.cuh"

DEV constexpr int part_bytes(int dim) { return dim * dim * 2; }  // of half of a matrix

// Starts the copies of a matrix and of its product with the mean, by all threads of the block, before the kernel in
// front has ended: nobody writes them meanwhile; all else may be its work.
template <int D, int THREADS>
DEV void load_matrix(const Side& s, int matrix, u32 weights, u32 sums) {
  constexpr int SIZE = 2 * part_bytes(D), ROUND = THREADS * 16;
  const int mine = thread_index() * 16;
  const u8* from = s.halves + wide(matrix, s.halves_head) + mine;
  UNROLL for (int i = 0; i < SIZE; i += ROUND)
      if (SIZE % ROUND == 0 || i + mine < SIZE) copy_async(weights + mine + i, from + i);
  if (s.sums && mine < D * 4) copy_async(sums + mine, (const u8*)(s.sums + matrix * s.sums_head) + mine);
  copies_commit();
}

// Where 16-byte unit `unit` of row `row` of a tile lies: plane `unit / 8`, its place there turned by the row.
DEV constexpr u32 place_in_tile(int row, int unit) {
  return unit / 8 * (TILE * 128) + row * 128 + ((unit ^ row) & 7) * 16;
}

// A tile times a matrix, without the mean; by a warpgroup. The smaller half first.
template <int D>
DEV void multiply_tile(u32 tile, u32 weights, float (&x)[D / 2]) {
  const u64 a = tile_address(tile), b = tile_address(weights);
  matrix_begin(x);
  UNROLL for (int part = 1; part >= 0; part--) UNROLL for (int k = 0; k < D / 16; k++)
      matrix_multiply(x, a + (k / 4 * (TILE * 128) + k % 4 * 32) / 16,
                      b + (part * part_bytes(D) + k / 4 * (D * 128) + k % 4 * 32) / 16, part == 0 || k > 0);
  matrix_end(x);
}
