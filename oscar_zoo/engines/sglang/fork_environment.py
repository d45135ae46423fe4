"""Environment variables of the SGLang fork that was published with OSCAR: honoured, without effect
here, or refused.

Users bring the start scripts of the fork. A variable that changes results there must either have
the same effect here or stop the start. An unknown variable is a misspelling. Needs neither torch
nor sglang.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Set

from oscar_zoo.errors import UsageError

K_FILE = "SGLANG_OSCAR_K_ROTATION_PATH"
V_FILE = "SGLANG_OSCAR_V_ROTATION_PATH"

PREFIXES = ("SGLANG_OSCAR_", "SGLANG_MIXED_KV_", "OSCAR_INT2_")
"""Prefixes of variables that are meant for an INT2 cache."""

HONOURED = frozenset(
    {
        K_FILE,
        V_FILE,
        "SGLANG_OSCAR_K_CLIP_RATIO",
        "SGLANG_OSCAR_V_CLIP_RATIO",
        "SGLANG_MIXED_KV_PREFIX_TOKENS",
        "SGLANG_MIXED_KV_RECENT_TOKENS",
    }
)

NO_EFFECT = frozenset(
    {
        "HADAMARD_ORDER",
        "SGLANG_INT2_BACKEND",
        "SGLANG_INT2_DECODE_MAX_SEQ",
        "SGLANG_INT2_DECODE_MAX_TILES",
        "SGLANG_OSCAR_ABSORB_V_ROTATION",
        "SGLANG_OSCAR_FUSED_ROTATE_CLIP_QUANT",
        "SGLANG_MIXED_KV_HP_MAX_SPLITS",
        "SGLANG_MIXED_KV_HP_PREFIX_POOL_TOKENS",
    }
)
"""These choose an implementation, not a result. `HADAMARD_ORDER` has no effect on the fork either
if rotation files are given, because these contain their Hadamard transform."""

YES, NO = ("1", "true", "yes", "y"), ("0", "false", "no", "n")
"""Texts that SGLang reads as true and as false."""
ONLY = {
    "SGLANG_OSCAR_K_QUANTIZER": (("int2",), "the INT2 quantizer is the only one"),
    "SGLANG_OSCAR_V_QUANTIZER": (("int2",), "the INT2 quantizer is the only one"),
    "SGLANG_MIXED_KV_HP_DTYPE": (
        ("bfloat16",),
        "the uncompressed tokens have the type of the model",
    ),
    "SGLANG_LLOYD_MAX": (NO, "Lloyd-Max codes are not the codes of this cache"),
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": (
        YES,
        "the windows cannot be turned off; lower --oscar-sink-size",
    ),
}
"""For each variable, the values that ask for what we do anyway, and why others are refused."""

REFUSED_FAMILIES = {
    "SGLANG_OSCAR_CALIBRATION_": "calibration is `oscar-zoo compute`",
    "SGLANG_OSCAR_MLA_": "MLA models are not supported",
    "SGLANG_OSCAR_PQ_": "product quantization is not supported",
    "SGLANG_OSCAR_DRAFT_": "a draft model keeps a cache in its own type",
}

SCALE_DTYPE = "SGLANG_MIXED_KV_SCALE_DTYPE"


def check(
    environ: Mapping[str, str], *, known_elsewhere: Set[str] = frozenset()
) -> tuple[str, ...]:
    """Look at every variable that is meant for an INT2 cache.

    Args:
        environ: the whole environment.
        known_elsewhere: names the caller reads itself.
    """
    return tuple(_warnings(environ, known_elsewhere | HONOURED))


def present(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the fork that are set, sorted: without INT2 they have no effect, which is worth one
    warning."""
    names = (name for name in environ if name.startswith(("SGLANG_OSCAR_", "SGLANG_MIXED_KV_")))
    return tuple(sorted(names))


def _warnings(environ: Mapping[str, str], known: Set[str]) -> Iterator[str]:
    for name, value in sorted(environ.items()):
        if name in known or not (name.startswith(PREFIXES) or name in ONLY or name in NO_EFFECT):
            continue
        if name in NO_EFFECT:
            yield (
                f"{name} has no effect here: it chooses how the published fork computes, not what."
            )
        elif name == SCALE_DTYPE:
            if value != "float16":
                yield f"{name}={value}: scales and offsets are stored in float16, 16 bit each."
        elif name in ONLY:
            wanted, reason = ONLY[name]
            if value.lower() not in wanted:
                raise UsageError(
                    f"{name}={value} is not supported: {reason}.", hint=f"unset {name}"
                )
        else:
            _refuse(name, known)


def _refuse(name: str, known: Set[str]) -> None:
    for family, reason in REFUSED_FAMILIES.items():
        if name.startswith(family):
            raise UsageError(f"{name} is not supported: {reason}.", hint=f"unset {name}")
    names = sorted(known | NO_EFFECT | set(ONLY) | {SCALE_DTYPE})
    near = difflib.get_close_matches(name, names, 1, 0.0)
    raise UsageError(
        f"no setting is called {name}.", hint=f"the nearest known name is {near[0]}; or unset it"
    )
