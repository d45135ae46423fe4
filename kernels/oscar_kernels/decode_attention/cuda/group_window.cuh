// Exact tokens of the windows by a warpgroup, 64 at a time, from memory straight into registers.
#pragma once

#include "group_state.cuh"
#include "window.cuh"

// The query in bfloat16 for windows, in shared memory: hi, and lo behind it, exact for a bfloat16 query. Product n has
// channels in the order in which lanes load rows of keys: of 8 channels of a lane the first or the second four.
constexpr int HALVES = QUERY ? 2 : 1, K_STEPS = DK / 16;
DEV void load_window_query(const Params& p, const QueryRows& rows, const Group& at, int lane) {
  const int g = lane / 4, t = lane % 4;
  UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int n = 0; n < K_STEPS / 8; n++) UNROLL for (int k = 0; k < 2; k++) {
    const int row = 8 * j + g % 2 * 4 + g / 2, step = at.warp * (K_STEPS / 4) + 2 * n + k;
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    if (row < GW) query_four(p, rows[row] * DK + 32 * (step / 2) + 8 * t + 4 * k, x);
    UNROLL for (int i = 0; i < 2; i++) {
      const u32 to = at.query + step * STEP_BYTES + i * 128 + j * 256 + g * 16 + t * 4;
      const u32 hi[1] = {pack_bf16(x[2 * i], x[2 * i + 1])};
      const u32 lo[1] = {pack_bf16(x[2 * i] - low_bf16(hi[0]), x[2 * i + 1] - high_bf16(hi[0]))};
      shared_store<1>(to, hi);
      if (QUERY) shared_store<1>(to + K_STEPS * STEP_BYTES, lo);
    }
  }
}

// 64 tokens: a warp has the keys of sixteen of them, and its quarter of the channels of all values. Weights are in two
// bfloat16 halves.
struct WindowTile {
  static constexpr int STEPS = 4, UNIT = DV / 32;  // channels of a lane, next to each other
  uint4 k[2][DK / 32];
  u32 v[STEPS][4][UNIT / 2];
  static constexpr bool LATE = LEAN && DK + DV > 256;  // no registers for keys and values at a time
  DEV void load_keys(const Params& p, const Window& w, const Group& at, int base, int lane) {
    const int g = lane / 4, t = lane % 4, last = w.count - 1;
    UNROLL for (int i = 0; i < 2; i++) {
      const int token = base + 16 * at.warp + 8 * i + g;
      const unsigned short* row = w.row(min(token, last), p.sink_k, p.ring_k, DK);
      UNROLL for (int j = 0; j < DK / 32; j++) k[i][j] = load_row(row, 4 * j + t, token <= last);
    }
  }
  DEV void load_values(const Params& p, const Window& w, const Group& at, int base, int lane) {
    const int g = lane / 4, t = lane % 4, last = w.count - 1;
    u64 rows[2];  // of tokens `lane` and 32 + lane
    UNROLL for (int i = 0; i < 2; i++)
        rows[i] = (u64)(w.row(min(base + 32 * i + lane, last), p.sink_v, p.ring_v, DV) + 8 * UNIT * at.warp);
    UNROLL for (int s = 0; s < STEPS; s++) UNROLL for (int i = 0; i < 4; i++) {
      const int token = 16 * s + 2 * t + i % 2 + i / 2 * 8;
      const u32 low = __shfl_sync(ALL, (u32)rows[s / 2], token % 32),
                high = __shfl_sync(ALL, (u32)(rows[s / 2] >> 32), token % 32);
      const unsigned short* row = reinterpret_cast<const unsigned short*>((u64)high << 32 | low) + UNIT * g;
      UNROLL for (int j = 0; j < UNIT / 2; j++) v[s][i][j] = 0;
      if (base + token <= last) load_words<UNIT / 2>(v[s][i], row);
    }
  }
  // Begins the products of the query with keys.
  DEV void scores(const Group& at, float (&y)[NUMBERS], u32 (&a)[K_STEPS][4]) const {
    UNROLL for (int n = 0; n < K_STEPS; n++) UNROLL for (int i = 0; i < 4; i++)
        a[n][i] = word(k[i % 2][n / 2], n % 2 * 2 + i / 2);
    const u32 query = uniform(operand(at.query));
    products_begin();
    UNROLL for (int half = 0; half < HALVES; half++) UNROLL for (int n = 0; n < K_STEPS; n++)
        group_multiply<true>(y, a[n], query + (half * K_STEPS + n) * STEP_BYTES / 16, half + n > 0);
    products_commit();
  }
  // The products of weights with values.
  DEV void add(const Group& at, GroupState& s) const {
    const u32 weights = uniform(operand(at.weights));
    u32 a[STEPS][FRAGMENTS][4];
    UNROLL for (int n = 0; n < STEPS; n++) {
      UNROLL for (int f = 0; f < FRAGMENTS; f++) UNROLL for (int i = 0; i < 4; i++)
          a[n][f][i] = prmt(v[n][i / 2 * 2][f], v[n][i / 2 * 2 + 1][f], i % 2 ? 0x7632 : 0x5410);
      products_begin();
      UNROLL for (int half = 0; half < 2; half++) UNROLL for (int f = 0; f < FRAGMENTS; f++)
          group_multiply<true>(s.acc[f], a[n][f], weights + (half * STEPS + n) * STEP_BYTES / 16, true);
      if (LEAN || n + 1 == STEPS) {
        products_commit();
        products_wait<0>();
        UNROLL for (int f = 0; f < FRAGMENTS; f++) {
          settled(s.acc[f]);
          UNROLL for (int k = LEAN ? n : 0; k <= n; k++) settled(a[k][f]);
        }
      }
    }
  }
};

