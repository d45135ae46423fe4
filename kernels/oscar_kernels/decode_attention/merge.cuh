// Stage 2: partial results to outputs, with the inverse of the value transform as a product of merged rows with the
// partner.
#pragma once

#include "work.cuh"

// Slices of the output channels, one of which a block has, so that no block reads all of a large partner. What it has of
// one lies in shared memory, else in registers: where stage 1 needs little shared memory a block that asks for much would
// wait until a multiprocessor is empty, and divides its memory anew.
constexpr int SLICES = DV > 128 ? DV / 128 : 1;
constexpr bool PARTNER_SHARED = SLICES > 1;

// How COUNT warps of a block share the outputs of ROWS rows: tiles of sixteen channels, of which SPLIT warps have one,
// each STEPS sixteenths of the sum.
template <int COUNT, int ROWS>
struct Outputs {
  static constexpr int LINES = ROWS < 8 ? 8 : ROWS, TILES = DV / 16 / SLICES, SPLIT = COUNT / TILES,
                       STEPS = DV / 16 / SPLIT;
};

// A row of the batch, of `rows` of this block, in the tensor of outputs; below zero if there is none.
DEV int find_row(const Params& p, int head, int at, int rows) {
  const int row = blockIdx.x / SLICES * rows + at;
  if (at >= rows || row >= p.batch * GROUP) return -1;
  return (int)QueryRows(p, row / GROUP, head, 0)[row % GROUP];
}
DEV u32 pack_out(float x, float y) { return QUERY == 1 ? pack_f16(x, y) : pack_bf16(x, y); }
DEV void store_out(const Params& p, size_t to, float x) {
  if constexpr (QUERY == 2)
    static_cast<float*>(p.out)[to] = x;
  else
    static_cast<unsigned short*>(p.out)[to] = (unsigned short)pack_out(x, 0.f);
}

// The tensor cores cut thirteen bits off a float; half of them make that rounding, which is nothing beside that of an
// output in bfloat16. What other outputs need of the rest is multiplied too.
constexpr bool EXACT = QUERY != 0;
constexpr u32 HALF = 0x1000, KEPT = 0xFFFFE000u;
DEV float rounded(float x) { return __uint_as_float(__float_as_uint(x) + HALF); }
DEV float4 rounded(const float4& x) { return make_float4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w)); }
DEV float rest(float x) { return x - __uint_as_float(__float_as_uint(x) + HALF & KEPT); }

// What a warp multiplies: four neighbouring channels of rows g and g + 8 of a tile for each of its steps, asked for before
// the kernel in front has ended.
template <class OUT, int COUNT>
struct Partner {
  static constexpr int UNITS = DV / 4, ROWS = DV / SLICES;
  const float4* shared;
  int tile, first;  // of the block's output channels, and the first step of the sum
  float4 all[PARTNER_SHARED ? 1 : OUT::STEPS][2];
  // Two rows next to each other share no bank.
  DEV static int place(int row, int unit) { return row * UNITS + (unit ^ (row & 1) * 4); }
  DEV Partner(const Params& p, int head, int warp, int lane)
      : shared(reinterpret_cast<const float4*>(dynamic_shared())),
        tile(warp % OUT::TILES),
        first(OUT::SPLIT > 1 ? warp / OUT::TILES * OUT::STEPS : 0) {
    if (!p.partner) return;
    const float4* from = reinterpret_cast<const float4*>(p.partner) +
                         ((p.partner_heads > 1 ? (size_t)head * DV : 0) + blockIdx.x % SLICES * ROWS) * UNITS;
    if constexpr (PARTNER_SHARED) {
      UNROLL for (int i = threadIdx.x; i < ROWS * UNITS; i += COUNT * 32)
          copy_async<16>(shared_address(shared + place(i / UNITS, i % UNITS)), from + i, true);
      commit_copies();
    } else {
      from += (16 * tile + lane / 4) * UNITS + 4 * first + lane % 4;
      UNROLL for (int i = 0; i < OUT::STEPS; i++) UNROLL for (int j = 0; j < 2; j++)
          all[i][j] = __ldg(from + 4 * i + 8 * j * UNITS);
    }
  }
  // Nothing waits for the loads until then.
  DEV void round() {
    UNROLL for (int i = 0; i < OUT::STEPS; i++) UNROLL for (int j = 0; j < 2; j++) {
      float4& x = all[PARTNER_SHARED ? 0 : i][j];
      not_before(x.x), not_before(x.y), not_before(x.z), not_before(x.w);
      x = rounded(x);
    }
  }
  DEV float4 get(int i, int j, int lane) const {
    if constexpr (!PARTNER_SHARED) return all[i][j];
    const float4 x = shared[place(16 * tile + lane / 4 + 8 * j, 4 * (first + i) + lane % 4)];
    return EXACT ? x : rounded(x);
  }
};

