"""What the GPU check needs of a machine, what is missing, and what the machine is. Standard library
only."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

NEEDED = (
    "torch",
    "triton",
    "sglang",
    "flashinfer",
    "transformers",
    "safetensors",
    "pytest",
    "rich",
    "click",
)
VERSIONS = {
    "torch": "torch",
    "triton": "triton",
    "sglang": "sglang",
    "flashinfer": "flashinfer_python",
    "transformers": "transformers",
}
"""Imported module -> distribution whose version is recorded."""
SMI = [
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total",
    "--format=csv,noheader,nounits",
]


def missing(device: str) -> str | None:
    """One sentence: what this machine lacks for the check, and the next step; `None` when nothing
    is missing."""
    if device == "cuda" and not gpus():
        return (
            "the GPU check needs an NVIDIA GPU, and nvidia-smi lists none here. Run it on a machine"
            " with one; a rehearsal without one: make gpu-check DEVICE=cpu"
        )
    needed = [name for name in NEEDED if device == "cuda" or name != "flashinfer"]
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        return (
            f"this Python has no {', '.join(lacking)}. Install them: pip install -e"
            " '.[compute,serve,dev]'"
        )
    return None


def gpus() -> list[tuple[str, str, int]]:
    """Name, driver version and memory in MiB of every GPU that `nvidia-smi` lists and
    `CUDA_VISIBLE_DEVICES` leaves visible."""
    if shutil.which(SMI[0]) is None:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [*SMI, f"--id={visible}"] if visible else SMI
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    return (
        [(name, driver, int(memory)) for name, driver, memory in rows]
        if done.returncode == 0
        else []
    )


def visible() -> list[str]:
    """The GPUs of `gpus`, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(len(gpus()))]


def facts() -> dict[str, str]:
    """The machine in words, in the order in which the document shows it."""
    found = gpus()
    gpu = (
        f"{len(found)} x {found[0][0]}, {found[0][2] / 1024:.0f} GiB"
        if found
        else "none (CPU rehearsal)"
    )
    rows = {
        "GPU": gpu,
        "driver": found[0][1] if found else "none",
        "Python": platform.python_version(),
    }
    for module, distribution in VERSIONS.items():
        try:
            rows[module] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            rows[module] = "not installed"
    warm = (Path.home() / ".cache/flashinfer").is_dir()
    rows["compiled kernels"] = "kept from an earlier run" if warm else "compiled in this run"
    cuda = re.search(r"\+cu(\d+)(\d)$", rows["torch"])
    return rows | ({"CUDA of torch": f"{cuda[1]}.{cuda[2]}"} if cuda else {})


def commit(root: Path) -> str:
    """Short commit of the checkout, with `-dirty` when it has changes; `unknown` outside of git."""
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=7",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
