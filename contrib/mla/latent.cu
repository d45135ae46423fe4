// Decode attention over 2-bit latents (MLA), stage 1 in CUDA C++: a candidate for the place of the Triton kernel.
//
// A block has 16 query heads and one split of a request's codes; its four warps share tiles of 64 tokens. For the
// logits a warp takes 16 tokens, all channels and one int8 digit of the query: an AND leaves four codes in the bytes
// of an operand, times 4^r for quarter r of the channels, which is also its group. For the sums a warp takes all
// tokens and the 128 channels of 32 bytes: a field left in place in a 16-bit lane is the float16 subnormal
// code * 4^r * 2^-24. Weights times the scale of each group cross shared memory in float16.
//
// What the digit loses of the query meets the middle of the codes, and all offsets the sums of the query, as one
// product in tf32 of a token's scales and offsets with numbers of the head, in two parts.
//
// Compiled by NVRTC, or by g++ for the emulator. -D: SLOT_T INDPTR_T ROW_T integer types, STAGES, AFFINE_BF16, RESIDENT
// blocks of a multiprocessor; with more than two the digits lie in shared memory, for want of registers.
#include "machine.cuh"

constexpr int D = 512, ROPE = 64, GROUPS = 4, TILE = 64, WARPS = 4, THREADS = 32 * WARPS, HEADS = 16;
constexpr int ROW = D / 4 + 2 * ROPE, AFFINE = 4 * GROUPS;  // bytes of a token
constexpr int STAGE = TILE * (ROW + AFFINE), WEIGHT_ROW = 48, WEIGHTS = GROUPS * TILE * WEIGHT_ROW;
constexpr int TOPS_AT = STAGES * STAGE + 2 * WEIGHTS, FLAGS_AT = TOPS_AT + 2 * WARPS * HEADS * 4,
              FULL_AT = FLAGS_AT + 2 * WARPS * 4, DIGITS_AT = (FULL_AT + 8 * STAGES + 15) / 16 * 16;
constexpr bool IN_SHARED = RESIDENT > 2;
constexpr float HEADROOM = 10.f, SLACK = 5.f, MIDDLE = 1.5f;  // as in latent_kernel.py

struct Params {
  const u8 *query, *codes, *affine;
  const INDPTR_T* indptr;
  const SLOT_T* slots;
  const ROW_T* rows;
  const int *sink_from, *ring_start;
  float *partial, *lse;
  long long query_token, query_head;  // strides, in numbers
  float factor;                       // of a logit, in base 2
  int heads, head_blocks, splits, exact_splits, sink, recent;
};

DEV float bits(u32 x) { return __uint_as_float(x); }
DEV float scale_of(u32 word) { return AFFINE_BF16 ? low_bf16(word) : low_f16(word); }
DEV float offset_of(u32 word) { return AFFINE_BF16 ? high_bf16(word) : high_f16(word); }
DEV float over_lanes(float x, bool largest, int from, int to) {
  UNROLL for (int o = from; o < to; o *= 2) {
    const float y = __shfl_xor_sync(ALL, x, o);
    x = largest ? fmaxf(x, y) : x + y;
  }
  return x;
}

