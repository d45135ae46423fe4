// What a block leaves of a segment for stage 2.
#pragma once

#include "state.cuh"

// Results of a warp in `memory`.
DEV Results gathered(u8* memory, int warp) {
  float* rows = reinterpret_cast<float*>(memory);
  float2* stats = reinterpret_cast<float2*>(rows + WARPS * GW * GATHERED_ROW);
  return {rows + warp * GW * GATHERED_ROW, GATHERED_ROW, stats + warp * GW};
}

// Results of warp `own` of the first token group, with those of the others; a warp of each group has some rows.
DEV void store_gathered(const Params& p, u8* memory, size_t at, int own, int group, int lane) {
  for (int row = group; row < GW; row += TW) {
    float2 stats[TW];
    float top = NEVER, weights[TW], sum = 0.f;
    UNROLL for (int i = 0; i < TW; i++) {
      stats[i] = gathered(memory, i * HB * VH + own).stats[row];
      top = fmaxf(top, stats[i].x);
    }
    UNROLL for (int i = 0; i < TW; i++) {
      weights[i] = ex2(stats[i].x - top);
      sum = fmaf(weights[i], stats[i].y, sum);
    }
    if (lane == 0) p.stats[at + row] = make_float2(top, sum);
    UNROLL for (int first = 0; first < DV; first += 128) {
      const int channel = first + 4 * lane;
      if (channel >= DV) break;
      float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
      UNROLL for (int i = 0; i < TW; i++) {
        const Results from = gathered(memory, i * HB * VH + own);
        const float4 x = *reinterpret_cast<const float4*>(from.rows + row * from.width + channel);
        y.x = fmaf(weights[i], x.x, y.x);
        y.y = fmaf(weights[i], x.y, y.y);
        y.z = fmaf(weights[i], x.z, y.z);
        y.w = fmaf(weights[i], x.w, y.w);
      }
      *reinterpret_cast<float4*>(p.partial + (at + row) * DV + channel) = y;
    }
  }
}

// The results of a segment; `memory` is that of the tiles, all of which have landed.
DEV void leave(const Params& p, State& s, u8* memory, size_t segment, bool window, int warp, int lane) {
  const size_t at = segment * LEFT * GW;
  if constexpr (GATHERS) {
    __syncthreads();  // all have read their tiles
    store_partial(s, gathered(memory, warp), window, lane);
    __syncthreads();
    const int own = warp % (HB * VH);
    store_gathered(p, memory, at + own * GW, own, warp / (HB * VH), lane);
    __syncthreads();  // before tiles of the next segment
  } else {
    const size_t mine = at + warp * GW;
    store_partial(s, {p.partial + mine * DV, DV, p.stats + mine}, window, lane);
  }
}
