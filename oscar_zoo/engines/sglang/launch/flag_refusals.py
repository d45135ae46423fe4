"""Engine flags that an INT2 cache refuses, told from the command line before SGLang reads it.

The rows are those of `refusals`, which checks what SGLang made of all flags. This module sees only
the user's flags, so a flag that SGLang itself sets is found at start-up. Needs neither torch nor
sglang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oscar_zoo.engines.sglang import refusals, settings
from oscar_zoo.engines.sglang.launch.plan import DRAFT_MODEL
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.setting_flags import BACKEND, OPTIONS
from oscar_zoo.errors import PathNotFound, UnsupportedMachine, UsageError
from oscar_zoo.models.config_file import read_config

OTHER_NAMES = {
    "--attention-context-parallel-size": "--attn-cp-size",
    "--decode-context-parallel-size": "--dcp-size",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-hicache": "--enable-hierarchical-cache",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-prefill-context-parallel": "--enable-prefill-cp",
}
"""Second names of flags that a row refuses, in any tested release of SGLang."""
ALGORITHM = "--speculative-algorithm"
NEED_DRAFT_MODELS = ("EAGLE", "EAGLE3", "STANDALONE")
"""Not `NEXTN`, whose drafts come from layers of the model itself."""
MEMORY = "--mem-fraction-static"
GRAPHS = re.compile(r"cuda_graph_backend_(?P<phase>prefill|decode)")


def check_flags(flags: UserFlags, device: str) -> None:
    """Refuse engine flags that the server would refuse on `device`, `cpu` or `cuda`."""
    config = _configuration(flags, device)
    refusals.check_rows(config, refusals.SERVER, UsageError)
    _check_fraction(flags.text(MEMORY))
    _check_drafts(getattr(config, "speculative_algorithm", None), flags, device)
    for option in OPTIONS.values():
        text = flags.text(*option.names)
        if text is not None:
            option.parse(text, option.flag)


def replaced_backends(flags: UserFlags) -> tuple[str, ...]:
    """One sentence for each attention backend of the user that the plugin replaces by its own."""
    names = ["--" + name.replace("_", "-") for name in refusals.BACKENDS]
    return tuple(
        f"{name} {text} is replaced by {BACKEND}, which alone reads an INT2 cache"
        for name in names
        if (text := flags.text(name)) in refusals.FORK_BACKENDS
    )


def _check_fraction(text: str | None) -> None:
    """Refuse a share of memory outside of 0 to 1, which SGLang itself accepts."""
    try:
        possible = text is None or 0.0 < float(text) <= 1.0
    except ValueError:
        possible = False
    if not possible:
        raise UsageError(
            f"{MEMORY} {text!r} is no share of the memory: it lies above 0 and is at most 1.",
            hint=f"for example -- {MEMORY}=0.8",
        )


def _check_drafts(algorithm: Any, flags: UserFlags, device: str) -> None:
    """Refuse speculative decoding that SGLang would give up only after it has loaded weights."""
    path = flags.text(*DRAFT_MODEL)
    if algorithm is None:
        return
    if device == "cpu":
        raise needs_gpu(ALGORITHM)
    if str(algorithm).upper() in NEED_DRAFT_MODELS and path is None:
        raise UsageError(
            f"{ALGORITHM} {algorithm} needs a draft model.",
            hint=f"name one: {DRAFT_MODEL[0]} MODEL; without one: {ALGORITHM} NGRAM",
        )
    if path is not None and path.startswith(("./", "../", "/", "~")):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise PathNotFound.for_path(path, "model folder")
        read_config(folder)


def needs_gpu(option: str) -> UnsupportedMachine:
    """The error for `option`, which asks for speculative decoding on a CPU."""
    return UnsupportedMachine(
        f"{option} needs a GPU: SGLang has the functions that accept drafts only there.",
        hint=f"leave out {option}, or serve on a GPU",
    )


def check_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse variables that the server would refuse; `environ` is its whole environment."""
    refusals.check_server(SimpleNamespace(), environ, eager_only=False)
    return settings.check(environ)


def _configuration(flags: UserFlags, device: str) -> SimpleNamespace:
    """The flags as attributes under SGLang's names, and the settings of CUDA graphs."""
    config = SimpleNamespace(device=device, cuda_graph_config=SimpleNamespace())
    for flag in flags.given:
        name, text = _whole(flag.name)[2:].replace("-", "_"), flag.value
        graphs = GRAPHS.fullmatch(name)
        if graphs is not None:
            setattr(config.cuda_graph_config, graphs["phase"], SimpleNamespace(backend=text))
        elif name in refusals.BACKENDS and text in refusals.FORK_BACKENDS:
            continue
        elif name not in ("device", "cuda_graph_config"):
            setattr(config, name, _value(text))
    return config


def _whole(flag: str) -> str:
    """The flag that the engine's parser takes `flag` for: a second name, or the beginning of
    one."""
    if flag in OTHER_NAMES:
        return OTHER_NAMES[flag]
    names = {row.name.split()[0] for row in refusals.SERVER}
    longer = {name for name in names if name.startswith(flag)}
    return flag if flag in names or len(longer) != 1 else longer.pop()


def _value(text: str | None) -> Any:
    """A flag without a value is on; a number is compared as one."""
    if text is None:
        return True
    try:
        return float(text)
    except ValueError:
        return text
