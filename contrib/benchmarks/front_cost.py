"""What the front costs: one INT2 server with it and one without, on this CPU, and many clients.

    python contrib/benchmarks/front_cost.py [ROUNDS] [CLIENTS] [SECONDS]

Both servers run all the time, and the clients ask one after the other, so both see the same
machine. The clients are those of `bench load`; requests per second and the median time to the first
token are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support")]

from engines import INSTALLED  # noqa: E402
from sglang_http import http_server  # noqa: E402
from tiny_artifacts import payload, write_folder  # noqa: E402

from oscar_zoo.engines.server_client import ServerClient  # noqa: E402
from oscar_zoo.evaluate.bench.load import Load, LoadReport, run_load  # noqa: E402

LONGEST, NEW_TOKENS = 64, 4


def main(rounds: int = 5, clients: int = 32, seconds: int = 10) -> None:
    """Print one line for each round, and the ratio of the medians."""
    found: dict[str, list[tuple[float, float, float]]] = {"off": [], "on": []}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="front-cost-")))
        pair = write_folder(work / "pair", payload())
        servers = {}
        for state in found:
            folder = work / state
            folder.mkdir()
            flags = ("--kv-cache-dtype=int2", f"--oscar-rotation-path={pair}")
            servers[state] = stack.enter_context(
                http_server(INSTALLED, folder, *flags, f"--oscar-front={state}")
            )
        load = Load(clients, seconds, LONGEST, NEW_TOKENS, aborts=0.0)
        for number in range(rounds):
            for state, server in servers.items():
                before = _processor_seconds(server.pid)
                client = ServerClient(f"http://127.0.0.1:{server.port}")
                tally = run_load(client, LoadReport(load))
                assert not tally.errors, tally.errors
                rate = tally.finished / seconds
                first = statistics.median(tally.first_token_s) * 1000
                cost = (_processor_seconds(server.pid) - before) / tally.finished * 1000
                found[state].append((rate, first, cost))
                print(
                    f"{number} front {state}: {rate:.1f} requests/s, first token {first:.0f} ms,"
                    f" {cost:.2f} ms of the HTTP process for each"
                )
    for place, what in enumerate(("requests/s", "ms to the first token", "ms of the HTTP process")):
        on, off = (statistics.median(one[place] for one in found[state]) for state in ("on", "off"))
        print(f"{what}, with and without: {on:.2f} / {off:.2f} = {on / off:.3f}")


def _processor_seconds(pid: int) -> float:
    """Of the process that speaks HTTP; it says the same on a machine with other work."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
