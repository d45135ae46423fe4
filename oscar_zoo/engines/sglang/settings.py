"""Settings of the INT2 cache: each value with its origin. Needs neither torch nor sglang.

Precedence: flag, environment (ours, then the fork's names), recipe of the artifact, default. A name
with one of our prefixes that nobody reads is an error, because a misspelt setting must never be
ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

from oscar_kernels.spec import BITS
from oscar_zoo.engines.sglang.setting_flags import (
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
    (
        "HADAMARD_ORDER",
        "SGLANG_INT2_BACKEND",
        "SGLANG_INT2_DECODE_MAX_SEQ",
        "SGLANG_INT2_DECODE_MAX_TILES",
        "SGLANG_OSCAR_ABSORB_V_ROTATION",
        "SGLANG_OSCAR_FUSED_ROTATE_CLIP_QUANT",
        "SGLANG_MIXED_KV_HP_MAX_SPLITS",
        "SGLANG_MIXED_KV_HP_PREFIX_POOL_TOKENS",
    )
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

Origin = Literal["flag", "environment", "recipe", "default"]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One value and where it came from."""

    value: T
    origin: Origin

    def __str__(self) -> str:
        shown = layers_text(self.value) if isinstance(self.value, tuple) else self.value
        return f"{shown} ({self.origin})"


@dataclass(frozen=True)
class ArtifactSource:
    """Where the rotation files are: in a folder, under a name in the store, or in the fork's two
    files. Exactly one is set."""

    folder: str | None = None
    artifact: str | None = None
    files: tuple[str, str] | None = None

    def __str__(self) -> str:
        return self.folder or self.artifact or " and ".join(self.files or ())


@dataclass(frozen=True)
class RecipeValues:
    """Settings of an artifact's recipe; `None` for a setting without one."""

    sink: int | None = None
    recent: int | None = None
    bits: CodeBits | None = None
    k_clip: tuple[float, ...] | None = None
    v_clip: tuple[float, ...] | None = None
    group_size: int | None = None


DEFAULTS = RecipeValues(
    sink=64, recent=256, bits=CodeBits(), k_clip=(0.96,), v_clip=(0.92,), group_size=None
)
"""The published serving recipe of OSCAR, where a group is the whole row."""


