// INT2 tokens on their way: positions, the ring of tiles, copies, and a whole segment.
#pragma once

#include "int2.cuh"

// The INT2 positions of a request: all below `ring_from` that the sink does not hold.
struct Positions {
  int cut, gap, count;
  DEV explicit Positions(const Request& r) {
    cut = min(r.sink_from, r.ring_from);
    gap = max(0, min(r.sink_end, r.ring_from) - cut);
    count = r.ring_from - gap;
  }
  DEV int operator[](int i) const { return i + (i >= cut ? gap : 0); }
};

// The ring of tiles. Tile k of a block uses stage k % STAGES; `full` is passed when its copies have landed, `empty`
// when all warps have read it. Each tile is copied by one warp, in turn, AHEAD tiles before it is read; nothing else
// keeps the warps together.
constexpr int AHEAD = STAGES - 2;
struct Ring {
  u32 shared, stage, round;
  DEV explicit Ring(u32 shared) : shared(shared), stage(0), round(0) {}
  DEV u32 data() const { return shared + stage * STAGE_BYTES; }
  DEV u32 full() const { return shared + STAGES * STAGE_BYTES + stage * 16; }
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

// Copies of one warp. Copy i of a lane is 16-byte unit i * 32 + lane of the tile.
struct Loader {
  static constexpr bool EVEN = 32 % ROW_UNITS == 0 || ROW_UNITS % 32 == 0;
  const SLOT_T* slots;
  Positions at;
  const u8 *codes, *affine;
  DEV Loader(const Params& p, const Request& r, int block) : slots(p.slots + r.first), at(r) {
    codes = p.codes + block * (ROW_UNITS * 16);
    affine = p.affine + block * AFFINE_ROW;
  }
  // Slot of token 32 * i + lane of a tile; 0, the dummy, behind the last token.
  DEV void fetch(int tile, int hi, u32 (&slot)[TW], int lane) const {
    UNROLL for (int i = 0; i < TW; i++) {
      const int j = tile * TILE + 32 * i + lane;
      slot[i] = tile < hi && j < at.count ? (u32)__ldg(slots + at[j]) : 0u;
    }
  }
  // `same`: the register that has `token` for all lanes, or -1.
  DEV static u32 pick(const u32 (&slot)[TW], int token, int same) {
    if (TW == 1 || same >= 0) return __shfl_sync(ALL, slot[TW == 1 ? 0 : same], token);
    u32 found = 0;
    UNROLL for (int i = 0; i < TW; i++) {
      const u32 x = __shfl_sync(ALL, slot[i], token);
      found = token / 32 == i ? x : found;
    }
    return found;
  }
  template <bool FULL>
  DEV void code(const Params& p, u32 stage, const u32 (&slot)[TW], int i, int same, int left, int lane) const {
    const int n = i * 32 + lane, token = n / ROW_UNITS, unit = n % ROW_UNITS;
    copy_async<16>(stage + (token * ROW_UNITS + swizzle<ROW_UNITS>(token, unit)) * 16,
                   codes + (u64)pick(slot, token, same) * p.code_stride + unit * 16, FULL || token < left);
  }
  template <bool FULL>
  DEV void scale(const Params& p, u32 stage, const u32 (&slot)[TW], int i, int same, int left, int lane) const {
    const int n = i * 32 + lane, token = n / AFFINE_UNITS, unit = n % AFFINE_UNITS;
    copy_async<AU>(
        stage + CODE_BYTES + (token * AFFINE_UNITS + (AFFINE_TURNED ? swizzle<AFFINE_UNITS>(token, unit) : unit)) * AU,
        affine + (u64)pick(slot, token, same) * p.affine_stride + unit * AU, FULL || token < left);
  }
  // All of a tile, as soon as its stage is free.
  DEV void copy(const Params& p, const Ring& to, int tile, const u32 (&slot)[TW], int lane) const {
    const int left = at.count - tile * TILE;
    wait_phase(to.empty(), to.round ^ 1);
    if (left >= TILE) {
      UNROLL for (int i = 0; i < COPIES; i++)
          code<true>(p, to.data(), slot, i, EVEN ? i * 32 / ROW_UNITS / 32 : -1, left, lane);
      UNROLL for (int i = 0; i < AFFINE_COPIES; i++)
          scale<true>(p, to.data(), slot, i, 32 % AFFINE_UNITS == 0 ? i * 32 / AFFINE_UNITS / 32 : -1, left, lane);
    } else {
      UNROLL_1 for (int i = 0; i < COPIES; i++) code<false>(p, to.data(), slot, i, -1, left, lane);
      UNROLL_1 for (int i = 0; i < AFFINE_COPIES; i++) scale<false>(p, to.data(), slot, i, -1, left, lane);
    }
    arrive_copies(to.full());
  }
};

DEV void int2_segment(const Params& p, State& s, Ring& ring, const Request& r, int block, size_t query_row, int head,
                      int group, int lo, int hi, int warp, int lane, bool& ahead) {
  const Loader loader(p, r, block);
  u32 slot[TW];
  int mine = lo + warp;  // the tile that this warp copies next
  loader.fetch(mine, hi, slot, lane);
  if (mine < min(lo + AHEAD, hi)) {
    loader.copy(p, ring.plus(warp), mine, slot, lane);
    mine += WARPS;
    loader.fetch(mine, hi, slot, lane);
  }
  Tile tile;
  tile.place(lane, head, group);
  int left = loader.at.count - lo * TILE - 32 * group;
  meet(ahead);
  Query8 q;
  q.load(p, query_row, lane);
  for (int i = lo; i < hi; i++) {
    if (i + AHEAD == mine) {
      if (mine < hi) loader.copy(p, ring.plus(AHEAD), mine, slot, lane);
      mine += WARPS;
      loader.fetch(mine, hi, slot, lane);
    }
    wait_phase(ring.full(), ring.round);
    tile.compute(p, s, q, ring.data(), left, lane);
    __syncwarp();
    if (lane == 0) arrive(ring.empty());
    ring = ring.plus(1);
    left -= TILE;
  }
}
