"""Settings of the INT2 cache: each value with its origin. Needs neither torch nor sglang.

SGLang drops command-line attributes it does not know and spawns its workers, so flags travel in the
environment: each `--oscar-*` flag writes one `OSCAR_INT2_*` variable, which children inherit.
Precedence: flag, environment (ours, then the fork's names), recipe of the artifact, default. A name
with one of our prefixes that nobody reads is an error, because a misspelt setting must never be
ignored.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Literal, TypeVar

from oscar_zoo.engines.sglang import fork_environment
from oscar_zoo.errors import UsageError

logger = logging.getLogger(__name__)

DTYPE = "int2"
"""Value of `--kv-cache-dtype` that turns the plugin on."""
BACKEND = "oscar_int2"
"""Value of `--attention-backend`; chosen when the user chose none."""
FROM_FLAGS = "OSCAR_INT2_FROM_FLAGS"
"""Comma-separated variables that a flag wrote, so that origins survive the way into spawned
children."""

Origin = Literal["flag", "environment", "recipe", "default"]
MODEL = "OSCAR_INT2_MODEL"
"""The model that this server was asked for. The plugin writes it, so that a folder with artifacts
of several models can be searched."""
T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One value and where it came from."""

    value: T
    origin: Origin

    def __str__(self) -> str:
        return f"{self.value} ({self.origin})"


@dataclass(frozen=True)
class Option:
    """One flag: its name, the variable that it writes, the parser of its text, and its name in the
    published fork."""

    flag: str
    variable: str
    read: Callable[[str], Any]
    help: str
    fork_flag: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the flag."""
        return (self.flag,) if self.fork_flag is None else (self.flag, self.fork_flag)


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(f"must be at least {least}")
        return value

    return read


def _ratio(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise ValueError("must lie in 0 .. 1")
    return value


def _name(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


def _window_on_hit(text: str) -> str:
    if text not in ("recompute", "int2"):
        raise ValueError("must be recompute or int2")
    return text


OPTIONS = {
    "rotation_path": Option(
        "--oscar-rotation-path",
        "OSCAR_INT2_ROTATION_PATH",
        str,
        "folder with one K and one V file, or with the artifacts of several models as"
        " <Model>/<tag>",
    ),
    "artifact": Option(
        "--oscar-artifact", "OSCAR_INT2_ARTIFACT", str, "name of an artifact in the local store"
    ),
    "rotation_sha256": Option(
        "--oscar-rotation-sha256",
        "OSCAR_INT2_ROTATION_SHA256",
        str,
        "digest the artifact must have",
    ),
    "sink": Option(
        "--oscar-sink-size", "OSCAR_INT2_SINK_SIZE", _whole(0), "first tokens kept uncompressed"
    ),
    "recent": Option(
        "--oscar-recent-size", "OSCAR_INT2_RECENT_SIZE", _whole(1), "last tokens kept uncompressed"
    ),
    "idle_sinks": Option(
        "--oscar-idle-sinks",
        "OSCAR_INT2_IDLE_SINKS",
        _whole(0),
        "finished prompts whose first tokens are kept; as many as --max-running-requests by"
        " default",
    ),
    "k_clip": Option(
        "--oscar-k-clip", "OSCAR_INT2_K_CLIP", _ratio, "clip ratio of keys; 0 is no clipping"
    ),
    "v_clip": Option(
        "--oscar-v-clip", "OSCAR_INT2_V_CLIP", _ratio, "clip ratio of values; 0 is no clipping"
    ),
    "group_size": Option(
        "--oscar-group-size",
        "OSCAR_INT2_GROUP_SIZE",
        _whole(1),
        "channels that share a scale",
        "--kv-cache-quant-group-size",
    ),
    "window_on_hit": Option(
        "--oscar-window-on-hit",
        "OSCAR_INT2_WINDOW_ON_HIT",
        _window_on_hit,
        "recompute: a prefix hit prefills the recent window again; int2: it reads the window as"
        " INT2",
    ),
    "name": Option(
        "--oscar-name",
        "OSCAR_INT2_NAME",
        _name,
        "how metrics and server information call the artifact",
    ),
}

FORK_NAMES = {
    "sink": "SGLANG_MIXED_KV_PREFIX_TOKENS",
    "recent": "SGLANG_MIXED_KV_RECENT_TOKENS",
    "k_clip": "SGLANG_OSCAR_K_CLIP_RATIO",
    "v_clip": "SGLANG_OSCAR_V_CLIP_RATIO",
}
"""Fallbacks: variables of the SGLang fork published with OSCAR that have the meaning of one of our
options."""


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
    k_clip: float | None = None
    v_clip: float | None = None
    group_size: int | None = None


DEFAULTS = RecipeValues(sink=64, recent=256, k_clip=0.96, v_clip=0.92, group_size=None)
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
    k_clip: Setting[float]
    v_clip: Setting[float]
    group_size: Setting[int | None]
    window_on_hit: Setting[str]
    warnings: tuple[str, ...] = ()
    name: str | None = None

    def describe(self) -> str:
        """Each value with its origin, one line."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{name} {x}" for name, x in values.items() if isinstance(x, Setting))