// Merged rows. A float32 output needs what is left of a number behind its eleven bits for the tensor cores too.
constexpr int PITCH = DV + 16;  // spreads loads of sixteen bytes over all banks
template <int LINES>
using Merged = float[LINES][PITCH];

// c += a b, of eight channels, two of a lane; all are `rounded`, unless it is EXACT.
DEV void multiply(float (&c)[4], const float (&a)[4], float b0, float b1) {
  if constexpr (EXACT) {
    mma_tf32(c, rest(a[0]), rest(a[1]), rest(a[2]), rest(a[3]), rounded(b0), rounded(b1));
    mma_tf32(c, rounded(a[0]), rounded(a[1]), rounded(a[2]), rounded(a[3]), rest(b0), rest(b1));
    mma_tf32(c, rounded(a[0]), rounded(a[1]), rounded(a[2]), rounded(a[3]), rounded(b0), rounded(b1));
  } else {
    mma_tf32(c, a[0], a[1], a[2], a[3], b0, b1);
  }
}

// out^T = partner o^T. `spare` is memory that nobody reads any more once all threads have multiplied; `rows` are those of
// the outputs that a lane stores, see `find_row`.
template <class OUT, int COUNT>
DEV void undo(const Params& p, const Partner<OUT, COUNT>& partner, const Merged<OUT::LINES>& merged, float* spare,
              const int (&rows)[OUT::LINES / 8], int warp, int lane) {
  constexpr int TILES = OUT::TILES, SPLIT = OUT::SPLIT, LINES = OUT::LINES;
  const int g = lane / 4, t = lane % 4, first_channel = blockIdx.x % SLICES * (DV / SLICES) + 16 * partner.tile;
  float c[LINES / 8][4] = {};
  UNROLL for (int i = 0; i < OUT::STEPS; i++) {
    const float4 x = partner.get(i, 0, lane), y = partner.get(i, 1, lane);
    UNROLL for (int n = 0; n < LINES / 8; n++) {
      const float4 z = *reinterpret_cast<const float4*>(&merged[8 * n + g][16 * (partner.first + i) + 4 * t]);
      multiply(c[n], {x.x, y.x, x.y, y.y}, z.x, z.y);
      multiply(c[n], {x.z, y.z, x.w, y.w}, z.z, z.w);
    }
  }
  if constexpr (SPLIT > 1) {
    __syncthreads();
    if (warp >= TILES)
      UNROLL for (int n = 0; n < LINES / 8; n++) UNROLL for (int i = 0; i < 4; i++)
          spare[(warp - TILES) * 16 * LINES + 128 * n + 32 * i + lane] = c[n][i];
    __syncthreads();
    if (warp >= TILES) return;
    UNROLL for (int n = 0; n < LINES / 8; n++) UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < SPLIT - 1; j++)
        c[n][i] += spare[(warp + j * TILES) * 16 * LINES + 128 * n + 32 * i + lane];
  }
  UNROLL for (int n = 0; n < LINES / 8; n++) {
    if constexpr (QUERY == 2) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int row = __shfl_sync(ALL, rows[n], 4 * (2 * t + i));
        if (row < 0) continue;
        store_out(p, (size_t)row * DV + first_channel + g, c[n][i]);
        store_out(p, (size_t)row * DV + first_channel + g + 8, c[n][i + 2]);
      }
    } else {  // two neighbouring channels at once
      const u32 low = transpose(pack_out(c[n][0], c[n][1])), high = transpose(pack_out(c[n][2], c[n][3]));
      if (rows[n] < 0) continue;
      u32* to = reinterpret_cast<u32*>(static_cast<unsigned short*>(p.out) + (size_t)rows[n] * DV + first_channel);
      to[t] = low;
      to[t + 4] = high;
    }
  }
}

// Channels of a lane, and how many of them are in a word of a partial result.
constexpr int EACH = DV / 32, IN_WORD = 4 / sizeof(Part);
typedef u32 PartWords[EACH / IN_WORD];

// Partial results of row `row` of the batch: the channels of a lane, and the statistics.
struct Parts {
  const Part* rows;
  const float2* stats;
  int count = 0;
  DEV void find(const Params& p, int row, int head, int lane) {
    u32 base = 0;
    if (row < p.batch * GROUP) {
      const int b = row / GROUP, query_head = row % GROUP, *first = Plan(p).parts + head / HB * p.batch + b;
      const int from = __ldcg(first);
      base = from * LEFT + (query_head / GW * HB + head % HB) * GW + query_head % GW;
      count = __ldcg(first + 1) - from;
    }
    rows = p.partial + (size_t)base * DV + lane * EACH;
    stats = p.stats + base;
  }
  DEV void skip(int parts) {
    rows += (size_t)parts * LEFT * DV;
    stats += parts * LEFT;
  }
};

