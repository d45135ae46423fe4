"""What this machine has: versions, folders, a GPU, an engine. Nothing heavy is imported for it.

Versions come from the metadata of packages, their supported ranges from the metadata of this one,
the GPU from its driver.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from oscar_kernels.chips import (
    CHIPS,
    LOWEST,
    Capability,
    KernelPath,
    cards_by_state,
    kernel_path,
    state,
)
from oscar_zoo import paths
from oscar_zoo.engines.sglang.compat.versions import BEYOND, FIRST, sglang_version
from oscar_zoo.errors import MissingDependency, OscarZooError
from oscar_zoo.models import hardware
from oscar_zoo.next_step import Install
from oscar_zoo.registry.store import Store
from oscar_zoo.version import __version__

State = Literal["ok", "warning", "failed", "not checked"]
LITTLE_DISK = 1_000_000_000
"""Less free space than this is a warning."""
_LIBRARIES = {
    "huggingface_hub": "every hub but folders",
    "modelscope-hub": "publishing to ModelScope",
    "torch": "compute, eval and serve",
    "transformers": "compute and eval",
    "triton": "INT2 kernels on a GPU",
}
_EXTRAS = {"modelscope-hub": "modelscope", "torch": "compute", "transformers": "compute"}


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was looked at.

    Attributes:
        topic: `version`, `folder`, `setting`, `token`, `hub` or `machine`.
        name: what it is.
        state: how it is.
        detail: what was seen.
        step: what to do about it, or `None`.
        essential: whether every command needs it.
        facts: the same for programs.
    """

    topic: str
    name: str
    state: State
    detail: str
    step: str | None = None
    essential: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def versions() -> Iterator[DoctorFinding]:
    """This program, Python, and the libraries that commands need."""
    yield DoctorFinding("version", "oscar-zoo", "ok", __version__, facts={"version": __version__})
    python = platform.python_version()
    yield DoctorFinding("version", "Python", "ok", python, facts={"version": python})
    ranges = _ranges()
    for name, needed_by in _LIBRARIES.items():
        version = _version(name)
        facts = {"version": version, "needed_by": needed_by, "supported": ranges.get(name)}
        if version is None:
            step = str(Install(_EXTRAS[name])) if name in _EXTRAS else None
            detail = f"not installed; needed only for {needed_by}"
            yield DoctorFinding("version", name, "ok", detail, step, facts=facts)
        elif name in ranges and not is_inside(version, ranges[name]):
            detail, step = (
                f"{version} is outside {ranges[name]}",
                f"pip install '{name}{ranges[name]}'",
            )
            yield DoctorFinding("version", name, "failed", detail, step, facts=facts)
        else:
            yield DoctorFinding("version", name, "ok", version, facts=facts)


def folders() -> Iterator[DoctorFinding]:
    """Cache, state and data: whether they can be written, how much room there is, whether the store
    is private."""
    places = {"cache": paths.cache_dir(), "state": paths.state_dir(), "data": paths.data_dir()}
    for name, path in places.items():
        essential = name != "data"
        problem, free = _room(path)
        facts = {"path": str(path), "free_bytes": free, "writable": problem is None}
        variable = f"OSCAR_ZOO_{name.upper()}"
        if problem is not None:
            step = f"check its owner and permissions, or point {variable} elsewhere"
            yield DoctorFinding(
                "folder", name, "failed", f"{path}: {problem}", step, essential, facts
            )
        elif free is not None and free < LITTLE_DISK:
            detail = f"{path}, only {free / 1e6:.0f} MB free"
            yield DoctorFinding(
                "folder",
                name,
                "warning",
                detail,
                "oscar-zoo cache gc, or free some space",
                facts=facts,
            )
        else:
            room = "" if free is None else f", {free / 1e9:.0f} GB free"
            yield DoctorFinding("folder", name, "ok", f"{path}{room}", facts=facts)
    yield _store()


def gpu() -> DoctorFinding:
    """The NVIDIA GPUs, as the driver's own tool names them."""
    cards = hardware.gpus()
    if cards:
        names = ", ".join(f"{card.name} with {card.memory / (1 << 30):.0f} GiB" for card in cards)
        facts = {"gpus": [{"name": card.name, "memory_bytes": card.memory} for card in cards]}
        return DoctorFinding("machine", "GPU", "ok", names, facts=facts)
    models = hardware.driver_models()
    if models:
        detail = f"{', '.join(models)}, but nvidia-smi does not work"
        return DoctorFinding(
            "machine", "GPU", "warning", detail, "check the driver: nvidia-smi", facts={"gpus": []}
        )
    return DoctorFinding(
        "machine",
        "GPU",
        "ok",
        "none by NVIDIA; compute and eval run on the CPU",
        facts={"gpus": []},
    )


