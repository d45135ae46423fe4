"""Which path the kernels take on each chip of NVIDIA, by its compute capability; needs no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

Capability = tuple[int, int]

LOWEST: Capability = (8, 0)
"""What every kernel needs: bfloat16 tensor cores and asynchronous copies."""
WRITE: Capability = (9, 0)
"""What the write in CUDA C++ is for: `wgmma`, which no later chip has."""
MEASURED: frozenset[Capability] = frozenset({(9, 0)})
"""Chips on which tiles were tuned and everything was tested, with the cards that `state` names."""
RAN_ELSEWHERE: frozenset[Capability] = frozenset({(8, 0), (8, 6), (8, 9)})
"""Chips whose code `make gpu-check` runs on a later one; see `Target.as_older`."""


@dataclass(frozen=True)
class Card:
    """A GPU that people have.

    Attributes:
        name: without its maker.
        sold: its GB of memory in the words of its maker, which are GiB.
        note: `ecc` where a sixteenth of them is for error correction, as the driver reports of
            GDDR6; `shared` where the CPU has them, too, and the system keeps about as much.
    """

    name: str
    sold: int
    note: str = ""

    @property
    def memory(self) -> int:
        """Bytes that programs see, within two percent."""
        return (self.sold << 30) * 15 // 16 if self.note else self.sold << 30


@dataclass(frozen=True)
class Chip:
    """A chip that sources are compiled for.

    Attributes:
        cards: GPUs with it.
        shared_bytes: most shared memory of a block (CUDA C++ Programming Guide, specifications).
    """

    cards: tuple[Card, ...]
    shared_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of its cards, each once."""
        return tuple(dict.fromkeys(card.name for card in self.cards))


@dataclass(frozen=True)
class Target:
    """A GPU that kernels are compiled for, as far as they depend on it.

    Attributes:
        capability: compute capability.
        shared_bytes: most shared memory of a block.
        multiprocessors: their number.
        driver: version of the driver, as 13000.
        older: whether code for an older chip runs on it, which the driver translates.
    """

    capability: Capability
    shared_bytes: int
    multiprocessors: int
    driver: int = 0
    older: bool = False

    @property
    def arch(self) -> str:
        """As NVRTC names it: `sm_90` for machine code, `compute_80` for what is translated."""
        return "{}_{}{}".format("compute" if self.older else "sm", *self.capability)

    def as_older(self) -> Target:
        """The chip whose code runs on this one where Triton's variable `OLDER_CODE` names one, else
        this one."""
        named = re.fullmatch("sm([0-9]+)([0-9])", os.environ.get(OLDER_CODE, ""))
        capability = (int(named[1]), int(named[2])) if named else self.capability
        if capability >= self.capability or capability not in CHIPS:
            return self
        shared = min(self.shared_bytes, CHIPS[capability].shared_bytes)
        return replace(self, capability=capability, shared_bytes=shared, older=True)


OLDER_CODE = "TRITON_OVERRIDE_ARCH"
"""Variable of Triton, which CUDA C++ follows here: with `sm80` a chip runs what an A100 runs."""


def _chip(kilobytes: int, cards: str) -> Chip:
    """A chip; each of its `cards` is a name and its GB, and the note of `Card`."""
    rows = (re.fullmatch("(.+) ([0-9]+) ?(ecc|shared|)", one) for one in re.split(r",\s+", cards))
    found = tuple(Card(row[1], int(row[2]), row[3]) for row in rows)  # type: ignore[index]
    return Chip(found, kilobytes << 10)


