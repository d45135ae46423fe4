// Writing new tokens into the INT2 cache: transform, clip, quantize, pack, store. Compute capability 9.0 (wgmma).
//
// Compiled by NVRTC, so nothing of CUDA is included. Shapes are -D flags: DK DV channels of a row (64, 128 or 256), GK
// GV groups of a row, BITS_K BITS_V bits of a code, RANK_K RANK_V the order statistic of the clip counted from the
// largest (0: none, else 2 to 16, and to 64 with rows of 256), GROUPS warpgroups of a block, SLOT_T ROW_T POSITION_T
// END_T integer types, AFFINE_BF16.
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

#include "side.cuh"
#include "step.cuh"

#if DK <= 128 && DV <= 128  // else the kernel for few rows is the only one: a larger matrix does not fit a block
// A block of any side; SLOTS: as `Block`.
template <bool SLOTS>
DEV void run_many(const Params& p) {
  dependents_may_start();  // they wait for the end of this one before they read what it writes
  const u32 shared = (dynamic_shared() + 1023) & ~1023u;  // tiles are swizzled by address bits
  int index = block_index();
  if (index < p.v.blocks) return run<ValueRow, SLOTS>(p, p.v, shared, index);
  index -= p.v.blocks;
  if (index < p.k.blocks) return run<KeyRow, SLOTS>(p, p.k, shared, index);
  run<QueryRow, SLOTS>(p, p.q, shared, index - p.k.blocks);
}
KERNEL(oscar_write, 128 * GROUPS, Params p) { run_many<false>(p); }
KERNEL(oscar_write_slots, 128 * GROUPS, Params p) { run_many<true>(p); }
#endif

// The same for few rows; see step.cuh.
KERNEL(oscar_write_step, STEP_THREADS, Params p) {
  dependents_may_start();
  const u32 shared = (dynamic_shared() + 1023) & ~1023u;
  int index = block_index();
  if (index < p.v.blocks) return run_step<ValueRow>(p, p.v, shared, index);
  index -= p.v.blocks;
  if (index < p.k.blocks) return run_step<KeyRow>(p, p.k, shared, index);
  run_step<QueryRow>(p, p.q, shared, index - p.k.blocks);
}
