"""A server under load, from its first request to its end: what is measured, and what must hold.

Only requests whose client hung up may fail. Memory must not grow, all token slots must be free
afterwards, and the same prompts must have the same completions as before. SIGTERM must let running
requests finish, turn new ones away, and end the server in time.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.server import Server
from oscar_zoo.errors import ServerFailed
from oscar_zoo.models import hardware

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
    """What is allowed: bytes that processes, and GPUs, may take more at the end than in the middle,
    and seconds from SIGTERM to the end of the server."""

    growth: int = 256 << 20
    drain_s: float = 300.0


@dataclass(frozen=True)
class Drain:
    """What happened after SIGTERM: requests that ran then, and how many of them got all their
    tokens; seconds until the server was gone, or the limit; how it ended, in words; whether
    `/health` was no longer healthy; and what happened to a request that came later."""

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
        seconds: that the load took.
        free_before, free_after: free token slots of each data-parallel worker; `free_after` is
            `None` where requests still ran, or where nobody looked.
        drain: `None` if a signal came first.
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
    def exit_code(self) -> int:
        """128 and the signal that ended it early, 1 where something did not hold, else 0."""
        if self.stopped is not None:
            return 128 + signal.Signals[self.stopped]
        return int(bool(self.violations))

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
    """Put `load` on a healthy server that nobody else uses, and end it.

    A signal that comes after the first answer of the load ends it early, and what was measured
    until then is returned.
    """
    calls = probes(load)
    answers = [_alone(client, call) for call in calls]
    client.flush()
    before, tally, stopped = client.free_tokens(), Tally(), None
    after, same, drain = None, None, None

    def tell(tally: Tally, seconds: float) -> None:
        done, total = min(int(seconds), int(load.seconds)), int(load.seconds)
        progress(done, total, f"{tally.requests:,} requests")

    watch, began = Watch(child.group, gpus), time.monotonic()
    seconds: float | None = None
    try:
        with watch:
            run_load(client, load, tell, tally)
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
    used = watch.host, watch.gpu
    return LoadReport(
        load, tally, seconds, *used, before, after, same, drain, limits, stopped=stopped
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
        prompt = Caller(load, 10_000 + index).next().prompt
        outcomes.append(call(client, ClientCall(prompt, load.new_tokens), ready.release))
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
    outcome = call(client, ClientCall((11, 12, 13), 1))
    seen.append("served" if outcome.error is None else f"refused ({outcome.error})")


PREFIXES = 8
FRESH_SHARE = 0.1
"""Share of the prompts that have no shared prefix."""
MOST_MESSAGES = 20
"""Number of different errors that are kept."""
END = b"data: [DONE]"


@dataclass(frozen=True)
class Load:
    """What the clients do.

    Attributes:
        seconds: how long they start new requests.
        longest, new_tokens: tokens of the longest prompt, and of the longest completion.
        aborts: share of the requests whose client hangs up.
        vocabulary: token ids below this one are sent; every model has as many.
        seed: the same seed gives the same requests, though not the same timing.
    """

    clients: int
    seconds: float
    longest: int
    new_tokens: int
    aborts: float
    vocabulary: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class ClientCall:
    """One request: its prompt, the tokens it generates, and after how many its client hangs up
    (`None`: never)."""

    prompt: tuple[int, ...]
    new_tokens: int
    hang_up: int | None = None


@dataclass
class Tally:
    """What became of all requests; clients share it."""

    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def requests(self) -> int:
        """All that ended somehow."""
        return self.finished + self.aborted + self.errors.total()

    def add(self, outcome: Outcome) -> None:
        """Count one request."""
        with self._lock:
            self.tokens += outcome.tokens
            if outcome.first_token_s is not None:
                self.first_token_s.append(outcome.first_token_s)
            if outcome.error is not None:
                known = outcome.error in self.errors or len(self.errors) < MOST_MESSAGES
                self.errors[outcome.error if known else "other errors"] += 1
            elif outcome.hung_up:
                self.aborted += 1
            else:
                self.finished += 1


@dataclass(frozen=True)
class Outcome:
    """One request: new tokens that arrived, seconds to the first, whether its client hung up, and
    what went wrong."""

    tokens: int = 0
    first_token_s: float | None = None
    hung_up: bool = False
    error: str | None = None


class Caller:
    """The requests of one client, one after the other."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._choice = random.Random(f"{load.seed} {number}")
        shared = random.Random(load.seed)
        self._prefixes = [self._tokens(shared, load.longest) for _ in range(PREFIXES)]

    def next(self) -> ClientCall:
        """Another one."""
        load, choice = self._load, self._choice
        length = choice.randint(2, load.longest)
        kept = 0 if choice.random() < FRESH_SHARE else choice.randrange(length)
        prompt = (*choice.choice(self._prefixes)[:kept], *self._tokens(choice, length - kept))
        new_tokens = choice.randint(1, load.new_tokens)
        # 0 is while it waits or is prefilled.
        hang_up = choice.randrange(new_tokens) if choice.random() < load.aborts else None
        return ClientCall(prompt, new_tokens, hang_up)

    def _tokens(self, choice: random.Random, number: int) -> tuple[int, ...]:
        return tuple(
            choice.choices(
                range(min(10, self._load.vocabulary - 1), self._load.vocabulary), k=number
            )
        )