def engine() -> Iterator[DoctorFinding]:
    """SGLang in the supported range, and the INT2 kernels."""
    first, beyond = (".".join(map(str, version)) for version in (FIRST, BEYOND))
    facts: dict[str, Any] = {"version": _version("sglang"), "supported": f">={first},<{beyond}"}
    try:
        detail = f"{sglang_version()}, supported"
        yield DoctorFinding("machine", "SGLang", "ok", detail, facts=facts)
    except MissingDependency as error:
        yield DoctorFinding(
            "machine", "SGLang", "ok", "not installed; only serve needs it", error.hint, facts=facts
        )
    except OscarZooError as error:
        yield DoctorFinding("machine", "SGLang", "failed", error.message, error.hint, facts=facts)
    yield kernels()


def kernels() -> DoctorFinding:
    """The path that the INT2 kernels take on the GPUs of this machine."""
    torch, capabilities = (
        _version("torch") is not None,
        sorted(set(hardware.compute_capabilities())),
    )
    paths = [(capability, kernel_path(capability)) for capability in capabilities]
    facts: dict[str, Any] = {
        "torch": torch,
        "paths": [
            {"compute_capability": _dotted(capability), **(asdict(found) if found else NO_PATH)}
            for capability, found in paths
        ],
        "known_gpus": [
            {"name": name, "compute_capability": _dotted(capability), "state": state(capability)}
            for capability, chip in CHIPS.items()
            for name in chip.names
        ],
    }
    known = "; ".join(f"{told}: {', '.join(names)}" for told, names in cards_by_state().items())
    if not torch:
        detail = "none without torch"
    elif not paths:
        detail = f"CUDA C++ and Triton on a GPU, plain torch on a CPU; {known}"
    else:
        detail = "; ".join(_told(capability, found) for capability, found in paths)
    if any(found is None for _, found in paths):
        lowest = f"a GPU from compute capability {_dotted(LOWEST)} on"
        step = f"{lowest} ({known}), or --device cpu"
        return DoctorFinding("machine", "INT2 kernels", "warning", detail, step, facts=facts)
    return DoctorFinding("machine", "INT2 kernels", "ok", detail, facts=facts)


NO_PATH = {"decode": None, "write": None, "measured": False}
_LANGUAGES = {"cuda": "CUDA C++", "triton": "Triton"}


def _told(capability: Capability, found: KernelPath | None) -> str:
    if found is None:
        return f"none for compute capability {_dotted(capability)}"
    return (
        f"decode in {_LANGUAGES[found.decode]}, write in {_LANGUAGES[found.write]}, the rest in"
        f" Triton; {state(capability)} (compute capability {_dotted(capability)})"
    )


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def counted(artifacts: int) -> str:
    """A number of artifacts in words."""
    return f"{artifacts} artifact{'' if artifacts == 1 else 's'}"


def _store() -> DoctorFinding:
    store = Store()
    try:
        count = len(store.installed())
    except OscarZooError as error:
        facts = {"path": str(store.root), "private": False}
        return DoctorFinding(
            "folder", "store", "failed", error.message, error.hint, essential=True, facts=facts
        )
    facts = {"path": str(store.root), "private": True, "artifacts": count}
    return DoctorFinding("folder", "store", "ok", f"private, {counted(count)}", facts=facts)


def _room(folder: Path) -> tuple[str | None, int | None]:
    """Why nothing can be written to `folder`, or `None`, and the bytes free there; creates
    nothing."""
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"x")
            probe.flush()
        return None, shutil.disk_usage(there).free
    except OSError as error:
        return f"cannot be written: {error.strerror or error}", None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ranges() -> dict[str, str]:
    """Supported versions by library, as this package declares them; the first declaration
    counts."""
    try:
        declared = importlib.metadata.requires("oscar-zoo") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    for line in declared:
        match = re.fullmatch(r"([\w.-]+)\s*([<>=!~][^;]*)?(;.*)?", line.strip())
        if match and match[2]:
            found.setdefault(match[1].replace("_", "-").lower(), match[2].strip())
    return {
        name: found[key] for name in _LIBRARIES if (key := name.replace("_", "-").lower()) in found
    }


def is_inside(version: str, supported: str) -> bool:
    """Whether `version` is in a range such as `>=1.31,<3`; other operators are not judged."""
    number = _number(version)
    for clause in supported.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([0-9.]+)\s*", clause)
        if match and (number < _number(match[2])) == (match[1] == ">="):
            return False
    return True


def _number(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    parts = [int(part) for part in release[0].split(".")] if release else []
    return tuple(parts + [0] * (4 - len(parts)))