@dataclass(frozen=True)
class PluginSettings:
    """Every setting in force. `group_size` is `None` for one group per row, and `idle_sinks` for
    one block per request."""

    source: Setting[ArtifactSource]
    expected_digest: str | None
    sink: Setting[int]
    recent: Setting[int]
    idle_sinks: Setting[int | None]
    bits: Setting[CodeBits]
    k_clip: Setting[tuple[float, ...]]
    v_clip: Setting[tuple[float, ...]]
    group_size: Setting[int | None]
    window_on_hit: Setting[str]
    warnings: tuple[str, ...] = ()
    name: str | None = None
    copy_of: str | None = None

    def check_layers(self, count: int) -> None:
        """Refuse lists that do not have an entry for each of `count` layers with full attention."""
        lists = {
            "--oscar-bits": (self.bits.value.k, self.bits.value.v),
            "--oscar-k-clip": (self.k_clip.value,),
            "--oscar-v-clip": (self.v_clip.value,),
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
        bits = of_layer(getattr(self.bits.value, role), index)
        ratios = getattr(self, f"{role}_clip").value
        if len(ratios) == 1 and bits > BITS:
            return bits, 0.0
        return bits, of_layer(ratios, index)

    def describe(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{name} {x}" for name, x in values.items() if isinstance(x, Setting))


def read_settings(environ: Mapping[str, str], recipe: RecipeValues | None = None) -> PluginSettings:
    """Settings of an INT2 server. `recipe`: of the artifact; `None` before it is loaded (`source`
    says what to load)."""
    warnings = list(check(environ))
    given = {name: _given(name, environ, warnings) for name in OPTIONS}

    def final(name: str, default: Any = None) -> Setting[Any]:
        setting, from_recipe = given[name], getattr(recipe, name, None)
        if setting is not None:
            return setting
        if from_recipe is not None:
            return Setting(from_recipe, "recipe")
        return Setting(getattr(DEFAULTS, name, default), "default")

    def plain(name: str) -> Any:
        setting = given[name]
        return None if setting is None else setting.value

    return PluginSettings(
        source=_source(given["rotation_path"], given["artifact"], environ, warnings),
        expected_digest=plain("rotation_sha256"),
        sink=final("sink"),
        recent=final("recent"),
        idle_sinks=final("idle_sinks"),
        bits=final("bits"),
        k_clip=final("k_clip"),
        v_clip=final("v_clip"),
        group_size=final("group_size"),
        window_on_hit=final("window_on_hit", "recompute"),
        warnings=tuple(warnings),
        name=plain("name"),
        copy_of=plain("copy_of"),
    )


def _given(name: str, environ: Mapping[str, str], warnings: list[str]) -> Setting[Any] | None:
    """Value from a flag or a variable, or `None`; a fork variable that loses against ours is told
    in `warnings`."""
    option, fork_name = OPTIONS[name], FORK_NAMES.get(name)
    text, fork_text = environ.get(option.variable), environ.get(fork_name or "")
    if text is None:
        if fork_text is None:
            return None
        return Setting(option.parse(fork_text, str(fork_name)), "environment")
    by_flag = option.flag in flags_given(environ)
    shown = option.flag if by_flag else option.variable
    value = option.parse(text, shown)
    if fork_text is not None and option.parse(fork_text, str(fork_name)) != value:
        warnings.append(f"{fork_name}={fork_text} is ignored: {shown} says {text}.")
    return Setting(value, "flag" if by_flag else "environment")


def _source(
    folder: Setting[str] | None,
    artifact: Setting[str] | None,
    environ: Mapping[str, str],
    warnings: list[str],
) -> Setting[ArtifactSource]:
    pair = environ.get(K_FILE), environ.get(V_FILE)
    if (pair[0] is None) != (pair[1] is None):
        raise UsageError(
            f"{K_FILE} and {V_FILE} come together; one is missing.",
            hint="set both, or use --oscar-rotation-path DIR",
        )
    if folder is not None and artifact is not None:
        raise UsageError(
            f"--oscar-rotation-path {folder.value} and --oscar-artifact {artifact.value} exclude"
            " each other.",
            hint="give one of them",
        )
    chosen = folder or artifact
    if chosen is not None:
        if pair[0] is not None:
            warnings.append(f"{K_FILE} and {V_FILE} are ignored: {chosen.value}.")
        source = ArtifactSource(folder.value) if folder else ArtifactSource(artifact=chosen.value)
        return Setting(source, chosen.origin)
    if pair[0] is None or pair[1] is None:
        raise UsageError(
            "--kv-cache-dtype int2 needs the rotations of an artifact.",
            hint="--oscar-rotation-path DIR, or --oscar-artifact NAME (oscar-zoo pull NAME)",
        )
    return Setting(ArtifactSource(files=(pair[0], pair[1])), "environment")


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
            what = "it chooses how the published fork computes, not what"
            warnings.append(f"{name} has no effect here: {what}.")
        elif name == SCALE_DTYPE and value != "float16":
            stored = "scales and offsets are stored in float16, 16 bit each"
            warnings.append(f"{name}={value}: {stored}.")
        elif name in ONLY and value.lower() not in ONLY[name][0]:
            why = ONLY[name][1]
            raise UsageError(f"{name}={value} is not supported: {why}.", hint=f"unset {name}")
        elif name.startswith(PREFIXES) and name not in (SCALE_DTYPE, *ONLY):
            names = sorted({*known, *NO_EFFECT, *ONLY, SCALE_DTYPE})
            near = difflib.get_close_matches(name, names, 1, 0.0)
            raise UsageError(
                f"no setting is called {name}.",
                hint=f"the nearest known name is {near[0]}; or unset it",
            )
    return tuple(warnings)
