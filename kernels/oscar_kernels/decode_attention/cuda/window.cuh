// Where the exact tokens of the windows are.
#pragma once

#include "drafts.cuh"

// The exact rows of a request, sink and ring: [sink_from, sink_end) and [ring_from, length), read once each.
struct Window {
  int from, split, jump, count, sink_from, sink_end, ring_from, ring_base, ring_rows, heads;
  size_t sink_row, ring_row;
  DEV Window(const Params& p, const Request& r, int b, int head)
      : sink_from(r.sink_from), sink_end(r.sink_end), ring_from(r.ring_from), ring_rows(p.ring_rows), heads(p.heads) {
    const bool apart = r.ring_from > r.sink_end || r.sink_end <= r.sink_from;
    from = apart ? r.sink_from : min(r.sink_from, r.ring_from);
    split = apart ? max(0, r.sink_end - r.sink_from) : r.length - from;
    jump = apart ? r.ring_from - split : from;
    count = apart ? split + r.length - r.ring_from : split;
    const int row = (int)p.rows[b];
    ring_base = ring_rows ? ring_from % ring_rows : 0;
    sink_row = (size_t)p.sink_block[row] * p.sink * heads + head;
    ring_row = (size_t)row * ring_rows * heads + head;
  }
  DEV int position(int i) const { return i < split ? from + i : jump + i; }
  // Whether some query rows may not see some of 16 tokens: drafts, or what only some read from the ring.
  DEV bool partly_seen(const Params& p, const Request& r, int base) const {
    const int last = position(base + 15);
    return last >= committed(r) || (last >= ring_from && position(base) < int2_end(p, r));
  }
  DEV const unsigned short* row(int i, const unsigned short* sink, const unsigned short* ring, int width) const {
    const int at = position(i);
    if (at >= sink_from && at < sink_end) return sink + (sink_row + (size_t)at * heads) * width;
    int slot = ring_base + at - ring_from;
    slot -= slot >= ring_rows ? ring_rows : 0;
    return ring + (ring_row + (size_t)slot * heads) * width;
  }
};
DEV int window_count(const Request& r) {
  return max(0, r.sink_end - r.sink_from) + r.length - r.ring_from - max(0, r.sink_end - max(r.sink_from, r.ring_from));
}

// The rows of a warp's next step, on their way to the second-level cache.
DEV void prefetch_rows(const Params& p, const Window& w, int base, int lane) {
  const int token = base + lane % 16;
  if (token >= w.count) return;
  for (int i = lane / 16; i < DK / 64; i += 2) prefetch(w.row(token, p.sink_k, p.ring_k, DK) + 64 * i);
  for (int i = lane / 16; i < DV / 64; i += 2) prefetch(w.row(token, p.sink_v, p.ring_v, DV) + 64 * i);
}
DEV uint4 load_row(const unsigned short* row, int unit, bool valid) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (valid) load_once(x, row + 8 * unit);
  return x;
}
DEV u32 word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
