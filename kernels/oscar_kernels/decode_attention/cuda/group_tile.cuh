// INT2 tokens by a warpgroup: the arithmetic of its tokens of a tile, and a whole segment.
#pragma once

#include "group_state.cuh"

// The tokens of a warpgroup, 64 at a time; a warp has logits and weights of sixteen of them, and multiplies all of
// them with its channels of values.
struct GroupTile {
  static constexpr int TOKENS = 2 * WARPGROUP, LOADS = PARTS_K * KC / 2, STEPS = 2 * IN_BYTE_K;
  u32 k_offset[LOADS], v_offset[PARTS_V], affine_offset, field;
  // Of the last tile: codes of values, with LEAN of all fields of a byte, and weights, which are in shared memory.
  u32 values[TOKEN_STEPS][LEAN ? PARTS_V : FRAGMENTS][4], turn, weights;
  static constexpr int EACH = Group::PIECES_SHARED ? IN_BYTE_V / 2 : IN_BYTE_V;  // fragments of a part
  DEV GroupTile(const Group& at, int lane, int head) : turn(0), weights(operand(at.weights)) {
    UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int f = 0; f < (LEAN ? PARTS_V : FRAGMENTS); f++)
        UNROLL for (int i = 0; i < 4; i++) values[k][f][i] = 0;
    const int token = at.tokens + (lane & 7);
    UNROLL for (int j = 0; j < LOADS; j++) {
      const int row = token + 16 * at.warp + (lane & 8), piece = 2 * j + lane / 16;
      k_offset[j] = (row * ROW_UNITS + swizzle<ROW_UNITS>(row, head * PIECES + piece)) * 16;
    }
    UNROLL for (int j = 0; j < PARTS_V; j++) {
      const int row = token + lane / 16 * 8, piece = KP + j * VC + 2 * at.set() + (lane >> 3 & 1);
      v_offset[j] = (row * ROW_UNITS + swizzle<ROW_UNITS>(row, head * PIECES + piece)) * 16;
    }
    affine_offset = affine_place(at.tokens + 16 * at.warp + lane / 4, head);
    field = fields<BITS_V>(0x00010001u, 0) << BITS_V * (at.quarter(0) % IN_BYTE_V);
  }
  // Begins the products of the query with codes, and with half of them under way takes those with values as done.
  DEV void scores(const Group& at, GroupState& s, u32 stage) {
    const u32 query = uniform(operand(at.query));
    UNROLL for (int load = 0; load < LOADS; load++) {
      u32 a[WARPGROUP][4];
      UNROLL for (int u = 0; u < WARPGROUP; u++) ldmatrix4(a[u], stage + k_offset[load] + 64 * u * ROW_UNITS * 16);
      UNROLL for (int e = 0; e < 2; e++) {
        UNROLL for (int i = 0; i < IN_BYTE_K; i++) UNROLL for (int u = 0; u < WARPGROUP; u++)
            UNROLL for (int j = 0; j < 4; j++)
            codes[u][load][e * IN_BYTE_K + i][j] = a[u][j] & fields<BITS_K>(0x00010001u, i);
        products_begin();
        UNROLL for (int i = 0; i < IN_BYTE_K; i++) UNROLL for (int u = 0; u < WARPGROUP; u++) {
          const int quarter = load / (KC / 2) * IN_BYTE_K + i, v = quarter * GK / 4;
          group_multiply<false>(y[u][v], codes[u][load][e * IN_BYTE_K + i], query + GroupQuery::step(load, e, i) / 16,
                         load % (KC / 2) != 0 || e != 0 || quarter != v * 4 / GK);
        }
        if (2 * load + e + 1 == LOADS) {
          products_commit();
          products_wait<1>();
          finish(s);
        }
        if (LEAN && e && load + 1 < LOADS) {
          products_commit();
          products_wait<0>();
          UNROLL for (int v = 0; v < GK; v++) UNROLL for (int u = 0; u < WARPGROUP; u++) settled(y[u][v]);
          UNROLL for (int i = 0; i < STEPS; i++) UNROLL for (int u = 0; u < WARPGROUP; u++) settled(codes[u][load][i]);
        }
        UNROLL for (int u = 0; u < WARPGROUP; u++) UNROLL for (int j = 0; j < 4; j++) a[u][j] >>= 8;
      }
    }
    products_commit();
  }
  DEV void settle_scores() {
    products_wait<0>();
    UNROLL for (int u = 0; u < WARPGROUP; u++) {
      UNROLL for (int i = 0; i < LOADS; i++) UNROLL for (int j = 0; j < STEPS; j++) settled(codes[u][i][j]);
      UNROLL for (int v = 0; v < GK; v++) settled(y[u][v]);
    }
  }
  // The codes of all tokens in the warp's channels, as operands.
  DEV void load_values(const Group& at, u32 stage, u32 empty, int lane) {
    u32 a[TOKEN_STEPS][PARTS_V][4];
    UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int j = 0; j < PARTS_V; j++)
        ldmatrix4_trans(a[k][j], stage + v_offset[j] + 16 * k * ROW_UNITS * 16);
    __syncwarp();
    if (lane == 0) arrive(empty);
    if (at.odd)
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int j = 0; j < PARTS_V; j++)
          UNROLL for (int i = 0; i < 4; i++) a[k][j][i] >>= 8;
    if constexpr (LEAN) {
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int j = 0; j < PARTS_V; j++)
          UNROLL for (int i = 0; i < 4; i++) values[k][j][i] = a[k][j][i];
    } else {
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int f = 0; f < FRAGMENTS; f++) {
        fragment(values[k][f], a[k][f / EACH], f);
        settled(values[k][f]);
      }
    }
  }
  DEV void fragment(u32 (&x)[4], const u32 (&a)[4], int f) const {
    UNROLL for (int i = 0; i < 4; i++) x[i] = a[i] & (field << BITS_V * IN_BYTE_V / EACH * (f % EACH));
  }
  // What a tile adds to sums of weights and offsets.
  struct Sums {
    float l[NT], z[NT][GV];
  };
  // Leaves the weights of logits `x` less their maxima, times value scale, in shared memory, and adds them up; their sum.
  DEV float weigh(const Group& at, const GroupState& s, const float (&x)[NT][TOKENS],
                  const float (&v_scale)[TOKENS][GV], const float (&v_offs)[TOKENS][GV], int lane, Sums& sums) const {
    float weight[NT][TOKENS], all = 0.f;
    UNROLL for (int n = 0; n < NT; n++) {
      float sum = 0.f;
      UNROLL for (int v = 0; v < GV; v++) sums.z[n][v] = s.z[n][v];
      UNROLL for (int o = 0; o < TOKENS; o++) {
        weight[n][o] = ex2(x[n][o]);
        sum = o ? sum + weight[n][o] : weight[n][o];
        UNROLL for (int v = 0; v < GV; v++) sums.z[n][v] = fmaf(weight[n][o], v_offs[o][v], sums.z[n][v]);
      }
      sums.l[n] = s.l[n] + sum;
      all = n ? all + sum : sum;
    }
    UNROLL for (int v = 0; v < GV; v++) UNROLL for (int u = 0; u < WARPGROUP; u++) {
      const float scale[2] = {v_scale[2 * u][v] * s.value_scale, v_scale[2 * u + 1][v] * s.value_scale};
      store_weights(at.weights + (turn ^ 1) * WEIGHT_BYTES + (v * TOKEN_STEPS + 4 * u + at.warp) * STEP_BYTES, lane,
                    [&](int j, int i) {
                      return pack_f16(weight[2 * j][2 * u + i] * scale[i], weight[2 * j + 1][2 * u + i] * scale[i]);
                    });
    }
    fence_for_products();
    return all;
  }
  // All of a tile whose scores are there, but the products with its values. Those of the tile before, and the scores of
  // the next one, go on while weights are made. With LEAN scores are made and waited for. The tile's stage is free when
  // the warp has arrived at `empty`.
  DEV void compute(const Params& p, GroupState& s, const GroupQuery& q, const Group& at, const Sight& sight,
                   const Ring& ring, int valid, bool first, bool last, int lane) {
    const u32 stage = ring.data();
    float x[NT][TOKENS], k_scale[TOKENS][GK], k_offs[TOKENS][GK], v_scale[TOKENS][GV], v_offs[TOKENS][GV];
    if (LEAN) {
      wait_phase(ring.full(), ring.round);
      add(s);
      scores(at, s, stage);
    }
    UNROLL for (int o = 0; o < TOKENS; o++)
        load_affine(stage + affine_offset + token_of(o) * AFFINE_ROW, k_scale[o], k_offs[o], v_scale[o], v_offs[o]);
    if (LEAN) {
      load_values(at, stage, ring.empty(), lane);
      settle_scores();
    }
    logits(p, s, q, k_scale, k_offs, x);
    hide(p, sight, valid, lane, x);
    if (!LEAN) {
      add(s);
      const Ring next = ring.plus(1);
      if (!last) wait_phase(next.full(), next.round);
      scores(at, s, next.data());  // behind the last tile of nothing, and nobody asks for them
      load_values(at, stage, ring.empty(), lane);
    }
    float largest = v_scale[0][0];
    UNROLL for (int o = 0; o < TOKENS; o++) UNROLL for (int v = 0; v < GV; v++) largest = fmaxf(largest, v_scale[o][v]);
    weights = uniform(operand(at.weights + (turn ^ 1) * WEIGHT_BYTES));
    bool low = first || largest * s.value_scale > 64.f;
    Sums sums;
    while (true) {  // at most twice
      const float sum = weigh(at, s, x, v_scale, v_offs, lane, sums);
      if (!at.any(low || sum > GroupState::MOST)) break;
      s.raise(at, x, largest, first, lane);
      low = false;
    }
    UNROLL for (int n = 0; n < NT; n++) {
      s.l[n] = sums.l[n];
      UNROLL for (int v = 0; v < GV; v++) s.z[n][v] = sums.z[n][v];
    }
    turn ^= 1;
    if (!LEAN) settle_scores();
  }
  DEV void logits(const Params& p, const GroupState& s, const GroupQuery& q, const float (&ks)[TOKENS][GK], const float (&ko)[TOKENS][GK], float (&x)[NT][TOKENS]) const {
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < TOKENS; o++) {
      float z = CAPPED ? 0.f : -s.m[n];
      UNROLL for (int v = 0; v < GK; v++)
          z = fmaf(y[o / 2][v][n / 2 * 4 + o % 2 * 2 + n % 2], ks[o][v] * q.scale, fmaf(ko[o][v], q.sum[n][v], z));
      x[n][o] = CAPPED ? logit(p, z) - s.m[n] : z;
    }
  }
  // Begins the products of the last tile's weights with its values; `finish` when they have been waited for.
  DEV void add(GroupState& s) {
    if constexpr (LEAN) {
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) {
        if (k > 1) {
          products_wait<1>();
          UNROLL for (int f = 0; f < FRAGMENTS; f++) settled(operands[k % 2][f]);
        }
        UNROLL for (int f = 0; f < FRAGMENTS; f++) fragment(operands[k % 2][f], values[k][f / EACH], f);
        products_begin();
        UNROLL for (int f = 0; f < FRAGMENTS; f++)
            group_multiply<false>(s.acc[f], operands[k % 2][f], weights_of(k, f), true);
        products_commit();
      }
    } else {
      products_begin();
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int f = 0; f < FRAGMENTS; f++)
          group_multiply<false>(s.acc[f], values[k][f], weights_of(k, f), true);
      products_commit();
    }
  }
  DEV u32 weights_of(int k, int f) const {
    return weights + (Group::quantization_group(f) * TOKEN_STEPS + k) * STEP_BYTES / 16;
  }
  DEV void finish(GroupState& s) {
    UNROLL for (int f = 0; f < FRAGMENTS; f++) {
      settled(s.acc[f]);
      if constexpr (LEAN)
        UNROLL for (int k = 0; k < 2; k++) settled(operands[k][f]);
      else
        UNROLL for (int k = 0; k < TOKEN_STEPS; k++) settled(values[k][f]);
    }
  }
  u32 operands[LEAN ? 2 : 1][FRAGMENTS][4];
  u32 codes[WARPGROUP][LOADS][STEPS][4];  // of keys
  float y[WARPGROUP][GK][NUMBERS];        // products of the query with them
};