// The query of 16 heads as operands: column g of the first and of the second n-tile is head g and 8 + g.
struct Query {
  u32 digits[IN_SHARED ? 1 : GROUPS][4][4], rotary[2][4][2];  // [r][c][2 * n + half]
  float factor[2][2], affine[2][2][2];  // of columns 2t and 2t + 1; [n][lost or sum][part] of column g
  // With digits in `shared` every warp leaves those of one group there.
  DEV void load(const Params& p, long long token, int head, u8* shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    UNROLL for (int n = 0; n < 2; n++) {
      const bool seen = head + 8 * n + g < p.heads;
      const u8* row = p.query + 2 * (token + (seen ? head + 8 * n + g : 0) * p.query_head);
      uint2 x[GROUPS][4][2];
      float largest = 0.f;
      UNROLL for (int r = 0; r < GROUPS; r++) UNROLL for (int c = 0; c < 4; c++) UNROLL for (int h = 0; h < 2; h++) {
        x[r][c][h] = {0, 0};
        if (seen) x[r][c][h] = __ldg((const uint2*)(row + 2 * (128 * r + 32 * c + 16 * h + 4 * t)));
        largest = fmaxf(largest, fmaxf(fabsf(low_bf16(x[r][c][h].x)), fabsf(high_bf16(x[r][c][h].x))));
        largest = fmaxf(largest, fmaxf(fabsf(low_bf16(x[r][c][h].y)), fabsf(high_bf16(x[r][c][h].y))));
      }
      largest = fmaxf(over_lanes(largest, true, 1, 4), 1e-30f);
      const float unit = 127.f / largest;
      UNROLL for (int r = 0; r < GROUPS; r++) {
        float sum = 0.f;
        int rounded = 0;
        UNROLL for (int c = 0; c < 4; c++) UNROLL for (int h = 0; h < 2; h++) {
          const float y[4] = {low_bf16(x[r][c][h].x), high_bf16(x[r][c][h].x), low_bf16(x[r][c][h].y),
                              high_bf16(x[r][c][h].y)};
          u32 word = 0;
          UNROLL for (int i = 0; i < 4; i++) {
            const u32 digit = __float_as_uint(fmaf(y[i], unit, 12582912.f)) & 255;  // rounded, in the low bits
            word |= digit << 8 * i;
            rounded += (signed char)digit;
            sum += y[i];
          }
          if (!IN_SHARED)
            digits[r][c][2 * n + h] = word;
          else if (r == warp)
            ((u32*)shared)[((4 * r + c) * 32 + lane) * 4 + 2 * n + h] = word;
        }
        sum = over_lanes(sum, false, 1, 4);
        const float lost = sum - over_lanes((float)rounded, false, 1, 4) * (largest * (1.f / 127.f));
        if (r == t) {
          affine[n][0][0] = bits(__float_as_uint(lost * MIDDLE) & 0xFFFFE000u);
          affine[n][0][1] = lost * MIDDLE - affine[n][0][0];
          affine[n][1][0] = bits(__float_as_uint(sum) & 0xFFFFE000u);
          affine[n][1][1] = sum - affine[n][1][0];
        }
      }
      UNROLL for (int j = 0; j < 2; j++) factor[n][j] = __shfl_sync(ALL, largest, 8 * t + 4 * j) * (1.f / 127.f);
      UNROLL for (int c = 0; c < 4; c++) UNROLL for (int h = 0; h < 2; h++) {
        rotary[n][c][h] = 0;
        if (seen) rotary[n][c][h] = __ldg((const u32*)(row + 2 * (D + 16 * c + 8 * h + 2 * t)));
      }
    }
  }
};

// Where a block's tokens are: `lo .. hi - 1` of those that are codes, counted without a hole of exact ones.
struct Part {
  int lo, hi, a, hole;
  const SLOT_T* slots;
  DEV Part(const Params& p, int b, int split) {
    const long long first = __ldg(p.indptr + b);
    const int n = (int)(__ldg(p.indptr + b + 1) - first), row = (int)__ldg(p.rows + b);
    const int s = min(n, p.sink), from = min(__ldg(p.sink_from + row), s);
    const int r = min(max(n - p.recent, __ldg(p.ring_start + row)), n);
    a = min(from, r);
    hole = s - a;
    const int count = a + max(r, s) - s;
    const int share = ((count + p.splits - 1) / p.splits + TILE - 1) / TILE * TILE;
    lo = split * share;
    hi = min(lo + share, count);
    slots = p.slots + first;
  }
  DEV u32 slot(int i) const {
    i = min(i, hi - 1);
    return (u32)__ldg(slots + (i < a ? i : i + hole));
  }
};

