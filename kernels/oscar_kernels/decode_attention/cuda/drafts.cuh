// Verification: the last DRAFTS tokens of a request are drafts, and each has a query. What its rows see.
#pragma once

#include "types.cuh"

// Query rows of one KV head of a request: those of its NODES query tokens, HEADS each. A warp takes GW of them.
struct QueryRows {
  size_t first, gap;  // rows of the tensors of queries and outputs: the first, and those of other heads in between
  int skip;
  DEV QueryRows(const Params& p, int b, int head, int part)
      : first(((size_t)b * NODES * p.heads + head) * HEADS), gap((size_t)(p.heads - 1) * HEADS), skip(part * GW) {}
  // Of row `i` of the warp; an odd number of rows leaves the last warp one too few. Without a remainder: of
  // `row % 3` NVRTC 13.0 makes a negative 32-bit offset and forgets its sign.
  DEV size_t operator[](int i) const {
    const int row = GROUP % VH ? min(skip + i, GROUP - 1) : skip + i;
    return DRAFTS ? first + row + row / HEADS * gap : first + row;
  }
};

DEV int committed(const Request& r) { return DRAFTS ? max(0, r.length - DRAFTS) : r.length; }
// First position that a query token reads from its ring, like a decode step with `depth` more committed tokens.
DEV int ring_from(const Params& p, const Request& r, int depth) {
  return max(r.ring_from, committed(r) + depth + 1 - p.recent);
}
// End of the positions that some query reads from INT2.
DEV int int2_end(const Params& p, const Request& r) { return DRAFTS ? ring_from(p, r, DRAFTS - 1) : r.ring_from; }

// The INT2 positions of a request: all below `end` that the sink does not hold.
struct Positions {
  int cut, gap, count;
  DEV Positions(const Request& r, int end) {
    cut = min(r.sink_from, end);
    gap = max(0, min(r.sink_end, end) - cut);
    count = end - gap;
  }
  DEV int operator[](int i) const { return i + (i >= cut ? gap : 0); }
};

// What the rows of a lane see, `t, 4 + t, ...` of the warp.
struct Sight {
  const Params& p;
  const Request& r;
  int b, skip, t;
  // Drafts, one bit each.
  DEV u32 drafts(int n) const {
    const int node = min((skip + 4 * n + t) / HEADS, NODES - 1);
    return p.mask ? __ldg(p.mask + b * NODES + node) : (2u << node) - 1;
  }
  DEV int exact_from(u32 drafts) const { return ring_from(p, r, max(0, __popc(drafts) - 1)); }
  DEV bool sees(u32 drafts, int position) const {
    const int ahead = position - committed(r);
    if (ahead >= 0) return drafts >> (ahead & 31) & 1;
    return (position >= r.sink_from && position < r.sink_end) || position >= exact_from(drafts);
  }
};