// As `int2_segment`, but COPIERS warps copy a tile together, and slots are asked for two turns ahead.
DEV void group_segment(const Params& p, GroupState& s, Ring& ring, const Request& r, int b, int block,
                       const QueryRows& rows, const Group& at, int head, int lo, int hi, int warp, int lane,
                       bool& ahead) {
  constexpr int TURNS = WARPS / COPIERS;
  lo = uniform(lo), hi = uniform(hi), ring.stage = uniform(ring.stage), ring.round = uniform(ring.round);
  const Loader loader(p, r, block, warp % COPIERS * (32 * COPIED));
  u32 slot[2][COPIED];
  int mine = lo + warp / COPIERS;  // the tile that this warp copies next
  loader.fetch(mine, hi, slot[0], lane);
  loader.fetch(mine + TURNS, hi, slot[1], lane);
  const auto copy = [&](const Ring& to) {
    if (mine < hi) loader.copy(p, to, mine, slot[0], lane);
    UNROLL for (int i = 0; i < COPIED; i++) slot[0][i] = slot[1][i];
    mine += TURNS;
    loader.fetch(mine + TURNS, hi, slot[1], lane);
  };
  UNROLL_1 while (mine <= min(lo + AHEAD, hi - 1)) copy(ring.plus(mine - lo));
  GroupTile tile(at, lane, head);
  int left = loader.at.count - lo * TILE - at.tokens - 16 * at.warp;
  meet(ahead);
  GroupQuery q;
  q.load(p, rows, at, lane);
  s.begin();
  if (!LEAN) {
    wait_phase(ring.full(), ring.round);
    tile.scores(at, s, ring.data());
    tile.settle_scores();
  }
  for (int i = lo; i < hi; i++) {
    tile.compute(p, s, q, at, Sight{p, r, b, rows.skip, lane % 4}, ring, left, i == lo, i + 1 == hi, lane);
    ring = ring.plus(1);
    left -= TILE;
    // Right behind a fence, since the next one waits for what has been asked for.
    if (i + 1 + AHEAD == mine) copy(ring.plus(AHEAD));
  }
  tile.add(s);
  products_wait<0>();
  tile.finish(s);
}
