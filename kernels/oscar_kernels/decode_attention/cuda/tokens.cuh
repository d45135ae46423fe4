// What a warp knows of its tokens of a tile: scales, offsets, and which of them its query rows see.
#pragma once

#include "query.cuh"

// Of the tokens of lane `g = lane / 4`, the `o`-th is `token_of(o) + g`.
DEV constexpr int token_of(int o) { return WARPGROUP ? o / 2 * 64 + o % 2 * 8 : 8 * o; }

// Where a lane finds the scales and offsets of token `row` and KV head `head` in a tile.
DEV u32 affine_place(int row, int head) {
  const int at = head * AFFINE;
  return CODE_BYTES + row * AFFINE_ROW +
         (AFFINE_TURNED ? swizzle<AFFINE_UNITS>(row, at / 16) * 16 + at % 16 : at);
}
DEV void load_affine(u32 at, float (&ks)[GK], float (&ko)[GK], float (&vs)[GV], float (&vo)[GV]) {
  u32 w[GK + GV];
  if constexpr ((GK + GV) % 4 == 0 && AU == 16) {
    UNROLL for (int i = 0; i < GK + GV; i += 4) shared_load<4>(w + i, at ^ (4 * i));
  } else if constexpr (GK + GV == 2) {
    shared_load<2>(w, at);
  } else {
    UNROLL for (int i = 0; i < GK + GV; i++) shared_load<1>(w + i, at + 4 * i);
  }
  UNROLL for (int v = 0; v < GK; v++) {
    ks[v] = low_affine(w[v]);
    ko[v] = high_affine(w[v]);
  }
  UNROLL for (int v = 0; v < GV; v++) {
    vs[v] = low_affine(w[GK + v]);
    vo[v] = high_affine(w[GK + v]);
  }
}

// Logits of tokens that a row may not see become -infinity; the first `valid` tokens of the warp count.
template <int COUNT>
DEV void hide(const Params& p, const Sight& sight, int valid, int lane, float (&x)[NT][COUNT]) {
  constexpr int SPAN = token_of(COUNT - 1) + 8;
  const int g = lane / 4;
  if (DRAFTS && valid < SPAN - 1 + DRAFTS) {  // some rows read the last tokens from their ring
    const int end = Positions(sight.r, int2_end(p, sight.r)).count;
    UNROLL for (int n = 0; n < NT; n++) {
      const int mine = valid - end + Positions(sight.r, sight.exact_from(sight.drafts(n))).count;
      UNROLL for (int o = 0; o < COUNT; o++) x[n][o] = token_of(o) + g < mine ? x[n][o] : -__int_as_float(0x7F800000);
    }
  } else if (valid < SPAN) {
    UNROLL for (int o = 0; o < COUNT; o++) UNROLL for (int n = 0; n < NT; n++)
        x[n][o] = token_of(o) + g < valid ? x[n][o] : -__int_as_float(0x7F800000);
  }
}
