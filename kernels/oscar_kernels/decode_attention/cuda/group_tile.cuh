// INT2 tokens by a warpgroup: the arithmetic of its tokens of a tile, and a whole segment.
#pragma once

#include "group.cuh"

// What a warp knows of its query rows so far: maxima are those of the warpgroup, sums those of the warp's tokens,
// outputs those of its channels and of all tokens. As `State` otherwise.
struct GroupState {
  float m[NT], l[NT], z[NT][GV], acc[FRAGMENTS][NUMBERS], value_scale;
  DEV void clear() {
    value_scale = 1048576.f;
    UNROLL for (int n = 0; n < NT; n++) {
      m[n] = l[n] = 0.f;
      UNROLL for (int v = 0; v < GV; v++) z[n][v] = 0.f;
    }
    UNROLL for (int f = 0; f < FRAGMENTS; f++) UNROLL for (int i = 0; i < NUMBERS; i++) acc[f][i] = 0.f;
  }
  // Raises the maxima to those of all warps and takes that from the logits `x`, which are less the maxima; see
  // `State::rescale`. Before the first tile there are none.
  template <int COUNT>
  DEV void raise(const Group& at, float (&x)[NT][COUNT], float largest, bool first, int lane) {
    const int g = lane / 4, t = lane % 4;
    UNROLL for (int o = 4; o < 32; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, o));
    if (lane == 0) at.give(at.largest(), largest);
    UNROLL for (int n = 0; n < NT; n++) {
      float top = x[n][0];
      UNROLL for (int o = 1; o < COUNT; o++) top = fmaxf(top, x[n][o]);
      UNROLL for (int o = 4; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, o));
      if (g == 0) at.give(at.place(0, 4 * n + t), top + m[n]);
    }
    at.sync();
    largest = Group::most(at.largest());
    float change = 1.f;
    if (largest * value_scale > 64.f) {
      const float next = __uint_as_float((u32)(127 + 5 + 127 - (int)(__float_as_uint(largest) >> 23)) << 23);
      change = next * __uint_as_float((254u << 23) - __float_as_uint(value_scale));
      value_scale = next;  // powers of two
    }
    UNROLL for (int n = 0; n < NT; n++) {
      const float top = fmaxf(first ? NEVER : m[n], Group::most(at.place(0, 4 * n + t))), less = m[n] - top,
                  factor = ex2(less);
      m[n] = top;
      UNROLL for (int o = 0; o < COUNT; o++) x[n][o] += less;
      if (first) continue;
      l[n] *= factor;
      UNROLL for (int v = 0; v < GV; v++) z[n][v] *= factor;
      UNROLL for (int f = 0; f < FRAGMENTS; f++) UNROLL for (int i = 0; i < 2; i++)
          acc[f][n / 2 * 4 + 2 * i + n % 2] *= factor * change;
    }
  }
};

