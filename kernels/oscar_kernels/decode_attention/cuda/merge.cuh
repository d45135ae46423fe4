// Stage 2: partial results to outputs, with the inverse of the value transform.
#pragma once

#include "work.cuh"

// Partial results of one query head of one request: those of its INT2 segments, then those of its window.
struct Parts {
  u32 base[2];
  int split, count;
  DEV u32 operator[](int i) const {
    return (i < split ? base[0] : base[1]) + (i / TW * WARPS + i % TW * (HB * VH)) * GW;
  }
};

// Parts of up to eight rows of a block, by one warp: lane 4 * row + 2 * kind + (first or last).
template <int ROWS>
DEV void find_parts(const Params& p, const int* prefix, Parts (&parts)[ROWS], int head, int lane) {
  const int row = blockIdx.x * ROWS + lane / 4, kind = lane / 2 % 2, b = min(row / GROUP, p.batch - 1),
            query_head = row % GROUP, block = head / HB;
  const Shares work(p, prefix[2 * p.batch]);
  const int from = prefix[2 * b + kind], to = prefix[2 * b + kind + 1];
  const int owner = (int)((block * work.units + (lane % 2 ? to - 1 : from)) / work.each);
  const int first = __shfl_sync(ALL, owner, lane & ~1), last = __shfl_sync(ALL, owner, lane | 1);
  const int count = row < p.batch * GROUP && to > from ? (last - first + 1) * TW : 0,
            before = __shfl_sync(ALL, count, lane & ~3);
  const int warp = query_head / GW * HB + head % HB;
  const u32 base = ((first + block * 2 * p.batch + 2 * b + kind - (kind ? before / TW : 0)) * WARPS + warp) * GW +
                   query_head % GW;
  if (lane / 4 < ROWS && lane % 2 == 0) {
    parts[lane / 4].base[kind] = base;
    if (kind) {
      parts[lane / 4].split = before;
      parts[lane / 4].count = before + count;
    }
  }
}

// Channel of row `at` of this block, if there is one.
DEV void store_out(const Params& p, int head, int at, int rows, int channel, float x) {
  const int row = blockIdx.x * rows + at;
  if (at >= rows || row >= p.batch * GROUP) return;
  const size_t to = QueryRows(p, row / GROUP, head, 0)[row % GROUP] * DV + channel;
  if constexpr (QUERY == 2)
    static_cast<float*>(p.out)[to] = x;
  else
    static_cast<unsigned short*>(p.out)[to] = (unsigned short)(QUERY == 1 ? pack_f16(x, 0.f) : pack_bf16(x, 0.f));
}

// A tile of sixteen rows and columns of the partner, as A operands in bfloat16 halves when `split`.
struct Halves {
  float2 y[4];
  u32 hi[4], lo[4];
  DEV void load(const float* partner, int tile, int k, int lane) {
    UNROLL for (int i = 0; i < 4; i++) {
      const int row = 16 * tile + lane / 4 + 8 * (i & 1), column = 16 * k + 2 * (lane % 4) + 8 * (i >> 1);
      y[i] = __ldg(reinterpret_cast<const float2*>(partner + (size_t)row * DV + column));
    }
  }
  DEV void split() {
    UNROLL for (int i = 0; i < 4; i++) {
      not_before(y[i]);  // nothing waits for the loads until then
      hi[i] = pack_bf16(y[i].x, y[i].y);
      lo[i] = pack_bf16(y[i].x - low_bf16(hi[i]), y[i].y - high_bf16(hi[i]));
    }
  }
};

