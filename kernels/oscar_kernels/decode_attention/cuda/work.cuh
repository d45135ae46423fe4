// Who does what: the batch as one list of units, cut into equal shares.
#pragma once

#include "ring.cuh"
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
  return r;
}
// Units of a segment; the first START of them are its beginning.
DEV int with_start(int units) { return START == 0 || units == 0 ? units : units + START; }
DEV int tile_units(const Params& p, const Request& r) {
  return with_start((Positions(r, int2_end(p, r)).count + TILE - 1) / TILE);
}
DEV int window_units(const Request& r) { return with_start((window_count(r) + STEP - 1) / STEP * WINDOW_COST); }

// Units of every request before it, and where its tokens are; by all threads of the block.
DEV void plan(const Params& p, int* prefix, Request* requests) {
  __shared__ int totals[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int carry = 0;
  for (int first = 0; first < p.batch; first += THREADS) {
    const int b = first + threadIdx.x;
    int tiles = 0, steps = 0;
    if (b < p.batch) {
      const Request r = request(p, b);
      requests[b] = r;
      tiles = tile_units(p, r);
      steps = window_units(r);
    }
    int sum = tiles + steps;
    UNROLL for (int o = 1; o < 32; o *= 2) {
      const int y = __shfl_up_sync(ALL, sum, o);
      sum += lane >= o ? y : 0;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    int before = carry;
    UNROLL for (int i = 0; i < WARPS; i++) {
      before += i < warp ? totals[i] : 0;
      carry += totals[i];
    }
    if (b < p.batch) {
      prefix[2 * b + 1] = before + sum - steps;
      prefix[2 * b + 2] = before + sum;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) prefix[0] = 0;
  __syncthreads();
}

// For stage 2.
DEV void store_prefix(const Params& p, const int* prefix) {
  for (int i = threadIdx.x; i <= 2 * p.batch; i += THREADS) p.prefix[i] = prefix[i];
}

// Equal shares of the list of units: block i takes [i * each, (i + 1) * each). A unit has thousands of bytes, so 32 bits
// count the units of any memory.
struct Shares {
  u32 units, total, each;
  DEV Shares(const Params& p, int units)
      : units(units), total(units * (p.heads / HB)), each((total + p.blocks - 1) / p.blocks) {}
};

struct Segment {
  int block, low, lo, hi;  // block of heads; 2 * request + kind; units of it behind its beginning, or none
  u32 end;                 // where the next one begins in the list
  DEV Segment(const Shares& work, const int* prefix, int batch, u32 at, u32 end) {
    block = work.units == work.total ? 0 : (int)(at / work.units);
    const int unit = (int)(at - block * work.units);
    low = 0;
    for (int high = 2 * batch; high - low > 1;) {  // prefix[low] <= unit < prefix[high]
      const int middle = (low + high) / 2;
      if (prefix[middle] <= unit)
        low = middle;
      else
        high = middle;
    }
    lo = unit - prefix[low];
    hi = min(prefix[low + 1] - prefix[low], lo + (int)(end - at));
    this->end = at + (hi - lo);
    if constexpr (START > 0) {
      lo = max(0, lo - START);
      hi = max(0, hi - START);
    }
  }
};

// The bytes that a block reads first, on their way to the second-level cache; each warp has a tile of INT2 tokens.
DEV void prefetch_segment(const Params& p, const Request& r, const Segment& x, int b, int head, int group, int warp,
                          int lane) {
  if (x.low % 2) {
    prefetch_rows(p, Window(p, r, b, head), (x.lo + WINDOW_COST - 1) / WINDOW_COST * STEP + 16 * group, lane);
  } else if (x.lo + warp < x.hi) {
    const Loader loader(p, r, x.block);
    u32 slot[TW];
    loader.fetch(x.lo + warp, x.hi, slot, lane);
    UNROLL for (int i = 0; i < TW; i++) {
      const u8 *codes = loader.codes + (u64)slot[i] * p.code_stride,
               *affine = loader.affine + (u64)slot[i] * p.affine_stride;
      UNROLL for (int at = 0; at < ROW_UNITS * 16; at += 128) prefetch(codes + at);
      prefetch(affine);
    }
  }
}
