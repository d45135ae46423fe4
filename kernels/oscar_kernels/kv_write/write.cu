// Writing new tokens into the INT2 cache: transform, clip, quantize, pack, store. Compute capability 9.0 (wgmma).
//
// Compiled by NVRTC, so nothing of CUDA is included. Shapes are -D flags: DK DV channels of a row (64, 128 or 256), GK
// GV groups of a row, BITS_K BITS_V bits of a code, RANK_K RANK_V the order statistic of the clip counted from the
// largest (0: none, else 2 to 16, and to 64 with rows of 256), GROUPS warpgroups of a block, SLOT_T ROW_T POSITION_T
// END_T integer types, AFFINE_BF16, FEEDBACK (keys are rounded with it).
//
// Work. A row is one token and head of K, V or the query. A block has one matrix, of one of these sides, in shared
// memory for its whole life, as two bfloat16 halves, copied while the kernel in front ends; its warpgroups take tiles
// of 64 rows in turn. A warp copies its sixteen rows of the next tile by cp.async, which only it reads, while the
// tensor cores multiply this one from its registers. Nothing but these cores couples warps: there is no barrier
// once the matrix has come, and every loop has a bound. Launches that write only slots, and those of few rows, have kernels of their own.
//
// A thread ends up with a quarter of two rows, see `channel_of`: its part of a row's codes is adjacent bytes.
//
// Sums have one order: the mean's product, the smaller half of the matrix, the larger half, each in the order of its
// rows. So they do not depend on the tile or the step that a row is in. Clip, scale and offset are exact; codes are, but
// for rounding ties.

#include "quantize.cuh"

DEV bool any(bool x) { return __any_sync(ALL, x); }

// One block: the matrix of a side in shared memory, and the tiles of its rows.

// SLOTS: only slots are written, neither windows nor rows.
template <class R, bool SLOTS>
struct Block {
  static constexpr int D = R::D;
  const Params& p;
  const Side& s;
  // In shared memory: the matrix; this warp's rows as they come; one transformed row of it; the feedback of the head.
  u32 weights, rows, apart, feedback;
  int matrix, group, warp, lane, count, step;

