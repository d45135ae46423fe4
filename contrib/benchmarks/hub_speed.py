"""How fast artifacts arrive from a hub on this machine, beside curl and sha256sum of the same bytes
in the same run.

    python contrib/benchmarks/hub_speed.py [ROUNDS]

The hub is another process. `fetch` is what `pull` does until it has hashed bytes; `pull` is the
whole command, start, verification and storing included; `pull, here and pinned` is the command for
something that is there already.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

from cli_child import Cli
from tiny_artifacts import payload

from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.registry.fetch import fetch_files
from oscar_zoo.registry.hubs.address import open_hub
from oscar_zoo.registry.view import HubView, find

LAYERS, DIM = 76, 256
NAME = "Big-Model/seq512_prompt2_group128"


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def by_curl(url: str, names: list[str], folder: Path) -> None:
    """Fetch with one curl and hash with one sha256sum, as a careful person would."""
    places = [str(folder / Path(name).name) for name in names]
    pairs = [
        part
        for name, place in zip(names, places, strict=True)
        for part in ("-o", place, f"{url}/{name}")
    ]
    subprocess.run(["curl", "-sf", *pairs], check=True)
    subprocess.run(["sha256sum", *places], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        geometry = Geometry(
            num_layers=LAYERS,
            num_q_heads=16,
            num_kv_heads=8,
            head_dim=DIM,
            v_head_dim=DIM,
            attention_layers=tuple(range(LAYERS)),
        )
        files = payload(geometry=geometry)
        seed = folder / "seed" / NAME
        seed.mkdir(parents=True)
        for name, data in files.items():
            (seed / name).write_bytes(data)
        server = Path(__file__).parents[2] / "tests/support" / "hub_server.py"
        hub = subprocess.Popen(
            [sys.executable, str(server), "--seed", str(folder / "seed"), "--repo", "org/zoo"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert hub.stdout is not None
            report(hub.stdout.readline().strip(), files, folder, rounds)
        finally:
            hub.kill()
            hub.wait()


def report(url: str, files: dict[str, bytes], folder: Path, rounds: int) -> None:
    """Run every way in turn, round after round."""
    os.environ |= {
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
        "OSCAR_ZOO_STATE": str(folder / "own"),
    }
    os.environ["OSCAR_ZOO_CACHE"] = str(folder / "own-cache")
    resolved = find(Reference("Big-Model"), HubView.open(open_hub("hf:org/zoo")))
    names = [f"{NAME}/{name}" for name in files]
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        cli = Cli(dict(os.environ), folder / str(number))
        cli.folder.mkdir()
        ways: dict[str, Callable[[], object]] = {
            "curl + sha256sum": lambda cli=cli: by_curl(
                f"{url}/org/zoo/resolve/main", names, cli.folder
            ),  # type: ignore[misc]
            "fetch": lambda: fetch_files(resolved),
            "pull": lambda cli=cli: cli("pull", "Big-Model", "--hub", "hf:org/zoo"),  # type: ignore[misc]
            "pull, here and pinned": lambda cli=cli: cli(
                "pull", "Big-Model", "--hub", "hf:org/zoo"
            ),  # type: ignore[misc]
        }
        for name, call in ways.items():
            times.setdefault(name, []).append(seconds(call))
    base = statistics.median(times["curl + sha256sum"])
    print(
        f"{sum(map(len, files.values())) / 1e6:.1f} MB in {len(files)} files, median (best) of"
        f" {rounds} rounds"
    )
    for name, values in times.items():
        middle = statistics.median(values)
        print(
            f"  {name:<24} {middle:6.3f} s ({min(values):.3f})   {middle / base:5.2f} x curl +"
            " sha256sum"
        )


if __name__ == "__main__":
    main()
