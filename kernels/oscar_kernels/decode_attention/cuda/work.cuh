// Who does what: the batch as one list of units, cut into equal shares.
#pragma once

#include "ring.cuh"
#include "window.cuh"

// Units of every request before it, and where its tokens are; by all threads of the block.
DEV void plan(const Params& p, int* prefix, Request* requests) {
  __shared__ int totals[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int carry = 0;
  for (int first = 0; first < p.batch; first += THREADS) {
    const int b = first + threadIdx.x;
    int tiles = 0, steps = 0;
    if (b < p.batch) {
      const int row = (int)p.rows[b];
      Request r;
      r.first = (int)p.indptr[b];
      r.length = (int)p.indptr[b + 1] - r.first;
      r.sink_end = min(p.sink, r.length);
      r.sink_from = min(p.sink_from[row], r.sink_end);
      r.ring_from = min(max(max(0, r.length - p.recent), p.ring_start[row]), r.length);
      requests[b] = r;
      tiles = (Positions(r).count + TILE - 1) / TILE;
      steps = (window_count(r) + STEP - 1) / STEP * WINDOW_COST;
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

DEV long long quotient(long long x, long long y) { return (x | y) >> 32 ? x / y : (u32)x / (u32)y; }

// Equal shares of the list of units: block i takes [i * each, (i + 1) * each).
struct Shares {
  long long units, total, each;
  DEV Shares(const Params& p, int units)
      : units(units), total((long long)units * (p.heads / HB)), each(quotient(total + p.blocks - 1, p.blocks)) {}
};

struct Segment {
  int block, low, lo, hi;  // block of heads; 2 * request + kind; units of it
  DEV Segment(const Shares& work, const int* prefix, int batch, long long at, long long end) {
    block = (int)quotient(at, work.units);
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
    hi = (int)min((long long)(prefix[low + 1] - prefix[low]), lo + end - at);
  }
};
