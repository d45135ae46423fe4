"""A server under load, from its first request to its end: what is measured, and what must hold.

Only requests whose client hung up may fail. Memory must not grow, all token slots must be free
afterwards, and the same prompts must have the same completions as before. SIGTERM must let running
requests finish, turn new ones away, and end the server in time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from oscar_zoo.bench import load_clients
from oscar_zoo.bench.load_clients import ClientCall, Load, Outcome, Tally
from oscar_zoo.bench.load_memory import Usage, Watch
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.server import Server
from oscar_zoo.errors import ServerFailed

SCHEMA = "oscar-zoo.bench-load/1"
SETTLE = 120.0
"""Seconds after which no request of a client that is gone may still run."""
DRAINED = 16
"""Maximum number of requests that run when the server is told to end."""
PAUSE, VISIT = 0.2, 1.0
"""Seconds between two tries, and from SIGTERM to the visit of a client that does not know it."""
LEAKED = 10.0
"""Seconds for which the same slots must be missing. A server on a busy machine may begin a request
after its client hung up, and keeps the prefix of it until the next flush."""
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LoadLimits:
    """What is allowed.

    Attributes:
        growth: bytes that processes, and GPUs, may take more at the end than in the middle.
        drain_s: seconds from SIGTERM to the end of the server.
    """

    growth: int = 256 << 20
    drain_s: float = 300.0


@dataclass(frozen=True)
class Drain:
    """What happened after SIGTERM.

    Attributes:
        running: requests that ran at that time.
        finished: how many of them got all their tokens.
        seconds: until the server was gone, or the limit.
        ended: whether the server was gone.
        status: how it ended, in words.
        turned_away: whether `/health` was no longer healthy.
        late_request: what happened to a request that came later.
    """

    running: int
    finished: int
    seconds: float
    ended: bool
    status: str
    turned_away: bool
    late_request: str


@dataclass(frozen=True)
class LoadReport:
    """Everything measured.

    Attributes:
        load: what the clients did.
        tally: what became of their requests.
        seconds: that the load took.
        host, gpu: memory of the processes and of the GPUs.
        free_before, free_after: free token slots of each data-parallel worker; `free_after` is
            `None` where requests still ran, or where nobody looked.
        same_answers: whether the same prompts have the same answers as before the load.
        drain: how the server ended, or `None` if a signal came first.
        limits: what is allowed.
        model: name of the model, where it is known.
        stopped: the signal that ended the run early, `SIGINT` or `SIGTERM`.
    """

    load: Load
    tally: Tally
    seconds: float
    host: Usage | None
    gpu: Usage | None
    free_before: tuple[int, ...]
    free_after: tuple[int, ...] | None
    same_answers: bool | None
    drain: Drain | None
    limits: LoadLimits
    model: str | None = None
    stopped: str | None = None

    @property
    def violations(self) -> tuple[str, ...]:
        """Everything that did not hold, one line each."""
        wrong = [
            f"{count} requests failed: {message}"
            for message, count in self.tally.errors.most_common()
        ]
        if not self.tally.finished:
            wrong.append("no request finished")
        for name, used in (("the processes", self.host), ("the GPUs", self.gpu)):
            if used is not None and used.growth > self.limits.growth:
                wrong.append(f"memory of {name} grew by {used.growth / 1e6:,.0f} MB")
        if self.free_after is None:
            if self.stopped is None:
                wrong.append(f"requests of clients that are gone still ran after {SETTLE:.0f} s")
        elif self.free_after != self.free_before:
            wrong.append(
                f"{sum(self.free_before) - sum(self.free_after):,} token slots were not given back"
            )
        if self.same_answers is False:
            wrong.append("the same prompts have other answers than before the load")
        return (*wrong, *(_drain_violations(self.drain) if self.drain is not None else ()))

    def to_json(self) -> dict[str, Any]:
        """The whole report in plain values, with the name of its schema."""
        tally, firsts = self.tally, self.tally.first_token_s
        return {
            "schema": SCHEMA,
            "model": self.model,
            "load": asdict(self.load),
            "seconds": self.seconds,
            "requests": tally.requests,
            "finished": tally.finished,
            "aborted": tally.aborted,
            "errors": dict(tally.errors),
            "new_tokens": tally.tokens,
            "tokens_per_second": tally.tokens / self.seconds,
            "ttft_median_s": statistics.median(firsts) if firsts else None,
            "host_memory": None if self.host is None else asdict(self.host),
            "gpu_memory": None if self.gpu is None else asdict(self.gpu),
            "free_tokens": {"before": self.free_before, "after": self.free_after},
            "same_answers": self.same_answers,
            "drain": None if self.drain is None else asdict(self.drain),
            "violations": list(self.violations),
            "stopped": self.stopped,
        }


def _drain_violations(drain: Drain) -> list[str]:
    wrong = []
    if drain.finished < drain.running:
        wrong.append(
            f"SIGTERM cut off {drain.running - drain.finished} of {drain.running} running requests"
        )
    if not drain.ended:
        wrong.append(f"the server still ran {drain.seconds:.0f} s after SIGTERM")
    elif drain.status not in FINE_ENDS:
        wrong.append(f"the server ended with {drain.status} after SIGTERM")
    if not drain.turned_away:
        wrong.append("/health still invited requests after SIGTERM")
    return wrong


FINE_ENDS = ("status 0", "killed by SIGKILL")
"""SGLang 0.5.17 ends itself with SIGKILL when it has drained. The clients see whether their
requests finished."""


def measure(
    child: Server,
    client: ServerClient,
    load: Load,
    limits: LoadLimits,
    progress: Progress,
    *,
    gpus: range = range(0),
) -> LoadReport:
    """Put `load` on a healthy server and end it.

    A signal that comes after the first answer of the load ends it early, and what was measured
    until then is returned.

    Args:
        child: the server; it is gone afterwards, unless it did not end in time or a signal came.
        client: a client of the server, which nobody else uses.
    """
    calls = load_clients.probes(load)
    answers = [_alone(client, call) for call in calls]
    client.flush()
    before, tally, stopped = client.free_tokens(), Tally(), None
    after, same, drain = None, None, None
    watch, began = Watch(child.group, gpus), time.monotonic()
    seconds: float | None = None
    try:
        with watch:
            load_clients.run_load(client, load, partial(_tell, progress, load), tally)
        seconds = time.monotonic() - began
        if child.returncode is not None:
            raise ServerFailed(
                f"the server ended under load ({child.status}).", hint=f"log: {child.log}"
            )
        after = free_when_idle(client, before)
        same = None if after is None else [_alone(client, call) for call in calls] == answers
        progress(0, 0, "drain")
        drain = _drain(child, client, load, limits)
    except (KeyboardInterrupt, SystemExit) as error:
        if not tally.requests:
            raise
        seconds = seconds or time.monotonic() - began
        stopped = "SIGINT" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
    return LoadReport(
        load,
        tally,
        seconds,
        watch.host,
        watch.gpu,
        before,
        after,
        same,
        drain,
        limits,
        stopped=stopped,
    )


def _tell(progress: Progress, load: Load, tally: Tally, seconds: float) -> None:
    progress(
        min(int(seconds), int(load.seconds)), int(load.seconds), f"{tally.requests:,} requests"
    )


def _alone(client: ServerClient, call: ClientCall) -> tuple[int, ...]:
    """The greedy completion, with an empty prefix cache and nothing else in the batch."""
    client.flush()
    return client.generate(call.prompt, call.new_tokens).ids


def free_when_idle(client: ServerClient, before: tuple[int, ...]) -> tuple[int, ...] | None:
    """Free tokens with an empty prefix cache once nothing runs; `None` if something still runs.

    Fewer than `before` are returned only after they were missing for `LEAKED` seconds.
    """
    deadline = time.monotonic() + SETTLE
    free, since = None, 0.0
    while True:
        try:
            client.flush()
            now = client.free_tokens()
        except ServerFailed:
            now = None
        if now != free:
            free, since = now, time.monotonic()
        waited = time.monotonic() - since
        if free == before or (free and waited > LEAKED) or time.monotonic() > deadline:
            return free
        time.sleep(PAUSE)


def _drain(child: Server, client: ServerClient, load: Load, limits: LoadLimits) -> Drain:
    """Send SIGTERM while requests run, and one more request later."""
    outcomes: list[Outcome] = []
    number = min(load.clients, DRAINED)
    ready = threading.Semaphore(0)

    def one(index: int) -> None:
        prompt = load_clients.Caller(load, 10_000 + index).next().prompt
        outcomes.append(
            load_clients.call(client, ClientCall(prompt, load.new_tokens), ready.release)
        )
        ready.release()  # also when it ended without a token

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(number)]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    late: list[str] = []
    visitor = threading.Thread(target=_visit, args=(client, late), daemon=True)
    began = time.monotonic()
    visitor.start()
    ended = child.drain(limits.drain_s)
    seconds = time.monotonic() - began
    for thread in (*threads, visitor):
        thread.join(SETTLE)
    health, request = late if len(late) == 2 else ("not seen", "not seen")
    return Drain(
        running=number,
        finished=sum(outcome.error is None for outcome in outcomes),
        seconds=seconds,
        ended=ended,
        status=child.status if ended else "still running",
        turned_away=health != "healthy",
        late_request=request,
    )


def _visit(client: ServerClient, seen: list[str]) -> None:
    """Ask the server after SIGTERM as a client that does not know of it."""
    time.sleep(VISIT)
    seen.append("healthy" if client.healthy() else "turned away")
    outcome = load_clients.call(client, ClientCall((11, 12, 13), 1))
    seen.append("served" if outcome.error is None else f"refused ({outcome.error})")
