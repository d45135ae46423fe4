"""Engine flags that an INT2 cache refuses, told from the command line before SGLang reads it.

The rows are those of `refusals`, which checks what SGLang made of all flags. This module sees only
the user's flags, so a flag that SGLang itself sets is found at start-up. Needs neither
torch nor sglang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from oscar_zoo.engines.sglang import fork_environment, refusal, refusals
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.setting_flags import OPTIONS
from oscar_zoo.errors import UsageError

OTHER_NAMES = {
    "--attention-context-parallel-size": "--attn-cp-size",
    "--decode-context-parallel-size": "--dcp-size",
    "--enable-dsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-hicache": "--enable-hierarchical-cache",
    "--enable-nsa-prefill-context-parallel": "--enable-prefill-cp",
    "--enable-prefill-context-parallel": "--enable-prefill-cp",
}
"""Second names of flags that a row refuses, in any tested release of SGLang."""
GRAPHS = re.compile(r"cuda_graph_backend_(?P<phase>prefill|decode)")


def check_flags(flags: UserFlags, device: str) -> None:
    """Refuse engine flags that the server would refuse.

    Args:
        flags: those of the user.
        device: `cpu` or `cuda`.

    Raises:
        UsageError: as `refusals.check_server`, or a value that an option of the cache does not
            take.
    """
    config = _configuration(flags, device)
    refusal.check_rows(config, refusals.SERVER, UsageError)
    for option in OPTIONS.values():
        text = flags.text(*option.names)
        if text is not None:
            option.parse(text, option.flag)


def check_environment(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse variables that the server would refuse; `environ` is the server's whole environment.

    Returns:
        Warnings, one sentence each.

    Raises:
        UsageError: as `refusals.check_server` and `fork_environment.check`.
    """
    refusals.check_server(SimpleNamespace(), environ, eager_only=False)
    return fork_environment.check(environ)


def _configuration(flags: UserFlags, device: str) -> SimpleNamespace:
    """What SGLang would call the flags: attributes, and the settings of CUDA graphs."""
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