// The tokens of a warpgroup, 64 at a time; a warp has logits and weights of sixteen of them, and multiplies all of
// them with its channels of values.
struct GroupTile {
  static constexpr int TOKENS = 2 * WARPGROUP, LOADS = PARTS_K * KC / 2, STEPS = 2 * IN_BYTE_K;
  u32 k_offset[LOADS], v_offset[PARTS_V], affine_offset, field;
  // Of the last tile: its values, its weights, which are in shared memory too, and its offsets.
  u32 values[TOKEN_STEPS][FRAGMENTS][4], turn;
  float weight[NT][TOKENS], v_offs[TOKENS][GV];
  DEV GroupTile(const Group& at, int lane, int head) : turn(0) {
    UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int f = 0; f < FRAGMENTS; f++)
        UNROLL for (int i = 0; i < 4; i++) values[k][f][i] = 0;
    UNROLL for (int o = 0; o < TOKENS; o++) {
      UNROLL for (int n = 0; n < NT; n++) weight[n][o] = 0.f;
      UNROLL for (int v = 0; v < GV; v++) v_offs[o][v] = 0.f;
    }
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
  // Begins the products of the query with codes of `u` times 64 tokens.
  DEV void scores(const Group& at, u32 stage, int u, u32 (&codes)[LOADS][STEPS][4], float (&x)[GK][NUMBERS]) const {
    UNROLL for (int load = 0; load < LOADS; load++) {
      u32 a[4];
      ldmatrix4(a, stage + k_offset[load] + 64 * u * ROW_UNITS * 16);
      UNROLL for (int e = 0; e < 2; e++) {
        UNROLL for (int i = 0; i < IN_BYTE_K; i++) UNROLL for (int j = 0; j < 4; j++)
            codes[load][e * IN_BYTE_K + i][j] = a[j] & fields<BITS_K>(0x00010001u, i);
        products_begin();
        UNROLL for (int i = 0; i < IN_BYTE_K; i++) {
          const int quarter = load / (KC / 2) * IN_BYTE_K + i, v = quarter * GK / 4;
          group_multiply(x[v], codes[load][e * IN_BYTE_K + i], GroupQuery::operand_of(at, load, e, i),
                         load % (KC / 2) != 0 || e != 0 || quarter != v * 4 / GK);
        }
        UNROLL for (int j = 0; j < 4; j++) a[j] >>= 8;
      }
    }
  }
  // The codes of all tokens in the warp's channels, as operands.
  DEV void load_values(const Group& at, u32 stage) {
    u32 a[TOKEN_STEPS][PARTS_V][4];
    UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int j = 0; j < PARTS_V; j++)
        ldmatrix4_trans(a[k][j], stage + v_offset[j] + 16 * k * ROW_UNITS * 16);
    if (at.odd)
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int j = 0; j < PARTS_V; j++)
          UNROLL for (int i = 0; i < 4; i++) a[k][j][i] >>= 8;
    constexpr int EACH = Group::PIECES_SHARED ? IN_BYTE_V / 2 : IN_BYTE_V;  // fragments of a part
    UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int f = 0; f < FRAGMENTS; f++)
        UNROLL for (int i = 0; i < 4; i++)
            values[k][f][i] = a[k][f / EACH][i] & (field << BITS_V * IN_BYTE_V / EACH * (f % EACH));
  }
  // The weights of logits `x` less their maxima, and, times value scale, in shared memory; their sum.
  DEV float weigh(const Group& at, const GroupState& s, const float (&x)[NT][TOKENS],
                  const float (&v_scale)[TOKENS][GV], int lane) {
    float sum = 0.f;
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < TOKENS; o++) {
      weight[n][o] = ex2(x[n][o]);
      sum += weight[n][o];
    }
    UNROLL for (int v = 0; v < GV; v++) {
      float scale[TOKENS];
      UNROLL for (int o = 0; o < TOKENS; o++) scale[o] = v_scale[o][v] * s.value_scale;
      UNROLL for (int u = 0; u < WARPGROUP; u++) {
        const u32 to = at.weights + (turn ^ 1) * WEIGHT_BYTES + (v * TOKEN_STEPS + 4 * u + at.warp) * STEP_BYTES;
        UNROLL for (int j = 0; j < PAIRS; j += 2) {
          u32 pairs[4];
          UNROLL for (int k = 0; k < 2; k++) UNROLL for (int i = 0; i < 2; i++) {
            const int n = 2 * min(j + k, PAIRS - 1), o = 2 * u + i;
            pairs[2 * k + i] = pack_f16(weight[n][o] * scale[o], weight[n + 1][o] * scale[o]);
          }
          if (j + 1 < PAIRS) {
            stmatrix_trans(to + j * 256 + lane * 16, pairs);
          } else {
            const u32 last[2] = {pairs[0], pairs[1]};
            stmatrix_trans(to + j * 256 + lane % 16 * 16, last);
          }
        }
      }
    }
    fence_for_products();
    return sum;
  }
  // All of a tile but the products with its values, which `add` begins while codes of the next one are unpacked. Its
  // stage is free when the warp has arrived at `empty`.
  DEV void compute(const Params& p, GroupState& s, const GroupQuery& q, const Group& at, const Sight& sight, u32 stage,
                   u32 empty, int valid, bool first, int lane) {
    u32 codes[WARPGROUP][LOADS][STEPS][4];
    float y[WARPGROUP][GK][NUMBERS], x[NT][TOKENS];
    float k_scale[TOKENS][GK], k_offs[TOKENS][GK], v_scale[TOKENS][GV];
    add(at, s);
    UNROLL for (int u = 0; u < WARPGROUP; u++) scores(at, stage, u, codes[u], y[u]);
    products_commit();
    UNROLL for (int o = 0; o < TOKENS; o++)
        load_affine(stage + affine_offset + token_of(o) * AFFINE_ROW, k_scale[o], k_offs[o], v_scale[o], v_offs[o]);
    products_wait<1>();
    finish(s);
    load_values(at, stage);
    __syncwarp();
    if (lane == 0) arrive(empty);
    products_wait<0>();
    UNROLL for (int u = 0; u < WARPGROUP; u++) {
      UNROLL for (int i = 0; i < LOADS; i++) UNROLL for (int j = 0; j < STEPS; j++) settled(codes[u][i][j]);
      UNROLL for (int v = 0; v < GK; v++) settled(y[u][v]);
    }
    logits(p, s, q, y, k_scale, k_offs, x);
    hide(p, sight, valid, lane, x);
    float largest = v_scale[0][0];
    UNROLL for (int o = 0; o < TOKENS; o++) UNROLL for (int v = 0; v < GV; v++) largest = fmaxf(largest, v_scale[o][v]);
    bool low = first || largest * s.value_scale > 64.f;
    while (true) {  // at most twice
      const float sum = weigh(at, s, x, v_scale, lane);
      if (!at.any(low || sum > MOST)) break;
      s.raise(at, x, largest, first, lane);
      low = false;
    }
    turn ^= 1;
  }
  // A sum of weights beyond which the maxima are raised; one of them may be twice to the power of HEADROOM.
  static constexpr float MOST = 256.f;
  DEV void logits(const Params& p, const GroupState& s, const GroupQuery& q, const float (&y)[WARPGROUP][GK][NUMBERS],
                  const float (&ks)[TOKENS][GK], const float (&ko)[TOKENS][GK], float (&x)[NT][TOKENS]) const {
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < TOKENS; o++) {
      float z = CAPPED ? 0.f : -s.m[n];
      UNROLL for (int v = 0; v < GK; v++)
          z = fmaf(y[o / 2][v][n / 2 * 4 + o % 2 * 2 + n % 2], ks[o][v] * q.scale, fmaf(ko[o][v], q.sum[n][v], z));
      x[n][o] = CAPPED ? logit(p, z) - s.m[n] : z;
    }
  }
  // Adds the last tile's weights, and begins their products with values; `finish` when they have been waited for.
  DEV void add(const Group& at, GroupState& s) const {
    const u32 weights = operand(at.weights + turn * WEIGHT_BYTES);
    products_begin();
    UNROLL for (int k = 0; k < TOKEN_STEPS; k++) UNROLL for (int f = 0; f < FRAGMENTS; f++) {
      const int step = Group::quantization_group(f) * TOKEN_STEPS + k;
      group_multiply(s.acc[f], values[k][f], weights + step * STEP_BYTES / 16, true);
    }
    products_commit();
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int o = 0; o < TOKENS; o++) {
      s.l[n] += weight[n][o];
      UNROLL for (int v = 0; v < GV; v++) s.z[n][v] = fmaf(weight[n][o], v_offs[o][v], s.z[n][v]);
    }
  }
  DEV void finish(GroupState& s) {
    UNROLL for (int f = 0; f < FRAGMENTS; f++) {
      settled(s.acc[f]);
      UNROLL for (int k = 0; k < TOKEN_STEPS; k++) settled(values[k][f]);
    }
  }
};

