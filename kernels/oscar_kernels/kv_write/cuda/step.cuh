// A few rows: a decode step. What they cost is the way of one row, and machine code that runs once and is fetched for it,
// from far away, since the weights of a model have swept the caches. So there is little of it. A block has the matrix and
// a tile of `block_rows` rows, 16 to 64, each of which belongs to one warp once the matrix units are done.
//
// Sums, clip, scale, offset and codes are those of `side.cuh` to the bit.
#pragma once

#include "codes.cuh"
#include "product.cuh"

constexpr int STEP_ROWS = 16, STEP_THREADS = 32 * STEP_ROWS;  // rows at a time

// A row in a warp. Lane `l` has channel `l % BYTES` of EACH quarters, from `l / BYTES * EACH` on: fields of one byte.
template <class R>
struct StepRow {
  static constexpr int D = R::D, EACH = D / 32, BYTES = D / 4, STRIDE = D + 8;  // of rows in shared memory, in floats
  static constexpr int OWN = R::G * EACH < 4 ? 1 : R::G * EACH / 4;             // groups that a lane has values of
  static constexpr bool SHARED = R::G == 1 || BYTES == 32;                      // by all lanes
  float x[EACH];
  int lane, byte, quarter;

  DEV StepRow(int lane) : lane(lane), byte(lane % BYTES), quarter(lane / BYTES * EACH) {}

  // Columns 8 j + 2 t + e are in the order of `channel_of`.
  DEV void load(u32 row, u32 sums, bool centred) {
    constexpr int JQ = D / 32;
    const int column = byte % (2 * JQ) / 2 * 8 + byte / (2 * JQ) * 2 + byte % 2;
    UNROLL for (int i = 0; i < EACH; i++) {
      const int at = ((quarter + i) * BYTES + column) * 4;
      x[i] = shared_load(row + at);
      if (centred) x[i] -= shared_load(sums + at);
    }
  }
  DEV void store_exact(u16* row) const {
    UNROLL for (int i = 0; i < EACH; i++) store_half(row + (quarter + i) * BYTES + byte, (u16)pack_bf16(x[i], 0.f));
  }

  // The RANK-th largest magnitude of the row. As integers magnitudes have the order of floats.
  DEV float limit() const {
    int y[EACH];
    UNROLL for (int i = 0; i < EACH; i++) y[i] = (int)bits_of(fabsf(x[i]));
    UNROLL for (int i = 1; i < EACH; i++) UNROLL for (int j = i; j > 0; j--) {
      const int larger = max(y[j - 1], y[j]);
      y[j] = min(y[j - 1], y[j]);
      y[j - 1] = larger;
    }
    int found = 0, left = R::RANK;
    UNROLL_1 for (int round = 0; round < R::RANK && left > 0; round++) {  // a value more each, with all its equals
      found = reduce_max(y[0]);
      const bool mine = y[0] == found;
      left -= count(mine);
      UNROLL for (int i = 0; i < EACH; i++) y[i] = mine ? (i + 1 < EACH ? y[i + 1] : -1) : y[i];
    }
    return float_of((u32)found);
  }