// One block: ROWS rows (request, query head) of one KV head; COUNT / ROWS warps merge a row.
template <int COUNT, int ROWS>
DEV void merge(const Params& p) {
  constexpr int EACH = DV / 32, DEEP = 8, SHARE = COUNT / ROWS, TILES = COUNT < MT ? COUNT : MT, SPLIT = COUNT / TILES,
                STEPS = (DV / 16 + SPLIT - 1) / SPLIT;
  constexpr bool EARLY = MT <= COUNT && STEPS <= 8;  // the partner's tiles fit in registers, before the wait
  __shared__ float merged[8][DV + 8], partly[COUNT][DV > 128 ? DV : 128], weights[COUNT][2];
  __shared__ Parts parts[ROWS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const float* partner = p.partner + (p.partner_heads > 1 ? (size_t)head * DV * DV : 0);
  Halves early[EARLY ? STEPS : 1];
  if (EARLY && p.partner) {
    UNROLL for (int i = 0; i < STEPS; i++) early[i].load(partner, warp % TILES,
                                                         min(warp / TILES + i * SPLIT, DV / 16 - 1), lane);
  }
  for (int i = threadIdx.x; i < (8 - ROWS) * DV; i += COUNT * 32) merged[ROWS + i / DV][i % DV] = 0.f;
  const bool alone = ALONE && p.batch == 1;
  if (alone && warp == 0) {
    __shared__ int prefix[3];
    const Request r = request(p, 0);
    prefix[0] = 0;  // all lanes write the same
    prefix[1] = tile_units(p, r);
    prefix[2] = prefix[1] + window_units(r);
    __syncwarp();
    find_parts<ROWS>(p, prefix, parts, head, lane);
  }
  wait_for_previous();
  if (!alone && warp == 0) find_parts<ROWS>(p, p.prefix, parts, head, lane);
  __syncthreads();
  const Parts mine = parts[warp / SHARE];
  float m = NEVER, l = 0.f, x[EACH];
  UNROLL for (int i = 0; i < EACH; i++) x[i] = 0.f;
  for (int first = warp % SHARE; first < mine.count; first += DEEP * SHARE) {
    float2 stat[DEEP];
    float y[DEEP][EACH];
    UNROLL for (int d = 0; d < DEEP; d++) {
      const bool valid = first + d * SHARE < mine.count;
      const u32 at = mine[first + d * SHARE];
      stat[d] = make_float2(NEVER, 0.f);
      if (valid) stat[d] = __ldcg(p.stats + at);
      const float* from = p.partial + (size_t)at * DV + lane * EACH;
      if constexpr (EACH == 2) {
        float2 z = make_float2(0.f, 0.f);
        if (valid) z = __ldcg(reinterpret_cast<const float2*>(from));
        y[d][0] = z.x;
        y[d][1] = z.y;
      } else {
        UNROLL for (int i = 0; i < EACH; i += 4) {
          float4 z = make_float4(0.f, 0.f, 0.f, 0.f);
          if (valid) z = __ldcg(reinterpret_cast<const float4*>(from + i));
          y[d][i] = z.x;
          y[d][i + 1] = z.y;
          y[d][i + 2] = z.z;
          y[d][i + 3] = z.w;
        }
      }
    }
    float top = m;
    UNROLL for (int d = 0; d < DEEP; d++) top = fmaxf(top, stat[d].x);
    const float old = ex2(m - top);
    m = top;
    l *= old;
    UNROLL for (int i = 0; i < EACH; i++) x[i] *= old;
    UNROLL for (int d = 0; d < DEEP; d++) {
      const float w = ex2(stat[d].x - m);
      l = fmaf(w, stat[d].y, l);
      UNROLL for (int i = 0; i < EACH; i++) x[i] = fmaf(w, y[d][i], x[i]);
    }
  }
  if constexpr (SHARE == 1) {
    const float factor = l > 0.f ? __fdividef(1.f, l) : 0.f;
    UNROLL for (int i = 0; i < EACH; i++) merged[warp][lane * EACH + i] = x[i] * factor;
  } else {
    UNROLL for (int i = 0; i < EACH; i++) partly[warp][lane * EACH + i] = x[i];
    if (lane == 0) {
      weights[warp][0] = m;
      weights[warp][1] = l;
    }
    __syncthreads();
    for (int n = threadIdx.x; n < ROWS * DV; n += COUNT * 32) {  // a warp has one row; lane i: warp i of the row
      const int at = n / DV, channel = n % DV, i = at * SHARE + lane % SHARE;
      float top = weights[i][0], y = 0.f;
      UNROLL for (int o = 1; o < SHARE; o *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, o));
      const float w = ex2(weights[i][0] - top);
      float sum = w * weights[i][1];
      UNROLL for (int o = 1; o < SHARE; o *= 2) sum += __shfl_xor_sync(ALL, sum, o);
      UNROLL for (int j = 0; j < SHARE; j++) y = fmaf(__shfl_sync(ALL, w, j), partly[at * SHARE + j][channel], y);
      merged[at][channel] = sum > 0.f ? __fdividef(y, sum) : 0.f;
    }
  }
  __syncthreads();
  if (!p.partner) {
    for (int n = threadIdx.x; n < ROWS * DV; n += COUNT * 32)
      store_out(p, head, n / DV, ROWS, n % DV, merged[n / DV][n % DV]);
    return;
  }
  // out^T = partner o^T in bfloat16 halves: hi hi + hi lo + lo hi; SPLIT warps share the channels of a tile of sixteen
  // outputs.
  const int g = lane / 4, t = lane % 4;
  for (int tile = warp % TILES; tile < MT; tile += TILES) {
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f}, e[4] = {0.f, 0.f, 0.f, 0.f};
    UNROLL for (int i = 0; i < STEPS; i++) {
      const int k = warp / TILES + i * SPLIT;
      if (k >= DV / 16) break;
      Halves a;
      if constexpr (EARLY)
        a = early[i];
      else
        a.load(partner, tile, k, lane);
      a.split();
      u32 hi[2], lo[2];
      UNROLL for (int j = 0; j < 2; j++) {
        const float y0 = merged[g][16 * k + 2 * t + 8 * j], y1 = merged[g][16 * k + 2 * t + 8 * j + 1];
        hi[j] = pack_bf16(y0, y1);
        lo[j] = pack_bf16(y0 - low_bf16(hi[j]), y1 - high_bf16(hi[j]));
      }
      mma_bf16(c, a.hi[0], a.hi[1], a.hi[2], a.hi[3], hi[0], hi[1]);
      mma_bf16(d, a.hi[0], a.hi[1], a.hi[2], a.hi[3], lo[0], lo[1]);
      mma_bf16(e, a.lo[0], a.lo[1], a.lo[2], a.lo[3], hi[0], hi[1]);
    }
    UNROLL for (int i = 0; i < 4; i++) c[i] += d[i] + e[i];
    if constexpr (SPLIT > 1) {  // then every warp has one tile
      UNROLL for (int i = 0; i < 4; i++) partly[warp][32 * i + lane] = c[i];
      __syncthreads();
      if (warp >= TILES) return;
      UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 1; j < SPLIT; j++)
          c[i] += partly[warp + j * TILES][32 * i + lane];
    }
    UNROLL for (int i = 0; i < 4; i++) store_out(p, head, 2 * t + (i & 1), ROWS, 16 * tile + g + 8 * (i >> 1), c[i]);
  }
}
