// The inverse of the value transform, as a product of merged rows with the partner.
#pragma once

#include "work.cuh"

// Slices of the output channels, one of which a block has, so that no block reads all of a large partner.
constexpr int SLICES = DV > 128 ? DV / 64 : 1;

// How COUNT warps of a block share the outputs of ROWS rows: tiles of sixteen channels, of which SPLIT warps have one,
// each STEPS sixteenths of the sum.
template <int COUNT, int ROWS>
struct Outputs {
  static constexpr int LINES = ROWS < 8 ? 8 : ROWS, TILES = DV / 16 / SLICES, SPLIT = COUNT / TILES,
                       STEPS = (DV / 16 + SPLIT - 1) / SPLIT;
};

// Channel of row `at` of this block, if there is one.
DEV void store_out(const Params& p, int head, int at, int rows, int channel, float x) {
  const int row = blockIdx.x / SLICES * rows + at;
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

// What a warp multiplies, loaded before the kernel in front has ended.
template <class OUT>
struct Partner {
  int tile, step;  // of output channels, and the first sixteenth of the sum
  Halves all[OUT::STEPS];
  DEV Partner(const Params& p, int head, int warp, int lane)
      : tile((int)(blockIdx.x % SLICES) * OUT::TILES + warp % OUT::TILES), step(warp / OUT::TILES) {
    if (!p.partner) return;
    const float* from = p.partner + (p.partner_heads > 1 ? (size_t)head * DV * DV : 0);
    UNROLL for (int i = 0; i < OUT::STEPS; i++) all[i].load(from, tile, min(step + i * OUT::SPLIT, DV / 16 - 1), lane);
  }
};

// Merged rows as B operands, in bfloat16 halves: pairs of channels.
template <int LINES>
struct Merged {
  u32 hi[LINES][DV / 2 + 4], lo[LINES][DV / 2 + 4];
  DEV void set(int row, int pair, float x, float y) {
    hi[row][pair] = pack_bf16(x, y);
    lo[row][pair] = pack_bf16(x - low_bf16(hi[row][pair]), y - high_bf16(hi[row][pair]));
  }
};

// out^T = partner o^T in bfloat16 halves: hi hi + (hi lo + lo hi). `spare` is memory that nobody reads any more once all
// threads are here, or have multiplied.
template <class OUT>
DEV void undo(const Params& p, Partner<OUT>& partner, const Merged<OUT::LINES>& merged, float* spare, int head, int rows,
              int warp, int lane) {
  constexpr int TILES = OUT::TILES, SPLIT = OUT::SPLIT, LINES = OUT::LINES;
  const int g = lane / 4, t = lane % 4;
  float c[LINES / 8][4] = {}, d[LINES / 8][4] = {};
  UNROLL for (int i = 0; i < OUT::STEPS; i++) {
    const int k = partner.step + i * SPLIT;
    if (k >= DV / 16) break;
    partner.all[i].split();
    const u32(&a)[4] = partner.all[i].hi, (&a_lo)[4] = partner.all[i].lo;
    UNROLL for (int n = 0; n < LINES / 8; n++) {
      u32 hi[2], lo[2];
      UNROLL for (int j = 0; j < 2; j++) {
        hi[j] = merged.hi[8 * n + g][8 * k + 4 * j + t];
        lo[j] = merged.lo[8 * n + g][8 * k + 4 * j + t];
      }
      mma_bf16(c[n], a[0], a[1], a[2], a[3], hi[0], hi[1]);
      mma_bf16(d[n], a[0], a[1], a[2], a[3], lo[0], lo[1]);
      mma_bf16(d[n], a_lo[0], a_lo[1], a_lo[2], a_lo[3], hi[0], hi[1]);
    }
  }
  UNROLL for (int n = 0; n < LINES / 8; n++) UNROLL for (int i = 0; i < 4; i++) c[n][i] += d[n][i];
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
  UNROLL for (int n = 0; n < LINES / 8; n++) UNROLL for (int i = 0; i < 4; i++)
      store_out(p, head, 8 * n + 2 * t + (i & 1), rows, 16 * partner.tile + g + 8 * (i >> 1), c[n][i]);
}
