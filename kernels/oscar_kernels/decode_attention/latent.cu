// Decode attention over 2-bit latents (MLA), stage 1 in CUDA C++.
//
// A block has HEADS query heads and one split of a request, of its codes or of its windows; its four warps share tiles of
// 64 tokens of codes. For the logits a warp takes 16 tokens, all channels and one int8 digit of the query: an AND leaves
// four codes in the bytes of an operand, times 4^r for quarter r of the channels, which is also its group. For the sums
// a warp takes all tokens and the 128 channels of 32 bytes: a field left in place in a 16-bit lane is the float16
// subnormal code * 4^r * 2^-24. Weights times the scale of each group cross shared memory in float16.
//
// What the digit loses of the query meets the middle of the codes, and all offsets the sums of the query, as one
// product in tf32 of a token's scales and offsets with numbers of the head.
//
// Compiled by NVRTC, or by g++ for the emulator. -D: SLOT_T INDPTR_T ROW_T integer types, TILES of eight query
// heads. With more than two the digits stay in shared memory, for want of registers.
#include "machine.cuh"

constexpr int STAGES = 3, RESIDENT = 2;  // of a block, and blocks of a multiprocessor
constexpr int D = 512, ROPE = 64, GROUPS = 4, TILE = 64, WARPS = 4, THREADS = 32 * WARPS, HEADS = 8 * TILES;
constexpr int ROW = D / 4 + 2 * ROPE, AFFINE = 4 * GROUPS, PITCH = ROW + AFFINE;  // bytes of a token
constexpr int STAGE = TILE * PITCH, WEIGHT_ROW = TILES == 1 ? 16 : 48, WEIGHTS = GROUPS * TILE * WEIGHT_ROW;
constexpr int TOPS_AT = STAGES * STAGE + 2 * WEIGHTS, FULL_AT = TOPS_AT + WARPS * HEADS * 4,
              DIGITS_AT = FULL_AT + (STAGES + 1) / 2 * 16, DIGITS = TILES * GROUPS * 4 * 32 * 8,
              SLOTS_AT = DIGITS_AT + DIGITS + WARPS * HEADS * 4 * 3;  // and what warps say of the query
constexpr bool IN_SHARED = TILES > 2;
// Exact rows: tiles of 16, spread over all banks.
constexpr int EXACT_TILE = 16, EXACT_ROW = 2 * (D + ROPE), EXACT_PITCH = EXACT_ROW + 16;
constexpr int EXACT_STAGE = EXACT_TILE * EXACT_PITCH, PARTS_AT = TOPS_AT - 2 * WARPS * HEADS * EXACT_TILE * 4,
              EXACT_STAGES = STAGES;
static_assert(EXACT_STAGES * EXACT_STAGE <= PARTS_AT);
constexpr float HEADROOM = 10.f, MIDDLE = 1.5f;
constexpr u32 MOST = 0x7800;  // of a weight, 2^15 in float16
constexpr u32 BIG = 0x4B400000u;                             // 1.5 * 2^23, to which integers of 22 bits are added

struct Params {
  const u8 *query, *codes, *affine, *sink_latent, *sink_rotary, *ring_latent, *ring_rotary;
  const INDPTR_T* indptr;
  const SLOT_T* slots;
  const ROW_T* rows;
  const int *sink_block, *sink_from, *ring_start;
  float *partial, *lse;
  long long query_token, query_head;  // strides, in numbers
  float factor;                       // of a logit, in base 2
  int heads, head_blocks, splits, exact_splits, sink, recent, ring;
};

// To the bits that a product keeps; half of those that it cuts off make the rounding.
DEV float rounded_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000 & 0xFFFFE000u); }
DEV float bits(u32 x) { return __uint_as_float(x); }
DEV float over_lanes(float x, bool largest, int from, int to) {
  UNROLL for (int o = from; o < to; o *= 2) {
    const float y = __shfl_xor_sync(ALL, x, o);
    x = largest ? fmaxf(x, y) : x + y;
  }
  return x;
}

