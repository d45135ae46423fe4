// A few rows: a decode step. What they cost is the way of one row, and machine code that runs once and is fetched for it,
// from far away, since the weights of a model have swept the caches. So there is little of it. A block has the matrix and
// a tile of `block_rows` rows, 16 to 64, each of which belongs to one warp once the tensor cores are done.
//
// A matrix of rows of 256 is more than a block has room for. Its columns come in four chunks, two of them at a time, and
// this is the kernel for any number of rows then, 16 to 48 of a block.
//
// Sums, clip, scale, offset and codes are those of `side.cuh` to the bit, for finite sums.
#pragma once

#include "product.cuh"
#include "row.cuh"

constexpr int STEP_ROWS = 16, STEP_THREADS = 32 * STEP_ROWS;  // rows at a time

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
DEV void finish_row(const Params& p, const Side& s, const Place& to, WarpRow<R>& row) {
  constexpr int D = R::D;
  if (s.out) row.store_exact(s.out + wide(to.token, s.out_token) + to.head * s.out_head);
  if constexpr (R::CACHED) {
    if (p.to_windows && to.position >= to.end - p.recent)
      row.store_exact(s.ring + ((to.request * p.ring_rows + to.position % p.ring_rows) * p.heads + to.head) * D);
    if (p.to_windows && to.position < p.sink)
      row.store_exact(s.sink +
                      (((long long)p.sink_block[to.request] * p.sink + to.position) * p.heads + to.head) * D);
    if (!p.to_slots) return;
    const long long at = to.slot * p.heads + to.head;
    row.quantize(p.codes + at * RECORD + R::CODES_AT, p.affine + at * AFFINE + R::AFFINE_AT);
  }
}

constexpr int STRIDE_PAD = 8;  // floats between transformed rows in shared memory, for its banks
template <int D>
DEV u32 place_of_product(int row, int column) {
  return (row * (D + STRIDE_PAD) + column) * 4;
}
// Writes what a warp has of a product, columns `first ..` of its sixteen rows from `row` on.
template <int D, int N>
DEV void store_product(u32 rows, int row, int first, int lane, const float (&x)[N]) {
  UNROLL for (int j = 0; j < N / 4; j++) UNROLL for (int i = 0; i < 2; i++)
      shared_store(rows + place_of_product<D>(row + lane / 4 + 8 * i, first + 8 * j + lane % 4 * 2), x[4 * j + 2 * i],
                   x[4 * j + 2 * i + 1]);
}

// The rows of a tile times the matrix, into `rows`; for all threads. Rows and the first two chunks have come.
template <class R>
DEV void multiply_chunks(const Side& s, int matrix, u32 weights, u32 tile, u32 rows, int count) {
  constexpr int D = R::D, CHUNKS = D / CHUNK;
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  UNROLL_1 for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const u32 at = weights + chunk % 2 * chunk_bytes<R>();
    if (chunk > 1) {
      if (chunk + 1 < CHUNKS)
        copies_wait_but<1>();
      else
        copies_wait();
      fence_for_matrix_units();
      block_sync();
    }
    if (warp < 4) {
      float x[CHUNK / 2];
      multiply_chunk<R>(tile, at, lane, x);
      matrix_end(x);
      if (16 * warp < count) store_product<D>(rows, 16 * warp, chunk * CHUNK, lane, x);
    }
    if (chunk + 2 < CHUNKS) {
      block_sync();
      load_chunk<R, STEP_THREADS>(s, matrix, chunk + 2, at);
    }
  }
}

template <class R>
DEV void run_step(const Params& p, const Side& s, u32 shared, int index) {
  constexpr int D = R::D, UNITS = D / 8, EACH = STEP_THREADS / UNITS;
  constexpr bool CHUNKED = D > 128;
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  int matrix = 0, part = index;
  if (s.matrices > 1) {
    matrix = index % s.matrices;
    part = index / s.matrices;
  }
  const int first = part * p.block_rows, end = min(first + p.block_rows, s.rows);
  const u32 weights = shared, tile = weights + (CHUNKED ? 2 * chunk_bytes<R>() : matrix_bytes<R>());
  const u32 rows = tile + 4 * rows_bytes<D>();
  if constexpr (CHUNKED) {
    load_chunk<R, STEP_THREADS>(s, matrix, 0, weights);
    load_chunk<R, STEP_THREADS>(s, matrix, 1, weights + chunk_bytes<R>());
  } else {
    load_matrix<R, STEP_THREADS>(s, matrix, weights);
  }
  wait_for_previous();
  UNROLL_1 for (int r = first + thread / UNITS; r < end; r += EACH) {
    const int token = token_of(s, r), head = matrix * s.heads + r - token * s.heads;
    const u32 place = CHUNKED ? place_in_tile(r - first, thread % UNITS) : place_in_rows<D>(r - first, thread % UNITS);
    copy_async(tile + place, s.x + wide(token, s.x_token) + (head * s.x_head + thread % UNITS * 8));
  }
  copies_commit();
  Place next = place_of<R>(p, s, matrix, first + warp);
  copies_wait();
  fence_for_matrix_units();
  block_sync();
  if constexpr (CHUNKED) {
    multiply_chunks<R>(s, matrix, weights, tile, rows, end - first);
  } else if (warp < 4) {
    float x[D / 2];
    multiply<R>(tile + warp * rows_bytes<D>(), weights, lane, x);
    matrix_end(x);
    if (16 * warp < end - first) store_product<D>(rows, 16 * warp, 0, lane, x);
  }
  block_sync();
  UNROLL_1 for (int row = first + warp; row < end; row += STEP_ROWS) {
    const Place to = next;
    if (row + STEP_ROWS < end) next = place_of<R>(p, s, matrix, row + STEP_ROWS);
    WarpRow<R> own(lane);
    own.load(rows + place_of_product<D>(row - first, 0));
    finish_row<R>(p, s, to, own);
  }
}
