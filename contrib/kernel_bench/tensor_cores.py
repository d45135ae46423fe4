"""What other instructions cost while the tensor cores work, and what a product costs beside them.

    python contrib/kernel_bench/tensor_cores.py

A line per instruction: its clock cycles in a warp that has a scheduler to itself, then beside
products by one and by two other warps of that scheduler; then the clock cycles of a product of 64
rows with two bfloat16 halves of 128 columns, as the write kernel has it, alone and beside one warp
of the instruction. Compute capability 9.0.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = {
    "min.u16x2": 'asm volatile("min.u16x2 %0, %0, %1;" : "+r"(x[i]) : "r"(x[(i + 7) % 16]));',
    "mad.u32": (
        'asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x[i]) : "r"(p.seed), "r"(x[(i + 7) %'
        " 16]));"
    ),
    "fma.f32": (
        'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(x[i]) : "r"(p.seed), "r"(p.seed + 1));'
    ),
}
UNROLLED, GROUPS = 128, 3
SHORT, LONG = 40_000, 4_000_000
"""Clock cycles that a side takes while it is timed, and while the other one is; about, and
alone."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("products", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("loops", ctypes.c_int),
        ("seed", ctypes.c_uint),
    )


def source(instruction: str) -> str:
    """A kernel whose first warpgroups make products, the last one runs `instruction`; it leaves
    their clock cycles."""
    return f"""
#include "machine.cuh"
struct Params {{ long long* out; int products, rounds, loops; u32 seed; }};
DEV void multiply(const Params& p, u32 weights) {{
  float y[64];
  const u32 a[4] = {{p.seed, p.seed, p.seed, p.seed}};
  UNROLL_1 for (int round = 0; round < p.rounds; round++) {{
    matrix_begin(y);
    UNROLL for (int k = 0; k < 16; k++)
        matrix_multiply(y, a, columns_address(weights) + (k / 4 * 16384 + k % 4 * 32) / 16, k > 0);
    matrix_commit();
    matrix_end(y);
  }}
  if (y[0] == 12345.f) p.out[0] = 0;
}}
DEV void others(const Params& p) {{
  u32 x[16], sum = 0;
  UNROLL for (int i = 0; i < 16; i++) x[i] = threadIdx.x * 77 + i * 131;
  UNROLL_1 for (int loop = 0; loop < p.loops; loop++) {{
    UNROLL for (int again = 0; again < {UNROLLED // 16}; again++) UNROLL for (int i = 0; i < 16; i++) {instruction}
  }}
  UNROLL for (int i = 0; i < 16; i++) sum ^= x[i];
  if (sum == 12345) p.out[0] = 0;
}}
extern "C" __global__ void __launch_bounds__({128 * GROUPS}, 1) contend(const __grid_constant__ Params p) {{
  const u32 weights = (shared_address(dynamic_shared()) + 1023) & ~1023u;  // anything: only the time counts
  __syncthreads();
  const int group = threadIdx.x / 128;
  const long long start = clock64();
  if (group < p.products) multiply(p, weights);
  else others(p);
  if (threadIdx.x % 128 == 0) p.out[blockIdx.x * {GROUPS} + group] = clock64() - start;
}}"""  # noqa: E501


def main() -> int:
    """Print the table; 2 without a GPU that has these tensor cores."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sys.path.insert(0, str(ROOT / "kernels"))
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("no CUDA device of compute capability 9.0", file=sys.stderr)
        return 2
    from oscar_kernels import nvrtc
    from oscar_kernels.kv_write.cuda import SOURCE
    from oscar_kernels.nvrtc import compile_source

    out = torch.zeros(
        torch.cuda.get_device_properties(0).multi_processor_count, GROUPS, dtype=torch.int64
    ).cuda()
    shared = 65536 + 1024

    def cycles(kernel: nvrtc.Kernel, products: int, others: int, *, timed: int) -> float:
        """Of one instruction or product of warpgroup `timed`, a median of multiprocessors; the
        others last longer."""
        rounds, loops = (
            (LONG // 1040, SHORT // UNROLLED)
            if timed >= products
            else (SHORT // 1040, LONG // UNROLLED)
        )
        launched = nvrtc.Kernel(kernel.handle, 128 * (products + others))
        parameters = _Params(out.data_ptr(), products, rounds, loops, 0x3F803F80)
        for _ in range(2):  # the first one brings the code
            launched.launch(
                (len(out), 1), parameters, torch.cuda.current_stream().cuda_stream, shared=shared
            )
        torch.cuda.synchronize()
        return statistics.median(out[:, timed].tolist()) / (
            loops * UNROLLED if timed >= products else rounds
        )

    print("instruction,alone,beside 1,beside 2,product alone,product beside")
    for name, instruction in INSTRUCTIONS.items():
        files = {"machine.cuh": SOURCE.files()["machine.cuh"], "contend.cu": source(instruction)}
        (kernel,) = nvrtc.load(
            compile_source(files, "contend.cu", ["-arch=sm_90a"]), {"contend": 128 * GROUPS}
        )
        kernel.allow_shared(shared)
        found = [cycles(kernel, products, 1, timed=products) for products in range(GROUPS)]
        products = [cycles(kernel, 1, others, timed=0) for others in (0, 1)]
        print(
            f"{name},"
            + ",".join(f"{x:.2f}" for x in found)
            + ","
            + ",".join(f"{x:.0f}" for x in products),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
