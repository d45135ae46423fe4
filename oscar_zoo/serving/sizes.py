"""Sizes of memory, names of GPUs and bits, as people write them. Imports nothing heavy."""

from __future__ import annotations

import math
import re

from oscar_zoo.errors import UsageError


def parse_memory(text: str, option: str, step: int = 1 << 10) -> int:
    """The bytes of a GPU that `24`, `24GB` or `24GiB` mean: all three GiB, as what is sold as 24 GB
    has them; raises `UsageError`, which names `option`."""
    units = {None: step**3, "g": step**3, "gi": 1 << 30, "m": step**2, "mi": 1 << 20}
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?:([gm]i?)b?)?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{text!r} is no size of memory.", hint=f"write it like {option} 24GiB")
    return round(float(match[1]) * units[match[2]])


def parse_weights(text: str) -> int:
    """The bytes of files that `16` (GB), `16GB` or `15GiB` mean; raises as `parse_memory`."""
    return parse_memory(text, "--weights", 1000)


def given_gpu(
    memory: int | str | None, gpu: str | None, gpus: int | None
) -> tuple[int, str, int | None]:
    """What exactly one of `--memory` and `--gpu` says, and `--tp` or a name such as `2xH100`: bytes
    of one GPU, how they were read in words, and how many GPUs, where that is said."""
    if memory is not None and gpu is None:
        said = _card(memory, "--memory") if isinstance(memory, str) else (memory, "as given")
        return *said, gpus
    if gpu is None or memory is not None:
        raise UsageError(
            "--memory and --gpu exclude each other." if gpu else "give one of --memory and --gpu.",
            hint="for example --memory 24GiB or --gpu H100",
        )
    size = _SIZE.fullmatch(gpu.strip())
    parts = (None, gpu.strip(), None) if size and size["unit"] else _COUNTED.fullmatch(gpu).groups()  # type: ignore[union-attr]
    first, name, last = parts
    numbers = {int(one) for one in (first, last) if one} | ({gpus} if gpus else set())
    if len(numbers) > 1 or 0 in numbers:
        raise UsageError(
            f"the number of GPUs cannot be {' and '.join(map(str, sorted(numbers)))}.",
            hint=f"--gpu {name!r} --tp {max(numbers) or 1}",
        )
    return *_card(name or gpu), next(iter(numbers), 1)


_SIZE = re.compile(r"[0-9.]+\s*(?P<unit>[MG]i?B?)?", re.IGNORECASE)
_COUNTED = re.compile(
    r"\s*(?:([0-9]{1,3})(?:\s*[x×*]\s*|\s+))?(.*?)(?:\s*[x×*]\s*([0-9]{1,3}))?\s*", re.IGNORECASE
)
_LARGEST = 1 << 40
"""Bytes of a GPU: a larger number is a name."""


def gpu_bytes(text: str) -> int:
    return _card(text, "--gpu-memory")[0]


def _card(name: str, option: str = "--gpu") -> tuple[int, str]:
    """Bytes of the GPU called `name` or of one with so much, and what it is, or a `UsageError`."""
    import difflib

    from oscar_kernels.chips import CHIPS, LOWEST, cards_named, is_unsupported, short, state

    found = cards_named(name)
    if len(found) == 1:
        ((capability, card),) = found
        size = f"{card.memory / (1 << 30):g} GiB{' shared with the CPU' * (card.note == 'shared')}"
        chip = "sm_{}{}".format(*capability)
        return card.memory, f"{card.name}: {size}, {chip}, {state(capability)}"
    if found:
        raise UsageError(
            f"{name!r} has several sizes of memory.",
            suggestions=[f"{card.name} {card.sold}GB" for _, card in found],
        )
    if _SIZE.fullmatch(name.strip()) and parse_memory(name, option) <= _LARGEST:
        return parse_memory(name, option), _read_as(name)
    least = ".".join(map(str, LOWEST))
    if is_unsupported(name):
        raise UsageError(
            f"{name} is not supported: the INT2 kernels need a GPU by NVIDIA of compute capability"
            f" {least} or later.",
            hint="which GPUs work: oscar-zoo doctor --json",
        )
    names, typed = {short(one) for chip in CHIPS.values() for one in chip.names}, short(name)
    close = [typed] if typed in names else difflib.get_close_matches(typed, names)
    raise UsageError(
        f"{name!r} is {'no size of memory and ' * (option != '--gpu')}no GPU that is known.",
        suggestions=[f"{card.name} {card.sold}GB" for one in close for _, card in cards_named(one)],
        hint="which are known: oscar-zoo doctor --json; for another one of compute capability"
        f" {least} or later give its memory, such as {option} 24GiB",
    )


def _read_as(size: str) -> str:
    number, unit = re.fullmatch(r"(.*?)\s*([A-Z]*)", size.strip().upper()).groups()  # type: ignore[union-attr]
    if "I" in unit:
        return "as given"
    return f"{number} {unit or 'GB'} of a card is read as {number} {(unit or 'G')[0]}iB"


def check_bits(bits: float, low: float, high: float, group_size: int, *, latents: bool) -> None:
    """Refuse a budget that is not between what codes of 2 and of 4 bits cost."""
    if not low <= bits <= high:
        scales = "scales and rotary keys" if latents else "scales"
        low, high = math.ceil(round(100 * low, 6)) / 100, math.floor(round(100 * high, 6)) / 100
        raise UsageError(
            f"--bits {bits:g} is not possible with groups of {group_size}: codes of 2 bits cost"
            f" {low:g} with their {scales}, codes of 4 bits {high:g}.",
            hint=f"use 2 or 4 for all codes, or a budget from {low:g} to {high:g}",
        )