// The query as operands: column g of n-tile n is head 8 * n + g. Every warp rounds one group of channels, which the others
// get through shared memory.
struct Query {
  u32 digits[IN_SHARED ? 1 : GROUPS][4][TILES][2], rotary[TILES][4][2];  // [r][c][n][half]
  float factor[TILES][2], affine[TILES][2];  // of columns 2t and 2t + 1; [n][lost or sum] of column g
  uint2 x[TILES][4][2];
  DEV static int digits_at(int n, int r, int c, int lane) { return (((n * GROUPS + r) * 4 + c) * 32 + lane) * 8; }
  // A column without a head has the last one's numbers.
  DEV Query(const Params& p, long long token, int head, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    UNROLL for (int n = 0; n < TILES; n++) {
      const u8* row = p.query + 2 * (token + min(head + 8 * n + g, p.heads - 1) * p.query_head);
      const uint2* latent = (const uint2*)(row + 2 * (128 * warp + 4 * t));
      const u32* key = (const u32*)(row + 2 * (D + 2 * t));
      UNROLL for (int c = 0; c < 4; c++) UNROLL for (int h = 0; h < 2; h++) {
        x[n][c][h] = __ldg(latent + 8 * c + 4 * h);
        rotary[n][c][h] = __ldg(key + 8 * c + 4 * h);
      }
    }
  }
  DEV void round(u8* memory, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    float* largest = (float*)(memory + DIGITS_AT) + DIGITS / 4;  // [warp][head]
    float* sum_and_lost = largest + WARPS * HEADS;               // [head][group][2]
    UNROLL for (int n = 0; n < TILES; n++) {
      float most = 1e-30f;
      UNROLL for (int c = 0; c < 4; c++) UNROLL for (int h = 0; h < 2; h++) {
        most = fmaxf(most, fmaxf(fabsf(low_bf16(x[n][c][h].x)), fabsf(high_bf16(x[n][c][h].x))));
        most = fmaxf(most, fmaxf(fabsf(low_bf16(x[n][c][h].y)), fabsf(high_bf16(x[n][c][h].y))));
      }
      most = over_lanes(most, true, 1, 4);
      if (t == 0) largest[warp * HEADS + 8 * n + g] = most;
    }
    __syncthreads();
    auto step = [&](int of) {
      float most = largest[of];
      UNROLL for (int i = 1; i < WARPS; i++) most = fmaxf(most, largest[i * HEADS + of]);
      return most * (1.f / 127.f);
    };
    UNROLL for (int n = 0; n < TILES; n++) {
      const float unit = step(8 * n + g), inverse = 1.f / unit;
      float sum = 0.f, rounded = 0.f;
      UNROLL for (int c = 0; c < 4; c++) UNROLL for (int h = 0; h < 2; h++) {
        const float y[4] = {low_bf16(x[n][c][h].x), high_bf16(x[n][c][h].x), low_bf16(x[n][c][h].y),
                            high_bf16(x[n][c][h].y)};
        u32 word = 0;
        UNROLL for (int i = 0; i < 4; i++) {
          const float shifted = fmaf(y[i], inverse, bits(BIG));  // rounded, in the low bits
          word |= (__float_as_uint(shifted) & 255) << 8 * i;
          rounded += shifted - bits(BIG);
          sum += y[i];
        }
        ((u32*)(memory + DIGITS_AT))[digits_at(n, warp, c, lane) / 4 + h] = word;
      }
      sum = over_lanes(sum, false, 1, 4);
      rounded = over_lanes(rounded, false, 1, 4);
      if (t == 0)
        *(float2*)&sum_and_lost[((8 * n + g) * GROUPS + warp) * 2] = make_float2(sum, (sum - rounded * unit) * MIDDLE);
    }
    __syncthreads();
    UNROLL for (int n = 0; n < TILES; n++) {
      UNROLL for (int j = 0; j < 2; j++) factor[n][j] = step(8 * n + 2 * t + j);
      const float2 both = *(const float2*)&sum_and_lost[((8 * n + g) * GROUPS + t) * 2];
      affine[n][0] = rounded_tf32(both.y), affine[n][1] = rounded_tf32(both.x);
    }
    if (!IN_SHARED)
      UNROLL for (int r = 0; r < GROUPS; r++) UNROLL for (int c = 0; c < 4; c++) UNROLL for (int n = 0; n < TILES; n++)
          shared_load<2>(shared_address(memory) + DIGITS_AT + digits_at(n, r, c, lane), digits[IN_SHARED ? 0 : r][c][n]);
  }
};

