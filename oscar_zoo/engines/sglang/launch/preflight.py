"""Checks before a server starts, from a few files and flags. Needs neither torch nor sglang.

Memory is judged by a lower bound. A server that is refused here could not have worked; one that
passes may still be too large, and SGLang then says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from oscar_zoo.artifact.specs import Geometry, Windows
from oscar_zoo.engines.sglang import refusals, sizing
from oscar_zoo.engines.sglang.compat.releases import COUNTS_ALL_CPU_RANKS, installed_from
from oscar_zoo.engines.sglang.sizing import (
    ITEMSIZES,
    SINKS_SHARE,
    Layout,
    SizeFlags,
    device_flags,
    splits,
)
from oscar_zoo.errors import NotEnoughMemory, UnsupportedMachine, UsageError
from oscar_zoo.models import hardware, weight_files
from oscar_zoo.models.config_file import ConfigFile, refuse_chosen_code
from oscar_zoo.models.weight_files import check_weight_files
from oscar_zoo.runtime.disk_files import make_private

ALL_OF_A_GPU = 0.95
HOST_SHARE = 0.9
"""Of what the host has free, for pages; the rest is for the engine itself."""
SIZE_ON_HOST = "--hicache-size"
"""SGLang's flag for GB of each GPU."""
LIKELY_ENOUGH = (2, 4, 8)