class EnvironmentAction(argparse.Action):
    """Writes the value of a flag to its variable and notes that a flag did it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse; `self.const` is the `Option`."""
        option: Option = self.const
        try:
            if option.fork_flag is not None:
                _check_same(option, option_string or option.flag, str(values), namespace)
            write_flag(option, str(values), os.environ)
        except UsageError as error:
            parser.error(error.message)


def _check_same(option: Option, name: str, text: str, namespace: argparse.Namespace) -> None:
    """Refuse two values under the two names of a flag; of one name given twice the last value
    counts, as elsewhere."""
    said: dict[str, str] = vars(namespace).setdefault(option.variable, {})
    said[name] = text
    if len(set(said.values())) > 1:
        values = " and ".join(said.values())
        raise UsageError(f"{' and '.join(option.names)} are one flag: {values} exclude each other.")


def write_flag(option: Option, text: str, environ: MutableMapping[str, str]) -> None:
    """Put the value of one flag into `environ`, where `read_settings` of every child finds it.

    Raises:
        UsageError: the text is not a value of this option.
    """
    _parse(option, text, option.flag)
    earlier = environ.get(option.variable)
    flags = [name for name in environ.get(FROM_FLAGS, "").split(",") if name]
    if earlier not in (None, text) and option.variable not in flags:
        logger.warning("%s=%s is ignored: %s=%s", option.variable, earlier, option.flag, text)
    environ[option.variable] = text
    environ[FROM_FLAGS] = ",".join(dict.fromkeys([*flags, option.variable]))


def flags_given(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The `--oscar-*` flags on this command line."""
    written = environ.get(FROM_FLAGS, "").split(",")
    return tuple(option.flag for option in OPTIONS.values() if option.variable in written)


def read_settings(environ: Mapping[str, str], recipe: RecipeValues | None = None) -> PluginSettings:
    """Settings of an INT2 server.

    Args:
        environ: usually `os.environ`.
        recipe: of the artifact; `None` before it is loaded (`source` says what to load).

    Raises:
        UsageError: no artifact, two artifacts, a value out of range, or a variable that nobody
            reads.
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
        k_clip=final("k_clip"),
        v_clip=final("v_clip"),
        group_size=final("group_size"),
        window_on_hit=given["window_on_hit"] or Setting("recompute", "default"),
        warnings=tuple(warnings),
        name=given["name"].value if given["name"] else None,
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
            else Setting(_parse(option, fork_text, str(fork_name)), "environment")
        )
    by_flag = option.flag in flags_given(environ)
    shown = option.flag if by_flag else option.variable
    value = _parse(option, text, shown)
    if fork_text is not None and _parse(option, fork_text, str(fork_name)) != value:
        warnings.append(f"{fork_name}={fork_text} is ignored: {shown} says {text}.")
    return Setting(value, "flag" if by_flag else "environment")


def _parse(option: Option, text: str, shown: str) -> Any:
    try:
        return option.read(text)
    except ValueError as error:
        raise UsageError(f"{shown} {text!r}: {error}.", hint=option.help) from None


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
