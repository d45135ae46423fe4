// A warpgroup and its query: what the four warps of a KV head share.
#pragma once

#include "ring.cuh"
#include "tokens.cuh"

// Columns of a product are query rows: column g of eight is row g % 2 * 4 + g / 2 of them, so that lane `t` has rows t,
// 4 + t, ... as in `State`. Channels of values: FRAGMENTS products have 16 of every warp each.
constexpr int COLUMNS = 8 * PAIRS, FRAGMENTS = DV / 64, NUMBERS = COLUMNS / 2;  // numbers of a product in a thread
constexpr int STEP_BYTES = 32 * COLUMNS;                                        // operand of one product
constexpr int QUERY_BYTES = DK / 16 * STEP_BYTES, TOKEN_STEPS = 4 * WARPGROUP,
              WEIGHT_BYTES = TOKEN_STEPS * GV * STEP_BYTES, EXCHANGE_BYTES = (1 + GV) * NT * 64;
constexpr int GROUP_BYTES = QUERY_BYTES + 2 * WEIGHT_BYTES + (EXCHANGE_BYTES + 16 + 127) / 128 * 128;

struct Group {
  u32 query, weights, exchange;  // in shared memory; weights of two tiles
  int warp, tokens, barrier;     // of the four; of the tile, where those of the warpgroup begin; its barrier
  bool odd;                      // whether the warp has odd bytes of values, else even ones
  DEV Group(u32 shared, int warp_of_block)  // which is the same for all lanes, as the compiler should know
      : warp(warp_of_block % 4), tokens(warp_of_block / (4 * HB) * (64 * WARPGROUP)), barrier(1 + warp_of_block / 4),
        odd((warp_of_block + warp_of_block / 4) % 2) {
    query = shared + warp_of_block / 4 * GROUP_BYTES;
    weights = query + QUERY_BYTES;
    exchange = weights + 2 * WEIGHT_BYTES;
  }
  // Before the first tile: no weights, which are multiplied with nothing.
  DEV void clear_weights(int thread) const {
    const u32 none[4] = {};
    UNROLL for (int at = 0; at < WEIGHT_BYTES; at += 128 * 16)
        if (at + 128 * 16 <= WEIGHT_BYTES || at + thread * 16 < WEIGHT_BYTES)
          shared_store<4>(weights + at + thread * 16, none);
  }
  DEV void sync() const { group_sync(barrier); }
  DEV bool any(bool x) const { return group_any(barrier, x); }
  // Where the warps put number `i` of query row `row`, next to each other; `largest` is one of no row.
  DEV u32 place(int i, int row) const { return exchange + (i * (4 * NT) + row) * 16; }
  DEV u32 largest() const { return exchange + EXCHANGE_BYTES; }
  DEV void give(u32 place, float x) const {
    const u32 words[1] = {__float_as_uint(x)};
    shared_store<1>(place + 4 * warp, words);
  }
  DEV static float most(u32 place) {
    u32 x[4];
    shared_load<4>(x, place);
    return fmaxf(fmaxf(__uint_as_float(x[0]), __uint_as_float(x[1])),
                 fmaxf(__uint_as_float(x[2]), __uint_as_float(x[3])));
  }
  DEV static float sum(u32 place) {
    u32 x[4];
    shared_load<4>(x, place);
    return (__uint_as_float(x[0]) + __uint_as_float(x[1])) + (__uint_as_float(x[2]) + __uint_as_float(x[3]));
  }
  // Quarter and channel of the fragments of values: warps 2 and 3 have the second half of the pieces, or of the fields.
  static constexpr bool PIECES_SHARED = FRAGMENTS == 2;
  DEV int set() const { return PIECES_SHARED ? 0 : warp / 2; }
  DEV int quarter(int f) const { return PIECES_SHARED ? 2 * f + warp / 2 : f; }
  DEV static constexpr int quantization_group(int f) { return (PIECES_SHARED ? 2 * f : f) * GV / 4; }
};

// The query as in HalfQuery, but in shared memory. Product `(load * 2 + e) * IN_BYTE_K + i` has channels 4t + e and
// 4t + e + 2 of pieces 2 * load and the next, of the i-th quarter of a byte.
struct GroupQuery {
  float scale, sum[NT][GK];
  DEV static constexpr int step(int load, int e, int i) { return ((load * 2 + e) * IN_BYTE_K + i) * STEP_BYTES; }
  DEV static u32 operand_of(const Group& at, int load, int e, int i) {
    return operand(at.query) + step(load, e, i) / 16;
  }
  DEV void load(const Params& p, const QueryRows& rows, const Group& at, int lane) {
    const int g = lane / 4, t = lane % 4, r = at.warp;  // its quarter of the channels
    float x[PAIRS][KC][4], largest = 0.f;
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int c = 0; c < KC; c++) {
      const int head = 8 * j + g % 2 * 4 + g / 2;
      x[j][c][0] = x[j][c][1] = x[j][c][2] = x[j][c][3] = 0.f;
      if (head < GW) query_four(p, rows[head] * DK + r * (DK / 4) + 16 * c + 4 * t, x[j][c]);
      UNROLL for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[j][c][i]));
    }
    UNROLL for (int o = 1; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    if (lane == 0) at.give(at.largest(), largest);
    at.sync();
    const u32 exponent = 268 - max(__float_as_uint(Group::most(at.largest())) >> 23, 20u);  // of the power of two
    scale = p.scale * 16777216.f * __uint_as_float((254 - exponent) << 23);
    const float factor = __uint_as_float((exponent - field_bit<BITS_K>(r)) << 23);
    const u32 to = at.query + step(r / IN_BYTE_K * (KC / 2), 0, r % IN_BYTE_K) + g * 16 + t * 4;
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int c = 0; c < KC; c++) UNROLL for (int e = 0; e < 2; e++) {
      const u32 pair[1] = {pack_f16(x[j][c][e] * factor, x[j][c][e + 2] * factor)};
      shared_store<1>(to + (c / 2 * 2 + e) * (IN_BYTE_K * STEP_BYTES) + c % 2 * 128 + j * 256, pair);
    }
    at.clear_weights(32 * at.warp + lane);
    fence_for_products();
    at.sync();
    float y[GK][NUMBERS];  // products with ones
    products_begin();
    UNROLL for (int load = 0; load < PARTS_K * KC / 2; load++) UNROLL for (int e = 0; e < 2; e++)
        UNROLL for (int i = 0; i < IN_BYTE_K; i++) {
      const int quarter = load / (KC / 2) * IN_BYTE_K + i, v = quarter * GK / 4;
      const u32 one = 0x3C003C00u + 0x04000400u * field_bit<BITS_K>(quarter), ones[4] = {one, one, one, one};
      group_multiply(y[v], ones, operand_of(at, load, e, i),
                     load % (KC / 2) != 0 || e != 0 || quarter != v * 4 / GK);
    }
    products_commit();
    products_wait<0>();
    UNROLL for (int v = 0; v < GK; v++) {
      settled(y[v]);
      UNROLL for (int n = 0; n < NT; n++) sum[n][v] = y[v][n / 2 * 4 + n % 2] * (scale * (1.f / 16777216.f));
    }
  }
};