  DEV Block(const Params& p, const Side& s, u32 shared, int index)
      : p(p), s(s), weights(shared), matrix(index % s.matrices) {
    const int own = (int)threadIdx.x / 32;
    group = own / 4;
    warp = own % 4;
    lane = (int)threadIdx.x % 32;
    rows = weights + matrix_bytes<R>() + own * rows_bytes<D>();
    apart = weights + matrix_bytes<R>() + 4 * GROUPS * rows_bytes<D>() + own * D * 4;
    feedback = apart + (4 * GROUPS - own) * D * 4;
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
    commit_copies();
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
      const int bit = 31 - __clz(which), i = bit % 4, from = bit - i;
      which ^= 1u << bit;
      if (lane / 4 == from / 4) {
        UNROLL for (int j = 0; j < D / 8; j++) {
          const float first = i ? x[4 * j + 2] : x[4 * j], second = i ? x[4 * j + 3] : x[4 * j + 1];
          shared_store(apart + (8 * j + lane % 4 * 2) * 4, first, second);
        }
      }
      __syncwarp();
      const u64 mine = (u64)(i ? place_of(at, 1) : place_of(at, 0));
      const u32 high = __shfl_sync(ALL, (u32)(mine >> 32), from), low = __shfl_sync(ALL, (u32)mine, from);
      const long long place = (long long)((u64)high << 32 | low);
      WarpRow<R> row(lane);
      row.load(apart);
      row.quantize(codes_at(place), affine_at(place), feedback);
      __syncwarp();
    }
  }

  // A tile from its product on.
  DEV void finish(const Pair& at, float (&x)[D / 2]) const {
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
      const u32 first = __ballot_sync(ALL, at.valid[0] && !plain[0]);
      const u32 second = __ballot_sync(ALL, at.valid[1] && !plain[1]);
      const u32 others = (first & 0x11111111) | (second & 0x11111111) << 1;  // four lanes say the same
      if (others) store_apart(others, at, x);
      if constexpr (R::FED_BACK) carry_on<R>(x, low, high, feedback, lane);
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
  if constexpr (R::FED_BACK) load_feedback<R, 128 * GROUPS>(p, block.matrix, block.feedback);
  wait_for_previous();
  int tile = block.first(index);
  block.load(tile);
  wait_copies<0>();
  fence_for_matrix_units();
  __syncthreads();
  while (tile < block.count) {
    wait_copies<0>();
    __syncwarp();
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

// A few rows: a decode step. What they cost is the way of one row, and machine code that runs once and is fetched for it,
// from far away, since the weights of a model have swept the caches. So there is little of it. A block has the matrix and
// a tile of `block_rows` rows, 16 to 64, each of which belongs to one warp once the tensor cores are done.
//
// A matrix of rows of 256 is more than a block has room for. Its columns come in four chunks, two of them at a time, and
// this is the kernel for any number of rows then, 16 to 48 of a block.
//
// Sums, clip, scale, offset and codes are those of many rows to the bit, for finite sums.

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
DEV void finish_row(const Params& p, const Side& s, const Place& to, WarpRow<R>& row, u32 feedback) {
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
    row.quantize(p.codes + at * RECORD + R::CODES_AT, p.affine + at * AFFINE + R::AFFINE_AT, feedback);
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
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  UNROLL_1 for (int chunk = 0; chunk < CHUNKS; chunk++) {
    const u32 at = weights + chunk % 2 * chunk_bytes<R>();
    if (chunk > 1) {
      if (chunk + 1 < CHUNKS)
        wait_copies<1>();
      else
        wait_copies<0>();
      fence_for_matrix_units();
      __syncthreads();
    }
    if (warp < 4) {
      float x[CHUNK / 2];
      multiply_chunk<R>(tile, at, lane, x);
      matrix_end(x);
      if (16 * warp < count) store_product<D>(rows, 16 * warp, chunk * CHUNK, lane, x);
    }
    if (chunk + 2 < CHUNKS) {
      __syncthreads();
      load_chunk<R, STEP_THREADS>(s, matrix, chunk + 2, at);
    }
  }
}

template <class R>
DEV void run_step(const Params& p, const Side& s, u32 shared, int index) {
  constexpr int D = R::D, UNITS = D / 8, EACH = STEP_THREADS / UNITS;
  constexpr bool CHUNKED = D > 128;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  int matrix = 0, part = index;
  if (s.matrices > 1) {
    matrix = index % s.matrices;
    part = index / s.matrices;
  }
  const int first = part * p.block_rows, end = min(first + p.block_rows, s.rows);
  const u32 weights = shared, tile = weights + (CHUNKED ? 2 * chunk_bytes<R>() : matrix_bytes<R>());
  const u32 rows = tile + 4 * rows_bytes<D>(), feedback = CHUNKED ? weights : rows + place_of_product<D>(TILE, 0);
  if constexpr (CHUNKED) {
    load_chunk<R, STEP_THREADS>(s, matrix, 0, weights);
    load_chunk<R, STEP_THREADS>(s, matrix, 1, weights + chunk_bytes<R>());
  } else {
    load_matrix<R, STEP_THREADS>(s, matrix, weights);
    if constexpr (R::FED_BACK) load_feedback<R, STEP_THREADS>(p, matrix, feedback);
  }
  wait_for_previous();
  UNROLL_1 for (int r = first + thread / UNITS; r < end; r += EACH) {
    const int token = token_of(s, r), head = matrix * s.heads + r - token * s.heads;
    const u32 place = CHUNKED ? place_in_tile(r - first, thread % UNITS) : place_in_rows<D>(r - first, thread % UNITS);
    copy_async(tile + place, s.x + wide(token, s.x_token) + (head * s.x_head + thread % UNITS * 8));
  }
  commit_copies();
  Place next = place_of<R>(p, s, matrix, first + warp);
  wait_copies<0>();
  fence_for_matrix_units();
  __syncthreads();
  if constexpr (CHUNKED) {
    multiply_chunks<R>(s, matrix, weights, tile, rows, end - first);
  } else if (warp < 4) {
    float x[D / 2];
    multiply<R>(tile + warp * rows_bytes<D>(), weights, lane, x);
    matrix_end(x);
    if (16 * warp < end - first) store_product<D>(rows, 16 * warp, 0, lane, x);
  }
  __syncthreads();
  if constexpr (CHUNKED && R::FED_BACK) {  // in place of the matrix
    load_feedback<R, STEP_THREADS>(p, matrix, feedback);
    wait_copies<0>();
    __syncthreads();
  }
  UNROLL_1 for (int row = first + warp; row < end; row += STEP_ROWS) {
    const Place to = next;
    if (row + STEP_ROWS < end) next = place_of<R>(p, s, matrix, row + STEP_ROWS);
    WarpRow<R> own(lane);
    own.load(rows + place_of_product<D>(row - first, 0));
    finish_row<R>(p, s, to, own, feedback);
  }
}

#if DK <= 128 && DV <= 128  // else the kernel for few rows is the only one: a larger matrix does not fit a block
// A block of any side; SLOTS: as `Block`.
template <bool SLOTS>
DEV void run_many(const Params& p) {
  dependents_may_start();  // they wait for the end of this one before they read what it writes
  const u32 shared = (shared_address(dynamic_shared()) + 1023) & ~1023u;  // tiles are swizzled by address bits
  int index = blockIdx.x;
  if (index < p.v.blocks) return run<ValueRow, SLOTS>(p, p.v, shared, index);
  index -= p.v.blocks;
  if (index < p.k.blocks) return run<KeyRow, SLOTS>(p, p.k, shared, index);
  run<QueryRow, SLOTS>(p, p.q, shared, index - p.k.blocks);
}
extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1) oscar_write(const __grid_constant__ Params p) {
  run_many<false>(p);
}
extern "C" __global__ void __launch_bounds__(128 * GROUPS, 1) oscar_write_slots(const __grid_constant__ Params p) {
  run_many<true>(p);
}
#endif

// The same for few rows.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, 1) oscar_write_step(const __grid_constant__ Params p) {
  dependents_may_start();
  const u32 shared = (shared_address(dynamic_shared()) + 1023) & ~1023u;
  int index = blockIdx.x;
  if (index < p.v.blocks) return run_step<ValueRow>(p, p.v, shared, index);
  index -= p.v.blocks;
  if (index < p.k.blocks) return run_step<KeyRow>(p, p.k, shared, index);
  run_step<QueryRow>(p, p.q, shared, index - p.k.blocks);
}