// As `int2_segment`, but COPIERS warps copy a tile together, and slots are asked for two turns ahead.
DEV void group_segment(const Params& p, GroupState& s, Ring& ring, const Request& r, int b, int block,
                       const QueryRows& rows, const Group& at, int head, int lo, int hi, int warp, int lane,
                       bool& ahead) {
  constexpr int TURNS = WARPS / COPIERS;
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
  UNROLL_1 while (mine < min(lo + AHEAD, hi)) copy(ring.plus(mine - lo));
  GroupTile tile(at, lane, head);
  int left = loader.at.count - lo * TILE - at.tokens - 16 * at.warp;
  meet(ahead);
  GroupQuery q;
  q.load(p, rows, at, lane);
  for (int i = lo; i < hi; i++) {
    if (i + AHEAD == mine) copy(ring.plus(AHEAD));
    wait_phase(ring.full(), ring.round);
    tile.compute(p, s, q, at, Sight{p, r, b, rows.skip, lane % 4}, ring.data(), ring.empty(), left, i == lo, lane);
    ring = ring.plus(1);
    left -= TILE;
  }
  tile.add(at, s);
  products_wait<0>();
  tile.finish(s);
}

// Partial results of the warpgroup's query heads: every warp has its channels; `at`: the first of them.
DEV void store_group(const Params& p, GroupState& s, const Group& group, size_t at, int lane) {
  const int g = lane / 4, t = lane % 4;
  UNROLL for (int n = 0; n < NT; n++) UNROLL for (int v = -1; v < GV; v++) {
    float x = v < 0 ? s.l[n] : s.z[n][max(v, 0)];
    UNROLL for (int o = 4; o < 32; o *= 2) x += __shfl_xor_sync(ALL, x, o);
    if (g == 0) group.give(group.place(1 + v, 4 * n + t), x);
  }
  group.sync();
  const u32 unit = 24 + (127u - (__float_as_uint(s.value_scale) >> 23)) + 127;  // exponent
  UNROLL for (int n = 0; n < NT; n++) {
    const int row = 4 * n + t;
    if (row >= GW) continue;
    if (group.warp == 0 && g == 0) p.stats[at + row] = make_float2(s.m[n], Group::sum(group.place(0, row)));
    float z[GV];
    UNROLL for (int v = 0; v < GV; v++) z[v] = Group::sum(group.place(1 + v, row));
    float* out = p.partial + (at + row) * DV + 2 * g + group.odd;
    UNROLL for (int f = 0; f < FRAGMENTS; f++) {
      const int r = group.quarter(f);
      const float factor = __uint_as_float((unit - field_bit<BITS_V>(r)) << 23);
      UNROLL for (int i = 0; i < 2; i++)
          out[r * (DV / 4) + 16 * (2 * group.set() + i)] =
              fmaf(s.acc[f][n / 2 * 4 + 2 * i + n % 2], factor, z[Group::quantization_group(f)]);
    }
  }
}
