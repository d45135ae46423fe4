"""How fast this GPU issues a loop of straight-line code, by its size: where its instruction caches end.

    python kernels/benchmarks/instruction_cache.py

A line per size of the loop: cycles per instruction of one warp, for some numbers of warps of a multiprocessor, which
run in step or each somewhere else in the loop. Four warps or fewer have a scheduler each, so 1 is the best; eight share
them, so 2 is, and so on.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from pathlib import Path

SIZES = (256, 512, 1024, 1536, 1792, 2048, 3072, 4096, 8192, 12_288)
WARPS = (1, 4, 8, 12, 16)
SKEW = 1777
"""Clock cycles between the starts of two warps that are not in step."""

INSTRUCTIONS = 200_000
"""Of a warp, about."""


class _Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("rounds", ctypes.c_int), ("skew", ctypes.c_int))


def source(size: int) -> str:
    """A kernel that runs `size` multiply-adds over and over, and leaves the clock cycles of each block's first warp."""
    line = 'asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[{}]) : "f"(y));'
    body = "\n".join(line.format(i % 8) for i in range(size))
    return f"""
struct Params {{ long long* out; int rounds, skew; }};
extern "C" __global__ void __launch_bounds__(1024, 1) loop(const __grid_constant__ Params p) {{
  float x[8], y = p.rounds, sum = 0.f;
  for (int i = 0; i < 8; i++) x[i] = i + threadIdx.x;
  __syncthreads();
  for (long long from = clock64(); clock64() - from < (long long)(threadIdx.x / 32) * p.skew;) {{ }}
  const long long start = clock64();
#pragma unroll 1
  for (int round = 0; round < p.rounds; round++) {{
{body}
  }}
  const long long cycles = clock64() - start;
  for (int i = 0; i < 8; i++) sum += x[i];
  if (threadIdx.x == 0) p.out[blockIdx.x] = cycles + (sum == 12345.f);
}}"""


def main() -> int:
    """Print the table; 2 without a GPU."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    from oscar_kernels.nvrtc import driver
    from oscar_kernels.nvrtc.compile import compile_source

    device = torch.cuda.get_device_properties(0)
    out = torch.zeros(device.multi_processor_count, dtype=torch.int64, device="cuda")
    columns = [f"{n}{way}" for n in WARPS for way in ("", " apart")]
    print("KiB,instructions," + ",".join(f"{name} warps" for name in columns))
    for size in SIZES:
        code = compile_source({"loop.cu": source(size)}, "loop.cu", [f"-arch=sm_{device.major}{device.minor}"])
        (loaded,) = driver.load(code, {"loop": 1024})
        rounds, found = max(4, INSTRUCTIONS // size), []
        for warps in WARPS:
            kernel = driver.Kernel(loaded.handle, 32 * warps)
            for skew in (0, SKEW):
                for _ in range(2):  # the first one brings the code
                    stream = torch.cuda.current_stream().cuda_stream
                    kernel.launch((len(out), 1), _Params(out.data_ptr(), rounds, skew), stream)
                torch.cuda.synchronize()
                found.append(statistics.median(out.tolist()) / (rounds * size))
        print(f"{size * 16 // 1024},{size}," + ",".join(f"{x:.2f}" for x in found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