def run_load(
    client: ServerClient,
    load: Load,
    tick: Callable[[Tally, float], None] = lambda tally, seconds: None,
    into: Tally | None = None,
) -> Tally:
    """Let all clients run until time is over and their last requests ended.

    `tick` is called about twice a second, with the counts so far and the seconds passed. What it
    raises, and a signal, ends the load: clients begin no other request, and what their last ones
    become is not counted.
    """
    tally, began, over = Tally() if into is None else into, time.monotonic(), threading.Event()

    def one(number: int) -> None:
        caller = Caller(load, number)
        while time.monotonic() - began < load.seconds:
            outcome = call(client, caller.next())
            if over.is_set():
                return
            tally.add(outcome)

    threads = [
        threading.Thread(target=one, args=(number,), daemon=True) for number in range(load.clients)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
                tick(tally, time.monotonic() - began)
    finally:
        over.set()
    return tally


def call(
    client: ServerClient, wanted: ClientCall, started: Callable[[], None] = lambda: None
) -> Outcome:
    """Send one request and read its stream; never raises for what the server does. `started` is
    called when the first token is there."""
    sampling = {"temperature": 0.7, "max_new_tokens": wanted.new_tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": wanted.prompt, "sampling_params": sampling, "stream": True})
    connection, began = client.connect(), time.monotonic()
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        if wanted.hang_up == 0:
            return Outcome(hung_up=True)
        response = connection.getresponse()
        if response.status != 200:
            return Outcome(error=f"status {response.status}: {_words(response.read(400))}")
        return _read(response, wanted, began, started)
    except TimeoutError:
        return Outcome(error="no answer in time")
    except (OSError, http.client.HTTPException) as error:
        return Outcome(error=f"{type(error).__name__}: {_words(str(error).encode())}")
    finally:
        _hang_up(connection)


def _read(
    response: http.client.HTTPResponse,
    wanted: ClientCall,
    began: float,
    started: Callable[[], None],
) -> Outcome:
    seen, first, last = 0, None, b""
    while line := response.readline():
        if line.startswith(END):
            return _judge(last, wanted, first)
        if not line.startswith(b"data:"):
            continue
        last, seen = line, seen + 1
        if first is None:
            first = time.monotonic() - began
            started()
        if wanted.hang_up is not None and seen >= wanted.hang_up:
            return Outcome(seen, first, hung_up=True)
    return Outcome(seen, first, error="the stream ended before its end")


def _judge(last: bytes, wanted: ClientCall, first: float | None) -> Outcome:
    """Whether the last event of a stream says that all tokens came."""
    try:
        event = json.loads(last.removeprefix(b"data:"))
        meta = event["meta_info"]
        count, reason = int(meta["completion_tokens"]), (meta["finish_reason"] or {}).get("type")
    except (ValueError, KeyError, TypeError):
        return Outcome(error=f"a stream ended with {_words(last)}")
    if reason != "length":
        return Outcome(count, first, error=f"finished by {reason}, not by length")
    if count != wanted.new_tokens:
        return Outcome(count, first, error=f"{count} of {wanted.new_tokens} tokens came")
    return Outcome(count, first)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Close at once: the server sees it while it still writes."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _words(data: bytes) -> str:
    return " ".join(data[:200].decode("utf-8", "replace").split())


def probes(load: Load, number: int = 3) -> Sequence[ClientCall]:
    """Requests whose answers must be the same before and after a load."""
    caller = Caller(load, -1)
    return [caller.next() for _ in range(number)]


PROC = Path("/proc")
SAMPLE_PAUSE = 1.0
"""Seconds between two samples."""


@dataclass(frozen=True)
class Usage:
    """Bytes in use over a run: medians of a stretch in the middle and of the last part, and the
    maximum. The first third is left out, because a server still fills its caches then."""

    early: int
    late: int
    peak: int

    @property
    def growth(self) -> int:
        """Bytes that the end is above the middle."""
        return self.late - self.early


def usage(samples: Sequence[int]) -> Usage | None:
    """The usage that equally spaced `samples` show, or `None` without samples."""
    if not samples:
        return None
    n = len(samples)
    middle, end = samples[n // 3 : max(n // 2, n // 3 + 1)], samples[-max(1, n // 6) :]
    return Usage(int(statistics.median(middle)), int(statistics.median(end)), max(samples))


def group_memory(group: int, proc: Path = PROC) -> int:
    """Resident bytes of all processes of a process group, shared pages counted in each."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    for place in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # gone meanwhile
            fields = (place / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[2]) == group:
                total += int(fields[21]) * page
    return total


def gpu_memory(numbers: range) -> int | None:
    """Bytes in use on the GPUs with these numbers, as `nvidia-smi` says; `None` without them.

    All users of these GPUs are counted.
    """
    found = hardware.visible(hardware.gpus())[numbers.start : numbers.stop]
    return sum(gpu.memory - gpu.free for gpu in found) if found else None


class Watch:
    """Samples the memory of a server in a thread while the block runs, every `pause` seconds."""

    def __init__(self, group: int, gpus: range = range(0), pause: float = SAMPLE_PAUSE) -> None:
        self._group, self._gpus, self._pause = group, gpus, pause
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._host: list[int] = []
        self._gpu: list[int] = []

    @property
    def host(self) -> Usage | None:
        """Memory of the processes."""
        return usage(self._host)

    @property
    def gpu(self) -> Usage | None:
        """Memory of the GPUs, if any."""
        return usage(self._gpu)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        has_gpu = bool(self._gpus)
        while not self._done.is_set():
            began = time.monotonic()
            self._host.append(group_memory(self._group))
            found = gpu_memory(self._gpus) if has_gpu else None
            has_gpu = found is not None
            if found is not None:
                self._gpu.append(found)
            self._done.wait(max(0.0, self._pause - (time.monotonic() - began)))
