// Shapes and parameters, and rows times the matrix of a side: the one statement of the order of its sums.
#pragma once

#include "machine.cuh"

constexpr int TILE = 64;  // rows
constexpr float MIN_RANGE = 1e-8f, LARGEST = AFFINE_BF16 ? 3.3895313892515355e38f : 65504.f;

struct Side {
  const u16* x;
  u16* out;  // transformed rows, or null
  const u8* halves;   // matrices as they lie in shared memory, see prepared.py
  const u8* mean;     // its product with them, as an operand beside them
  u16 *ring, *sink;
  int x_token, x_head, out_token, out_head, halves_head, mean_head;  // strides in elements
  int blocks, matrices, heads, rows;                                // heads and rows of one matrix
  u32 magic, shift;                                                 // division by `heads`, see `token_of`
};

struct Params {
  Side v, k, q;
  u8* codes;
  u16* affine;
  const SLOT_T* slots;
  const ROW_T* request_rows;
  const POSITION_T* positions;
  const END_T* ends;
  const int* sink_block;
  const u16* feedback;  // of K, a matrix of DK x DK halves for each head, zeros but above its diagonal
  int tokens, heads, recent, sink, to_slots, to_windows;
  int block_rows;  // of a block of the kernel for few rows
  int ring_rows;   // positions of a ring, at least `recent`
};

struct KeyRow {
  static constexpr int D = DK, G = GK, BITS = BITS_K, RANK = RANK_K, CODES_AT = 0, AFFINE_AT = 0;
  static constexpr bool CACHED = true, CENTRED = true, FED_BACK = FEEDBACK;
};
struct ValueRow {
  static constexpr int D = DV, G = GV, BITS = BITS_V, RANK = RANK_V, CODES_AT = DK * BITS_K / 8, AFFINE_AT = 2 * GK;
  static constexpr bool CACHED = true, CENTRED = false, FED_BACK = false;
};
struct QueryRow {
  static constexpr int D = DK, G = 1, BITS = 2, RANK = 0, CODES_AT = 0, AFFINE_AT = 0;
  static constexpr bool CACHED = false, CENTRED = false, FED_BACK = false;
};
constexpr int RECORD = (DK * BITS_K + DV * BITS_V) / 8, AFFINE = 2 * (GK + GV);

// Row `r` of a matrix's rows is head `r % heads` of this token; exact below 2^31.
DEV int token_of(const Side& s, int r) { return s.heads == 1 ? r : (int)(__umulhi((u32)r, s.magic) >> s.shift); }

DEV long long wide(int x, int y) { return (long long)x * y; }

// Channel of column `n` of a product. A thread has columns 8 j + 2 t + e, t = lane % 4: of every quarter of the row,
// 2 JQ adjacent channels, whose codes share 2 JQ adjacent bytes.
template <int D>
DEV int channel_of(int n) {
  constexpr int JQ = D / 32;
  const int j = n / 8, t = n / 2 % 4, e = n % 2;
  return j / JQ * (D / 4) + 2 * JQ * t + 2 * (j % JQ) + e;
}

DEV constexpr int part_bytes(int dim) { return dim * dim * 2; }  // of half of a matrix
template <class R>
DEV constexpr int matrix_bytes() {  // of both halves, and of the mean's product
  return 2 * part_bytes(R::D) + (R::CENTRED ? 32 * R::D : 0);
}

// Starts the copies of a matrix and of its product with the mean, by all threads of the block, before the kernel in
// front has ended: nobody writes them meanwhile; all else may be its work.
template <class R, int THREADS>
DEV void load_matrix(const Side& s, int matrix, u32 weights) {
  constexpr int SIZE = 2 * part_bytes(R::D), ROUND = THREADS * 16, STRIP = matrix_bytes<R>() - SIZE;
  const int mine = (int)threadIdx.x * 16;
  const u8* from = s.halves + wide(matrix, s.halves_head) + mine;
  UNROLL for (int i = 0; i < SIZE; i += ROUND)
      if (SIZE % ROUND == 0 || i + mine < SIZE) copy_async(weights + mine + i, from + i);
  UNROLL for (int i = 0; i < STRIP; i += ROUND)
      if (i + mine < STRIP) copy_async(weights + SIZE + mine + i, s.mean + (wide(matrix, s.mean_head) + mine + i));
  commit_copies();
}

// The feedback of a head in shared memory. The 16-byte units of a quarter of a row are turned by the quarter: four
// threads, which read one of each quarter at once, find them in different banks.
template <int D>
DEV u32 place_in_feedback(int row, int column) {
  constexpr int UNITS = D / 32;
  const int unit = column / 8;
  return (row * D + (unit ^ unit / UNITS % UNITS) * 8 + column % 8) * 2;
}
// Starts its copies, as those of a matrix; with it a head has a matrix.
template <class R, int THREADS>
DEV void load_feedback(const Params& p, int head, u32 to) {
  constexpr int D = R::D, UNITS = D / 8;
  const u16* from = p.feedback + wide(head, D * D);
  UNROLL_1 for (int i = threadIdx.x; i < D * UNITS; i += THREADS)
      copy_async(to + place_in_feedback<D>(i / UNITS, i % UNITS * 8), from + i * 8);
  commit_copies();
}