// A request's tokens, as positions: codes are `0 .. a - 1` and `s .. r - 1`, and exact rows the others. A block has
// `lo .. hi - 1` of one of the two, counted without a hole.
struct Part {
  int lo, hi, n, row, a, s, r, sink_from;
  long long first;
  DEV Part(const Params& p, int b, int split) {
    first = __ldg(p.indptr + b);
    n = (int)(__ldg(p.indptr + b + 1) - first), row = (int)__ldg(p.rows + b);
    sink_from = __ldg(p.sink_from + row);
    s = min(n, p.sink);
    r = min(max(n - p.recent, __ldg(p.ring_start + row)), n);
    a = min(min(sink_from, s), r);
    r = max(r, s);
    const bool exact = split < p.exact_splits;
    const int count = exact ? s - a + n - r : a + r - s;
    const int tile = exact ? EXACT_TILE : TILE, number = exact ? p.exact_splits : p.splits;
    const int share = ((count + number - 1) / number + tile - 1) / tile * tile;
    lo = (exact ? split : split - p.exact_splits) * share;
    hi = min(lo + share, count);
  }
  DEV int tiles(int size) const { return (hi - lo + size - 1) / size; }
};

// Copies of a warp: 16 tokens of a tile, 128 bytes of four of them with one instruction, and their scales. With them come
// the slots of the tile that is copied once these have arrived.
struct Loader {
  const SLOT_T* slots;
  const u8 *codes, *affine;
  SLOT_T* held;  // slots of this warp's tokens, of STAGES tiles
  int token, lane;
  DEV Loader(const Params& p, const Part& part, u8* memory, int warp) : lane(threadIdx.x % 32) {
    slots = p.slots + part.first;
    codes = p.codes + lane % 8 * 16;
    affine = p.affine;
    held = (SLOT_T*)(memory + SLOTS_AT) + 16 * warp;
    token = part.lo + 16 * warp + lane % 16;
  }
  DEV const SLOT_T* slot(const Part& part, int tile) const {
    const int i = min(token + tile * TILE, part.hi - 1);
    return slots + (i < part.a ? i : i + part.s - part.a);
  }
  // The slots that this lane needs, once they are there: of four tokens, and of its own.
  DEV void find(u32 (&mine)[5], int tile) const {
    const SLOT_T* of = held + tile % STAGES * TILE;
    UNROLL for (int i = 0; i < 4; i++) mine[i] = (u32)of[4 * i + lane / 8];
    mine[4] = (u32)of[lane % 16];
  }
  DEV void copy(const u32 (&mine)[5], const Part& part, int tile, u32 base, int warp) const {
    const u32 stage = base + tile % STAGES * STAGE + 16 * warp * PITCH;
    UNROLL for (int i = 0; i < 4; i++) {
      const u8* from = codes + (u64)mine[i] * ROW;
      UNROLL for (int half = 0; half < 2; half++)
          copy_async<16>(stage + (4 * i + lane / 8) * PITCH + lane % 8 * 16 + 128 * half, from + 128 * half, true);
    }
    if (lane < 16) {
      copy_async<16>(stage + lane * PITCH + ROW, affine + (u64)mine[4] * AFFINE, true);
      copy_async<sizeof(SLOT_T)>(shared_address(held + (tile + STAGES - 1) % STAGES * TILE + lane),
                                 slot(part, tile + STAGES - 1), true);
    }
    arrive_copies(base + FULL_AT + 8 * (tile % STAGES));
  }
};