@dataclass(frozen=True)
class ServerDemand:
    """What decides the memory of a server; the least that one device has to hold is its `total`."""

    model: str
    geometry: Geometry
    windows: Windows
    weights: int | None  # bytes of all weights as they are stored, where known
    itemsize: int | None  # bytes of a stored number; `None` for quantized ones, which keep theirs
    device: str
    gpu: int = 0  # number of the first one
    tensor_parallel: int = 1
    flags: SizeFlags = field(default_factory=SizeFlags)
    memory: int | None = None  # bytes of the smallest GPU, where known

    @property
    def _dtype_bytes(self) -> int:
        """Bytes of one number in the type of the model when it runs."""
        usual = device_flags(self.device).get("--dtype", "auto")
        return ITEMSIZES.get(self.flags.dtype or usual, 2)

    @property
    def layout(self) -> Layout:
        return Layout.of_flags(self.flags, tp=self.tensor_parallel)

    @property
    def _token(self) -> int:
        return self.layout.token_bytes(
            layers=len(self.geometry.attention_layers),
            num_kv_heads=self.geometry.num_kv_heads,
            dims=sum(self.geometry.row_dims),
            itemsize=self._dtype_bytes,
        )

    @property
    def usual_requests(self) -> int:
        """The `--max-running-requests` of a server whose flags do not say one."""
        on_cpu = device_flags(self.device).get("--max-running-requests")
        if on_cpu is not None:
            return int(on_cpu)
        return sizing.usual_requests(self.memory, self._token, self.windows, self.layout)

    @property
    def requests(self) -> int:
        """Concurrent requests of one device; SGLang keeps one more row for itself."""
        asked = self.flags.requests
        return max(1, (self.usual_requests if asked is None else asked) // self.layout.workers)

    @property
    def row(self) -> int:
        return (self.windows.sink + self.windows.recent) * self._token

    @property
    def all_windows(self) -> int:
        return self.row * (self.requests + 1)

    @property
    def weights_here(self) -> int:
        if self.weights is None or not self.flags.weights_known:
            return 0
        scale = 1.0 if self.itemsize is None else self._dtype_bytes / self.itemsize
        return int(self.weights * scale) // self.tensor_parallel

    @property
    def total(self) -> int:
        return self.weights_here + self.all_windows


def check_folder(folder: Path, model_id: str) -> ConfigFile:
    """Refuse a folder that is no model, or one of a kind that an INT2 cache cannot serve."""
    refuse_chosen_code(folder, model_id)
    config = ConfigFile.of_folder(folder)
    refusals.check_config(config, model_id)
    weight_files.check_model_folder(folder)
    check_weight_files(folder)
    return config


def check_memory(server: ServerDemand, free: int | None) -> None:
    """Refuse a server that cannot fit into the `free` bytes of every device that it runs on; `None`
    where they are unknown."""
    if free is None:
        return
    usual = device_flags(server.device).get("--mem-fraction-static", str(ALL_OF_A_GPU))
    asked = server.flags.memory_fraction
    fraction = float(usual) if asked is None else asked
    usable = int(free * fraction)
    if server.total <= usable:
        return
    requests = "1 request" if server.requests == 1 else f"{server.requests} requests"
    told = [f"{server.all_windows / 1e9:.1f} GB of that are the windows of {requests}"]
    if fraction < ALL_OF_A_GPU:
        told.append(f"SGLang uses {fraction:.0%} of what is free")
    hint = "; ".join([*told, " or ".join(_ways(server, usable))])
    where = f"cuda:{server.gpu}" if server.device == "cuda" else server.device
    raise NotEnoughMemory.for_model(server.model, server.total, where, usable, hint=hint)


def host_cache_flag(size: int, layout: Layout, free: int | None) -> str:
    """The engine's flag for pages in `size` bytes of the host's memory, which all GPUs share, with
    the first tokens of prompts. Refuses more than is `free`, and too little for the engine, which
    counts whole GB of each GPU."""
    _check_host("--host-cache {}GiB", -(-size >> 30), 1 << 30, free)
    each = int(size / (1 + SINKS_SHARE) / layout.gpus / 1e9)
    if each < 1:
        more = f"ask for more: --host-cache {int((1 + SINKS_SHARE) * layout.gpus) + 1}GiB"
        raise UsageError("--host-cache is less than 1 GB for each GPU.", hint=more)
    return f"{SIZE_ON_HOST}={each}"


def check_host_size(each: int, layout: Layout, free: int | None) -> None:
    """Refuse `each` GB for every GPU, and the first tokens beside them, if less is `free`."""
    of_one = int((1 + SINKS_SHARE) * layout.gpus * 1e9)
    _check_host(f"{SIZE_ON_HOST}={{}}", each, of_one, free)


def _check_host(flag: str, number: int, unit: int, free: int | None) -> None:
    most = number if free is None else int(HOST_SHARE * free) // unit
    if free is not None and number > most:
        what, sizes = flag[: flag.index("{") - 1], (number * unit, "the host", free)
        hint = f"{HOST_SHARE:.0%} of that at most: {flag.format(most)}"
        raise NotEnoughMemory.for_model(what, *sizes, hint=hint)


def check_disk_cache(folder: Path, layout: Layout, *, make: bool) -> None:
    """Refuse more GPUs than one, and a folder that others can enter; one that is missing is made if
    `make`."""
    workers = {"tp_size": layout.gpus, "dp_size": layout.replicas * layout.workers}
    config = SimpleNamespace(enable_hierarchical_cache=True, **workers)
    refusals.check_rows(config, refusals.ON_DISK, UsageError)
    if make:
        make_private(folder.expanduser())


def free_memory(
    device: str, gpu: int, number: int, environ: Mapping[str, str] = os.environ
) -> int | None:
    """Free bytes on the CPU, or on the fullest of `number` GPUs from `gpu`; `None` if unknown."""
    if device == "cpu":
        return hardware.available_ram()
    return min((card.free for card in check_gpus(gpu, number, environ)), default=None)


def _ways(server: ServerDemand, usable: int) -> list[str]:
    """Changes each of which would be enough."""
    ways = []
    requests = (usable - server.weights_here) // server.row - 1
    if requests >= 1:
        ways.append(f"lower the requests at a time: -- --max-running-requests={requests}")
    for number in LIKELY_ENOUGH if server.device == "cuda" else ():
        more = replace(server, tensor_parallel=number)
        shared = splits(more.geometry, more.layout.attention_ranks)
        if number > server.tensor_parallel and shared and more.total <= usable:
            ways.append(f"spread it over {number} GPUs: -- --tp={number}")
            break
    return ways or ["use more GPUs or a smaller model"]


CORES = "SGLANG_CPU_OMP_THREADS_BIND"
"""Variable that names the cores of every rank, with `|` between them; `all` is its default."""
NODES = Path("/sys/devices/system/node")


def check_devices(
    layout: Layout,
    device: str,
    gpu: int = 0,
    *,
    environ: Mapping[str, str] = os.environ,
    nodes: Path = NODES,
) -> None:
    """Refuse flags that need more devices than there are. On a GPU every rank takes one, from
    number `gpu` on. On a CPU SGLang gives every rank a NUMA node, or the cores that a variable
    names."""
    if device == "cpu":
        _check_cpu(layout, environ, nodes)
    else:
        check_gpus(gpu, layout.gpus, environ, tensor_parallel=layout.tp)


def check_gpus(
    gpu: int, number: int, environ: Mapping[str, str], *, tensor_parallel: int | None = None
) -> list[hardware.Gpu]:
    """The `number` GPUs from `gpu` on, of which `tensor_parallel` (`None` for all) share the model;
    none where the driver's tool names none at all."""
    seen = hardware.visible(hardware.gpus(environ), environ)
    if seen and gpu + number > len(seen):
        left = len(seen) - gpu
        hint = None
        if left > 0:
            fewer = f"spread the model over fewer: -- --tp={left}"
            alone = tensor_parallel in (None, number)
            hint = fewer if alone else f"let --tp, --pp and --dp need no more than {left} together"
        raise UnsupportedMachine(
            f"{number} GPUs are wanted{f' from cuda:{gpu} on' if gpu else ''}, {len(seen)} are"
            " here.",
            hint=hint,
        )
    return seen[gpu : gpu + number]


def _check_cpu(layout: Layout, environ: Mapping[str, str], nodes: Path) -> None:
    ranks = layout.gpus if installed_from(COUNTS_ALL_CPU_RANKS) else layout.tp
    cores = environ.get(CORES) or "all"
    listed = cores != "all"
    places = len(cores.split("|")) if listed else _numa_nodes(nodes)
    if ranks <= places:
        return
    room = f"{CORES} names" if listed else "its NUMA nodes are enough for"
    split = "|".join(map(str, range(ranks)))
    raise UnsupportedMachine(
        f"the flags need {layout.gpus} GPUs, and the server would run on the CPU, where {room}"
        f" {places} of {ranks} ranks.",
        hint=(
            "leave out --tp, --pp and --dp, or use GPUs: --device cuda; to try several ranks on one"
            f" CPU, name the cores of each: {CORES}='{split}'"
        ),
    )


def _numa_nodes(nodes: Path) -> int:
    """NUMA nodes that have cores; 1 where the kernel lists none."""
    with_cores = [one for one in nodes.glob("node[0-9]*/cpulist") if one.read_text().strip()]
    return max(1, len(with_cores))
