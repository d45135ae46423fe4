// Who does what: the batch as one list of units, cut into equal shares. The same in all layers, so the first one of a step
// works it out.
#pragma once

#include "window.cuh"

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