  DEV static int ordered(float x) {  // integers in the order of floats
    const int bits = (int)bits_of(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
  }
  DEV static float unordered(int x) { return float_of((u32)(x ^ (x >> 31 & 0x7FFFFFFF))); }
  // Of all lanes that share a group.
  DEV static int largest(int x) {
    if (SHARED) return reduce_max(x);
    UNROLL for (int mask = 1; mask < BYTES; mask *= 2) x = max(x, shuffle_xor(x, mask));
    return x;
  }

  DEV void quantize(u8* codes, u16* affine) {
    if constexpr (R::RANK > 0) {
      const float most = limit();
      UNROLL for (int i = 0; i < EACH; i++) x[i] = fminf(fmaxf(x[i], -most), most);
    }
    u32 bits = 0;
    UNROLL for (int v = 0; v < OWN; v++) {
      constexpr int N = EACH / OWN;  // values of the group in this lane
      int top = ordered(x[v * N]), bottom = ~top;
      UNROLL for (int i = 1; i < N; i++) {
        top = max(top, ordered(x[v * N + i]));
        bottom = max(bottom, ~ordered(x[v * N + i]));
      }
      const float high = unordered(largest(top)), low = unordered(~largest(bottom));
      float inverse;
      const u32 word = affine_word(low, high, inverse);
      UNROLL for (int i = 0; i < N; i++)
          bits |= (code_bits(fmaf(x[v * N + i] - low, inverse, UP)) & 3) << 2 * (quarter + v * N + i);
      if (SHARED ? lane == 0 : byte == 0) store_word(affine + 2 * (SHARED ? v : lane / BYTES * OWN + v), word);
    }
    if constexpr (BYTES < 32) bits |= shuffle_xor(bits, BYTES);
    if (lane < BYTES) store_byte(codes + byte, (u8)bits);
  }
};

// Where a row goes. Asked for well before it is needed.
struct Place {
  int token, head, position, end;
  long long slot, request;
};
template <class R>
DEV Place place_of(const Params& p, const Side& s, int matrix, int row) {
  Place to = {};
  const int r = min(row, s.rows - 1);
  to.token = token_of(s, r);
  to.head = matrix * s.heads + r - to.token * s.heads;
  if (R::CACHED && p.to_slots) to.slot = p.slots[to.token];
  if (R::CACHED && p.to_windows) {
    to.position = (int)p.positions[to.token];
    to.end = (int)p.ends[to.token];
    to.request = p.request_rows[to.token];
  }
  return to;
}

template <class R>
DEV void finish_row(const Params& p, const Side& s, const Place& to, StepRow<R>& row) {
  constexpr int D = R::D;
  if (s.out) row.store_exact(s.out + wide(to.token, s.out_token) + to.head * s.out_head);
  if constexpr (R::CACHED) {
    if (p.to_windows && to.position >= to.end - p.recent)
      row.store_exact(s.ring + ((to.request * p.recent + to.position % p.recent) * p.heads + to.head) * D);
    if (p.to_windows && to.position < p.sink)
      row.store_exact(s.sink +
                      (((long long)p.sink_block[to.request] * p.sink + to.position) * p.heads + to.head) * D);
    if (!p.to_slots) return;
    const long long at = to.slot * p.heads + to.head;
    row.quantize(p.codes + at * RECORD + R::CODES_AT, p.affine + at * AFFINE + R::AFFINE_AT);
  }
}

template <class R>
DEV void run_step(const Params& p, const Side& s, u32 shared, int index) {
  constexpr int D = R::D, UNITS = D / 8, EACH = STEP_THREADS / UNITS, STRIDE = StepRow<R>::STRIDE;
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  int matrix = 0, part = index;
  if (s.matrices > 1) {
    matrix = index % s.matrices;
    part = index / s.matrices;
  }
  const int first = part * p.block_rows, end = min(first + p.block_rows, s.rows);
  const u32 weights = shared, tile = weights + 2 * part_bytes(D), sums = tile + TILE * D * 2, rows = sums + D * 4;
  load_matrix<D, STEP_THREADS>(s, matrix, weights, sums);
  wait_for_previous();
  UNROLL_1 for (int r = first + thread / UNITS; r < end; r += EACH) {
    const int token = token_of(s, r), head = matrix * s.heads + r - token * s.heads;
    copy_async(tile + place_in_tile(r - first, thread % UNITS),
               s.x + wide(token, s.x_token) + (head * s.x_head + thread % UNITS * 8));
  }
  copies_commit();
  Place next = place_of<R>(p, s, matrix, first + warp);
  copies_wait<0>();
  fence_for_matrix_units();
  block_sync();
  if (warp < 4) {  // a warpgroup; its warps have sixteen rows each
    float x[D / 2];
    multiply_tile<D>(tile, weights, x);
    if (16 * warp < end - first) {
      UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int i = 0; i < 2; i++)
          shared_store(rows + ((16 * warp + lane / 4 + 8 * i) * STRIDE + 8 * j + lane % 4 * 2) * 4, x[4 * j + 2 * i],
                       x[4 * j + 2 * i + 1]);
    }
  }
  block_sync();
  UNROLL_1 for (int row = first + warp; row < end; row += STEP_ROWS) {
    const Place to = next;
    if (row + STEP_ROWS < end) next = place_of<R>(p, s, matrix, row + STEP_ROWS);
    StepRow<R> mine(lane);
    mine.load(rows + (row - first) * STRIDE * 4, sums, s.sums);
    finish_row<R>(p, s, to, mine);
  }
}
