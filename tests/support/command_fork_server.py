"""The process behind `cli_child`: it imports what most commands import, then forks for every one of
them."""

from __future__ import annotations

import gc
import importlib
import socket
import sys

import sglang_fork_server

PRELOADED = (
    "filelock",
    "httpx",
    "numpy",
    "rich.console",
    "rich.progress",
    "rich.table",
    "yaml",
    "forked_commands",
    "oscar_zoo.registry.artifacts",
    "oscar_zoo.serving.doctor",
    "oscar_zoo.registry.mirror",
    "oscar_zoo.registry.publish",
    "oscar_zoo.registry.pull",
    "oscar_zoo.cli.commands.pull",
    "oscar_zoo.cli.main",
    "oscar_zoo.registry.hubs.huggingface",
    "oscar_zoo.registry.hubs.http",
)
CLIENTS = ("huggingface_hub", "modelscope_hub")
"""They read variables while they are imported, so every command imports them itself."""


def serve(listener: socket.socket) -> None:
    sglang_fork_server.serve(listener, _preload)


def _preload() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    assert not [name for name in CLIENTS if name in sys.modules]
    gc.collect()
    gc.freeze()
