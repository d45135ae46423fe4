"""Pull from a loopback hub that delivers damaged files, many times, each time with another damage.

Every kind of damage comes to every file in turn; where it is, and how large, is by chance.

As a program: `corruption_run.py COUNT SEED KIND` with a private environment; prints one line of
JSON.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests/support")]

from hub_server import HubServer  # noqa: E402
from hub_uses import pull  # noqa: E402
from tiny_artifacts import FILE_NAME, K_NAME, V_NAME, artifact_files  # noqa: E402

from oscar_zoo import paths  # noqa: E402
from oscar_zoo.artifact.files import sha256_hex  # noqa: E402
from oscar_zoo.errors import IntegrityError, NetworkError, OscarZooError  # noqa: E402
from oscar_zoo.registry.hubs.address import open_hub  # noqa: E402
from oscar_zoo.registry.hubs.base import Limits  # noqa: E402
from oscar_zoo.registry.store import Store  # noqa: E402

ONE, OTHER = "tiny-qwen3-hard/seq512_prompt2_group64", "tiny-qwen3/seq512_prompt2_group64"
SAME_SIZE = ("flip", "hole", "exchange")
Damage = tuple[str, dict[str, Any]]


def damages(chance: random.Random, size: int, name: str) -> dict[str, Damage]:
    """Every kind of damage to the file `name` of `size` bytes, as faults of the loopback hub."""
    other = f"{ONE}/{V_NAME if name == K_NAME else K_NAME}"
    at, n = chance.randrange(size // 2, size - 64), chance.randint(16, 64)

    def hole(data: bytes) -> bytes:
        return data[:at] + bytes(n) + data[at + n :]

    def exchange(data: bytes) -> bytes:
        return data[at : at + n] + data[n:at] + data[:n] + data[at + n :]

    def repeat(data: bytes) -> bytes:
        return data[: at + n] + data[at:]

    return {
        **{each.__name__: ("edit", {"change": each}) for each in (hole, exchange, repeat)},
        "flip": ("flip", {"at": chance.randrange(size)}),
        "swap": ("swap", {"other": other}),
        "cut": ("cut", {"after": chance.randrange(size)}),
        "reset": ("reset", {"after": chance.randrange(size)}),
        "extra": ("extra", {"n": chance.randint(1, 1000)}),
        "shorter": ("wrong_length", {"by": -chance.randint(1, size - 1)}),
        "longer": ("wrong_length", {"by": chance.randint(1, 1000)}),
        "empty": ("empty", {}),
        "html": ("html", {}),
        "pointer": ("lfs_pointer", {}),
    }


def store_state(root: Path) -> dict[str, tuple[str, int]]:
    """Every file of entries and blobs with its content and the time it was written."""
    files = (
        path
        for part in ("artifacts", "blobs")
        for path in (root / part).rglob("*")
        if path.is_file()
    )
    return {str(path): (sha256_hex(path.read_bytes()), path.stat().st_mtime_ns) for path in files}


def run(count: int, seed: int, scheme: str) -> dict[str, Any]:
    """Pull `count` times from damaged deliveries, then once from an honest one; see the keys of the
    result."""
    chance = random.Random(seed)
    files = {
        f"{a}/{n}": d
        for a in (ONE, OTHER)
        for n, d in artifact_files(artifact=a, seed=len(a)).items()
    }
    outcomes: collections.Counter[str] = collections.Counter()
    accepted, same_size = [], 0
    with HubServer() as server:
        server.repository("org/zoo", "hf" if scheme == "hf" else "ms", files=files)
        os.environ |= {"HF_ENDPOINT": server.url, "MODELSCOPE_ENDPOINT": server.url}
        store, hub = (Store(), lambda: open_hub(f"{scheme}:org/zoo", network=Limits(tries=1)))
        pull("tiny-qwen3", hub(), store)
        before = store_state(store.root)
        for number in range(count):
            name = (K_NAME, V_NAME, FILE_NAME)[number % 3]
            kinds = damages(chance, len(files[f"{ONE}/{name}"]), name)
            in_turn = [*kinds, "flip"]  # every kind with every file
            kind = in_turn[number // 3 % len(in_turn)]
            fault = server.fault(kinds[kind][0], f"{ONE}/{name}", **kinds[kind][1])
            shutil.rmtree(paths.cache_dir() / "hubs", ignore_errors=True)
            try:
                pull("tiny-qwen3-hard", hub(), store)
                accepted.append([number, kind, name])
            except (IntegrityError, NetworkError) as error:
                outcomes[f"{kind}: {error.code}"] += 1
            except OscarZooError as error:
                accepted.append([number, kind, name, error.code, error.message])
            if not fault.hits:
                accepted.append([number, kind, name, "the fault was never met"])
            same_size += kind in SAME_SIZE or (kind == "swap" and name != FILE_NAME)
            server.clear_faults()
        unchanged = store_state(store.root) == before
        healed = pull("tiny-qwen3-hard", hub(), store).artifact.files == artifact_files(
            artifact=ONE, seed=len(ONE)
        )
    return {
        "refused": sum(outcomes.values()),
        "same_size": same_size,
        "accepted": accepted[:20],
        "unchanged": unchanged,
        "healed": healed,
        "outcomes": dict(sorted(outcomes.items())),
    }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