// Copies of one thread: a unit of eight tokens of a tile, and the scales of one of them.
struct Loader {
  u32 slot[8];
  int unit, token;
  DEV Loader() : unit(threadIdx.x % 16), token(threadIdx.x / 16) {}
  DEV void fetch(const Part& part, int tile) {
    UNROLL for (int i = 0; i < 8; i++) slot[i] = part.slot(part.lo + tile * TILE + token + 8 * i);
  }
  DEV void copy(const Params& p, const Part& part, int tile, u32 stage, u32 full) const {
    const u8* codes = p.codes + unit * 16;
    const u32 to = stage + token * ROW + (unit ^ token) * 16;  // token < 8
    const int left = part.hi - part.lo - tile * TILE - token;
    u32 mine = 0;
    UNROLL for (int i = 0; i < 8; i++) {
      copy_async<16>(to + 8 * i * ROW, codes + (u64)slot[i] * ROW, 8 * i < left);
      mine = unit == i ? slot[i] : mine;
    }
    if (unit < 8)
      copy_async<16>(stage + TILE * ROW + (token + 8 * unit) * AFFINE, p.affine + (u64)mine * AFFINE, 8 * unit < left);
    arrive_copies(full);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) oscar_latent_stage1(const __grid_constant__ Params p) {
  u8* memory = dynamic_shared();
  const u32 base = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x / p.head_blocks, head = blockIdx.x % p.head_blocks * HEADS, b = blockIdx.y;
  const Part part(p, b, split);
  const long long where = ((long long)b * p.heads + head) * (p.exact_splits + p.splits) + p.exact_splits + split;
  if (part.lo >= part.hi) {
    if (threadIdx.x < HEADS && head + (int)threadIdx.x < p.heads)
      p.lse[where + threadIdx.x * (p.exact_splits + p.splits)] = -bits(0x7F800000u);
    return;
  }
  if (threadIdx.x == 0) {
    UNROLL for (int i = 0; i < STAGES; i++) barrier_init(base + FULL_AT + 8 * i, THREADS);
    UNROLL for (int i = 0; i < 2 * WARPS; i++) ((int*)(memory + FLAGS_AT))[i] = 0;
  }
  const int tiles = (part.hi - part.lo + TILE - 1) / TILE;
  Loader loader;
  loader.fetch(part, 0);
  __syncthreads();
  UNROLL for (int i = 0; i < STAGES - 1; i++) {
    if (i < tiles) loader.copy(p, part, i, base + i * STAGE, base + FULL_AT + 8 * i);
    loader.fetch(part, i + 1);
  }
  Query q;
  q.load(p, (long long)b * p.query_token, head, memory + DIGITS_AT, warp, lane);
  if (IN_SHARED) __syncthreads();

  const float none = -bits(0x7F800000u);
  float m[2][2] = {{none, none}, {none, none}};  // the highest logit, less HEADROOM
  float l[2][2] = {}, z[2][2][GROUPS] = {};  // of columns 2t and 2t + 1
  float sums[2][GROUPS][2][4] = {};  // [odd channel][group][n]: channels g and g + 8 of a warp's 16-bit lanes
  u32 of_logits[4];  // bytes of a stage that this lane addresses for logits, and for sums; of weights that it reads, writes
  UNROLL for (int c = 0; c < 4; c++)
      of_logits[c] = (16 * warp + (lane & 15)) * ROW + (((2 * c + lane / 16) ^ (lane & 7)) * 16);
  const u32 of_sums = ((lane & 7) + lane / 16 * 8) * ROW + (((2 * warp + (lane / 8 & 1)) ^ (lane & 7)) * 16),
            of_weights = (lane & 15) * WEIGHT_ROW + lane / 16 * 16, of_own = (16 * warp + g) * WEIGHT_ROW + 4 * t;
  for (int tile = 0; tile < tiles; tile++) {
    const u32 stage = base + tile % STAGES * STAGE, weights = base + STAGES * STAGE + tile % 2 * WEIGHTS;
    wait_phase(base + FULL_AT + 8 * (tile % STAGES), tile / STAGES & 1);

    float x[2][4] = {};
    UNROLL for (int c = 0; c < 4; c++) {
      u32 w[4];
      ldmatrix4(w, stage + of_logits[c] + D / 4);
      UNROLL for (int n = 0; n < 2; n++)
          mma_bf16(x[n], w[0], w[1], w[2], w[3], q.rotary[n][c][0], q.rotary[n][c][1]);
    }
    u32 words[2][GROUPS], mine[2];  // of tokens g and g + 8
    UNROLL for (int o = 0; o < 2; o++) {
      const u32 at = stage + TILE * ROW + (16 * warp + g + 8 * o) * AFFINE;
      shared_load<4>(words[o], at);
      shared_load<1>(&mine[o], at + 4 * t);
    }
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 2; i++)
        mma_tf32(x[n], scale_of(mine[0]), scale_of(mine[1]), offset_of(mine[0]), offset_of(mine[1]), q.affine[n][0][i],
                 q.affine[n][1][i]);
    int products[GROUPS][2][4];
    const int zero[2] = {0, 0};
    UNROLL for (int c = 0; c < 4; c++) {
      u32 w[4];
      ldmatrix4(w, stage + of_logits[c]);
      UNROLL for (int r = 0; r < GROUPS; r++) {
        const u32 field = 0x03030303u << 2 * r, a[4] = {w[0] & field, w[1] & field, w[2] & field, w[3] & field};
        u32 b[4];
        if (IN_SHARED)
          shared_load<4>(b, base + DIGITS_AT + ((4 * r + c) * 32 + lane) * 16);
        else
          UNROLL for (int i = 0; i < 4; i++) b[i] = q.digits[IN_SHARED ? 0 : r][c][i];
        UNROLL for (int n = 0; n < 2; n++) {
          if (c == 0)
            mma_u8_first(products[r][n], zero, a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]);
          else
            mma_u8(products[r][n], a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1]);
        }
      }
    }
    float scales[2][GROUPS], bound[2];
    UNROLL for (int o = 0; o < 2; o++) {
      float largest = 0.f;
      UNROLL for (int r = 0; r < GROUPS; r++) {
        scales[o][r] = scale_of(words[o][r]);
        largest = fmaxf(largest, scales[o][r]);
      }
      bound[o] = fmaxf((float)__float_as_uint(largest) * (1.f / 8388608.f) - 127.f, -24.f);
    }
    const int left = part.hi - part.lo - tile * TILE - 16 * warp - g;  // tokens from this lane's first one on
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) {
      float y = 0.f;
      UNROLL for (int r = 0; r < GROUPS; r++)
          y = fmaf(scales[i / 2][r] * (1.f / (1 << 2 * r)), __int2float_rn(products[r][n][i]), y);
      x[n][i] = fmaf(q.factor[n][i % 2], y, x[n][i]) * p.factor;
    }
    if (tile == tiles - 1)
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++)
          x[n][i] = i / 2 * 8 < left ? x[n][i] : none;
    bool raise = false;
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < 2; j++)
        raise |= fmaxf(x[n][j] + bound[0], x[n][j + 2] + bound[1]) > m[n][j] + (HEADROOM + SLACK);
    int* flags = (int*)(memory + FLAGS_AT) + tile % 2 * WARPS;
    float* tops = (float*)(memory + TOPS_AT) + tile % 2 * WARPS * HEADS;
    if (__any_sync(ALL, raise)) {
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < 2; j++) {
        const float top = over_lanes(fmaxf(x[n][j] + bound[0], x[n][j + 2] + bound[1]), true, 4, 32);
        if (g == 0) tops[warp * HEADS + 8 * n + 2 * t + j] = top;
      }
      if (lane == 0) flags[warp] = tile + 1;
    }
    float y[2][4];  // weights
    auto weigh = [&] {
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++)
          y[n][i] = ex2(x[n][i] - m[n][i % 2]);
      UNROLL for (int r = 0; r < GROUPS; r++) UNROLL for (int o = 0; o < 2; o++) UNROLL for (int n = 0; n < 2; n++)
          *(u32*)(memory + (weights - base) + of_own + (r * TILE + 8 * o) * WEIGHT_ROW + 16 * n) =
              pack_f16(y[n][2 * o] * scales[o][r], y[n][2 * o + 1] * scales[o][r]);
    };
    weigh();
    __syncthreads();
    bool risen = false;
    UNROLL for (int i = 0; i < WARPS; i++) risen |= flags[i] == tile + 1;
    if (risen) {  // seldom, behind the first tile: all agree on what is highest, and weigh again
      UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < 2; j++) {
        float top = m[n][j];
        UNROLL for (int i = 0; i < WARPS; i++)
            if (flags[i] == tile + 1) top = fmaxf(top, tops[i * HEADS + 8 * n + 2 * t + j] - HEADROOM);
        const float fade = ex2(m[n][j] - top);
        m[n][j] = top;
        l[n][j] *= fade;
        UNROLL for (int r = 0; r < GROUPS; r++) {
          z[n][j][r] *= fade;
          UNROLL for (int e = 0; e < 2; e++) UNROLL for (int o = 0; o < 2; o++) sums[e][r][n][2 * o + j] *= fade;
        }
      }
      weigh();
      __syncthreads();
    }
    if (tile + STAGES - 1 < tiles) {
      const int next = tile + STAGES - 1;
      loader.copy(p, part, next, base + next % STAGES * STAGE, base + FULL_AT + 8 * (next % STAGES));
      loader.fetch(part, next + 1);
    }
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < 4; i++) {
      l[n][i % 2] += y[n][i];
      UNROLL for (int r = 0; r < GROUPS; r++)
          z[n][i % 2][r] = fmaf(y[n][i], offset_of(words[i / 2][r]), z[n][i % 2][r]);
    }
    UNROLL for (int k = 0; k < TILE; k += 16) {
      u32 w[4];
      ldmatrix4_trans(w, stage + of_sums + k * ROW);
      UNROLL for (int r = 0; r < GROUPS; r++) {
        u32 by[4];
        ldmatrix4_trans(by, weights + of_weights + (r * TILE + k) * WEIGHT_ROW);
        const u32 field = 0x00030003u << 2 * r;
        UNROLL for (int e = 0; e < 2; e++) UNROLL for (int n = 0; n < 2; n++)
            mma_f16(sums[e][r][n], w[0] >> 8 * e & field, w[1] >> 8 * e & field, w[2] >> 8 * e & field,
                    w[3] >> 8 * e & field, by[2 * n], by[2 * n + 1]);
      }
    }
  }

  __syncthreads();  // all have read their tiles, whose memory takes what warps add up
  float* shared = (float*)memory;
  UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < 2; j++) UNROLL for (int r = -1; r < GROUPS; r++) {
    const float x = over_lanes(r < 0 ? l[n][j] : z[n][j][r < 0 ? 0 : r], false, 4, 32);
    if (g == 0) shared[(warp * HEADS + 8 * n + 2 * t + j) * (GROUPS + 1) + r + 1] = x;
  }
  __syncthreads();
  UNROLL for (int n = 0; n < 2; n++) UNROLL for (int j = 0; j < 2; j++) {
    const int of = 8 * n + 2 * t + j;
    if (head + of >= p.heads) continue;
    const long long to = where + (long long)of * (p.exact_splits + p.splits);
    float all[GROUPS + 1] = {};
    UNROLL for (int i = 0; i < WARPS; i++) UNROLL for (int r = 0; r <= GROUPS; r++)
        all[r] += shared[(i * HEADS + of) * (GROUPS + 1) + r];
    if (warp == 0 && g == 0) p.lse[to] = m[n][j] + log2f(all[0]);
    const float one = 1.f / all[0];
    UNROLL for (int r = 0; r < GROUPS; r++) UNROLL for (int o = 0; o < 2; o++) {
      const float unit = 16777216.f / (1 << 2 * r);
      float2 pair;
      pair.x = fmaf(sums[0][r][n][2 * o + j], unit, all[r + 1]) * one;
      pair.y = fmaf(sums[1][r][n][2 * o + j], unit, all[r + 1]) * one;
      *(float2*)(p.partial + to * D + 128 * r + 32 * warp + 2 * (g + 8 * o)) = pair;
    }
  }
}