// What a lane knows of a row: maximum and sum of all, its channels of the output.
struct RowSum {
  float m = NEVER, l = 0.f, x[EACH] = {};
  template <int N>
  DEV void add(const float2 (&stats)[N], const PartWords (&y)[N]) {
    float top = m;
    UNROLL for (int d = 0; d < N; d++) top = fmaxf(top, stats[d].x);
    const float old = ex2(m - top);
    m = top;
    l *= old;
    UNROLL for (int i = 0; i < EACH; i++) x[i] *= old;
    UNROLL for (int d = 0; d < N; d++) {
      const float w = ex2(stats[d].x - m) * stats[d].y;
      l += w;
      UNROLL for (int i = 0; i < EACH; i++) {
        const u32 z = y[d][i / IN_WORD];
        x[i] = fmaf(w, IN_WORD == 1 ? __uint_as_float(z) : i % 2 ? high_affine(z) : low_affine(z), x[i]);
      }
    }
  }
};

// N words next to each other, past the first-level cache.
template <int N>
DEV void load_words(u32 (&x)[N], const void* at) {
  if constexpr (N == 1) {
    x[0] = __ldcg(static_cast<const u32*>(at));
  } else if constexpr (N == 2) {
    const uint2 y = __ldcg(static_cast<const uint2*>(at));
    x[0] = y.x, x[1] = y.y;
  } else {
    UNROLL for (int i = 0; i < N / 4; i++) {
      const uint4 y = __ldcg(static_cast<const uint4*>(at) + i);
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
  }
}
// Part `i` of a row, or zeros; channels as they are, because nothing should wait for them.
DEV void load_part(const Parts& from, int i, bool valid, float2& stats, PartWords& y) {
  stats = make_float2(NEVER, 0.f);
  UNROLL for (int j = 0; j < EACH / IN_WORD; j++) y[j] = 0;
  if (!valid) return;
  stats = __ldcg(from.stats + i * LEFT);
  load_words(y, from.rows + i * LEFT * DV);
}

// Every SHARE-th part of OWN rows, DEEP of each at a time; `first` of them are in front of `parts`.
template <int DEEP, int SHARE, int OWN>
DEV void sum_parts(Parts (&parts)[OWN], int first, RowSum (&rows)[OWN]) {
  int most = 0;
  UNROLL for (int j = 0; j < OWN; j++) most = max(most, parts[j].count);
  for (; first < most; first += DEEP * SHARE) {
    float2 stats[OWN][DEEP];
    PartWords y[OWN][DEEP];
    UNROLL for (int d = 0; d < DEEP; d++) UNROLL for (int j = 0; j < OWN; j++)
        load_part(parts[j], d * SHARE, first + d * SHARE < parts[j].count, stats[j][d], y[j][d]);
    UNROLL for (int j = 0; j < OWN; j++) {
      rows[j].add(stats[j], y[j]);
      parts[j].skip(DEEP * SHARE);
    }
  }
}

// Learned sinks of a block's rows, in base 2.
template <int ROWS>
DEV void load_sinks(const Params& p, float (&sinks)[ROWS], int head) {
  const int at = threadIdx.x, row = blockIdx.x / SLICES * ROWS + at, node = row % GROUP / HEADS;
  if (at >= ROWS || row >= p.batch * GROUP) return;
  const size_t token = (size_t)(row / GROUP) * NODES + node;
  sinks[at] = 1.44269504f * __ldcg(p.sink_logits + token * p.sink_logits_token +
                                   (size_t)(head * HEADS + row % HEADS) * p.sink_logits_head);
}

// What a row's sum is multiplied with: one over the sum of all weights, to which a learned sink adds its own. The sum
// and `l` are of weights that are one where a logit is `m`.
DEV float normalizer(float m, float l, float sink) {
  if constexpr (!LEARNED) return one_over(l);
  const float top = fmaxf(m, sink), w = ex2(m - top), sum = fmaf(w, l, ex2(sink - top));
  return l > 0.f ? __fdividef(w, sum) : 0.f;
}

// Two channels of row `at`, which are outputs if there is no partner.
DEV void put(const Params& p, float (&merged)[PITCH], int head, int at, int rows, int pair, float x, float y) {
  if (p.partner) {
    *reinterpret_cast<float2*>(&merged[2 * pair]) = EXACT ? make_float2(x, y) : make_float2(rounded(x), rounded(y));
  } else if (const int row = find_row(p, head, at, rows); row >= 0) {
    store_out(p, (size_t)row * DV + 2 * pair, x);
    store_out(p, (size_t)row * DV + 2 * pair + 1, y);
  }
}

// Merges the sums of the SHARE warps that have a row, in `apart` and `weights`.
template <int COUNT, int ROWS, int LINES>
DEV void merge_shares(const Params& p, float (&merged)[LINES][PITCH], const float (&apart)[COUNT][DV < 128 ? 128 : DV],
                      const float (&weights)[COUNT][2], const float* sinks, int head, int lane) {
  constexpr int SHARE = COUNT / ROWS;
  for (int n = threadIdx.x; n < ROWS * DV / 2; n += COUNT * 32) {  // a warp has one row; lane i: warp i of the row
    const int at = n / (DV / 2), pair = n % (DV / 2), i = at * SHARE + lane % SHARE;
    float top = weights[i][0], y[2] = {0.f, 0.f};
    UNROLL for (int o = 1; o < SHARE; o *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, o));
    const float w = ex2(weights[i][0] - top);
    float sum = w * weights[i][1];
    UNROLL for (int o = 1; o < SHARE; o *= 2) sum += __shfl_xor_sync(ALL, sum, o);
    UNROLL for (int j = 0; j < SHARE; j++) {
      const float z = __shfl_sync(ALL, w, j);
      const float2 part = *reinterpret_cast<const float2*>(&apart[at * SHARE + j][2 * pair]);
      y[0] = fmaf(z, part.x, y[0]), y[1] = fmaf(z, part.y, y[1]);
    }
    const float factor = normalizer(top, sum, LEARNED ? sinks[at] : 0.f);
    put(p, merged[at], head, at, ROWS, pair, y[0] * factor, y[1] * factor);
  }
}

