"""The flags of the INT2 cache, and the variables in which they travel. Needs neither torch nor
sglang.

SGLang drops command-line attributes it does not know and spawns its workers, so each `--oscar-*`
flag writes one `OSCAR_INT2_*` variable, which children inherit.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from oscar_kernels.spec import BITS, WIDTHS
from oscar_zoo.artifact.names import parse_digest
from oscar_zoo.artifact.specs import MOST_TOKENS
from oscar_zoo.errors import InvalidName, UsageError

logger = logging.getLogger(__name__)

DTYPE = "int2"
"""Value of `--kv-cache-dtype` that turns the plugin on."""
BACKEND = "oscar_int2"
"""Value of `--attention-backend`; chosen when the user chose none."""
FROM_FLAGS = "OSCAR_INT2_FROM_FLAGS"
"""Comma-separated variables that a flag wrote, so that origins survive the way into spawned
children."""

MODEL = "OSCAR_INT2_MODEL"
"""The model that this server was asked for. The plugin writes it, so that a folder with artifacts
of several models can be searched."""
MOST_LAYERS = 1000
T = TypeVar("T", int, float)


def whole_number(text: str) -> int | None:
    digits = text.strip()
    try:
        return int(digits) if digits.isascii() and digits.isdigit() else None
    except ValueError:  # Python refuses thousands of digits
        return None


def parse_layers(text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """The values of a list that has an entry for each layer with full attention, or of one value
    for all, a list of one. `NxM` stands for `N`, `M` times: `4,2x35`."""
    values: list[T] = []
    for entry in text.split(","):
        value, star, times = entry.strip().partition("x")
        count = whole_number(times) if star else 1
        if count is None or not 1 <= count <= MOST_LAYERS:
            raise ValueError(
                f"{entry.strip()!r} must say how many layers have the value, 1 to {MOST_LAYERS},"
                " as 2x35 does"
            )
        values += [read(value)] * count
    if len(values) > MOST_LAYERS:
        raise ValueError(f"{len(values)} entries are more than a model has layers")
    return tuple(values)


def layers_text(values: Sequence[float]) -> str:
    runs = [(value, sum(1 for _ in run)) for value, run in itertools.groupby(values)]
    return ",".join(f"{value:g}" if count == 1 else f"{value:g}x{count}" for value, count in runs)


def of_layer(values: Sequence[T], index: int) -> T:
    return values[0] if len(values) == 1 else values[index]


def one_or_text(values: Sequence[float]) -> float | str:
    return values[0] if len(values) == 1 else layers_text(values)


@dataclass(frozen=True)
class CodeBits:
    """Bits of the codes of keys and of values: lists as of `parse_layers`. As text the two lists
    stand on both sides of a slash, and one list is for both: `2`, `4/2`, `4,2x35/2`."""

    k: tuple[int, ...] = (BITS,)
    v: tuple[int, ...] = (BITS,)

    @classmethod
    def parse(cls, text: str) -> CodeBits:
        k, _, v = text.partition("/")
        return cls(parse_layers(k, _width), parse_layers(v or k, _width))

    @property
    def narrow(self) -> bool:
        return {*self.k, *self.v} == {BITS}

    def __str__(self) -> str:
        k, v = layers_text(self.k), layers_text(self.v)
        return k if k == v else f"{k}/{v}"


def _width(text: str) -> int:
    if text.strip() not in map(str, WIDTHS):
        raise ValueError(f"codes have {' or '.join(map(str, WIDTHS))} bits, not {text.strip()!r}")
    return int(text)


@dataclass(frozen=True)
class Option:
    """One flag: the parser of its text, its name in the published fork, and a value that may be
    given."""

    flag: str
    read: Callable[[str], Any]
    help: str
    example: str | None = None
    fork_flag: str | None = None

    @property
    def variable(self) -> str:
        return "OSCAR_INT2_" + self.flag.removeprefix("--oscar-").replace("-", "_").upper()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.flag,) if self.fork_flag is None else (self.flag, self.fork_flag)

    def parse(self, text: str, shown: str) -> Any:
        try:
            return self.read(text)
        except ValueError as error:
            advice = f"for example {shown}={self.example}" if self.example else self.help
            raise UsageError(f"{shown} {text!r}: {error}.", hint=advice) from None


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = whole_number(text)
        if value is None or not least <= value <= MOST_TOKENS:
            raise ValueError(f"must be a whole number from {least} to {MOST_TOKENS}")
        return value

    return read


def _number(what: str, most: float, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= most:
        raise ValueError(f"{what} a number from 0 to {most:g}, not {text.strip()!r}")
    return value


_RATIOS = partial(parse_layers, read=partial(_number, "a clip ratio is", 1))


def _name(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


def _absolute(text: str) -> str:
    if not _name(text).startswith("/"):
        raise ValueError("must be an absolute path")
    return text


def _digest(text: str) -> str:
    try:
        return parse_digest(text)
    except InvalidName as error:
        raise ValueError(error.hint) from None


def _one_of(*words: str, path: bool = False) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words and not (path and text.startswith("/")):
            raise ValueError(f"must be {' or '.join(words)}")
        return text

    return read


OPTIONS = {
    "front": Option(
        "--oscar-front",
        _one_of("on", "off", path=True),
        "on: only routes of inference, health, metrics and information exist for clients, and pages"
        " of other origins may not ask; off by default, oscar-zoo serve turns it on",
    ),
    "rotation_path": Option(
        "--oscar-rotation-path",
        str,
        "folder with one K and one V file, or with the artifacts of several models as"
        " <Model>/<tag>",
    ),
    "artifact": Option("--oscar-artifact", str, "name of an artifact in the local store"),
    "rotation_sha256": Option("--oscar-rotation-sha256", str, "digest the artifact must have"),
    "sink": Option("--oscar-sink-size", _whole(0), "first tokens kept uncompressed", "64"),
    "recent": Option("--oscar-recent-size", _whole(1), "last tokens kept uncompressed", "256"),
    "idle_sinks": Option(
        "--oscar-idle-sinks",
        _whole(0),
        "finished prompts whose first tokens are kept; as many as --max-running-requests by"
        " default",
        "16",
    ),
    "host_sinks": Option(
        "--oscar-host-sinks",
        _whole(0),
        "prompts whose first tokens are kept in the host's memory when their place on the GPU is"
        " given away; as many as take 1 GB by default, and none on a CPU",
        "1000",
    ),
    "disk_cache": Option(
        "--oscar-disk-cache",
        _absolute,
        "private folder where prompts of the host's memory are kept in files, also when the server"
        " ends; needs --enable-hierarchical-cache",
        "/home/me/prompts",
    ),
    "disk_size": Option(
        "--oscar-disk-size",
        _whole(1),
        "GB that these files may take; half of what is free by default",
        "500",
    ),
    "bits": Option(
        "--oscar-bits",
        CodeBits.parse,
        "bits of a code, 2 or 4: of keys and values (4), of each (4/2), or of each layer"
        " (4,2x35/2); codes of 4 bits are not clipped where the clip is one ratio",
        "4/2",
    ),
    "k_clip": Option(
        "--oscar-k-clip",
        _RATIOS,
        "clip ratio of keys, of all layers or of each (0,0.96x35); 0 is no clipping",
        "0.96",
    ),
    "v_clip": Option("--oscar-v-clip", _RATIOS, "clip ratio of values, as --oscar-k-clip", "0.92"),
    "group_size": Option(
        "--oscar-group-size",
        _whole(1),
        "channels that share a scale",
        "128",
        "--kv-cache-quant-group-size",
    ),
    "window_on_hit": Option(
        "--oscar-window-on-hit",
        _one_of("recompute", "int2"),
        "recompute: a prefix hit prefills the recent window again; int2: it reads the window as"
        " INT2",
    ),
    "canary_minutes": Option(
        "--oscar-canary-minutes",
        partial(_number, "minutes are", 10_000),
        "how often a fixed text is scored through the cache, to notice answers that get worse; 10"
        " by default, 0 never",
        "10",
    ),
    "name": Option("--oscar-name", _name, "how metrics and server information call the artifact"),
    "copy_of": Option(
        "--oscar-copy-of",
        _digest,
        "digest of the artifact that the files are a verified copy of, which log, metrics and"
        " server information then tell",
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


class EnvironmentAction(argparse.Action):
    """Writes the value of a flag to its variable and notes that a flag did it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
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
    """Put the value of one flag into `environ`, where `read_settings` of every child finds it."""
    option.parse(text, option.flag)
    earlier = environ.get(option.variable)
    flags = [name for name in environ.get(FROM_FLAGS, "").split(",") if name]
    if earlier not in (None, text) and option.variable not in flags:
        logger.warning("%s=%s is ignored: %s=%s", option.variable, earlier, option.flag, text)
    environ[option.variable] = text
    environ[FROM_FLAGS] = ",".join(dict.fromkeys([*flags, option.variable]))


def flags_given(environ: Mapping[str, str]) -> tuple[str, ...]:
    written = environ.get(FROM_FLAGS, "").split(",")
    return tuple(option.flag for option in OPTIONS.values() if option.variable in written)
