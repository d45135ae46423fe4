"""Reads mutants, or compares what was accepted with torch.load; for `fuzz_experiments`.

As a program: `fuzz_child.py TASK PROGRESS FIRST END [FILE ..]` with the task `read` or `compare`;
accepted numbers come on stdin for `compare`. The file PROGRESS always holds the number at work, so
that a process which dies names its input. Prints one line of JSON.
"""

from __future__ import annotations

import io
import json
import mmap
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests/support")]

import numpy as np  # noqa: E402
from hostile import code_of  # noqa: E402
from mutants import Mutants  # noqa: E402

from oscar_zoo.artifact.formats import LayerTransform, RotationSet  # noqa: E402
from oscar_zoo.artifact.outcome import Outcome, Verified  # noqa: E402
from oscar_zoo.artifact.reader import read_rotation  # noqa: E402
from oscar_zoo.artifact.verify import verify_files  # noqa: E402
from oscar_zoo.errors import MalformedFile  # noqa: E402

MEMORY = 1 << 30
"""Address space of a process that reads mutants."""
SECONDS = 1.0
"""CPU seconds that one input may take."""
INVERSE = 5e-6


class Numbers:
    """The numbers to do, each written down before its turn."""

    def __init__(self, progress: Path, numbers: Iterable[int]) -> None:
        with progress.open("w+b") as file:
            file.truncate(8)
            self._place = mmap.mmap(file.fileno(), 8)
        self._numbers = numbers

    def __iter__(self) -> Any:
        for number in self._numbers:
            struct.pack_into("q", self._place, 0, number)
            yield number


def read(mutants: Mutants, numbers: Numbers) -> dict[str, Any]:
    """Verify every mutant with little memory; an exception is a violation."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    codes: Counter[str] = Counter()
    accepted, violations, worst = [], [], [0.0, -1.0]
    for number in numbers:
        data = mutants[number]
        began = time.process_time()
        try:
            outcome = verify_files({"k_rotation.pt": data})
            found = None if _early(outcome) else read_rotation(data, what="mutant")
        except MalformedFile:
            found = None
        except Exception as error:
            violations.append(f"mutant {number}: {type(error).__name__}: {error}")
            continue
        seconds = time.process_time() - began
        codes[code_of(outcome)] += 1
        if not isinstance(outcome, get_args(Outcome)):
            violations.append(f"mutant {number}: {outcome!r} is no outcome")
        if found is not None:
            accepted.append(number)
        if isinstance(outcome, Verified) and found is not None and not _inverse(found):
            violations.append(f"mutant {number}: verified, and not the inverse of its partner")
        worst = max(worst, [seconds, float(number)])
        if seconds > SECONDS:
            violations.append(f"mutant {number}: {seconds:.1f} s of CPU")
    return {"codes": codes, "accepted": accepted, "violations": violations, "worst": worst[0]}


def _early(outcome: Outcome) -> bool:
    """Whether the reader refused it, so that nothing is there to compare."""
    code = code_of(outcome)
    return code.startswith(("zip.", "pickle.", "file.", "tensor.", "schema.", "layers."))


def _inverse(found: RotationSet) -> bool:
    one = found.layers[0]
    forward, partner = one.forward.astype(np.float64), one.partner.astype(np.float64)
    error = forward @ np.swapaxes(partner, -2, -1) - np.eye(forward.shape[-1])
    return bool(np.abs(error).max() <= INVERSE)


def compare(mutants: Mutants, numbers: Numbers) -> dict[str, Any]:
    """Read what was accepted with `torch.load`, too; every difference is a violation."""
    import torch

    compared, violations = 0, []
    for number in numbers:
        data = mutants[number]
        found = read_rotation(data, what="mutant")
        try:
            value = torch.load(io.BytesIO(data), weights_only=True)
            wrong = different(value, found)
        except Exception as error:
            wrong = f"torch.load: {type(error).__name__}: {str(error)[:200]}"
        compared += 1
        if wrong is not None:
            violations.append(f"mutant {number}: {wrong}")
    return {"compared": compared, "violations": violations}


def different(value: Any, found: RotationSet) -> str | None:
    """What `torch.load` reads in another way than we do, or `None`."""
    for name in ("format_version", "objective"):
        if value[name] != getattr(found, name):
            return f"{name} is {value[name]!r}, not {getattr(found, name)!r}"
    if sorted(value["layers"]) != list(found.layer_ids):
        return f"layers are {sorted(value['layers'])}, not {found.layer_ids}"
    for layer in found.layers:
        wrong = _different_layer(value["layers"][layer.layer_id], layer, found.declared_role)
        if wrong is not None:
            return f"layer {layer.layer_id}: {wrong}"
    return None


def _different_layer(entry: Any, layer: LayerTransform, side: str | None) -> str | None:
    partner = "o_rotation" if side == "v" else "q_rotation"
    arrays = {
        "rotation": layer.forward,
        partner: layer.partner,
        "k_mean": layer.mean,
        "eigenvalues": layer.eigenvalues,
    }
    for name, ours in arrays.items():
        theirs = entry.get(name)
        if theirs is None:
            continue
        if ours is None or tuple(theirs.shape) != ours.shape:
            return f"{name} is {tuple(theirs.shape)}, not {None if ours is None else ours.shape}"
        if theirs.numpy().tobytes() != ours.tobytes():
            return f"{name} has other numbers"
    return None


def main() -> None:
    """Do the task of the command line."""
    task, progress, first, end, *files = sys.argv[1:]
    chosen = json.load(sys.stdin) if task == "compare" else range(int(first), int(end))
    mutants = Mutants([Path(name).read_bytes() for name in files])
    result = (compare if task == "compare" else read)(mutants, Numbers(Path(progress), chosen))
    # ru_maxrss would include the process that started this one
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps({**result, "peak_kib": int(status["VmHWM"].split()[0])}))


if __name__ == "__main__":
    main()
