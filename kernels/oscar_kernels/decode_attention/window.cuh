// Exact tokens of the windows, from memory straight into registers.
#pragma once

#include "state.cuh"

// The exact rows of a request, sink and ring: [sink_from, sink_end) and [ring_from, length), read once each.
struct Window {
  int from, split, jump, count, sink_from, sink_end, ring_from, ring_base, ring_rows, heads;
  size_t sink_row, ring_row;
  DEV Window(const Params& p, const Request& r, int head)
      : sink_from(r.sink_from), sink_end(r.sink_end), ring_from(r.ring_from), ring_rows(p.ring_rows), heads(p.heads) {
    const bool apart = r.ring_from > r.sink_end || r.sink_end <= r.sink_from;
    from = apart ? r.sink_from : min(r.sink_from, r.ring_from);
    split = apart ? max(0, r.sink_end - r.sink_from) : r.length - from;
    jump = apart ? r.ring_from - split : from;
    count = apart ? split + r.length - r.ring_from : split;
    ring_base = ring_rows ? ring_from % ring_rows : 0;
    sink_row = (size_t)r.sink_block * p.sink * heads + head;
    ring_row = (size_t)r.row * ring_rows * heads + head;
  }
  DEV int position(int i) const { return i < split ? from + i : jump + i; }
  // Whether some query rows may not see some of 16 tokens: drafts, or what only some read from the ring.
  DEV bool partly_seen(const Params& p, const Request& r, int base) const {
    const int last = position(base + 15);
    return last >= committed(r) || (last >= ring_from && position(base) < int2_end(p, r));
  }
  DEV const unsigned short* row(int i, const unsigned short* sink, const unsigned short* ring, int width) const {
    const int at = position(i);
    if (at >= sink_from && at < sink_end) return sink + (sink_row + (size_t)at * heads) * width;
    int slot = ring_base + at - ring_from;
    slot -= slot >= ring_rows ? ring_rows : 0;
    return ring + (ring_row + (size_t)slot * heads) * width;
  }
};
DEV int window_count(const Request& r) {
  return max(0, r.sink_end - r.sink_from) + r.length - r.ring_from - max(0, r.sink_end - max(r.sink_from, r.ring_from));
}

// The rows of a warp's next step, on their way to the second-level cache.
DEV void prefetch_rows(const Params& p, const Window& w, int base, int lane) {
  const int token = base + lane % 16;
  if (token >= w.count) return;
  for (int i = lane / 16; i < DK / 64; i += 2) prefetch(w.row(token, p.sink_k, p.ring_k, DK) + 64 * i);
  for (int i = lane / 16; i < DV / 64; i += 2) prefetch(w.row(token, p.sink_v, p.ring_v, DV) + 64 * i);
}
DEV uint4 load_row(const unsigned short* row, int unit, bool valid) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (valid) load_once(x, row + 8 * unit);
  return x;
}
DEV u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The query in bfloat16 for windows: hi + lo, exact for a bfloat16 query. Channels in the order in which lanes load
// rows.
struct Query16 {
  u32 hi[PAIRS][DK / 16][2], lo[PAIRS][NT > 1 && QUERY ? DK / 16 : 1][2];
  DEV void load(const Params& p, const QueryRows& rows, int lane) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (NT > 1 && QUERY == 0) {
      UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int k = 0; k < DK / 32; k++) {
        const int head = 8 * j + g % 2 * 4 + g / 2;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (head < GW)
          x = __ldcg(reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(p.query) + rows[head] * DK) +
                     4 * k + t);
        UNROLL for (int i = 0; i < 4; i++) hi[j][2 * k + i / 2][i % 2] = word(x, i);
      }
      return;
    }
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int k = 0; k < DK / 16; k++) UNROLL for (int i = 0; i < 2; i++) {
      const int head = NT == 1 ? g / 2 : 8 * j + g % 2 * 4 + g / 2;
      const float2 x = head < GW ? query_pair(p, rows[head] * DK + 8 * (4 * (k / 2) + t) + 4 * (k % 2) + 2 * i)
                                 : make_float2(0.f, 0.f);
      const u32 h = pack_bf16(x.x, x.y), l = pack_bf16(x.x - low_bf16(h), x.y - high_bf16(h));
      hi[j][k][i] = NT == 1 && g % 2 ? l : h;
      if constexpr (NT > 1 && QUERY) lo[j][k][i] = l;
    }
  }
};

