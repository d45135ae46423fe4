"""Many streaming clients at once, some of which hang up: their requests, and the outcomes.

A client sends one request after the other until time is over. Prompts are random tokens; most begin
with one of a few shared prefixes, cut anywhere, so that the prefix cache is hit at every length.
Clients are threads, because they wait nearly all of their time.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from oscar_zoo.engines.server_client import ServerClient

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
        clients: number of clients at the same time.
        seconds: how long they start new requests.
        longest: tokens of the longest prompt.
        new_tokens: tokens of the longest completion.
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

    What `tick` raises, and a signal, ends the load: clients begin no other request, and what their
    last ones become is not counted.

    Args:
        tick: called about twice a second, with the counts so far and the seconds passed.
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
    """Send one request and read its stream; never raises for what the server does.

    Args:
        started: called when the first token is there.
    """
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
