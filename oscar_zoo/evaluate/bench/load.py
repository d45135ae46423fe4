"""A server under load, from its first request to its end: what is measured, and what must hold.

Only requests whose client hung up may fail. Memory must not grow, all token slots must be free
afterwards, and the same prompts must have the same completions as before. SIGTERM must let running
requests finish, turn new ones away, and end the server in time.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import computed_field

from oscar_zoo.artifact.outcome import HIDDEN, says
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.server import DRAIN_SECONDS, Server
from oscar_zoo.errors import ServerFailed
from oscar_zoo.evaluate.bench.report import Stopped
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models import hardware

SETTLE = 120.0
"""Seconds after which no request of a client that is gone may still run."""
DRAINED = 16
"""Maximum number of requests that run when the server is told to end."""
PAUSE, VISIT = 0.2, 1.0
"""Seconds between two tries, and from SIGTERM to the visit of a client that does not know it."""
LEAKED = 10.0
"""Seconds for which the same slots must be missing. A server on a busy machine may begin a request
after its client hung up, and keeps the prefix of it until the next flush."""
FINE_ENDS = ("status 0", "killed by SIGKILL")
"""SGLang 0.5.17 ends itself with SIGKILL when it has drained. The clients see whether their
requests finished."""
GROWTH = 256 << 20
PREFIXES = 8
FRESH_SHARE = 0.1
"""Share of the prompts that have no shared prefix."""
PROBES = 3
MOST_MESSAGES = 20
"""Number of different errors that are kept."""
END = b"data: [DONE]"
SAMPLE_PAUSE = 1.0
"""Seconds between two samples of memory."""


@dataclass(frozen=True)
class Load:
    clients: int
    seconds: Annotated[float, says("For which they start new requests.")]
    longest: Annotated[int, says("Tokens of the longest prompt.")]
    new_tokens: Annotated[int, says("Of the longest completion.")]
    aborts: Annotated[float, says("Share of the requests whose client hangs up.")]
    vocabulary: Annotated[int, says("Token ids below it are sent; every model has them.")] = 1000
    seed: Annotated[int, says("Of the requests, not of their timing.")] = 0


@dataclass(frozen=True)
class Usage:
    """Bytes in use over the run, without its first third, in which a server fills its caches."""

    early: Annotated[int, says("Median of a stretch in the middle.")]
    late: Annotated[int, says("Median of the last part.")]
    peak: Annotated[int, says("Maximum.")]


@dataclass(frozen=True)
class FreeTokens:
    """Token slots of each data-parallel worker."""

    before: tuple[int, ...]
    after: Annotated[tuple[int, ...] | None, says("Null where nobody looked.")] = None


@dataclass(frozen=True)
class Drain:
    """What happened after SIGTERM."""

    running: Annotated[int, says("Requests at the time of SIGTERM.")]
    finished: Annotated[int, says("How many of them got all their tokens.")]
    seconds: Annotated[float, says("Until the server was gone, or the limit.")]
    ended: Annotated[bool, says("Whether the server was gone.")]
    status: Annotated[str, says("How it ended, in words.")]
    turned_away: Annotated[bool, says("Whether /health was no longer healthy.")]
    late_request: Annotated[str, says("What happened to a request that came later.")]

    @property
    def violations(self) -> list[str]:
        wrong, cut_off = [], self.running - self.finished
        if cut_off:
            wrong.append(f"SIGTERM cut off {cut_off} of {self.running} running requests")
        if not self.ended:
            wrong.append(f"the server still ran {self.seconds:.0f} s after SIGTERM")
        elif self.status not in FINE_ENDS:
            wrong.append(f"the server ended with {self.status} after SIGTERM")
        if not self.turned_away:
            wrong.append("/health still invited requests after SIGTERM")
        return wrong


@dataclass
class Call:
    """One request, whose client hangs up after so many tokens, and what became of it: the new
    tokens that arrived, seconds to the first of them, and what went wrong."""

    prompt: tuple[int, ...]
    new_tokens: int
    hang_up: int | None = None
    tokens: int = 0
    first_token_s: float | None = None
    hung_up: bool = False
    error: str | None = None

    def run(self, client: ServerClient, started: Callable[[], None] = lambda: None) -> Call:
        """Send it and read its stream; never raises for what the server does. `started` is called
        when the first token is there."""
        sampling = {"temperature": 0.7, "max_new_tokens": self.new_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": self.prompt, "sampling_params": sampling, "stream": True})
        connection, began = client.connect(), time.monotonic()
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            if self.hang_up == 0:
                self.hung_up = True
            elif (response := connection.getresponse()).status == 200:
                self._read(response, began, started)
            else:
                self.error = f"status {response.status}: {_words(response.read(400))}"
        except TimeoutError:
            self.error = "no answer in time"
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {_words(str(error).encode())}"
        finally:
            if connection.sock is not None:
                with suppress(OSError):  # at once, so that the server sees it while it writes
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        return self

    def _read(
        self, response: http.client.HTTPResponse, began: float, started: Callable[[], None]
    ) -> None:
        last = b""
        while line := response.readline():
            if line.startswith(END):
                self.error = self._judge(last)
                return
            if not line.startswith(b"data:"):
                continue
            last, self.tokens = line, self.tokens + 1
            if self.first_token_s is None:
                self.first_token_s = time.monotonic() - began
                started()
            if self.hang_up is not None and self.tokens >= self.hang_up:
                self.hung_up = True
                return
        self.error = "the stream ended before its end"

    def _judge(self, last: bytes) -> str | None:
        """What the last event of a stream says against it, where not all tokens came."""
        try:
            meta = json.loads(last.removeprefix(b"data:"))["meta_info"]
            self.tokens = int(meta["completion_tokens"])
            reason = (meta["finish_reason"] or {}).get("type")
        except (ValueError, KeyError, TypeError):
            self.tokens, self.first_token_s = 0, None
            return f"a stream ended with {_words(last)}"
        if reason != "length":
            return f"finished by {reason}, not by length"
        if self.tokens != self.new_tokens:
            return f"{self.tokens} of {self.new_tokens} tokens came"
        return None


@dataclass
class LoadReport:
    """What oscar-zoo bench load prints: requests that clients sent to a server, and its end."""

    load: Load
    model: str | None = None
    seconds: Annotated[float, says("That the load took.")] = 0.0
    finished: int = 0
    aborted: Annotated[int, says("Requests whose client hung up.")] = 0
    errors: Annotated[dict[str, int], says("Number of requests by what they failed with.")] = field(
        default_factory=dict
    )
    new_tokens: Annotated[int, says("Of all requests.")] = 0
    host_memory: Annotated[Usage | None, says("Of all processes; null if unknown.")] = None
    gpu_memory: Annotated[Usage | None, says("Of the GPUs; null without one.")] = None
    free_tokens: FreeTokens = field(default_factory=lambda: FreeTokens(()))
    same_answers: Annotated[bool | None, says("As before; null if nobody asked.")] = None
    drain: Annotated[Drain | None, says("Null where a signal came before.")] = None
    stopped: Stopped = None
    schema: Literal["oscar-zoo.bench-load/1"] = "oscar-zoo.bench-load/1"
    growth: Annotated[int, *HIDDEN] = GROWTH
    """Bytes that processes, and GPUs, may take more at the end than in the middle."""
    first_token_s: Annotated[list[float], *HIDDEN] = field(default_factory=list)
    lock: Annotated[Any, *HIDDEN] = field(default_factory=threading.Lock, repr=False, compare=False)

    @computed_field(description="All that ended somehow.")  # type: ignore[prop-decorator]
    @property
    def requests(self) -> int:
        return self.finished + self.aborted + sum(self.errors.values())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds

    @computed_field(description="Seconds to the first token.")  # type: ignore[prop-decorator]
    @property
    def ttft_median_s(self) -> float | None:
        return statistics.median(self.first_token_s) if self.first_token_s else None

    @computed_field(description="Everything that did not hold; empty when all is well.")  # type: ignore[prop-decorator]
    @property
    def violations(self) -> list[str]:
        counted = sorted(self.errors.items(), key=lambda item: -item[1])
        wrong = [f"{count} requests failed: {message}" for message, count in counted]
        if not self.finished:
            wrong.append("no request finished")
        for name, used in (("the processes", self.host_memory), ("the GPUs", self.gpu_memory)):
            if used is not None and used.late - used.early > self.growth:
                wrong.append(f"memory of {name} grew by {(used.late - used.early) / 1e6:,.0f} MB")
        before, after = self.free_tokens.before, self.free_tokens.after
        if after is None and self.stopped is None:
            wrong.append(f"requests of clients that are gone still ran after {SETTLE:.0f} s")
        elif after not in (None, before):
            wrong.append(f"{sum(before) - sum(after or ()):,} token slots were not given back")
        if self.same_answers is False:
            wrong.append("the same prompts have other answers than before the load")
        return wrong + (self.drain.violations if self.drain is not None else [])

    @property
    def exit_code(self) -> int:
        if self.stopped is not None:
            return 128 + signal.Signals[self.stopped]
        return int(bool(self.violations))

    def add(self, call: Call) -> None:
        with self.lock:
            self.new_tokens += call.tokens
            if call.first_token_s is not None:
                self.first_token_s.append(call.first_token_s)
            if call.error is None:
                self.aborted += call.hung_up
                self.finished += not call.hung_up
                return
            known = call.error in self.errors or len(self.errors) < MOST_MESSAGES
            message = call.error if known else "other errors"
            self.errors[message] = self.errors.get(message, 0) + 1


def measure(
    child: Server,
    client: ServerClient,
    report: LoadReport,
    progress: Progress,
    *,
    gpus: range = range(0),
) -> LoadReport:
    """Put the load of `report` on a healthy server that nobody else uses, and end it. A signal that
    comes after the first answer ends it early, and what was measured until then is returned."""
    # The same prompts before and after the load.
    load, asked = report.load, list(itertools.islice(calls(report.load, -1), PROBES))
    answers = [_alone(client, call) for call in asked]
    client.flush()
    report.free_tokens = FreeTokens(client.free_tokens())

    def tell(report: LoadReport, seconds: float) -> None:
        done, total = min(int(seconds), int(load.seconds)), int(load.seconds)
        progress(done, total, f"{report.requests:,} requests")

    samples: tuple[list[int], list[int]] = ([], [])
    try:
        with watched(child.group, gpus) as samples:
            run_load(client, report, tell)
        if child.returncode is not None:
            raise ServerFailed(
                f"the server ended under load ({child.status}).", hint=f"log: {child.log}"
            )
        before = report.free_tokens.before
        report.free_tokens = FreeTokens(before, free_when_idle(client, before))
        if report.free_tokens.after is not None:
            report.same_answers = [_alone(client, call) for call in asked] == answers
        progress(0, 0, "drain")
        report.drain = _drain(child, client, load)
    except (KeyboardInterrupt, SystemExit) as error:
        if not report.requests:
            raise
        report.stopped = "SIGINT" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
    report.host_memory, report.gpu_memory = map(usage, samples)
    return report


def _alone(client: ServerClient, call: Call) -> tuple[int, ...]:
    """The greedy completion, with an empty prefix cache and nothing else in the batch."""
    client.flush()
    return client.generate(call.prompt, call.new_tokens).ids


def free_when_idle(client: ServerClient, before: tuple[int, ...]) -> tuple[int, ...] | None:
    """Free tokens with an empty prefix cache once nothing runs; `None` if something still runs, and
    fewer than `before` only after they were missing for `LEAKED` seconds."""
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


def _drain(child: Server, client: ServerClient, load: Load) -> Drain:
    """Send SIGTERM while requests run, and one more request later."""
    numbers = range(10_000, 10_000 + min(load.clients, DRAINED))
    running = [Call(next(calls(load, number)).prompt, load.new_tokens) for number in numbers]
    ready, late, seen = threading.Semaphore(0), Call((11, 12, 13), 1), dict[str, bool]()

    def one(call: Call) -> None:
        call.run(client, ready.release)
        ready.release()  # also when it ended without a token

    def visit() -> None:
        time.sleep(VISIT)
        seen["healthy"] = client.healthy()
        late.run(client)
        seen["asked"] = True

    threads = [threading.Thread(target=one, args=(call,), daemon=True) for call in running]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    visitor = threading.Thread(target=visit, daemon=True)
    began = time.monotonic()
    visitor.start()
    ended = child.drain(DRAIN_SECONDS)
    seconds = time.monotonic() - began
    for thread in (*threads, visitor):
        thread.join(SETTLE)
    answered = "served" if late.error is None else f"refused ({late.error})"
    return Drain(
        running=len(running),
        finished=sum(call.error is None for call in running),
        seconds=seconds,
        ended=ended,
        status=child.status if ended else "still running",
        turned_away=not seen.get("healthy"),
        late_request=answered if "asked" in seen else "not seen",
    )


def calls(load: Load, number: int) -> Iterator[Call]:
    """The requests of one client, one after the other."""
    choice, shared = random.Random(f"{load.seed} {number}"), random.Random(load.seed)
    most = load.vocabulary

    def tokens(source: random.Random, count: int) -> tuple[int, ...]:
        return tuple(source.choices(range(min(10, most - 1), most), k=count))

    prefixes = [tokens(shared, load.longest) for _ in range(PREFIXES)]
    while True:
        length = choice.randint(2, load.longest)
        kept = 0 if choice.random() < FRESH_SHARE else choice.randrange(length)
        prompt = (*choice.choice(prefixes)[:kept], *tokens(choice, length - kept))
        new_tokens = choice.randint(1, load.new_tokens)
        # 0 is while it waits or is prefilled.
        hang_up = choice.randrange(new_tokens) if choice.random() < load.aborts else None
        yield Call(prompt, new_tokens, hang_up)


def run_load(
    client: ServerClient,
    report: LoadReport,
    tick: Callable[[LoadReport, float], None] = lambda report, seconds: None,
) -> LoadReport:
    """Let all clients of the load of `report` run until time is over and their last requests ended.

    `tick` is called about twice a second, with the counts so far and the seconds passed. What it
    raises, and a signal, ends the load: clients begin no other request, and what their last ones
    become is not counted.
    """
    load, began, over = report.load, time.monotonic(), threading.Event()

    def one(number: int) -> None:
        for call in calls(load, number):
            if time.monotonic() - began >= load.seconds:
                return
            call.run(client)
            if over.is_set():
                return
            report.add(call)

    threads = [
        threading.Thread(target=one, args=(number,), daemon=True) for number in range(load.clients)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
                tick(report, time.monotonic() - began)
    finally:
        over.set()
        report.seconds = time.monotonic() - began
    return report


def _words(data: bytes) -> str:
    return " ".join(data[:200].decode("utf-8", "replace").split())


def usage(samples: Sequence[int]) -> Usage | None:
    """The usage that equally spaced `samples` show, or `None` without samples."""
    if (n := len(samples)) == 0:
        return None
    middle, end = samples[n // 3 : max(n // 2, n // 3 + 1)], samples[-max(1, n // 6) :]
    return Usage(int(statistics.median(middle)), int(statistics.median(end)), max(samples))


def group_memory(group: int) -> int:
    """Resident bytes of all processes of a process group, shared pages counted in each."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # gone meanwhile
            fields = (place / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[2]) == group:
                total += int(fields[21]) * page
    return total


def gpu_memory(numbers: range) -> int | None:
    """Bytes in use on the GPUs with these numbers, by whomever; `None` without them."""
    found = hardware.visible(hardware.gpus())[numbers.start : numbers.stop]
    return sum(gpu.memory - gpu.free for gpu in found) if found else None


@contextmanager
def watched(
    group: int, gpus: range = range(0), pause: float = SAMPLE_PAUSE
) -> Iterator[tuple[list[int], list[int]]]:
    """Samples of memory, taken every `pause` seconds while the block runs: bytes of all processes
    of a group, and of its GPUs, if any."""
    host, used, done = list[int](), list[int](), threading.Event()

    def look() -> None:
        while not done.is_set():
            began = time.monotonic()
            host.append(group_memory(group))
            found = gpu_memory(gpus) if gpus else None
            if found is not None:
                used.append(found)
            done.wait(max(0.0, pause - (time.monotonic() - began)))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield host, used
    finally:
        done.set()
        thread.join()
