// Decode attention over an INT2 cache: stage 1 (partial results) and stage 2 (merge, undo the value transform).
//
// Compiled by NVRTC, so nothing of CUDA is included. Shapes are -D flags: DK DV channels of a row, GK GV groups of a
// row, BITS_K BITS_V bits of a code, GROUP query rows of a KV head, HB KV heads and TW token groups of a block, VH
// warps that share the query heads of a KV head, STAGES of the ring of tiles, SLOT_T INDPTR_T ROW_T integer types,
// QUERY 0 bfloat16 1 float16 2 float32, AFFINE_BF16, CAPPED, LEARNED (sinks), BLOCKS per multiprocessor, WINDOW_COST
// START; DRAFTS of a request that are verified, or 0.
//
// Work. The batch is one list of units: for every block of HB heads and every request its INT2 tiles (TILE tokens, two
// units each), then its window steps (16 * TW tokens, WINDOW_COST units each). In front of either, START units stand for
// what its beginning costs. A block takes an equal share of the list, whatever the lengths, and leaves one partial result
// per segment, a run of units of one request and kind. The plan says which; it is made in front of the first layer.
//
// Before the kernel in front has ended. If that one writes only queries and newest tokens (`prefix_stable`), a block
// copies its first tiles meanwhile, or loads its first window rows. Stage 2 looks up which parts it merges.
//
// Arithmetic of INT2 tokens. Codes go from shared memory through ldmatrix straight into the operands of mma.sync.
//
// K: one AND leaves four codes in the bytes of an int8 operand, times 2^B where B is the lowest bit of their field. The
// query is a 16-bit integer per channel in two int8 digits, neighbouring columns, so the product is exact: hi * 256 +
// lo, scaled once per token. With more than four query heads a warp (`MANY_ROWS`) a bfloat16 query is one such digit
// (`ByteQuery` says what that costs). With one in float16 codes are taken as for V, and the query is times 2^-B.
//
// V: a field left in place in a 16-bit lane is the float16 subnormal code * 2^B * 2^-24, exact; 2^-B * 2^24 goes to the
// end. Weights are float16, kept in range by a power of two for the scales of values (`State::rescale`), or bfloat16
// (`COARSE`), as codes are then.
//
// Scales and offsets stay outside: logit = scale * (q . code) + offset * sum(q), out = sum(p * scale * code) +
// sum(p * offset).
//
// Columns of a warp's matrices: one n-tile holds four query heads, lane `t = lane % 4` owning head `t` (digits hi and
// lo); with up to four heads per warp the value side uses its eight columns as (head, odd or even octet of tokens).

#include "merge.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) oscar_decode_plan(const __grid_constant__ Params p) { make_plan(p); }

extern "C" __global__ void __launch_bounds__(ROOM, BLOCKS) oscar_decode_stage1(const __grid_constant__ Params p) {
  u8* memory = dynamic_shared();
  __shared__ Segment x;
  x.fetch(p, blockIdx.x);
  Ring ring(shared_address(memory));
  if (threadIdx.x == 0)
    for (Ring x = ring; x.round == 0; x = x.plus(1)) {
      barrier_init(x.full(), 32);
      barrier_init(x.empty(), THREADS);
    }
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, local = warp % HB, part = warp / HB % VH,
            group = warp / (HB * VH);
  bool ahead = OVERLAPS && p.prefix_stable;  // of the end of the kernel in front
  if (!ahead) wait_then_release();
  while (x.at >= 0) {
    const int b = x.low / 2, head = x.block * HB + local;
    const QueryRows rows(p, b, head, part);
    State s;
    s.clear();
    if (x.low % 2)
      window_segment(p, s, x.r, b, head, rows, group, x.lo, x.hi, ahead);
    else
      int2_segment(p, s, ring, x.r, b, x.block, rows, local, group, x.lo, x.hi, warp, lane, ahead);
    meet(ahead);  // a warp without tokens has not; the kernel in front may still read what is stored here
    leave(p, s, memory, x.at, x.low % 2, warp, lane);
    if (!x.more) break;
    const int next = p.blocks + x.at + 1;
    __syncthreads();
    x.fetch(p, next);
    __syncthreads();
  }
  meet(ahead);
}

#define STAGE2(ROWS, WARPS_OF_BLOCK, ...)                                                                              \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__) oscar_decode_stage2_##ROWS(const __grid_constant__ Params p) { \
    merge<WARPS_OF_BLOCK, ROWS>(p);                                                                                    \
  }
STAGE2(1, 16, 512)
STAGE2(2, 8, 256, 2)
STAGE2(4, 8, 256, 2)
STAGE2(8, 8, 256, 2)
STAGE2(16, 8, 256, 2)
STAGE2(24, 8, 256, 2)