// Of the rows the kernel in front has written only the last, the newest tokens.
DEV void window_segment(const Params& p, State& s, const Request& r, int b, int head, const QueryRows& rows, int group,
                        int lo, int hi, bool& ahead) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Window w(p, r, head);
  Query16 q;
  for (int step = lo; step < hi; step++) {
    const int base = step * STEP + 16 * group;
    if (base >= w.count) continue;
    if (base + 15 + NODES >= w.count) meet(ahead);
    uint4 k[2][DK / 32], v[4][VC];
    UNROLL for (int i = 0; i < 2; i++) {
      const int token = base + 8 * i + g;
      const unsigned short* row = w.row(min(token, w.count - 1), p.sink_k, p.ring_k, DK);
      UNROLL for (int j = 0; j < DK / 32; j++) k[i][j] = load_row(row, 4 * j + t, token < w.count);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const int token = base + 2 * t + (i & 1) + 8 * (i >> 1);
      const unsigned short* row = w.row(min(token, w.count - 1), p.sink_v, p.ring_v, DV);
      UNROLL for (int j = 0; j < VC; j++) v[i][j] = load_row(row, 8 * j + g, token < w.count);
    }
    if (step + 1 < hi) prefetch_rows(p, w, base + STEP, lane);
    meet(ahead);
    if (step == lo) q.load(p, rows, lane);
    float c[PAIRS][4] = {}, x[NT][2], top[NT];
    UNROLL for (int n = 0; n < DK / 16; n++) {
      const u32 a0 = word(k[0][n / 2], n % 2 * 2), a1 = word(k[1][n / 2], n % 2 * 2),
                a2 = word(k[0][n / 2], n % 2 * 2 + 1), a3 = word(k[1][n / 2], n % 2 * 2 + 1);
      UNROLL for (int j = 0; j < PAIRS; j++) {
        mma_bf16(c[j], a0, a1, a2, a3, q.hi[j][n][0], q.hi[j][n][1]);
        if constexpr (NT > 1 && QUERY) mma_bf16(c[j], a0, a1, a2, a3, q.lo[j][n][0], q.lo[j][n][1]);
      }
    }
    bool raise = false;
    const bool partly = DRAFTS && w.partly_seen(p, r, base);
    UNROLL for (int n = 0; n < NT; n++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const float y = logit(p, (NT == 1 ? c[0][2 * i] + c[0][2 * i + 1] : c[n / 2][2 * i + n % 2]) * p.scale);
        x[n][i] = base + 8 * i + g < w.count ? y : -__int_as_float(0x7F800000);
      }
      if (partly) {
        const Sight sight{p, r, b, rows.skip, t};
        const u32 drafts = sight.drafts(n);
        UNROLL for (int i = 0; i < 2; i++)
            if (!sight.sees(drafts, w.position(base + 8 * i + g))) x[n][i] = -__int_as_float(0x7F800000);
      }
      top[n] = fmaxf(x[n][0], x[n][1]);
      raise |= top[n] > s.m[n] + HEADROOM;
    }
    if (__any_sync(ALL, raise)) s.rescale(top, 0.f);
    UNROLL for (int n = 0; n < NT; n++) UNROLL for (int i = 0; i < 2; i++) {
      x[n][i] = ex2(x[n][i] - s.m[n]);
      s.l[n] += x[n][i];
    }
    u32 hi_b[PAIRS][2], lo_b[PAIRS][2];
    const u32 even = g & 1 ? 0u : ALL;
    UNROLL for (int j = 0; j < PAIRS; j++) UNROLL for (int i = 0; i < (NT == 1 ? 1 : 2); i++) {
      const float y0 = x[2 * j][i], y1 = NT == 1 ? x[0][1] : x[NT == 1 ? 0 : 2 * j + 1][i];
      const u32 h = pack_bf16(y0, y1);
      hi_b[j][i] = transpose(h);
      lo_b[j][i] = transpose(pack_bf16(y0 - low_bf16(h), y1 - high_bf16(h)));
    }
    if constexpr (NT == 1) {
      hi_b[0][1] = hi_b[0][0] & ~even;
      hi_b[0][0] &= even;
      lo_b[0][1] = lo_b[0][0] & ~even;
      lo_b[0][0] &= even;
    }
    UNROLL for (int m = 0; m < MT;
                m++) {  // DV = 64: channels 8g + 2m and 8g + 2m + 1; else 8g + i of two 64-channel pieces
      const int j = VC == 1 ? 0 : m / 8 * 2, i = VC == 1 ? 2 * m : m % 8, j2 = VC == 1 ? 0 : j + 1,
                i2 = VC == 1 ? i + 1 : i;
      const u32 s0 = i % 2 ? 0x7632 : 0x5410, s1 = i2 % 2 ? 0x7632 : 0x5410;
      const u32 a0 = prmt(word(v[0][j], i / 2), word(v[1][j], i / 2), s0),
                a1 = prmt(word(v[0][j2], i2 / 2), word(v[1][j2], i2 / 2), s1);
      const u32 a2 = prmt(word(v[2][j], i / 2), word(v[3][j], i / 2), s0),
                a3 = prmt(word(v[2][j2], i2 / 2), word(v[3][j2], i2 / 2), s1);
      UNROLL for (int h = 0; h < PAIRS; h++) {
        mma_bf16(s.acc[h][m], a0, a1, a2, a3, hi_b[h][0], hi_b[h][1]);
        mma_bf16(s.acc[h][m], a0, a1, a2, a3, lo_b[h][0], lo_b[h][1]);
      }
    }
  }
}
