"""Stock SGLang without our plugin, on loopback: what an INT2 server is compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from oscar_zoo import children
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.flags import device_flags, device_switches
from oscar_zoo.engines.sglang.launch import plan, ports, server, staging
from oscar_zoo.engines.sglang.launch.environment import child_environment, set_variables
from oscar_zoo.engines.sglang.launch.own_server import StartedServer, StartNews, follow_start
from oscar_zoo.engines.sglang.launch.rank_port import rank_port
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags

StockCache = Literal["bf16", "fp8"]
BACKENDS = {"cuda": "flashinfer", "cpu": "torch_native"}
"""Attention backend of a stock server, by device."""
NO_PLUGIN = "none"
"""Value of SGLANG_PLUGINS that names no plugin."""
CACHE_TYPES: dict[StockCache, str] = {"bf16": "auto", "fp8": "fp8_e4m3"}
"""Values of `--kv-cache-dtype`; `auto` is the type of the weights."""


@dataclass(frozen=True)
class StockServer:
    """A server to start.

    Attributes:
        cache: type of its cache.
        model: local folder or hub id, at `revision`.
        device: `cpu` or `cuda`.
        log: file for everything that the server prints.
        timeout: seconds that its start may take, and that one answer may take.
        gpu: number of the first GPU.
        flags: engine flags of the user.
    """

    cache: StockCache
    model: str
    revision: str | None
    device: str
    log: Path
    timeout: float
    gpu: int = 0
    flags: UserFlags = field(default_factory=UserFlags)


@contextmanager
def stock_server(wanted: StockServer, news: StartNews) -> Iterator[StartedServer]:
    """Start `wanted` and wait until it is healthy."""
    planned = _plan(wanted, ports.free_port())
    news.starting(wanted.log)
    with server.running(planned, wanted.log) as child:
        child.wait_until_healthy(wanted.timeout, follow_start(wanted.log, news))
        url = ports.client_url(planned.url)
        yield StartedServer(child, url, ServerClient(url, timeout=wanted.timeout))


def _plan(wanted: StockServer, port: int) -> plan.LaunchPlan:
    flags = {
        "--model-path": wanted.model,
        "--host": plan.LOOPBACK,
        "--port": str(port),
        "--attention-backend": BACKENDS[wanted.device],
        "--kv-cache-dtype": CACHE_TYPES[wanted.cache],
        **device_flags(wanted.device),
    }
    if wanted.gpu:
        flags["--base-gpu-id"] = str(wanted.gpu)
    if wanted.revision is not None:
        flags["--revision"] = wanted.revision
    argv = children.python("-m", "sglang.launch_server")
    argv += [f"{name}={value}" for name, value in flags.items()]
    argv += [*device_switches(wanted.device), *rank_port(wanted.flags, listens=port)]
    argv += wanted.flags.words
    kernels = staging.kernels_folder()
    env = child_environment(os.environ, device=wanted.device, kernels=kernels)
    sets = set_variables(device=wanted.device, kernels=kernels) | {"SGLANG_PLUGINS": NO_PLUGIN}
    return plan.LaunchPlan(tuple(argv), env | sets, plan.url(plan.LOOPBACK, port), sets)