// One block: ROWS rows (request, query head) of one KV head, and a slice of the output channels. Several of the COUNT
// warps merge a row, or one merges several. DEEP: sixteen warps of one row load a part of each of 132 multiprocessors
// at once.
template <int COUNT, int ROWS>
DEV void merge(const Params& p) {
  typedef Outputs<COUNT, ROWS> Out;
  constexpr int SHARE = COUNT > ROWS ? COUNT / ROWS : 1, OWN = ROWS > COUNT ? ROWS / COUNT : 1,
                DEEP = SHARE > 1 ? 9 : 8 / OWN;
  alignas(16) __shared__ Merged<Out::LINES> merged;
  __shared__ float apart[SHARE > 1 ? COUNT : 1][DV < 128 ? 128 : DV], weights[COUNT][2];
  __shared__ float sinks[LEARNED ? ROWS : 1];
  static_assert((COUNT - Out::TILES) * 16 * Out::LINES * 4 <= (SHARE > 1 ? sizeof(apart) : sizeof(merged)), "room");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  Partner<Out, COUNT> partner(p, head, warp, lane);
  for (int i = threadIdx.x; i < (Out::LINES - ROWS) * PITCH; i += COUNT * 32) (&merged[ROWS][0])[i] = 0.f;
  int outs[Out::LINES / 8];
  UNROLL for (int n = 0; n < Out::LINES / 8; n++) outs[n] = find_row(p, head, 8 * n + lane / 4, ROWS);
  const int row = warp / SHARE * OWN;
  Parts parts[OWN];
  UNROLL for (int j = 0; j < OWN; j++) {
    parts[j].find(p, blockIdx.x / SLICES * ROWS + row + j, head, lane);
    parts[j].skip(warp % SHARE);
    not_before(parts[j].rows), not_before(parts[j].stats);
  }
  if (!EXACT && !PARTNER_SHARED && p.partner) partner.round();
  wait_then_release();
  if constexpr (LEARNED) {
    load_sinks<ROWS>(p, sinks, head);
    __syncthreads();
  }
  RowSum sums[OWN];
  sum_parts<DEEP, SHARE>(parts, warp % SHARE, sums);
  if constexpr (SHARE == 1) {
    UNROLL for (int j = 0; j < OWN; j++) {
      const float factor = normalizer(sums[j].m, sums[j].l, LEARNED ? sinks[row + j] : 0.f);
      UNROLL for (int i = 0; i < EACH; i += 2)
          put(p, merged[row + j], head, row + j, ROWS, (lane * EACH + i) / 2, sums[j].x[i] * factor,
              sums[j].x[i + 1] * factor);
    }
  } else {
    UNROLL for (int i = 0; i < EACH; i++) apart[warp][lane * EACH + i] = sums[0].x[i];
    if (lane == 0) {
      weights[warp][0] = sums[0].m;
      weights[warp][1] = sums[0].l;
    }
    __syncthreads();
    merge_shares<COUNT, ROWS>(p, merged, apart, weights, sinks, head, lane);
  }
  if (!p.partner) return;
  if (PARTNER_SHARED) wait_copies<0>();
  __syncthreads();
  undo(p, partner, merged, SHARE > 1 ? apart[0] : merged[0], outs, warp, lane);
}
