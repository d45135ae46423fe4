// How a block gets through its share of the batch: what it copies, what it takes, and what it leaves.
#pragma once

#include "int2.cuh"
#include "plan.cuh"

// INT2 tokens on their way: the ring of tiles, copies, and a whole segment.

// The ring of tiles. Tile k of a block uses stage k % STAGES; `full` is passed when its copies have landed, `empty`
// when all warps have read it. Each tile is copied by one warp, in turn, AHEAD tiles before it is read; nothing else
// keeps the warps together.
constexpr int AHEAD = STAGES - 2;
struct Ring {
  u32 shared, stage, round;
  DEV explicit Ring(u32 shared) : shared(shared), stage(0), round(0) {}
  DEV u32 data() const { return shared + stage * STAGE_BYTES; }
  DEV u32 full() const { return shared + TILE_BYTES + stage * 16; }
  DEV u32 empty() const { return full() + 8; }
  DEV Ring plus(u32 tiles) const {
    Ring x = *this;
    x.stage += tiles;
    if (x.stage >= STAGES) {
      x.stage -= STAGES;
      x.round ^= 1;
    }
    return x;
  }
};

// Copy i of a lane is unit i * 32 + lane of a tile whose tokens have UNITS each. Every PERIOD copies begin with a token,
// `base`, and the lane's part of an address is worked out PERIOD times. Where copies are of one token each, the compiler
// finds that by itself, and a schedule that is 2 % faster.
template <int UNITS>
struct Place {
  static constexpr bool EVEN = UNITS % 32 == 0;
  static constexpr int PERIOD = UNITS / common_divisor(UNITS, 32), TOKENS = PERIOD * 32 / UNITS;
  int base, ahead, unit;
  DEV Place(int i, int lane) {
    if constexpr (EVEN) {
      const int n = i * 32 + lane;
      base = 0;
      ahead = n / UNITS;
      unit = n % UNITS;
    } else {
      const u32 n = i % PERIOD * 32 + lane;
      base = i / PERIOD * TOKENS;
      ahead = n / UNITS;
      unit = n - ahead * UNITS;
    }
  }
  DEV int token() const { return base + ahead; }
  template <bool TURNED>
  DEV int to() const {
    if constexpr (!TURNED) return token() * UNITS + unit;
    if constexpr (EVEN) return token() * UNITS + swizzle<UNITS>(token(), unit);
    return ((ahead * UNITS + swizzle<UNITS>(ahead, unit)) ^ turn<UNITS>(base)) + base * UNITS;
  }
};

// Copies of one warp.
struct Loader {
  const SLOT_T* slots;
  Positions at;
  const u8 *codes, *affine, *own;
  // Whether a lane's copies are of one unit of every token, so that its address is worked out once. Kernels of few query
  // heads are faster as the compiler does it by itself.
  static constexpr bool OWN = MANY_ROWS && Place<ROW_UNITS>::PERIOD == 1;
  DEV Loader(const Params& p, const Request& r, int block) : slots(p.slots + r.first), at(r, int2_end(p, r)) {
    codes = p.codes + block * (ROW_UNITS * 16);
    affine = p.affine + block * AFFINE_ROW;
    own = codes + Place<ROW_UNITS>(0, threadIdx.x % 32).unit * 16;
    if (OWN) worked_out(own);
  }
  // Slot of token 32 * i + lane of a tile; 0, the dummy, behind the last token.
  DEV void fetch(int tile, int hi, u32 (&slot)[TW], int lane) const {
    UNROLL for (int i = 0; i < TW; i++) {
      const int j = tile * TILE + 32 * i + lane;
      slot[i] = tile < hi && j < at.count ? (u32)__ldg(slots + at[j]) : 0u;
    }
  }
  DEV void code(const Params& p, u32 stage, u32 slots, int i, int lane) const {
    const Place<ROW_UNITS> at(i, lane);
    copy_async<16>(stage + at.to<true>() * 16,
                   (OWN ? own : codes + at.unit * 16) + (u64)__shfl_sync(ALL, slots, at.token()) * p.code_stride, true);
  }
  DEV void scale(const Params& p, u32 stage, u32 slots, int i, int left, int lane) const {
    const Place<AFFINE_UNITS> at(i, lane);
    copy_async<AU>(stage + CODE_BYTES + at.to<AFFINE_TURNED>() * AU,
                   affine + at.unit * AU + (u64)__shfl_sync(ALL, slots, at.token()) * p.affine_stride, at.token() < left);
  }
  // All of a tile, as soon as its stage is free. Behind the last token come codes of the dummy slot, and zeros as their
  // scales and offsets.
  DEV void copy(const Params& p, const Ring& to, int tile, const u32 (&slot)[TW], int lane) const {
    const int left = at.count - tile * TILE;
    wait_phase(to.empty(), to.round ^ 1);
    UNROLL for (int i = 0; i < COPIES; i++) code(p, to.data(), slot[i / ROW_UNITS], i, lane);
    UNROLL for (int i = 0; i < AFFINE_COPIES; i++) scale(p, to.data(), slot[i / AFFINE_UNITS], i, left, lane);
    arrive_copies(to.full());
  }
};

DEV void int2_segment(const Params& p, State& s, Ring& ring, const Request& r, int b, int block, const QueryRows& rows,
                      int head, int group, int lo, int hi, int warp, int lane, bool& ahead) {
  const Loader loader(p, r, block);
  u32 slot[TW];
  int mine = lo + warp;  // the tile that this warp copies next
  loader.fetch(mine, hi, slot, lane);
  if (mine < min(lo + AHEAD, hi)) {
    u32 later[TW];  // not behind the copies
    loader.fetch(mine + WARPS, hi, later, lane);
    loader.copy(p, ring.plus(warp), mine, slot, lane);
    mine += WARPS;
    UNROLL for (int i = 0; i < TW; i++) slot[i] = later[i];
  }
  Tile tile;
  tile.place(lane, head, group);
  int left = loader.at.count - lo * TILE - 32 * group;
  meet(ahead);
  Query q;
  q.load(p, rows, lane);
  tile.begin(s);
  for (int i = lo; i < hi; i++) {
    if (i + AHEAD == mine) {
      if (mine < hi) loader.copy(p, ring.plus(AHEAD), mine, slot, lane);
      mine += WARPS;
      loader.fetch(mine, hi, slot, lane);
    }
    wait_phase(ring.full(), ring.round);
    tile.compute(p, s, q, Sight{p, r, b, rows.skip, lane % 4}, ring.data(), ring.empty(), left, i == lo, lane);
    ring = ring.plus(1);
    left -= TILE;
  }
}

// What a block leaves of a segment for stage 2.

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
  const size_t at = segment * LEFT;
  if constexpr (TW > 1) {
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