// Weights of 16 tokens as operands.
DEV void weights_of(u32 (&by)[3][2], u32 at) {
  if constexpr (TILES > 1) {
    u32 w[4];
    ldmatrix4_trans(w, at);
    by[0][0] = w[0], by[0][1] = w[1], by[1][0] = w[2], by[1][1] = w[3];
  }
  if constexpr (TILES % 2) ldmatrix2_trans(by[TILES - 1][0], by[TILES - 1][1], at + 16 * (TILES - 1));
}

DEV void attend_codes(const Params& p, const Part& part, u8* memory, long long token, int head, long long where) {
  const u32 base = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int tiles = part.tiles(TILE);
  const Loader loader(p, part, memory, warp);
  SLOT_T first_slots[STAGES - 1];
  UNROLL for (int i = 0; i < STAGES - 1; i++) first_slots[i] = __ldg(loader.slot(part, i));
  Query q(p, token, head, warp, lane);
  if (lane < 16)
    UNROLL for (int i = 0; i < STAGES - 1; i++) loader.held[i * TILE + lane] = first_slots[i];
  UNROLL for (int i = 0; i < STAGES - 1; i++) {
    __syncwarp();  // slots were written, and those that new ones replace were read
    u32 slots[5];
    loader.find(slots, i);
    if (i < tiles) loader.copy(slots, part, i, base, warp);
  }
  q.round(memory, warp, lane);

  const float none = -bits(0x7F800000u);
  float m[TILES][2];  // the highest logit, less HEADROOM
  UNROLL for (int n = 0; n < TILES; n++) m[n][0] = m[n][1] = none;
  float all[TILES][4] = {};  // of columns 2t and 2t + 1: rows 0 to 3 weights times offsets of a group, the others weights
  float sums[2][GROUPS][TILES][4] = {};  // [odd channel][group][n]: channels g and g + 8 of 16-bit lanes
  // Bytes of a stage that this lane addresses for logits, and for sums; of weights that it reads, writes.
  const u32 of_logits = (16 * warp + (lane & 15)) * PITCH + lane / 16 * 16,
            of_sums = ((lane & 7) + lane / 16 * 8) * PITCH + (2 * warp + (lane / 8 & 1)) * 16,
            of_weights = (lane & 15) * WEIGHT_ROW + lane / 16 * 16, of_own = (16 * warp + g) * WEIGHT_ROW + 4 * t,
            of_offsets = ROW + (16 * warp + 2 * t) * PITCH + 4 * (g % GROUPS);
  for (int tile = 0; tile < tiles; tile++) {
    const u32 stage = base + tile % STAGES * STAGE, weights = base + STAGES * STAGE + tile % 2 * WEIGHTS;
    wait_phase(base + FULL_AT + 8 * (tile % STAGES), tile / STAGES & 1);
    u32 slots[5];
    loader.find(slots, tile + STAGES - 1);

    float x[TILES][4] = {};
    UNROLL for (int c = 0; c < 4; c++) {
      u32 w[4];
      ldmatrix4(w, stage + of_logits + D / 4 + 32 * c);
      UNROLL for (int n = 0; n < TILES; n++)
          mma_bf16(x[n], w[0], w[1], w[2], w[3], q.rotary[n][c][0], q.rotary[n][c][1]);
    }
    u32 words[2][GROUPS], mine[2];  // of tokens g and g + 8
    UNROLL for (int o = 0; o < 2; o++) {
      const u32 at = stage + ROW + (16 * warp + g + 8 * o) * PITCH;
      shared_load<4>(at, words[o]);
      shared_load<1>(at + 4 * t, &mine[o]);
    }
    UNROLL for (int n = 0; n < TILES; n++)
        mma_tf32(x[n], low_f16(mine[0]), low_f16(mine[1]), high_f16(mine[0]), high_f16(mine[1]), q.affine[n][0],
                 q.affine[n][1]);
    int products[GROUPS][TILES][4];
    const int first[2] = {(int)BIG, (int)BIG};
    UNROLL for (int c = 0; c < 4; c++) {
      u32 w[4];
      ldmatrix4(w, stage + of_logits + 32 * c);
      UNROLL for (int r = 0; r < GROUPS; r++) {
        const u32 field = 0x03030303u << 2 * r, a[4] = {w[0] & field, w[1] & field, w[2] & field, w[3] & field};
        UNROLL for (int n = 0; n < TILES; n++) {
          u32 b[2];
          if (IN_SHARED)
            shared_load<2>(base + DIGITS_AT + Query::digits_at(n, r, c, lane), b);
          else
            b[0] = q.digits[IN_SHARED ? 0 : r][c][n][0], b[1] = q.digits[IN_SHARED ? 0 : r][c][n][1];
          if (c == 0)
            mma_u8_first(products[r][n], first, a[0], a[1], a[2], a[3], b[0], b[1]);
          else
            mma_u8(products[r][n], a[0], a[1], a[2], a[3], b[0], b[1]);
        }
      }
    }
    float scales[2][GROUPS];
    UNROLL for (int o = 0; o < 2; o++) {
      float without = 0.f;  // BIG in all products; what is lost of their sum is little beside the rounding of the query
      UNROLL for (int r = 0; r < GROUPS; r++) {
        scales[o][r] = low_f16(words[o][r]) * (1.f / (1 << 2 * r));
        without = fmaf(scales[o][r], -bits(BIG), without);
      }
      UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int j = 0; j < 2; j++) {
        float y = without;
        UNROLL for (int r = 0; r < GROUPS; r++) y = fmaf(scales[o][r], bits((u32)products[r][n][2 * o + j]), y);
        x[n][2 * o + j] = fmaf(q.factor[n][j], y, x[n][2 * o + j]);
      }
    }
    if (tile == tiles - 1) {
      const int left = part.hi - part.lo - tile * TILE - 16 * warp - g;  // tokens from this lane's first one on
      UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int i = 0; i < 4; i++)
          x[n][i] = i / 2 * 8 < left ? x[n][i] : none;
    }
    u32 y[TILES][2];  // weights of token g + 8 * o and two heads: [n][o]
    auto weigh = [&] {  // whether one is too large, itself or with a scale
      u32 large[2];
      UNROLL for (int o = 0; o < 2; o++) {
        u32 scale[GROUPS], most = 0x3C003C00u;
        UNROLL for (int r = 0; r < GROUPS; r++) {
          scale[r] = prmt(words[o][r], 0, 0x1010);
          most = max_f16(most, scale[r]);
        }
        UNROLL for (int n = 0; n < TILES; n++) {
          y[n][o] = pack_f16(ex2(fmaf(x[n][2 * o], p.factor, -m[n][0])), ex2(fmaf(x[n][2 * o + 1], p.factor, -m[n][1])));
          UNROLL for (int r = 0; r < GROUPS; r++)
              *(u32*)(memory + (weights - base) + of_own + (r * TILE + 8 * o) * WEIGHT_ROW + 16 * n) =
                  multiply_f16(y[n][o], scale[r]);
        }
        large[o] = y[0][o];
        UNROLL for (int n = 1; n < TILES; n++) large[o] = max_f16(large[o], y[n][o]);
        large[o] = multiply_f16(large[o], most);
      }
      const u32 both = max_f16(large[0], large[1]);
      return max(both & 0xFFFF, both >> 16) > MOST;
    };
    if (__syncthreads_or(weigh())) {  // seldom, behind the first tile: all agree on what is highest, and weigh again
      float* tops = (float*)(memory + TOPS_AT);
      float bound[2];  // of the largest scale, in base 2
      UNROLL for (int o = 0; o < 2; o++) {
        float largest = 0.f;
        UNROLL for (int r = 0; r < GROUPS; r++) largest = fmaxf(largest, low_f16(words[o][r]));
        bound[o] = fmaxf((float)__float_as_uint(largest) * (1.f / 8388608.f) - 127.f, 0.f);
      }
      UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int j = 0; j < 2; j++) {
        const float most = fmaxf(fmaf(x[n][j], p.factor, bound[0]), fmaf(x[n][j + 2], p.factor, bound[1]));
        const float top = over_lanes(most, true, 4, 32);
        if (g == 0) tops[warp * HEADS + 8 * n + 2 * t + j] = top;
      }
      __syncthreads();
      UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int j = 0; j < 2; j++) {
        float top = m[n][j];
        UNROLL for (int i = 0; i < WARPS; i++) top = fmaxf(top, tops[i * HEADS + 8 * n + 2 * t + j] - HEADROOM);
        const float fade = ex2(m[n][j] - top);
        m[n][j] = top;
        all[n][j] *= fade;
        UNROLL for (int r = 0; r < GROUPS; r++) UNROLL for (int e = 0; e < 2; e++) UNROLL for (int o = 0; o < 2; o++)
            sums[e][r][n][2 * o + j] *= fade;
      }
      weigh();
      __syncthreads();
    }
    if (tile + STAGES - 1 < tiles) loader.copy(slots, part, tile + STAGES - 1, base, warp);
    u32 offsets[2];  // of tokens 2t and 2t + 1, and those eight behind, and group g
    UNROLL for (int o = 0; o < 2; o++) {
      u32 word[2];
      UNROLL for (int i = 0; i < 2; i++) shared_load<1>(stage + of_offsets + (8 * o + i) * PITCH, &word[i]);
      offsets[o] = g < GROUPS ? prmt(word[0], word[1], 0x7632) : 0x3C003C00u;
    }
    UNROLL for (int n = 0; n < TILES; n++)
        mma_f16(all[n], offsets[0], 0, offsets[1], 0, transpose(y[n][0]), transpose(y[n][1]));
    UNROLL for (int k = 0; k < TILE; k += 16) {
      u32 w[4];
      ldmatrix4_trans(w, stage + of_sums + k * PITCH);
      UNROLL for (int r = 0; r < GROUPS; r++) {
        u32 by[3][2];
        weights_of(by, weights + of_weights + (r * TILE + k) * WEIGHT_ROW);
        const u32 field = 0x00030003u << 2 * r;
        UNROLL for (int e = 0; e < 2; e++) UNROLL for (int n = 0; n < TILES; n++)
            mma_f16(sums[e][r][n], w[0] >> 8 * e & field, w[1] >> 8 * e & field, w[2] >> 8 * e & field,
                    w[3] >> 8 * e & field, by[n][0], by[n][1]);
      }
    }
  }

  __syncthreads();  // all have read their tiles, whose memory takes what warps add up
  float* shared = (float*)memory;
  if (g <= GROUPS)
    UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int j = 0; j < 2; j++)
        shared[(warp * HEADS + 8 * n + 2 * t + j) * (GROUPS + 1) + g] = all[n][j];
  __syncthreads();
  UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int j = 0; j < 2; j++) {
    const int of = 8 * n + 2 * t + j;
    if (head + of >= p.heads) continue;
    const long long to = where + (long long)of * (p.exact_splits + p.splits);
    float whole[GROUPS + 1] = {};
    UNROLL for (int i = 0; i < WARPS; i++) UNROLL for (int r = 0; r <= GROUPS; r++)
        whole[r] += shared[(i * HEADS + of) * (GROUPS + 1) + r];
    if (warp == 0 && g == 0) p.lse[to] = m[n][j] + log2f(whole[GROUPS]);
    const float one = 1.f / whole[GROUPS];
    UNROLL for (int r = 0; r < GROUPS; r++) UNROLL for (int o = 0; o < 2; o++) {
      const float unit = 16777216.f / (1 << 2 * r);
      float2 pair;
      pair.x = fmaf(sums[0][r][n][2 * o + j], unit, whole[r]) * one;
      pair.y = fmaf(sums[1][r][n][2 * o + j], unit, whole[r]) * one;
      *(float2*)(p.partial + to * D + 128 * r + 32 * warp + 2 * (g + 8 * o)) = pair;
    }
  }
}

