"""Grammars of requests are compiled on trial first, in a process that ends where it takes too much.

How long a grammar takes to compile, or to be followed, does not show in its text, and a thread that
compiles cannot be stopped. So the scheduler asks a second process, started with the first grammar.
That one forks for each trial: the fork has limits of processor time and memory, compiles, follows
some tokens and says what it found. Only what passes is compiled by SGLang itself, in threads that
leave the processor to others. Requests without a grammar never wait for any of this.

What is slow only behind other tokens shows in the scheduler, where everybody waits for it: there an
answer ends that took too much (`followed`).

Run as a program, this is the second process. It needs xgrammar and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oscar_zoo import children

CPU_SECONDS, WAIT_SECONDS = 2, 30
"""Processor time of a trial, and the longest that it may take beside others."""
MEMORY = 1 << 30
"""Bytes that a trial may take beyond what its process has."""
STEPS = 128
FOLLOW_SECONDS, TOKEN_SECONDS = 0.2, 0.002
"""Processor time to follow a grammar, and more for each token that it takes."""
AT_ONCE = 4
MOST_CACHED = 256 << 20
"""Bytes of compiled grammars that SGLang's compiler keeps."""
MOST_KEPT = 512
"""Grammars that SGLang keeps beside them, bad ones among them."""
NICE = 19
PASSED = b"passed"
METHODS = {
    "compile_json_schema": "json_schema",
    "compile_regex": "regex",
    "compile_grammar": "ebnf",
    "compile_structural_tag": "structural_tag",
}
"""Methods of a compiler that a request can call, and the parameter that holds the grammar."""


class Trials:
    """The process that tries grammars for one compiler."""

    def __init__(self, tokens: str) -> None:
        self._tokens = tokens.encode()
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._starting = threading.Lock()
        self._wire: socket.socket | None = None

    def failure(self, method: str, given: list[Any], named: dict[str, Any]) -> str | None:
        """Why a grammar must not be compiled, in words; `None` where it may."""
        job = json.dumps([method, given, named]).encode()
        with self._places:
            said = self._ask(job)
        if said == PASSED:
            return None
        limit = f"{CPU_SECONDS} s of processor time, or {MEMORY >> 20} MiB"
        return _failed(said.decode("utf-8", "replace")) or f"takes more than {limit}, to compile"

    def _ask(self, job: bytes) -> bytes:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as answer:
            try:
                with _in_memory(job) as place:
                    self._send(place, writing)
            finally:
                os.close(writing)
            return answer.read()  # until nobody holds the other end

    def _send(self, *descriptors: int) -> None:
        with self._starting:
            if self._wire is not None:
                with contextlib.suppress(OSError):
                    socket.send_fds(self._wire, [b"."], descriptors)
                    return
                self._wire.close()  # the process was killed
            self._wire = self._started()
            socket.send_fds(self._wire, [b"."], descriptors)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, _in_memory(self._tokens) as place:
            child = children.start(
                children.python("-m", __name__, str(theirs.fileno()), str(place)),
                pass_fds=(theirs.fileno(), place),
            )
        threading.Thread(target=child.wait, daemon=True).start()
        return ours


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    place = os.memfd_create("grammar")
    try:
        with open(place, "wb", closefd=False) as file:
            file.write(content)
        yield place
    finally:
        os.close(place)


def guarded(compiler: type[Any], refusal: str | None = None) -> Callable[..., Any]:
    """What makes xgrammar's `compiler`, with a trial before each grammar; `refusal` says why this
    engine can follow none, or is `None`."""

    def make(*given: Any, **named: Any) -> Any:
        named.setdefault("cache_limit_bytes", MOST_CACHED)
        tokens = given[0] if given else named["tokenizer_info"]
        return _Guarded(compiler(*given, **named), tokens, refusal)

    return make