// Of the rows the kernel in front has written only the last, the newest tokens.
DEV void group_window_segment(const Params& p, GroupState& s, const Request& r, int b, int head, const QueryRows& rows,
                              const Group& at, int group, int lo, int hi, int lane, bool& ahead) {
  const int g = lane / 4;
  const Window w(p, r, b, head);
  bool first = true;
  for (int step = lo; step < hi; step++) {
    const int base = step * STEP + 64 * group;
    if (base >= w.count) break;
    if (base + 63 + NODES >= w.count) meet(ahead);
    WindowTile tile;
    tile.load_keys(p, w, at, base, lane);
    if (!WindowTile::LATE) tile.load_values(p, w, at, base, lane);
    if (step + 1 < hi) prefetch_rows(p, w, base + STEP + 16 * at.warp, lane);
    meet(ahead);
    at.sync();  // all have used the query, or the weights, of before
    if (first) {
      load_window_query(p, rows, at, lane);
      fence_for_products();
      at.sync();
      s.begin();
    }
    float y[NUMBERS], x[NT][2], weight[NT][2];
    u32 a[K_STEPS][4];
    tile.scores(at, y, a);
    products_wait<0>();
    settled(y);
    UNROLL for (int n = 0; n < K_STEPS; n++) settled(a[n]);
    if (WindowTile::LATE) tile.load_values(p, w, at, base, lane);
    const int mine = base + 16 * at.warp;
    const bool partly = DRAFTS && w.partly_seen(p, r, mine);
    UNROLL for (int n = 0; n < NT; n++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const float z = logit(p, y[n / 2 * 4 + 2 * i + n % 2] * p.scale) - s.m[n];
        x[n][i] = mine + 8 * i + g < w.count ? z : -__int_as_float(0x7F800000);
      }
      if (partly) {
        const Sight sight{p, r, b, rows.skip, lane % 4};
        const u32 drafts = sight.drafts(n);
        UNROLL for (int i = 0; i < 2; i++)
            if (!sight.sees(drafts, w.position(mine + 8 * i + g))) x[n][i] = -__int_as_float(0x7F800000);
      }
    }
    bool low = first;
    while (true) {  // at most twice
      float sum = 0.f;
      UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 2; i++) {
        weight[n][i] = ex2(x[n][i]);
        sum += weight[n][i];
      }
      UNROLL for (int half = 0; half < 2; half++)
          store_weights(at.weights + (half * WindowTile::STEPS + at.warp) * STEP_BYTES, lane, [&](int j, int i) {
        const float y0 = weight[2 * j][i], y1 = weight[2 * j + 1][i];
        const u32 hi = pack_bf16(y0, y1);
        return half ? pack_bf16(y0 - low_bf16(hi), y1 - high_bf16(hi)) : hi;
      });
      fence_for_products();
      if (!at.any(low || sum > GroupState::MOST)) break;
      s.raise(at, x, 0.f, first, lane);
      low = false;
    }
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 2; i++) s.l[n] += weight[n][i];
    tile.add(at, s);
    first = false;
  }
}
