"""Whether this machine has the devices that a server's flags ask for. Needs neither torch nor
sglang.

On a GPU every rank takes one. On a CPU SGLang gives every rank a NUMA node, or the cores that a
variable names for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from oscar_zoo.engines.sglang.compat.versions import COUNTS_ALL_CPU_RANKS, installed_from
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.errors import UnsupportedMachine
from oscar_zoo.models import hardware

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
    """Refuse flags that need more devices than there are.

    Args:
        layout: how the user's flags spread the server; 1 where they say nothing.
        device: `cpu` or `cuda`.
        gpu: number of the first GPU.
    """
    if device == "cpu":
        _check_cpu(layout, environ, nodes)
    else:
        check_gpus(gpu, layout.gpus, environ, tensor_parallel=layout.tp)


def check_gpus(
    gpu: int, number: int, environ: Mapping[str, str], *, tensor_parallel: int | None = None
) -> list[hardware.Gpu]:
    """The `number` GPUs from `gpu` on; none where the driver's tool names none at all.

    Args:
        tensor_parallel: how many of them share the model; `None` for all.
    """
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
    seen = len(hardware.visible(hardware.gpus(environ), environ))
    gpus = "no GPU is" if not seen else "1 GPU is" if seen == 1 else f"{seen} GPUs are"
    room = f"{CORES} names" if listed else "its NUMA nodes are enough for"
    split = "|".join(map(str, range(ranks)))
    use = "" if seen < ranks else ", or use the GPUs: --device cuda"
    raise UnsupportedMachine(
        f"the flags need {layout.gpus} GPUs, {gpus} here, and the server would run on the CPU,"
        f" where {room} {places} of {ranks} ranks.",
        hint=(
            f"leave out --tp, --pp and --dp{use}; to try several ranks on one CPU, name the cores"
            f" of each: {CORES}='{split}'"
        ),
    )


def _numa_nodes(nodes: Path) -> int:
    """NUMA nodes that have cores; 1 where the kernel lists none."""
    with_cores = [one for one in nodes.glob("node[0-9]*/cpulist") if one.read_text().strip()]
    return max(1, len(with_cores))