class _Guarded:
    """A compiler of xgrammar whose grammars passed a trial."""

    def __init__(self, compiler: Any, tokens: Any, refusal: str | None) -> None:
        self._compiler, self._refusal = compiler, refusal
        self._trials = Trials(tokens.serialize_json())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._compiler, name)
        if name not in METHODS:
            return found

        def tried(*given: Any, **named: Any) -> Any:
            plain = [one if isinstance(one, str) else one.model_dump_json() for one in given]
            failure = self._refusal or self._trials.failure(name, plain, named)
            if failure is not None:
                raise RuntimeError(f"{METHODS[name]} {failure}")  # which SGLang answers with 400
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            try:
                return found(*given, **named)
            except RuntimeError as error:
                raise RuntimeError(f"{METHODS[name]} {_failed(str(error))}") from error

        return tried


def _failed(said: str) -> str:
    return said and f"cannot be compiled: {' '.join(said.split())[:500]}"


def followed(matcher: type[Any]) -> type[Any]:
    """xgrammar's `matcher`, which says that its text is complete once it took too much time. An
    ambiguous grammar takes longer with each token, and would keep the whole scheduler."""

    class Followed(matcher):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.left = FOLLOW_SECONDS

        def fill_next_token_bitmask(self, *given: Any, **named: Any) -> Any:
            return self._timed(super().fill_next_token_bitmask, given, named)

        def accept_token(self, *given: Any, **named: Any) -> Any:
            self.left += TOKEN_SECONDS
            return self._timed(super().accept_token, given, named)

        def rollback(self, *given: Any, **named: Any) -> None:
            if self.left > 0:  # SGLang gives no tokens to one that is complete
                super().rollback(*given, **named)

        def is_terminated(self) -> bool:
            return self.left <= 0 or super().is_terminated()

        def _timed(self, call: Callable[..., Any], given: Any, named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self.left -= time.thread_time() - began

    return Followed


def forget(cache: dict[Any, Any]) -> None:
    while len(cache) > MOST_KEPT:
        cache.pop(next(iter(cache)), None)


def main() -> None:
    import xgrammar

    wire, place = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    os.nice(NICE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a trial
    tokens = xgrammar.TokenizerInfo.deserialize_json(_content(place).decode())
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    while True:
        message, descriptors, *_ = socket.recv_fds(wire, 1, 2)
        if not message:
            return
        if os.fork() == 0:
            wire.close()
            _try(xgrammar, compiler, *descriptors)
        for one in descriptors:
            os.close(one)


def _try(xgrammar: Any, compiler: Any, job: int, answer: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    signal.alarm(WAIT_SECONDS)
    said = PASSED
    try:
        method, given, named = json.loads(_content(job))
        compiled = getattr(compiler, method)(*given, **named)
        if not _is_quick(xgrammar, compiled):
            said = b"its tokens take too long to find"
    except MemoryError:
        said = b""
    except Exception as error:
        said = str(error)[:500].encode("utf-8", "replace") or type(error).__name__.encode()
    with contextlib.suppress(OSError):
        os.write(answer, said)
    os._exit(0)


def _is_quick(xgrammar: Any, compiled: Any) -> bool:
    """Whether the tokens that are allowed next are found in time, behind some that are chosen by
    chance."""
    matcher = followed(xgrammar.GrammarMatcher)(compiled)
    tokens, chance = compiled.tokenizer_info, random.Random(0)
    mask = xgrammar.allocate_token_bitmask(1, tokens.vocab_size)
    for _ in range(STEPS):
        matcher.fill_next_token_bitmask(mask)
        allowed = [32 * place for place, word in enumerate(mask[0].tolist()) if word]
        first = chance.choice(allowed) if allowed else 0
        word = int(mask[0, first // 32]) if allowed else 0
        several = [first + bit for bit in range(32) if word >> bit & 1]
        going_on = [token for token in several if token not in tokens.stop_token_ids]
        if not going_on or not matcher.accept_token(chance.choice(going_on)):
            break
        if matcher.is_terminated():
            break
    return bool(matcher.left > 0)


def _content(place: int) -> bytes:
    with open(place, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


if __name__ == "__main__":
    main()
