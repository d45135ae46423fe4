// How a block gets through its share of the batch: what it copies, what it takes, and what it leaves.
#pragma once

#include "int2.cuh"
#include "window.cuh"

// INT2 tokens on their way: the ring of tiles, copies, and a whole segment.

// The ring of tiles. Tile k of a block uses stage k % STAGES; `full` is passed when its copies have landed, `empty`
// when all warps have read it. Each tile is copied by one warp, in turn, AHEAD tiles before it is read; nothing else
// keeps the warps together.
constexpr int AHEAD = STAGES - 2;
struct Ring {
  u32 shared, stage, round;
  DEV explicit Ring(u32 at) : shared(at), stage(0), round(0) { worked_out(shared); }
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
  const u8 *codes, *affine, *own, *own_affine;
  // Whether a lane's copies are of one unit of every token, so that its address is worked out once. Kernels of few query
  // heads are faster as the compiler does it by itself.
  static constexpr bool OWN = MANY_ROWS && Place<ROW_UNITS>::PERIOD == 1,
                        OWN_AFFINE = MANY_ROWS && Place<AFFINE_UNITS>::PERIOD == 1;
  // A copy of codes is of so many tokens. A lane keeps the slot that the others of the same token ask for by a constant.
  static constexpr int AT_ONCE = 32 % ROW_UNITS == 0 ? 32 / ROW_UNITS : 1, PART = 32 / AT_ONCE;
  DEV Loader(const Params& p, const Request& r, int block) : slots(p.slots + r.first), at(r, int2_end(p, r)) {
    codes = p.codes + block * (ROW_UNITS * 16);
    affine = p.affine + block * AFFINE_ROW;
    own = codes + Place<ROW_UNITS>(0, threadIdx.x % 32).unit * 16;
    own_affine = affine + Place<AFFINE_UNITS>(0, threadIdx.x % 32).unit * AU;
    if (OWN) worked_out(own);
    if (OWN_AFFINE) worked_out(own_affine);
  }
  // Slots of 32 * i and the next tokens of a tile; 0, the dummy, behind the last token.
  DEV void fetch(int tile, int hi, u32 (&slot)[TW], int lane) const {
    UNROLL for (int i = 0; i < TW; i++) {
      const int j = tile * TILE + 32 * i + lane % PART * AT_ONCE + lane / PART;
      slot[i] = tile < hi && j < at.count ? (u32)__ldg(slots + at[j]) : 0u;
    }
  }
  DEV void code(const Params& p, u32 stage, u32 slots, int i, int lane) const {
    const Place<ROW_UNITS> at(i, lane);
    const u32 slot = AT_ONCE > 1 ? __shfl_sync(ALL, slots, i % PART, PART) : __shfl_sync(ALL, slots, at.token());
    copy_async<16>(stage + at.to<true>() * 16, (OWN ? own : codes + at.unit * 16) + (u64)slot * p.code_stride, true);
  }
  DEV void scale(const Params& p, u32 stage, u32 slots, int i, int left, int lane) const {
    const Place<AFFINE_UNITS> at(i, lane);
    const int token = at.token() % 32;
    const u32 slot = __shfl_sync(ALL, slots, token % AT_ONCE * PART + token / AT_ONCE);
    copy_async<AU>(stage + CODE_BYTES + at.to<AFFINE_TURNED>() * AU,
                   (OWN_AFFINE ? own_affine : affine + at.unit * AU) + (u64)slot * p.affine_stride, at.token() < left);
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
  if (warp < AHEAD) {
    u32 later[TW];  // not behind the copies
    loader.fetch(mine + WARPS, hi, later, lane);
    if (mine < hi) loader.copy(p, ring.plus(warp), mine, slot, lane);
    mine += WARPS;
    UNROLL for (int i = 0; i < TW; i++) slot[i] = later[i];
  }
  Tile tile;
  tile.place(lane, head, group);
  int left = loader.at.count - lo * TILE - 32 * group;
  meet(ahead);
  Query q;
  q.load(p, rows, lane);
  UNROLL for (int n = 0; n < NT; n++) s.m[n] = 0.f;  // which logits of the first tile are less
  for (int i = lo; i < hi;) {
    if (i + AHEAD == mine) {
      if (mine < hi) loader.copy(p, ring.plus(AHEAD), mine, slot, lane);
      mine += WARPS;
      loader.fetch(mine, hi, slot, lane);
    }
    const int copying = min(mine - AHEAD, hi);
    UNROLL_1 for (; i < copying; i++) {
      wait_phase(ring.full(), ring.round);
      tile.compute(p, s, q, Sight{p, r, b, rows.skip, lane % 4}, ring.data(), ring.empty(), left, i == lo, lane);
      ring = ring.plus(1);
      left -= TILE;
    }
  }
}

// Who does what: the batch as one list of units, cut into equal shares, once for all layers of a step.

// Where the tokens of request `b` are.
DEV Request request(const Params& p, int b) {
  const int row = (int)p.rows[b];
  Request r;
  r.first = (int)p.indptr[b];
  r.length = (int)p.indptr[b + 1] - r.first;
  const int known = committed(r);
  r.sink_end = min(p.sink, known);
  r.sink_from = min(p.sink_from[row], r.sink_end);
  r.ring_from = min(max(max(0, known + (DRAFTS > 0) - p.recent), p.ring_start[row]), known);
  r.row = row;
  r.sink_block = p.sink_block[row];
  return r;
}
constexpr int TILE_COST = 2;  // units; WINDOW_COST are those of a window step
// Units of a segment; the first START of them are its beginning.
DEV int with_start(int units) { return START == 0 || units == 0 ? units : units + START; }
DEV int tile_units(const Params& p, const Request& r) {
  return with_start((Positions(r, int2_end(p, r)).count + TILE - 1) / TILE * TILE_COST);
}
DEV int window_units(const Request& r) { return with_start((window_count(r) + STEP - 1) / STEP * WINDOW_COST); }

// Tokens of one kind and request that a block takes.
struct alignas(16) Segment {
  int block, low, lo, hi;  // block of heads; 2 * request + kind; tiles, or steps of a window
  int at, more;            // its number, below zero for a block without work; whether the block has the next one, too
  Request r;
  // Segment `i` of the plan, by the first threads of a block into its shared memory.
  DEV void fetch(const Params& p, int i) {
    constexpr int WORDS = sizeof(Segment) / 4;
    if (threadIdx.x < WORDS) reinterpret_cast<int*>(this)[threadIdx.x] = __ldcg(p.plan + i * WORDS + threadIdx.x);
  }
};
// The plan of a step: the first segment of every block, all segments in their order, and the number of the first one of
// every block of heads and request, behind which comes their end.
struct Plan {
  Segment* first;
  Segment* all;
  int* parts;
  DEV explicit Plan(const Params& p)
      : first(reinterpret_cast<Segment*>(p.plan)),
        all(first + p.blocks),
        parts(reinterpret_cast<int*>(all + p.blocks + 2 * p.batch * (p.heads / HB))) {}
};

// The sum over all threads in front of this one, and then the sum of all in `carry`.
DEV int sum_before(int x, int& carry) {
  __shared__ int totals[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
  UNROLL for (int o = 1; o < 32; o *= 2) {
    const int y = __shfl_up_sync(ALL, sum, o);
    sum += lane >= o ? y : 0;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  int before = carry + sum - x;
  UNROLL for (int i = 0; i < WARPS; i++) {
    before += i < warp ? totals[i] : 0;
    carry += totals[i];
  }
  __syncthreads();
  return before;
}

// A unit has thousands of bytes, so 32 bits count the units of any memory.
DEV void make_plan(const Params& p) {
  const Plan plan(p);
  int* prefix = reinterpret_cast<int*>(dynamic_shared());  // units in front of every kind of every request
  for (int i = threadIdx.x; i < p.blocks; i += THREADS) plan.first[i].at = -1;
  int units = 0;
  for (int first = 0; first < p.batch; first += THREADS) {
    const int b = first + threadIdx.x;
    int tiles = 0, steps = 0;
    if (b < p.batch) {
      const Request r = request(p, b);
      tiles = tile_units(p, r);
      steps = window_units(r);
    }
    const int before = sum_before(tiles + steps, units);
    if (b < p.batch) {
      prefix[2 * b] = before;
      prefix[2 * b + 1] = before + tiles;
    }
  }
  if (threadIdx.x == 0) prefix[2 * p.batch] = units;
  __syncthreads();
  const u32 total = (u32)units * (p.heads / HB), whole = p.blocks * TILE_COST,
            each = max(1u, (total + whole - 1) / whole) * TILE_COST;  // else blocks share tiles, of which one has them all
  int segments = 0;
  for (int first = 0; first < 2 * p.batch * (p.heads / HB); first += THREADS) {
    const int i = first + threadIdx.x, block = i / (2 * p.batch), low = i - block * 2 * p.batch;
    u32 from = 0, begin = 0, end = 0;
    int owner = 0, count = 0;
    if (block < p.heads / HB) {
      from = (u32)block * units + prefix[low];
      end = (u32)block * units + prefix[low + 1];
      begin = min(from + START, end);
      owner = begin / each;
      count = begin < end ? (int)((end - 1) / each) - owner + 1 : 0;
    }
    const int number = sum_before(count, segments);
    if (block < p.heads / HB && low % 2 == 0) plan.parts[block * p.batch + low / 2] = number;
    if (count == 0) continue;
    Segment x;
    x.block = block;
    x.low = low;
    x.r = request(p, low / 2);
    for (int k = 0; k < count; k++) {
      const u32 share = (owner + k) * each, next = share + each, cost = low % 2 ? WINDOW_COST : TILE_COST;
      x.lo = (int)((max(begin, share) - begin + cost - 1) / cost);
      x.hi = (int)((min(end, next) - begin + cost - 1) / cost);
      x.at = number + k;
      x.more = end < next && end + START < next && end < total;
      // What ends where another one begins in the same share has one in front of it.
      (k == 0 && from > share ? plan.all[x.at] : plan.first[owner + k]) = x;
    }
  }
  if (threadIdx.x == 0) plan.parts[p.batch * (p.heads / HB)] = segments;
}

// What a block leaves of a segment for stage 2.

// Results of a warp in `memory`.
DEV Results<float> gathered(u8* memory, int warp) {
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
    UNROLL for (int i = 0; i < TW; i++) weights[i] *= one_over(sum);
    if (lane == 0) p.stats[at + row] = make_float2(top, sum);
    UNROLL for (int first = 0; first < DV; first += 128) {
      const int channel = first + 4 * lane;
      if (channel >= DV) break;
      float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
      UNROLL for (int i = 0; i < TW; i++) {
        const Results<float> from = gathered(memory, i * HB * VH + own);
        const float4 x = *reinterpret_cast<const float4*>(from.rows + row * from.width + channel);
        y.x = fmaf(weights[i], x.x, y.x);
        y.y = fmaf(weights[i], x.y, y.y);
        y.z = fmaf(weights[i], x.z, y.z);
        y.w = fmaf(weights[i], x.w, y.w);
      }
      leave_channels(p.partial + (at + row) * DV + channel, y);
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
    store_partial(s, Results<Part>{p.partial + mine * DV, DV, p.stats + mine}, window, lane);
  }
}
