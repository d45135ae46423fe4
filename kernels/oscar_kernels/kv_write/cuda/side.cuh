// One block: the matrix of a side in shared memory, and the tiles of its rows.
#pragma once

#include "codes.cuh"
#include "product.cuh"

template <class R>
struct Block {
  static constexpr int D = R::D, PART = part_bytes(D), A_BYTES = TILE * D * 2, UNITS = D / 8;  // 16-byte units of a row
  const Params& p;
  const Side& s;
  u32 weights, tiles, sums;  // in shared memory: both halves of the matrix, two tiles of each warpgroup, mean's product
  int matrix, group, local, lane, count, step;

  DEV Block(const Params& p, const Side& s, u32 shared, int index)
      : p(p), s(s), weights(shared), matrix(index % s.matrices) {
    group = thread_index() / 128;
    local = thread_index() % 128;
    lane = local % 32;
    tiles = weights + 2 * PART + group * 2 * A_BYTES;
    sums = weights + 2 * PART + GROUPS * 2 * A_BYTES;
    count = (s.rows + TILE - 1) / TILE;
    step = s.blocks / s.matrices * GROUPS;
  }
  DEV int first(int index) const { return next(group * (s.blocks / s.matrices) + index / s.matrices); }

  // Tile `tile`, or the next one of this warpgroup that has something to do. All its threads find the same.
  DEV int next(int tile) const {
    if (R::CACHED && !p.to_slots && !s.out)
      while (tile < count && !in_windows(tile)) tile += step;
    return tile;
  }
  DEV bool in_windows(int tile) const {
    const int last = token_of(s, min(tile * TILE + TILE, s.rows) - 1);
    bool wanted = false;
    for (int token = token_of(s, tile * TILE) + lane; token <= last; token += 32) {
      const long long position = p.positions[token];
      wanted |= position < p.sink || position >= (long long)p.ends[token] - p.recent;
    }
    return any(wanted);
  }

  // Starts the copies of a tile. Rows after the last one stay as they are: no row changes another.
  DEV void load(int tile, int stage) const {
    if (tile < count) {
      constexpr int EACH = 128 / UNITS;  // rows of one copy of all threads
      const int row = local / UNITS, unit = local % UNITS, r = tile * TILE + row;
      const int token = token_of(s, r);
      int head = r - token * s.heads;
      const u16* from = s.x + wide(token, s.x_token) + ((matrix * s.heads + head) * s.x_head + unit * 8);
      u32 to = tiles + stage * A_BYTES + place_in_tile(row, unit);
      const int tokens = token_of(s, EACH), heads = EACH - tokens * s.heads;
      const long long forth = wide(tokens, s.x_token) + heads * s.x_head, over = s.x_token - s.heads * s.x_head;
      UNROLL for (int i = 0; i < TILE; i += EACH) {
        if (r + i < s.rows) copy_async(to + i * 128, from);
        from += forth;
        head += heads;
        if (head >= s.heads) {
          head -= s.heads;
          from += over;
        }
      }
    }
    copies_commit();
  }

  // Asks for where the rows of a tile go: otherwise that is waited for when they are ready.
  DEV void announce(int tile) const {
    if (!R::CACHED || tile >= count || local > 1) return;
    const int token = token_of(s, min(tile * TILE + local * (TILE - 1), s.rows - 1));
    if (p.to_slots) prefetch(p.slots + token);
    if (!p.to_windows) return;
    prefetch(p.positions + token);
    prefetch(p.ends + token);
    prefetch(p.request_rows + token);
  }

  // A tile times the matrix.
  DEV void product(int stage, float (&x)[D / 2]) const {
    multiply_tile<D>(tiles + stage * A_BYTES, weights, x);
    if (s.sums) {
      UNROLL for (int j = 0; j < D / 8; j++) UNROLL for (int e = 0; e < 2; e++) {
        const float sum = shared_load(sums + (8 * j + 2 * (lane % 4) + e) * 4);
        x[4 * j + e] -= sum;
        x[4 * j + 2 + e] -= sum;
      }
    }
  }

  // Where row g + 8 I of a warp goes, all but its codes.
  template <int I>
  DEV void store_exact(const float (&x)[D / 2], int row, int token, int head) const {
    const int t = lane % 4;
    if (row >= s.rows) return;
    if (s.out) store_row<D, I>(s.out + wide(token, s.out_token) + head * s.out_head, x, t);
    if (!R::CACHED || !p.to_windows) return;
    const long long position = p.positions[token], request = p.request_rows[token];
    if (position >= (long long)p.ends[token] - p.recent)
      store_row<D, I>(s.ring + ((request * p.recent + position % p.recent) * p.heads + head) * D, x, t);
    if (position < p.sink)
      store_row<D, I>(s.sink + (((long long)p.sink_block[request] * p.sink + position) * p.heads + head) * D, x, t);
  }

  DEV void finish(int tile, float (&x)[D / 2]) const {
    if (tile * TILE + local / 32 * 16 >= s.rows) return;  // a whole warp
    int row[2], token[2], head[2];
    long long place[2];
    bool valid[2];  // other rows hold anything: they must not send the warp the long way
    UNROLL for (int i = 0; i < 2; i++) {
      row[i] = tile * TILE + local / 32 * 16 + lane / 4 + 8 * i;
      const int r = min(row[i], s.rows - 1);
      valid[i] = row[i] < s.rows;
      token[i] = token_of(s, r);
      head[i] = matrix * s.heads + r - token[i] * s.heads;
      place[i] = R::CACHED && p.to_slots ? (long long)p.slots[token[i]] * p.heads + head[i] : 0;
    }
    if (s.out || p.to_windows) {
      store_exact<0>(x, row[0], token[0], head[0]);
      store_exact<1>(x, row[1], token[1], head[1]);
    }
    if constexpr (R::CACHED) {
      if (!p.to_slots) return;
      float low[2][R::G], high[2][R::G], limit[2] = {0.f, 0.f};
      extremes<R>(x, low, high, valid);
      if constexpr (R::RANK > 0) Order<R>::find(x, low, high, limit, valid);
      store_codes<R, 0>(p, x, low[0], high[0], limit[0], place[0], valid[0], lane % 4);
      store_codes<R, 1>(p, x, low[1], high[1], limit[1], place[1], valid[1], lane % 4);
    }
  }
};

template <class R>
DEV void run(const Params& p, const Side& s, u32 shared, int index) {
  const Block<R> block(p, s, shared, index);
  load_matrix<R::D, 128 * GROUPS>(s, block.matrix, block.weights, block.sums);
  wait_for_previous();
  int tile = block.first(index), ahead = block.next(tile + block.step);
  block.load(tile, 0);
  block.announce(tile);
  block.load(ahead, 1);
  copies_wait<2>();
  fence_for_matrix_units();
  block_sync();
  for (int stage = 0; tile < block.count; stage ^= 1) {
    copies_wait<1>();  // all but the newest
    fence_for_matrix_units();
    group_sync(block.group);
    float x[R::D / 2];
    block.product(stage, x);
    group_sync(block.group);  // all four warps have read the tile
    const int after = block.next(ahead + block.step);
    block.load(after, stage);
    block.announce(ahead);
    block.finish(tile, x);
    tile = ahead;
    ahead = after;
  }
}
