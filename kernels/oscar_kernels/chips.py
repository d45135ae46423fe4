"""Which path the kernels take on each chip of NVIDIA, by its compute capability; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

Capability = tuple[int, int]

LOWEST: Capability = (8, 0)
"""What every kernel needs: bfloat16 tensor cores and asynchronous copies."""
WRITE: Capability = (9, 0)
"""What the write in CUDA C++ is for: `wgmma`, which no later chip has."""
MEASURED: frozenset[Capability] = frozenset({(9, 0)})
"""Chips on which tiles were tuned and everything was tested: H100 and H200."""


@dataclass(frozen=True)
class Chip:
    """A chip that sources are compiled for.

    Attributes:
        name: of some GPUs with it.
        shared_bytes: most shared memory of a block (CUDA C++ Programming Guide, table of technical
            specifications per compute capability).
    """

    name: str
    shared_bytes: int


@dataclass(frozen=True)
class Target:
    """A GPU that kernels are compiled for, as far as they depend on it.

    Attributes:
        capability: compute capability.
        shared_bytes: most shared memory of a block.
        multiprocessors: their number.
        driver: version of the driver, as 13000.
    """

    capability: Capability
    shared_bytes: int
    multiprocessors: int
    driver: int = 0


CHIPS: dict[Capability, Chip] = {
    (8, 0): Chip("A100", 163 << 10),
    (8, 6): Chip("A10, RTX 30", 99 << 10),
    (8, 9): Chip("L4, L40S, RTX 40", 99 << 10),
    (9, 0): Chip("H100, H200", 227 << 10),
    (10, 0): Chip("B200", 227 << 10),
    (12, 0): Chip("RTX 50, RTX PRO 6000", 99 << 10),
}


@dataclass(frozen=True)
class KernelPath:
    """What runs on a chip: `cuda`, or `triton` for the ops that have no CUDA C++ there.

    Single shapes may still go to Triton: those that need more shared memory than a block has, and
    those that are faster there.
    """

    decode: str
    write: str
    measured: bool


def kernel_path(capability: Capability) -> KernelPath | None:
    """The path of a chip; `None` where no kernel runs."""
    if capability < LOWEST:
        return None
    write = "cuda" if capability == WRITE else "triton"
    return KernelPath("cuda", write, capability in MEASURED)