// A matrix of more than 128 columns does not fit a block: its columns come in chunks, a quarter of the channels of 256
// each. A chunk in shared memory is as a matrix of that many columns, with its part of the mean's product behind it.
constexpr int CHUNK = 64, PLANE = CHUNK * 128;  // bytes of 64 channels of a chunk's columns, or of a tile's rows
template <class R>
DEV constexpr int chunk_bytes() {
  return 4 * CHUNK * R::D + 32 * CHUNK;
}
template <class R, int THREADS>
DEV void load_chunk(const Side& s, int matrix, int chunk, u32 weights) {
  constexpr int PLANES = R::D / 64, SIZE = 2 * PLANES * PLANE, STRIP = 32 * CHUNK;
  const u8* from = s.halves + wide(matrix, s.halves_head) + chunk * PLANE;
  UNROLL for (int i = 0; i < SIZE; i += THREADS * 16) {
    const int at = i + (int)threadIdx.x * 16;
    copy_async(weights + at, from + at / PLANE * (R::D * 128) + at % PLANE);
  }
  const int mine = (int)threadIdx.x * 16;
  if (R::CENTRED && mine < STRIP)
    copy_async(weights + SIZE + mine, s.mean + (wide(matrix, s.mean_head) + chunk * STRIP + mine));
  commit_copies();
}

// The sixteen rows of a warp lie in shared memory with 16-byte units turned by the row: those of eight rows, which are
// read at once, are in different banks.
template <int D>
DEV constexpr int rows_bytes() {
  return 16 * D * 2;
}
template <int D>
DEV u32 place_in_rows(int row, int unit) {
  return row * D * 2 + (unit ^ (row & 7)) * 16;
}

// The rows of a tile where the tensor cores read them: as the columns of a chunk.
DEV u32 place_in_tile(int row, int unit) { return unit / 8 * PLANE + row * 128 + ((unit ^ row) & 7) * 16; }

// Starts the copies of rows g and g + 8, g = lane / 4, whose first channels are at these addresses.
template <int D>
DEV void copy_rows(u32 rows, const u16* first, const u16* second, int lane) {
  const int g = lane / 4, t = lane % 4;
  UNROLL for (int m = 0; m < D / 32; m++) {
    const u32 to = rows + place_in_rows<D>(g, t + 4 * m);
    copy_async(to, first + 8 * t + 32 * m);
    copy_async(to + 8 * D * 2, second + 8 * t + 32 * m);
  }
}

// Takes the mean's product, three summands of it in columns 0 to 2 at `strip`, times one.
template <int N>
DEV void multiply_mean(float (&x)[N], u32 strip, int lane) {
  const u32 ones = lane % 4 == 0 ? 0x3F803F80u : lane % 4 == 1 ? 0x3F80u : 0u;
  const u32 one[4] = {ones, ones, 0u, 0u};
  matrix_multiply(x, one, narrow_columns_address(strip), false);
}
// Begins the product of four warps' rows with a matrix, less the mean's product: the mean first, then the smaller half.
// Copies to `rows` may be started again when this returns, `x` is there after `matrix_end`.
template <class R>
DEV void multiply(u32 rows, u32 weights, int lane, float (&x)[R::D / 2]) {
  constexpr int D = R::D;
  const u64 b = columns_address(weights);
  u32 a[D / 16][4];
  UNROLL for (int k = 0; k < D / 16; k++) ldmatrix4(a[k], rows + place_in_rows<D>(lane % 16, 2 * k + lane / 16));
  __syncwarp();
  matrix_begin(x);
  if constexpr (R::CENTRED) multiply_mean(x, weights + 2 * part_bytes(D), lane);
  UNROLL for (int part = 1; part >= 0; part--) UNROLL for (int k = 0; k < D / 16; k++)
      matrix_multiply(x, a[k], b + (part * part_bytes(D) + k / 4 * (D * 128) + k % 4 * 32) / 16,
                      R::CENTRED || part == 0 || k > 0);
  matrix_commit();
}

// The same with one chunk of columns, and with rows that the tensor cores read in shared memory, see `place_in_tile`.
template <class R>
DEV void multiply_chunk(u32 tile, u32 weights, int lane, float (&x)[CHUNK / 2]) {
  constexpr int PLANES = R::D / 64;  // of 64 channels each, of rows and of columns
  matrix_begin(x);
  if constexpr (R::CENTRED) multiply_mean(x, weights + 2 * PLANES * PLANE, lane);
  UNROLL for (int step = 0; step < 2 * PLANES; step++) {
    const int plane = step % PLANES, part = step < PLANES;
    const u64 a = columns_address(tile + plane * PLANE), b = columns_address(weights + (part * PLANES + plane) * PLANE);
    UNROLL for (int k = 0; k < 4; k++) matrix_multiply_tile(x, a + 2 * k, b + 2 * k, R::CENTRED || step > 0 || k > 0);
  }
  matrix_commit();
}