// Rows of the windows. A warp has a quarter of the channels, for the logits those of rotary keys among them.
DEV void attend_windows(const Params& p, const Part& part, u8* memory, long long token, int head, long long where) {
  constexpr int STEPS = (D + ROPE) / 16 / WARPS, COPIED = EXACT_STAGES - 1;
  const u32 base = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int tiles = part.tiles(EXACT_TILE);
  const long long block = __ldg(p.sink_block + part.row);
  auto copy = [&](int tile) {  // a thread has an eighth of a row
    const int mine = threadIdx.x / 8, unit = threadIdx.x % 8;
    const u32 to = base + tile % EXACT_STAGES * EXACT_STAGE + mine * EXACT_PITCH + 16 * unit;
    const int i = min(part.lo + tile * EXACT_TILE + mine, part.hi - 1);
    const int position = i < part.s - part.a ? part.a + i : part.r - (part.s - part.a) + i;
    const bool sink = position >= part.sink_from && position < part.s;
    const long long at = sink ? block * p.sink + position : (long long)part.row * p.ring + position % p.ring;
    const u8* latent = (sink ? p.sink_latent : p.ring_latent) + at * 2 * D + 16 * unit;
    UNROLL for (int k = 0; k < D / 64; k++) copy_async<16>(to + 128 * k, latent + 128 * k, true);
    copy_async<16>(to + 2 * D, (sink ? p.sink_rotary : p.ring_rotary) + at * 2 * ROPE + 16 * unit, true);
    arrive_copies(base + FULL_AT + 8 * (tile % EXACT_STAGES));
  };
  UNROLL_1 for (int i = 0; i < min(COPIED, tiles); i++) copy(i);
  u32 q[STEPS][TILES][2];
  UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int c = 0; c < STEPS; c++) UNROLL for (int h = 0; h < 2; h++) {
    q[c][n][h] = 0;
    if (head + 8 * n + g < p.heads)
      q[c][n][h] = __ldg((const u32*)(p.query + 2 * (token + (head + 8 * n + g) * p.query_head +
                                                    16 * (STEPS * warp + c) + 8 * h + 2 * t)));
  }
  const float none = -bits(0x7F800000u);
  float m[TILES][2], l[TILES][2] = {}, sums[8][TILES][4] = {};
  UNROLL for (int n = 0; n < TILES; n++) m[n][0] = m[n][1] = none;
  const u32 of_logits = (lane & 15) * EXACT_PITCH + (2 * STEPS * warp + lane / 16) * 16,
            of_sums = ((lane & 7) + lane / 16 * 8) * EXACT_PITCH + (16 * warp + (lane / 8 & 1)) * 16;
  UNROLL_1 for (int tile = 0; tile < tiles; tile++) {
    const u32 stage = base + tile % EXACT_STAGES * EXACT_STAGE;
    wait_phase(base + FULL_AT + 8 * (tile % EXACT_STAGES), tile / EXACT_STAGES & 1);
    float x[TILES][4] = {};
    UNROLL for (int c = 0; c < STEPS; c++) {
      u32 w[4];
      ldmatrix4(w, stage + of_logits + 32 * c);
      UNROLL for (int n = 0; n < TILES; n++) mma_bf16(x[n], w[0], w[1], w[2], w[3], q[c][n][0], q[c][n][1]);
    }
    float4* parts = (float4*)(memory + PARTS_AT) + tile % 2 * WARPS * TILES * 32;
    UNROLL for (int n = 0; n < TILES; n++) parts[(TILES * warp + n) * 32 + lane] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    __syncthreads();
    if (tile + COPIED < tiles) copy(tile + COPIED);
    u32 by[TILES][2];
    bool risen = false;
    float fade[TILES][2];
    UNROLL for (int n = 0; n < TILES; n++) {
      float y[4] = {};
      UNROLL for (int i = 0; i < WARPS; i++) {
        const float4 z = parts[(TILES * i + n) * 32 + lane];
        y[0] += z.x, y[1] += z.y, y[2] += z.z, y[3] += z.w;
      }
      const int left = part.hi - part.lo - tile * EXACT_TILE - g;
      UNROLL for (int i = 0; i < 4; i++) y[i] = i / 2 * 8 < left ? y[i] * p.factor : none;
      UNROLL for (int j = 0; j < 2; j++) {
        const float top = fmaxf(m[n][j], over_lanes(fmaxf(y[j], y[j + 2]), true, 4, 32));
        fade[n][j] = ex2(m[n][j] - top);
        risen |= top > m[n][j];
        m[n][j] = top;
        y[j] = ex2(y[j] - top), y[j + 2] = ex2(y[j + 2] - top);
        l[n][j] = l[n][j] * fade[n][j] + y[j] + y[j + 2];
      }
      UNROLL for (int o = 0; o < 2; o++) by[n][o] = transpose(pack_bf16(y[2 * o], y[2 * o + 1]));
    }
    if (__any_sync(ALL, risen))
      UNROLL for (int i = 0; i < 8; i++) UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int k = 0; k < 4; k++)
          sums[i][n][k] *= fade[n][k % 2];
    UNROLL for (int i = 0; i < 8; i++) {
      u32 w[4];
      ldmatrix4_trans(w, stage + of_sums + 32 * i);
      UNROLL for (int n = 0; n < TILES; n++) mma_bf16(sums[i][n], w[0], w[1], w[2], w[3], by[n][0], by[n][1]);
    }
  }
  UNROLL for (int n = 0; n < TILES; n++) UNROLL for (int j = 0; j < 2; j++) {
    const int of = 8 * n + 2 * t + j;
    const float all = over_lanes(l[n][j], false, 4, 32), one = 1.f / all;
    if (head + of >= p.heads) continue;
    const long long to = where + (long long)of * (p.exact_splits + p.splits);
    if (warp == 0 && g == 0) p.lse[to] = m[n][j] + log2f(all);
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int o = 0; o < 2; o++)
        p.partial[to * D + 128 * warp + 16 * i + 8 * o + g] = sums[i][n][2 * o + j] * one;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) oscar_latent_stage1(const __grid_constant__ Params p) {
  u8* memory = dynamic_shared();
  const bool one = p.head_blocks == 1;  // saves a division
  const int split = one ? blockIdx.x : blockIdx.x / p.head_blocks, b = blockIdx.y;
  const int head = one ? 0 : blockIdx.x % p.head_blocks * HEADS;
  if (threadIdx.x == 0)
    UNROLL for (int i = 0; i < STAGES; i++) barrier_init(shared_address(memory) + FULL_AT + 8 * i, THREADS);
  wait_then_release();
  const Part part(p, b, split);
  const long long where = ((long long)b * p.heads + head) * (p.exact_splits + p.splits) + split;
  __syncthreads();
  if (part.lo >= part.hi) {
    if (threadIdx.x < HEADS && head + (int)threadIdx.x < p.heads)
      p.lse[where + threadIdx.x * (p.exact_splits + p.splits)] = -bits(0x7F800000u);
  } else if (split < p.exact_splits) {
    attend_windows(p, part, memory, (long long)b * p.query_token, head, where);
  } else {
    attend_codes(p, part, memory, (long long)b * p.query_token, head, where);
  }
}
