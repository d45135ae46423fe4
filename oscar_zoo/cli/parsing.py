"""What the text of an option or argument means, for those whose type click does not have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from oscar_zoo.errors import UsageError
from oscar_zoo.serving.sizes import parse_memory as parse_memory

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.bench.sides import Cache
    from oscar_zoo.engines.sglang.offline_job import Bulk, Case


def parse_clip(text: str | None) -> Clip | None:
    """The value of `--clip K,V`, or `None` where the option was not given."""
    from oscar_zoo.artifact.specs import Clip

    if text is None:
        return None
    try:
        k, v = (float(part) for part in text.split(","))
        return Clip(k=k, v=v)
    except ValueError:
        raise UsageError(
            f"--clip {text!r} is not two ratios between 0 and 1.",
            hint="for example --clip 0.96,0.92; 0 turns it off",
        ) from None


def parse_bits(text: str | None) -> float | Literal["auto"] | None:
    """The value of `--bits`, or `None` where the option was not given."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    wanted = "2 or 4 for all codes, a budget such as 2.75, or auto"
    return _real(text, "--bits", "a number of bits", wanted)


def parse_percent(text: str | None, option: str) -> float | None:
    """The value of an option in percent, with or without the sign; `None` if it was not given."""
    if text is None:
        return None
    what = "a number in percent"
    return _real(text.removesuffix("%").strip(), option, what, f"{what} such as 0.1%")


def _real(text: str, option: str, what: str, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{option} {text!r} is not {what}.", hint=f"use {wanted}")
    return value


def numbers(option: str, text: str, *, least: int = 1) -> tuple[int, ...]:
    """The whole numbers from `least` on of a list such as `1,16`, each of them once; raises
    `UsageError`."""
    parts = listed(text)
    if not all(_is_number(part) or (part == "0" and least == 0) for part in parts):
        raise UsageError(
            f"{option} {text!r} is not a list of whole numbers from {least} on.",
            hint=f"for example {option} 1,16",
        )
    return tuple(dict.fromkeys(map(int, parts)))


def cases_of(batch: str | None, context: str | None, cases: str | None) -> tuple[Case, ...]:
    """Those of `--cases`, or every `--batch` with every `--context`; raises `UsageError`."""
    from oscar_zoo.engines.sglang.offline_job import Case

    if cases is None:
        batches = numbers("--batch", batch or "1,16")
        contexts = numbers("--context", context or "8000,30000")
        return tuple(Case(batch=b, context=c) for b in batches for c in contexts)
    if batch is not None or context is not None:
        raise UsageError(
            "--cases takes the place of --batch and --context.", hint="leave one of them out"
        )
    pairs = [part.split("x") for part in listed(cases.lower())]
    if not all(len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs):
        raise UsageError(
            f"--cases {cases!r} is not a list of batches and contexts.",
            hint="for example --cases 1x100000,64x8000",
        )
    return tuple(dict.fromkeys(Case(batch=int(b), context=int(c)) for b, c in pairs))


def caches_of(text: str) -> tuple[Cache, ...]:
    """The caches of `--caches bf16,int2`, each of them once; raises `UsageError`."""
    from oscar_zoo.bench.sides import CACHES

    known = {str(cache): cache for cache in CACHES}
    names = dict.fromkeys(listed(text.lower()))
    if not known.keys() >= names.keys():
        raise UsageError(
            f"--caches {text!r} is not a list of caches.",
            hint=f"name one or more of {', '.join(known)}",
        )
    return tuple(known[name] for name in names)


def listed(text: str) -> tuple[str, ...]:
    """The words of a list such as `fa3,triton`."""
    return tuple(part.strip() for part in text.split(","))


def bulk_of(job: str | None, turns: int) -> Bulk | None:
    """The requests that `--job 64x30000x512` and `--turns` mean, or `None` without a job."""
    from oscar_zoo.engines.sglang.offline_job import Bulk

    if job is None:
        if turns > 1:
            raise UsageError(
                "--turns needs a job.", hint="for example --job 64x16000x256 --turns 2"
            )
        return None
    parts = job.lower().split("x")
    if len(parts) != 3 or not all(map(_is_number, parts)):
        raise UsageError(
            f"--job {job!r} is not REQUESTSxPROMPTxANSWER.",
            hint="for example --job 64x30000x512, in requests and tokens",
        )
    requests, context, new_tokens = map(int, parts)
    return Bulk(requests=requests, context=context, new_tokens=new_tokens, turns=turns)


def apart(artifact: str | None, flags: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The artifact and the engine flags; click takes the first flag for the artifact if none was
    named."""
    if artifact is not None and artifact.startswith("-"):
        return None, (artifact, *flags)
    return artifact, flags


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 24
