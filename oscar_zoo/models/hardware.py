"""The GPUs of this machine as `nvidia-smi` lists them, whether a server can use one, and the main
memory that is free for this process.

This is cheap and needs no torch, so a command line for another machine can be made without it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oscar_zoo import children
from oscar_zoo.errors import UnsupportedMachine, UsageError

SMI = [
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
]
CAPABILITIES = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
MIB = 1 << 20
SECONDS = 5.0
"""How long the driver's tool may take."""

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Control groups of the first version say such numbers where there is no limit."""

_SEEN: ContextVar[dict[tuple[str, ...], list[str]] | None] = ContextVar("seen", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """In the block the driver's tool is asked for everything once: every call takes 0.1 s or
    more."""
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


@dataclass(frozen=True)
class Gpu:
    """One GPU: number and id of the driver, name, bytes of memory in all and unused."""

    index: int
    uuid: str
    name: str
    memory: int
    free: int


def gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Every GPU of this machine; none where the driver's tool does not work. Only `PATH` and
    `LD_LIBRARY_PATH` of `environ` are passed on."""
    try:
        return [_gpu(line) for line in _said(SMI, environ)]
    except ValueError:
        return []


def compute_capabilities(environ: Mapping[str, str] = os.environ) -> list[tuple[int, int]]:
    """The compute capability of every GPU, such as `(9, 0)`; none where the tool is too old."""
    found = [re.fullmatch(r"(\d+)\.(\d+)", line.strip()) for line in _said(CAPABILITIES, environ)]
    return [(int(one[1]), int(one[2])) for one in found if one] if all(found) else []


def _said(command: list[str], environ: Mapping[str, str]) -> list[str]:
    variables = {name: environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in environ}
    seen, key = _SEEN.get(), (*command, *variables.values())
    if seen is None:
        return _ask(command, variables)
    if key not in seen:
        seen[key] = _ask(command, variables)
    return seen[key]


def _ask(command: list[str], variables: Mapping[str, str]) -> list[str]:
    try:
        said = children.output(command, env=variables, seconds=SECONDS)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [line for line in said.splitlines() if line.strip()]


def driver_models() -> list[str]:
    """Names of the GPUs from the kernel's driver, also when `nvidia-smi` does not work."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(
            r"^Model:\s*(.+)$", path.read_text("utf-8", errors="replace"), re.MULTILINE
        )
        found.append(match[1].strip() if match else "a GPU of unknown model")
    return found


def visible(found: list[Gpu], environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs in `found` that `CUDA_VISIBLE_DEVICES` makes visible, in its order. A list ends at
    its first unknown entry, as CUDA reads it. All count as visible where it names parts of GPUs
    (MIG)."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or "MIG-" in wanted:
        return found
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        named = (g for g in found if entry and (entry == str(g.index) or g.uuid.startswith(entry)))
        match = next(named, None)
        if match is None:
            break
        chosen.append(match)
    return chosen


def torch_without_cuda() -> bool:
    """Whether a CPU build of torch is installed, by its version; torch is not imported."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def default_device(environ: Mapping[str, str] = os.environ) -> str:
    """`cuda` where a server would find a GPU and a torch that can use one, else `cpu`."""
    if torch_without_cuda() or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "cpu"
    return "cuda" if gpus(environ) or driver_models() else "cpu"


def pick_serving_device(wanted: str | None, *, check: bool = True) -> tuple[str, int]:
    """Kind and number of the device that a server runs on: the one `wanted`, or the first GPU, else
    the CPU. `check` is off for a command that another machine will run."""
    if wanted is None:
        return default_device(), 0
    kind, number = parse_device(wanted)
    if kind == "cuda" and check:
        check_gpu(number)
    return kind, number


def device_name(device: str, gpu: int) -> str:
    cards = visible(gpus()) if device == "cuda" else []
    return cards[gpu].name if len(cards) > gpu else device.upper()


def parse_device(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,3}))?", name)
    if match is None or (match[1] == "cpu" and match[2]):
        raise UsageError(
            f"{name!r} is not a device.", hint="devices are called cpu, cuda or cuda:0"
        )
    return match[1], int(match[2] or 0)


def check_build() -> None:
    if torch_without_cuda():
        message = f"torch {version('torch')} is a build for CPUs."
        raise UnsupportedMachine(message, hint="install one for CUDA, or use --device cpu")


def check_gpu(index: int, environ: Mapping[str, str] = os.environ) -> None:
    check_build()
    found = gpus(environ)
    there = len(visible(found, environ)) if found else len(driver_models())
    if index >= there:
        what = f"no device cuda:{index}, only {there}" if there else "no GPU"
        raise UnsupportedMachine(
            f"there is {what} here.", hint="see them: nvidia-smi; without one: --device cpu"
        )


def _gpu(line: str) -> Gpu:
    index, uuid, rest = (part.strip() for part in line.split(",", 2))
    name, memory, free = (part.strip() for part in rest.rsplit(",", 2))
    return Gpu(int(index), uuid, name, int(memory) * MIB, int(free) * MIB)


def available_ram(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Main memory that is free without swapping, in bytes: the least of what the machine and every
    control group around this process allow."""
    free = [_kilobytes(proc / "meminfo", "MemAvailable"), *_left_in_groups(proc, cgroup)]
    known = [one for one in free if one is not None]
    unused = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(known, default=unused)


def resident_set() -> int:
    return _kilobytes(PROC / "self/status", "VmRSS") or 0


def _kilobytes(path: Path, name: str) -> int | None:
    for line in _lines(path):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_groups(proc: Path, cgroup: Path) -> Iterator[int]:
    """Bytes that each group may still take; file pages that it could give back count as free."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, inside = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = cgroup / "memory" if controllers else cgroup
        first = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        names = first if controllers else ("memory.max", "memory.current")
        group = top / inside.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None and limit < UNLIMITED:
                yield max(0, limit - used + _file_pages(folder / "memory.stat"))
            if folder == top:
                break


def _file_pages(stat: Path) -> int:
    counts = dict(line.split(" ", 1) for line in _lines(stat) if " " in line)
    names = ("active_file", "inactive_file")
    return sum(int(counts.get(name, counts.get(f"total_{name}", "0"))) for name in names)


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or a kind of group that is not used
        return []
