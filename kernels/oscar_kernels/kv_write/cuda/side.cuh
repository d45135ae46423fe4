// One block: the matrix of a side in shared memory, and the tiles of its rows.
#pragma once

#include "product.cuh"
#include "row.cuh"

// SLOTS: only slots are written, neither windows nor rows.
template <class R, bool SLOTS>
struct Block {
  static constexpr int D = R::D;
  const Params& p;
  const Side& s;
  u32 weights, rows, apart;  // in shared memory: the matrix; this warp's rows as they come; one transformed row of it
  int matrix, group, warp, lane, count, step;

  DEV Block(const Params& p, const Side& s, u32 shared, int index)
      : p(p), s(s), weights(shared), matrix(index % s.matrices) {
    const int own = thread_index() / 32;
    group = own / 4;
    warp = own % 4;
    lane = thread_index() % 32;
    rows = weights + matrix_bytes<R>() + own * rows_bytes<D>();
    apart = weights + matrix_bytes<R>() + 4 * GROUPS * rows_bytes<D>() + own * D * 4;
    count = (s.rows + TILE - 1) / TILE;
    step = s.blocks / s.matrices * GROUPS;
  }
  DEV int first(int index) const { return next(group * (s.blocks / s.matrices) + index / s.matrices); }

  // Tile `tile`, or the next one of this warpgroup that has something to do. All its threads find the same.
  DEV int next(int tile) const {
    if (!SLOTS && R::CACHED && !p.to_slots && !s.out)
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

  // Rows g and g + 8 of a warp, g = lane / 4. Those after the last one are the last one again, and not `valid`.
  struct Pair {
    int token[2], head[2];
    bool valid[2];
    long long slot[2];
  };
  DEV Pair pair_of(int tile) const {
    Pair at = {};
    UNROLL for (int i = 0; i < 2; i++) {
      const int row = tile * TILE + warp * 16 + lane / 4 + 8 * i, r = min(row, s.rows - 1);
      at.valid[i] = row < s.rows;
      at.token[i] = token_of(s, r);
      at.head[i] = matrix * s.heads + r - at.token[i] * s.heads;
    }
    return at;
  }
  // Starts the copies of this warp's rows of a tile.
  DEV void load(int tile) const {
    if (tile < count) {
      const Pair at = pair_of(tile);
      copy_rows<D>(rows, s.x + wide(at.token[0], s.x_token) + at.head[0] * s.x_head,
                   s.x + wide(at.token[1], s.x_token) + at.head[1] * s.x_head, lane);
    }
    copies_commit();
  }

  // Where row g + 8 I of a warp goes, all but its codes.
  template <int I>
  DEV void store_exact(const Pair& at, const float (&x)[D / 2]) const {
    const int t = lane % 4, token = at.token[I], head = at.head[I];
    if (!at.valid[I]) return;
    if (s.out) store_row<D, I>(s.out + wide(token, s.out_token) + head * s.out_head, x, t);
    if (!R::CACHED || !p.to_windows) return;
    const long long position = p.positions[token], request = p.request_rows[token];
    if (position >= (long long)p.ends[token] - p.recent)
      store_row<D, I>(s.ring + ((request * p.ring_rows + position % p.ring_rows) * p.heads + head) * D, x, t);
    if (position < p.sink)
      store_row<D, I>(s.sink + (((long long)p.sink_block[request] * p.sink + position) * p.heads + head) * D, x, t);
  }

  DEV long long place_of(const Pair& at, int i) const { return at.slot[i] * p.heads + at.head[i]; }
  DEV u8* codes_at(long long place) const { return p.codes + place * RECORD + R::CODES_AT; }
  DEV u16* affine_at(long long place) const { return p.affine + place * AFFINE + R::AFFINE_AT; }

  // Rows that the straight way does not fit, one after the other, by the whole warp; bit 4 g + i of `which` is row
  // g + 8 i.
  DEV void store_apart(u32 which, const Pair& at, const float (&x)[D / 2]) const {
    UNROLL_1 while (which) {
      long_way();
      const int bit = last_one(which), i = bit % 4, from = bit - i;
      which ^= 1u << bit;
      if (lane / 4 == from / 4) {
        UNROLL for (int j = 0; j < D / 8; j++) {
          const float first = i ? x[4 * j + 2] : x[4 * j], second = i ? x[4 * j + 3] : x[4 * j + 1];
          shared_store(apart + (8 * j + lane % 4 * 2) * 4, first, second);
        }
      }
      warp_sync();
      const u64 mine = (u64)(i ? place_of(at, 1) : place_of(at, 0));
      const u32 high = shuffle_from((u32)(mine >> 32), from), low = shuffle_from((u32)mine, from);
      const long long place = (long long)((u64)high << 32 | low);
      WarpRow<R> row(lane);
      row.load(apart);
      row.quantize(codes_at(place), affine_at(place));
      warp_sync();
    }
  }

  // A tile from its product on.
  DEV void finish(const Pair& at, const float (&x)[D / 2]) const {
    if (!SLOTS && (s.out || p.to_windows)) {
      store_exact<0>(at, x);
      store_exact<1>(at, x);
    }
    if constexpr (R::CACHED) {
      if (!SLOTS && !p.to_slots) return;
      float low[2][R::G], high[2][R::G], limit[2] = {0.f, 0.f};
      bool plain[2] = {true, true};
      extremes<R>(x, low, high, plain);
      if constexpr (R::RANK > 0) {
        Order<R>::find(x, low, high, limit, plain);
        UNROLL for (int i = 0; i < 2; i++) clip_extremes<R>(low[i], high[i], limit[i], plain[i]);
      }
      const bool straight[2] = {at.valid[0] && plain[0], at.valid[1] && plain[1]};
      const u32 first = vote(at.valid[0] && !plain[0]), second = vote(at.valid[1] && !plain[1]);
      const u32 others = (first & 0x11111111) | (second & 0x11111111) << 1;  // four lanes say the same
      if (others) store_apart(others, at, x);
      const long long place[2] = {place_of(at, 0), place_of(at, 1)};
      store_codes<R, 0>(x, low[0], high[0], codes_at(place[0]), affine_at(place[0]), straight[0], lane % 4);
      store_codes<R, 1>(x, low[1], high[1], codes_at(place[1]), affine_at(place[1]), straight[1], lane % 4);
    }
  }
};

template <class R, bool SLOTS>
DEV void run(const Params& p, const Side& s, u32 shared, int index) {
  const Block<R, SLOTS && R::CACHED> block(p, s, shared, index);
  load_matrix<R, 128 * GROUPS>(s, block.matrix, block.weights);
  wait_for_previous();
  int tile = block.first(index);
  block.load(tile);
  copies_wait();
  fence_for_matrix_units();
  block_sync();
  while (tile < block.count) {
    copies_wait();
    warp_sync();
    float x[R::D / 2];
    multiply<R>(block.rows, block.weights, block.lane, x);
    auto at = block.pair_of(tile);  // while the tensor cores work
    if (R::CACHED && (SLOTS || p.to_slots)) {
      UNROLL for (int i = 0; i < 2; i++) at.slot[i] = (long long)p.slots[at.token[i]];
    }
    tile = block.next(tile + block.step);
    block.load(tile);
    matrix_end(x);
    UNROLL for (int i = 0; i < 2; i++) not_before(at.slot[i]);
    block.finish(at, x);
  }
}
