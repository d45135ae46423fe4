"""Settings of the INT2 cache: each value with its origin. Needs neither torch nor sglang.

Precedence: flag, environment (ours, then the fork's names), recipe of the artifact, default. A name
with one of our prefixes that nobody reads is an error, because a misspelt setting must never be
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

from oscar_kernels.spec import BITS
from oscar_zoo.engines.sglang import fork_environment
from oscar_zoo.engines.sglang.layer_values import CodeBits, layers_text, of_layer
from oscar_zoo.engines.sglang.setting_flags import (
    FORK_NAMES,
    FROM_FLAGS,
    MODEL,
    OPTIONS,
    flags_given,
)
from oscar_zoo.errors import UsageError

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
    """Every setting in force.

    `group_size` is `None` for one group per row, and `idle_sinks` for one block per request.
    """

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
        """Bits and clip ratio of one side in a layer, counted among those with full attention.

        A ratio that is one for all layers belongs to codes of 2 bits, and wider ones are not
        clipped.
        """
        bits = of_layer(getattr(self.bits.value, role), index)
        ratios = getattr(self, f"{role}_clip").value
        if len(ratios) == 1 and bits > BITS:
            return bits, 0.0
        return bits, of_layer(ratios, index)

    def describe(self) -> str:
        """Each value with its origin, one line."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{name} {x}" for name, x in values.items() if isinstance(x, Setting))


def read_settings(environ: Mapping[str, str], recipe: RecipeValues | None = None) -> PluginSettings:
    """Settings of an INT2 server.

    Args:
        recipe: of the artifact; `None` before it is loaded (`source` says what to load).
    """
    known = {option.variable for option in OPTIONS.values()} | {FROM_FLAGS, MODEL}
    warnings = list(fork_environment.check(environ, known_elsewhere=known))
    given = {name: _given(name, environ, warnings) for name in OPTIONS}

    def final(name: str) -> Setting[Any]:
        setting = given[name]
        from_recipe = getattr(recipe, name, None)
        if setting is not None:
            return setting
        return (
            Setting(from_recipe, "recipe")
            if from_recipe is not None
            else Setting(getattr(DEFAULTS, name), "default")
        )

    digest = given["rotation_sha256"]
    return PluginSettings(
        source=_source(given["rotation_path"], given["artifact"], environ, warnings),
        expected_digest=None if digest is None else digest.value,
        sink=final("sink"),
        recent=final("recent"),
        idle_sinks=given["idle_sinks"] or Setting(None, "default"),
        bits=final("bits"),
        k_clip=final("k_clip"),
        v_clip=final("v_clip"),
        group_size=final("group_size"),
        window_on_hit=given["window_on_hit"] or Setting("recompute", "default"),
        warnings=tuple(warnings),
        name=given["name"].value if given["name"] else None,
        copy_of=given["copy_of"].value if given["copy_of"] else None,
    )


def _given(name: str, environ: Mapping[str, str], warnings: list[str]) -> Setting[Any] | None:
    """Value from a flag or a variable, or `None`; a fork variable that loses against ours is told
    in `warnings`."""
    option, fork_name = OPTIONS[name], FORK_NAMES.get(name)
    text, fork_text = environ.get(option.variable), environ.get(fork_name or "")
    if text is None:
        return (
            None
            if fork_text is None
            else Setting(option.parse(fork_text, str(fork_name)), "environment")
        )
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
    pair = environ.get(fork_environment.K_FILE), environ.get(fork_environment.V_FILE)
    if (pair[0] is None) != (pair[1] is None):
        raise UsageError(
            f"{fork_environment.K_FILE} and {fork_environment.V_FILE} come together; one is"
            " missing.",
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
            warnings.append(
                f"{fork_environment.K_FILE} and {fork_environment.V_FILE} are ignored:"
                f" {chosen.value}."
            )
        source = (
            ArtifactSource(artifact=chosen.value)
            if folder is None
            else ArtifactSource(folder=folder.value)
        )
        return Setting(source, chosen.origin)
    if pair[0] is None or pair[1] is None:
        raise UsageError(
            "--kv-cache-dtype int2 needs the rotations of an artifact.",
            hint="--oscar-rotation-path DIR, or --oscar-artifact NAME (oscar-zoo pull NAME)",
        )
    return Setting(ArtifactSource(files=(pair[0], pair[1])), "environment")
