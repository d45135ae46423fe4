// Shapes and parameters.
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
  int tokens, heads, recent, sink, to_slots, to_windows;
  int block_rows;  // of a block of the kernel for few rows
  int ring_rows;   // positions of a ring, at least `recent`
};

struct KeyRow {
  static constexpr int D = DK, G = GK, BITS = BITS_K, RANK = RANK_K, CODES_AT = 0, AFFINE_AT = 0;
  static constexpr bool CACHED = true, CENTRED = true;
};
struct ValueRow {
  static constexpr int D = DV, G = GV, BITS = BITS_V, RANK = RANK_V, CODES_AT = DK * BITS_K / 8, AFFINE_AT = 2 * GK;
  static constexpr bool CACHED = true, CENTRED = false;
};
struct QueryRow {
  static constexpr int D = DK, G = 1, BITS = 2, RANK = 0, CODES_AT = 0, AFFINE_AT = 0;
  static constexpr bool CACHED = false, CENTRED = false;
};
constexpr int RECORD = (DK * BITS_K + DV * BITS_V) / 8, AFFINE = 2 * (GK + GV);

// Row `r` of a matrix's rows is head `r % heads` of this token; exact below 2^31.
DEV int token_of(const Side& s, int r) { return s.heads == 1 ? r : (int)(multiply_high((u32)r, s.magic) >> s.shift); }

DEV long long wide(int x, int y) { return (long long)x * y; }

// Channel of column `n` of a product. A thread has columns 8 j + 2 t + e, t = lane % 4: of every quarter of the row,
// 2 JQ adjacent channels, whose codes share 2 JQ adjacent bytes.
template <int D>
DEV int channel_of(int n) {
  constexpr int JQ = D / 32;
  const int j = n / 8, t = n / 2 % 4, e = n % 2;
  return j / JQ * (D / 4) + 2 * JQ * t + 2 * (j % JQ) + e;
}
