"""SGLang's engine inside one of our own programs: no HTTP server, the same process for requests.

The only door to `import sglang` for the programs that measure or calibrate without a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def open_engine(arguments: Sequence[str]) -> Any:
    """An engine with the settings of a server's command line, `--oscar-*` flags included."""
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # before the command line is read, because plugins add flags to it
    return sglang.Engine(server_args=prepare_server_args(list(arguments)))


def release() -> str:
    """The version that SGLang says it has."""
    import sglang

    return str(sglang.__version__)
