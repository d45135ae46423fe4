"""What the front costs: one INT2 server with it and one without, on this CPU, and many clients.

    python tests/benchmarks/front_cost.py [ROUNDS] [CLIENTS] [SECONDS]

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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support")]

from engines import INSTALLED  # noqa: E402
from sglang_http import http_server  # noqa: E402
from tiny_artifacts import payload, write_folder  # noqa: E402

from oscar_zoo.bench.load_clients import Load, run_load  # noqa: E402
from oscar_zoo.evaluate.server_client import ServerClient  # noqa: E402

LONGEST, NEW_TOKENS = 64, 4


def main(rounds: int = 5, clients: int = 32, seconds: int = 10) -> None:
    """Print one line for each round, and the ratio of the medians."""
    found: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
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
                tally = run_load(ServerClient(f"http://127.0.0.1:{server.port}"), load)
                assert not tally.errors, tally.errors
                rate = tally.finished / seconds
                first = statistics.median(tally.first_token_s) * 1000
                found[state].append((rate, first))
                print(f"{number} front {state}: {rate:.1f} requests/s, first token {first:.0f} ms")
    rate, first = (
        [statistics.median(one[place] for one in found[state]) for state in ("on", "off")]
        for place in (0, 1)
    )
    print(f"requests/s: {rate[0]:.1f} / {rate[1]:.1f} = {rate[0] / rate[1]:.3f}")
    print(f"first token, ms: {first[0]:.0f} / {first[1]:.0f} = {first[0] / first[1]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
