"""Settings of the INT2 cache: each value with its origin. Needs neither torch nor sglang.

Precedence: flag, environment (ours, then the fork's names), recipe of the artifact, default. A name
with one of our prefixes that nobody reads is an error, because a misspelt setting must never be
ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oscar_kernels.spec import BITS
from oscar_zoo.engines.setting_flags import (
    FORK_NAMES,
    FROM_FLAGS,
    MODEL,
    OPTIONS,
    CodeBits,
    flags_given,
    layers_text,
    of_layer,
)
from oscar_zoo.errors import UsageError

K_FILE, V_FILE = "SGLANG_OSCAR_K_ROTATION_PATH", "SGLANG_OSCAR_V_ROTATION_PATH"
SCALE_DTYPE = "SGLANG_MIXED_KV_SCALE_DTYPE"
PREFIXES = ("OSCAR_INT2_", "SGLANG_OSCAR_", "SGLANG_MIXED_KV_")
"""Prefixes of variables that are meant for an INT2 cache: ours, and those of the SGLang fork that
was published with OSCAR, whose start scripts users bring."""
NO_EFFECT = frozenset(
    "HADAMARD_ORDER SGLANG_INT2_BACKEND SGLANG_INT2_DECODE_MAX_SEQ SGLANG_INT2_DECODE_MAX_TILES"
    " SGLANG_OSCAR_ABSORB_V_ROTATION SGLANG_OSCAR_FUSED_ROTATE_CLIP_QUANT"
    " SGLANG_MIXED_KV_HP_MAX_SPLITS SGLANG_MIXED_KV_HP_PREFIX_POOL_TOKENS".split()
)
"""Variables of the fork that choose an implementation, not a result. `HADAMARD_ORDER` has no effect
there either if rotation files are given, because these contain their Hadamard transform."""
YES, NO = ("1", "true", "yes", "y"), ("0", "false", "no", "n")
"""Texts that SGLang reads as true and as false."""
ONLY = {
    "SGLANG_OSCAR_K_QUANTIZER": (("int2",), "the INT2 quantizer is the only one"),
    "SGLANG_OSCAR_V_QUANTIZER": (("int2",), "the INT2 quantizer is the only one"),
    "SGLANG_MIXED_KV_HP_DTYPE": (("bfloat16",), "uncompressed tokens have the type of the model"),
    "SGLANG_LLOYD_MAX": (NO, "Lloyd-Max codes are not the codes of this cache"),
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": (YES, "the windows are always on; lower --oscar-sink-size"),
}
"""For variables of the fork, the values that ask for what we do anyway, and why others are refused.
"""

DESCRIBED = tuple(
    "source sink recent idle_sinks host_sinks bits k_clip v_clip group_size window_on_hit".split()
)

Origin = Literal["flag", "environment", "recipe", "default"]


@dataclass(frozen=True)
class ArtifactSource:
    """Where the rotation files are: in a folder, under a name in the store, or in the fork's two
    files. Exactly one is set."""

    folder: str | None = None
    artifact: str | None = None
    files: tuple[str, str] | None = None

    def __str__(self) -> str:
        return self.folder or self.artifact or " and ".join(self.files or ())


@dataclass(frozen=True, kw_only=True)
class RecipeValues:
    """What a recipe says; by default the published one of OSCAR, where a group is the whole row."""

    sink: int = 64
    recent: int = 256
    bits: CodeBits = CodeBits()  # noqa: RUF009 (frozen)
    k_clip: tuple[float, ...] = (0.96,)
    v_clip: tuple[float, ...] = (0.92,)
    group_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class PluginSettings(RecipeValues):
    """Every setting in force, and where those come from that are no defaults."""

    source: ArtifactSource
    origins: Mapping[str, Origin]
    expected_digest: str | None = None
    idle_sinks: int | None = None  # one block per request
    host_sinks: int | None = None  # as many as `worker.HOST_BYTES` hold
    disk_cache: str | None = None  # no files
    disk_size: int | None = None  # half of what is free
    window_on_hit: str = "recompute"
    canary_minutes: float = 10
    warnings: tuple[str, ...] = ()
    name: str | None = None
    copy_of: str | None = None

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, "default")

    @property
    def refilled(self) -> int:
        """Tokens that a prefix hit leaves to prefill, so that the recent window is filled."""
        return self.recent if self.window_on_hit == "recompute" else 0

    def check_layers(self, count: int) -> None:
        lists = {
            "--oscar-bits": (self.bits.k, self.bits.v),
            "--oscar-k-clip": (self.k_clip,),
            "--oscar-v-clip": (self.v_clip,),
        }
        for flag, values in lists.items():
            for one in values:
                if len(one) not in (1, count):
                    raise UsageError(
                        f"{flag} has {len(one)} entries, and the model has {count} layers with"
                        " full attention.",
                        hint="give one value, or one for each of these layers",
                    )

    def code(self, role: Literal["k", "v"], index: int) -> tuple[int, float]:
        """Bits and clip ratio of one side in a layer, counted among those with full attention. A
        ratio that is one for all layers belongs to codes of 2 bits, and wider ones are not
        clipped."""
        bits = of_layer(getattr(self.bits, role), index)
        ratios = getattr(self, f"{role}_clip")
        if len(ratios) == 1 and bits > BITS:
            return bits, 0.0
        return bits, of_layer(ratios, index)

    def describe(self) -> str:
        told = []
        for name in DESCRIBED:
            value = getattr(self, name)
            shown = layers_text(value) if isinstance(value, tuple) else value
            told.append(f"{name} {shown} ({self.origin(name)})")
        return ", ".join(told)


def read_settings(environ: Mapping[str, str], recipe: RecipeValues | None = None) -> PluginSettings:
    """Settings of an INT2 server. `recipe`: of the artifact; `None` before it is loaded (`source`
    says what to load)."""
    warnings = list(check(environ))
    given: dict[str, Any] = {} if recipe is None else vars(recipe).copy()
    origins: dict[str, Origin] = dict.fromkeys(given, "recipe")
    for name in OPTIONS:
        found = _given(name, environ, warnings)
        if found is not None:
            given[name], origins[name] = found
    source, origins["source"] = _source(given, origins, environ, warnings)
    for name in ("front", "rotation_path", "artifact"):
        given.pop(name, None)
    return PluginSettings(
        source=source,
        origins=origins,
        expected_digest=given.pop("rotation_sha256", None),
        warnings=tuple(warnings),
        **given,
    )


def _given(name: str, environ: Mapping[str, str], warnings: list[str]) -> tuple[Any, Origin] | None:
    """Value from a flag or a variable, or `None`; a fork variable that loses against ours is told
    in `warnings`."""
    option, fork_name = OPTIONS[name], FORK_NAMES.get(name, "")
    text, fork_text = environ.get(option.variable), environ.get(fork_name)
    if text is None:
        return None if fork_text is None else (option.parse(fork_text, fork_name), "environment")
    by_flag = option.flag in flags_given(environ)
    shown = option.flag if by_flag else option.variable
    value = option.parse(text, shown)
    if fork_text is not None and option.parse(fork_text, fork_name) != value:
        warnings.append(f"{fork_name}={fork_text} is ignored: {shown} says {text}.")
    return value, "flag" if by_flag else "environment"


def _source(
    given: Mapping[str, Any],
    origins: Mapping[str, Origin],
    environ: Mapping[str, str],
    warnings: list[str],
) -> tuple[ArtifactSource, Origin]:
    k_file, v_file = environ.get(K_FILE), environ.get(V_FILE)
    if (k_file is None) != (v_file is None):
        raise UsageError(
            f"{K_FILE} and {V_FILE} come together; one is missing.",
            hint="set both, or use --oscar-rotation-path DIR",
        )
    chosen = [name for name in ("rotation_path", "artifact") if name in given]
    if len(chosen) == 2:
        both = " and ".join(f"{OPTIONS[name].flag} {given[name]}" for name in chosen)
        raise UsageError(f"{both} exclude each other.", hint="give one of them")
    if chosen:
        if k_file is not None:
            warnings.append(f"{K_FILE} and {V_FILE} are ignored: {given[chosen[0]]}.")
        source = ArtifactSource(given.get("rotation_path"), given.get("artifact"))
        return source, origins[chosen[0]]
    if k_file is None or v_file is None:
        raise UsageError(
            "--kv-cache-dtype int2 needs the rotations of an artifact.",
            hint="--oscar-rotation-path DIR, or --oscar-artifact NAME (oscar-zoo pull NAME)",
        )
    return ArtifactSource(files=(k_file, v_file)), "environment"


def present(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the fork that are set, sorted: without INT2 they have no effect, which is worth one
    warning."""
    return tuple(sorted(name for name in environ if name.startswith(PREFIXES[1:])))