CHIPS: dict[Capability, Chip] = {
    (8, 0): _chip(163, "A100 40, A100 80, A800 40, A800 80"),
    (8, 6): _chip(99, """A2 16 ecc, A10 24 ecc, A10G 24 ecc, A40 48 ecc, RTX A6000 48, RTX A4000 16,
        RTX A5000 24, RTX 3050 6, RTX 3050 8, RTX 3060 12, RTX 3060 Ti 8, RTX 3070 8,
        RTX 3070 Ti 8, RTX 3080 10, RTX 3080 12, RTX 3080 Ti 12, RTX 3090 24, RTX 3090 Ti 24"""),
    (8, 9): _chip(99, """L4 24 ecc, L20 48 ecc, L40 48 ecc, L40S 48 ecc, RTX 2000 Ada 16,
        RTX 4000 Ada 20, RTX 4500 Ada 24, RTX 5000 Ada 32, RTX 6000 Ada 48, RTX 4060 8,
        RTX 4060 Ti 8, RTX 4060 Ti 16, RTX 4070 12, RTX 4070 SUPER 12, RTX 4070 Ti 12,
        RTX 4070 Ti SUPER 16, RTX 4080 16, RTX 4080 SUPER 16, RTX 4090 24, RTX 4090 D 24"""),
    (9, 0): _chip(227, "H100 80, H100 NVL 94, H200 141, H800 80, H20 96, GH200 96, GH200 144"),
    (10, 0): _chip(227, "B200 180"),
    (12, 0): _chip(99, """RTX 5060 8, RTX 5060 Ti 8, RTX 5060 Ti 16, RTX 5070 12, RTX 5070 Ti 16,
        RTX 5080 16, RTX 5090 32, RTX PRO 4000 24, RTX PRO 4500 32, RTX PRO 5000 48,
        RTX PRO 6000 96"""),
    (12, 1): _chip(99, "DGX Spark 128 shared, GB10 128 shared"),
}  # fmt: skip
NOT_SUPPORTED = "not supported"
OLDER = ("V100", "T4", "RTX 20", "P100", "P40", "GTX", "Titan", "RTX 8000")
"""How names of cards begin for which people ask, and that are below `LOWEST`."""
OTHERS = ("MI1", "MI2", "MI3", "Radeon", "RX", "Arc", "Gaudi")
"""How names of other makers' GPUs begin."""
_GB = re.compile(r"([0-9]+)\s*gi?b")
_BESIDE = re.compile(
    r"[0-9]+\s*gi?b|nvidia|geforce|tesla|rtx|sxm[0-9]?|pcie|hbm[0-9]?e?|blackwell|generation"
    r"|(workstation|server) edition|[^a-z0-9]"
)
"""What a name of a card may have and lack."""


def cards_named(text: str) -> list[tuple[Capability, Card]]:
    """The cards that `text` may mean, such as `rtx4090` or `NVIDIA A100-SXM4-80GB`."""
    name, size = short(text), _GB.search(text.lower())
    return [
        (capability, card)
        for capability, chip in CHIPS.items()
        for card in chip.cards
        if name == short(card.name) and (size is None or int(size[1]) == card.sold)
    ]


def is_unsupported(text: str) -> bool:
    """Whether `text` names one of `OLDER` or `OTHERS`."""
    return short(text).startswith(tuple(map(short, OLDER + OTHERS)))


def short(name: str) -> str:
    """`name` without what may be left out."""
    return _BESIDE.sub("", name.lower())


@dataclass(frozen=True)
class KernelPath:
    """What runs on a chip: `cuda`, or `triton` for the ops that have no CUDA C++ there.

    Single shapes may still go to Triton: those that need more shared memory than a block has, and
    those that are faster there.
    """

    decode: str
    write: str
    measured: bool


def state(capability: Capability) -> str:
    """What is known of the kernels on a chip, in words."""
    if capability < LOWEST:
        return NOT_SUPPORTED
    if capability in MEASURED:
        return "measured on H100 and H200 only"
    if capability in RAN_ELSEWHERE:
        return "its kernels ran on an H200, not on the card"
    return "compiled only" if capability in CHIPS else "not tried"


def cards_by_state() -> dict[str, list[str]]:
    """What is known of the kernels, and the names of the cards for which it is."""
    found: dict[str, list[str]] = {}
    for capability, chip in CHIPS.items():
        found.setdefault(state(capability), []).extend(chip.names)
    return found


def kernel_path(capability: Capability) -> KernelPath | None:
    """The path of a chip; `None` where no kernel runs."""
    if capability < LOWEST:
        return None
    return KernelPath("cuda", "cuda" if capability == WRITE else "triton", capability in MEASURED)
