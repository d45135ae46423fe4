"""Sizes of memory and names of GPUs, as people write them. Imports nothing heavy."""

from __future__ import annotations

import re

from oscar_zoo.errors import UsageError


def parse_memory(text: str, option: str = "--gpu-memory") -> int:
    """The bytes of a GPU that `24`, `24GB` or `24GiB` mean: all three GiB, as what is sold as 24 GB
    has them; raises `UsageError`, which names `option`."""
    return _bytes(text, option, 1 << 10)


def parse_weights(text: str, option: str = "--weights") -> int:
    """The bytes of files that `16` (GB), `16GB` or `15GiB` mean; raises as `parse_memory`."""
    return _bytes(text, option, 1000)


def _bytes(text: str, option: str, step: int) -> int:
    units = {None: step**3, "g": step**3, "gi": 1 << 30, "m": step**2, "mi": 1 << 20}
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?:([gm]i?)b?)?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{text!r} is no size of memory.", hint=f"write it like {option} 24GiB")
    return round(float(match[1]) * units[match[2]])


def given_gpu(
    memory: int | str | None, gpu: str | None, gpus: int | None
) -> tuple[int, str, int | None]:
    """What exactly one of `--memory` and `--gpu` says, and `--tp` or a name such as `2xH100`: bytes
    of one GPU, how they were read in words, and how many GPUs, where that is said."""
    if isinstance(memory, int) and gpu is None:
        return memory, "as given", gpus
    if isinstance(memory, str) and gpu is None:
        return parse_memory(memory, "--memory"), _read_as(memory), gpus
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


def _card(name: str) -> tuple[int, str]:
    """Bytes of the GPU called `name`, or of one that has so much, and what it is; raises
    `UsageError`."""
    import difflib

    from oscar_kernels.chips import CHIPS, LOWEST, cards_named, is_unsupported, state

    found = cards_named(name)
    if len(found) == 1:
        ((capability, card),) = found
        size = f"{card.memory / (1 << 30):g} GiB"
        chip = "sm_{}{}".format(*capability)
        return card.memory, f"{card.name}: {size}, {chip}, {state(capability)}"
    if found:
        raise UsageError(
            f"{name!r} has several sizes of memory.",
            suggestions=[f"{card.name} {card.sold}GB" for _, card in found],
        )
    if _SIZE.fullmatch(name) and parse_memory(name, "--gpu") <= _LARGEST:
        return parse_memory(name, "--gpu"), _read_as(name)
    least = ".".join(map(str, LOWEST))
    if is_unsupported(name):
        raise UsageError(
            f"{name} is not supported: the INT2 kernels need a GPU by NVIDIA of compute capability"
            f" {least} or later.",
            hint="which GPUs work: oscar-zoo doctor",
        )
    names = {one.lower(): one for chip in CHIPS.values() for one in chip.names}
    close = [names[key] for key in difflib.get_close_matches(name.lower(), names)]
    known = "" if close else f"known are {', '.join(names.values())}; "
    raise UsageError(
        f"no GPU is known as {name!r}.",
        suggestions=close,
        hint=f"{known}for another one of compute capability {least} or later give its memory,"
        " such as --gpu 24GB",
    )


def _read_as(size: str) -> str:
    number, unit = re.fullmatch(r"(.*?)\s*([A-Z]*)", size.strip().upper()).groups()  # type: ignore[union-attr]
    if "I" in unit:
        return "as given"
    return f"{number} {unit or 'GB'} of a card is read as {number} {(unit or 'G')[0]}iB"