def check(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings about variables that are meant for an INT2 cache and that nobody reads. One that
    changes results on the fork must either have the same effect here or stop the start."""
    ours = {option.variable for option in OPTIONS.values()} | {FROM_FLAGS, MODEL}
    known = ours | {K_FILE, V_FILE, *FORK_NAMES.values()}
    warnings = []
    for name, value in sorted(environ.items()):
        if name in known:
            continue
        if name in NO_EFFECT:
            warnings.append(f"{name} has no effect here: it chooses how the fork computes.")
        elif name == SCALE_DTYPE and value != "float16":
            warnings.append(f"{name}={value}: scales and offsets are stored in 16 bit (float16).")
        elif name in ONLY and value.lower() not in ONLY[name][0]:
            why = f"{name}={value} is not supported: {ONLY[name][1]}."
            raise UsageError(why, hint=f"unset {name}")
        elif name.startswith(PREFIXES) and name not in (SCALE_DTYPE, *ONLY):
            names = sorted({*known, *NO_EFFECT, *ONLY, SCALE_DTYPE})
            near = difflib.get_close_matches(name, names, 1, 0.0)
            raise UsageError(
                f"no setting is called {name}.",
                hint=f"the nearest known name is {near[0]}; or unset it",
            )
    return tuple(warnings)
