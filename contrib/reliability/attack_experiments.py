"""S16: a default server under attack, started in a hostile folder. Innocent clients ask all the
while, and each must get a whole answer. (`requests` compares the tokens.) Only in the long form;
`tests/engines/sglang/test_http.py` sends such ids, bodies and grammars to every release, and
`test_front.py` beside it bounds bodies and connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from experiment import Found, Scale
from load_experiments import FLAGS, MODEL, environment, ready_server
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.engines.sglang.launch.plan import free_port

CONNECTIONS, BODIES, GRAMMARS, IDS = 2000, 40, 10, 16
BODY = 50 << 20
"""Bytes that each unfinished body announces, and sends until it is refused."""
GROWTH = 500 << 20
"""Bytes by which all processes of a server may grow: its limit of bodies is half of them."""
SLOWER = 2.0
"""How many times as long an innocent request may take beside hostile grammars."""
CALM_SECONDS, SIEGE_SECONDS = 15.0, 60.0
PROMPT, NEW_TOKENS = list(range(100, 164)), 8
HOSTILE = ("sglang/__init__.py", "random.py", "torch.py", "transformers/__init__.py", "json.py")
"""Files of the folder in which the server is started; one that is imported leaves `CANARY`."""
CANARY = "imported"


def occupied_by_nobody(scale: Scale) -> Found:
    """Hostile folder, ids, bodies, grammars and connections, one after the other."""
    folder = _hostile_folder(scale.work / "folder")
    artifact = write_folder(scale.work / "rotation", artifact_files())
    command = ["serve", str(artifact), "--model", str(MODEL), "--port", str(free_port()), "--json"]
    figures: dict[str, int | float | str] = {}
    wrong: list[str] = []
    with _served(command, folder, scale.work / "state") as server:
        assert _is_whole(_generate(server)), "the server does not answer"
        attacks: list[Callable[..., Iterator[str]]] = [_ids, _deep, _grammars, _bodies, _siege]
        for attack in attacks:
            wrong += attack(server, figures)
            answer = _generate(server)
            if not _is_whole(answer):
                wrong.append(f"behind {attack.__name__[1:]} the server says {answer}")
                break
    if (folder / CANARY).exists():
        wrong.append(f"imported: {(folder / CANARY).read_text()}")
    figures["hostile files in the folder"] = len(HOSTILE)
    return Found(figures, tuple(wrong))


@dataclass(frozen=True)
class _Server:
    port: int
    process: psutil.Process

    def memory(self) -> int:
        """Bytes of all its processes that nobody else holds."""
        total = 0
        for one in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_full_info().uss
        return total

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        """Status and text of an answer; 0 and the reason where none came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()
        finally:
            connection.close()


def _hostile_folder(folder: Path) -> Path:
    for name in HOSTILE:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"with open({str(folder / CANARY)!r}, 'a') as file: file.write(__name__)\n")
    return folder


@contextlib.contextmanager
def _served(command: list[str], folder: Path, own: Path) -> Iterator[_Server]:
    """A server of our launcher, in a folder where the program itself is found without it."""
    serve = subprocess.Popen(
        [str(Path(sys.executable).with_name("oscar-zoo")), *command, "--", *FLAGS],
        cwd=folder,
        env=environment(own),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = str(ready_server(serve)["url"])
        port = int(url.removesuffix("/v1").rpartition(":")[2])
        yield _Server(port, psutil.Process(serve.pid))
    finally:
        serve.terminate()
        serve.wait(120)


def _generate(server: _Server, **more: Any) -> tuple[int, bytes]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.ask("/generate", {"input_ids": PROMPT, "sampling_params": sampling, **more})


def _is_whole(answer: tuple[int, bytes]) -> bool:
    return answer[0] == 200 and len(json.loads(answer[1])["output_ids"]) == NEW_TOKENS


@dataclass
class _Innocents:
    """Clients that ask one request after the other until they are stopped."""

    server: _Server
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def asking(self, clients: int = 2) -> Iterator[None]:
        """While the block runs."""
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                began = time.monotonic()
                answer = _generate(self.server)
                self.seconds.append(time.monotonic() - began)
                if not _is_whole(answer):
                    self.wrong.append(f"an innocent request got {answer[0]} {answer[1][:200]!r}")

        threads = [threading.Thread(target=ask) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def median(self) -> float:
        """Milliseconds."""
        return round(1000 * statistics.median(self.seconds), 1)


def _at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of all of them, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        results[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _ids(server: _Server, figures: dict[str, Any]) -> Iterator[str]:
    """Ids that are beginnings of each other's and of everybody's: nobody's request ends early."""
    innocents = _Innocents(server)
    ids = [f"{number:x}" for number in range(IDS)]
    with innocents.asking():
        for _ in range(5):
            given = _at_once(
                [lambda one=one: _generate(server, rid=one) for one in ids]  # type: ignore[misc]
            )
            for one in ids:
                server.ask("/abort_request", {"rid": one})
            for one, answer in zip(ids, given, strict=True):
                if answer[0] == 200 and json.loads(answer[1])["meta_info"]["id"] != one:
                    yield f"id {one} comes back as {json.loads(answer[1])['meta_info']['id']}"
                if answer[0] == 200 and not _is_whole(answer):
                    yield f"id {one}: {answer[1][:200]!r}"
    figures["requests with ids of one digit"] = len(ids)
    yield from innocents.wrong


DEEP = 10_000


def _deep(server: _Server, figures: dict[str, Any]) -> Iterator[str]:
    """Bodies that a recursive reader fails at, and arguments of chat templates."""
    nested, named = "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP
    chat = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, %s}'
    schema = (
        '"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": %s}}'
    )
    bodies = [chat % (schema % value) for value in (nested, named)]
    bodies += [chat % f'"response_format": {value}' for value in (nested, named)]
    for value in (nested, named, "[1]", '"a"', "7", '{"tokenize": 5}', '{"chat_template": "{{"}'):
        bodies.append(chat % f'"chat_template_kwargs": {value}')
    for key in (
        "conversation",
        "add_generation_prompt",
        "return_tensors",
        "continue_final_message",
    ):
        bodies.append(chat % f'"chat_template_kwargs": {{"{key}": [{{}}]}}')
    bodies += [nested, named, f'{{"messages": {nested}}}', f'{{"tools": {named}, "messages": []}}']
    counts: Counter[int] = Counter()
    for body in bodies:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"):
            status, text = server.ask(path, body.encode())
            counts[status] += 1
            if not (status == 200 or 400 <= status < 500):
                yield f"{path} {status} {text[:120]!r}: {body[:120]}"
    figures["hostile bodies"] = counts.total()


def _grammars(server: _Server, figures: dict[str, Any]) -> Iterator[str]:
    """Ten grammars at once that take minutes to compile, or longer with each token, again and
    again, beside innocents."""
    calm, beside = _Innocents(server), _Innocents(server)
    with calm.asking():
        time.sleep(CALM_SECONDS)
    statuses: Counter[int] = Counter()
    began, turn = time.monotonic(), 0
    with beside.asking():
        while time.monotonic() - began < CALM_SECONDS:
            bodies = [{"sampling_params": one} for one in hostile_grammars(turn)]
            for status, _ in _at_once(
                [lambda body=body: _generate(server, **body) for body in bodies]  # type: ignore[misc]
            ):
                statuses[status] += 1
            turn += 1
    ratio = beside.median() / calm.median()
    figures["innocent requests beside ten hostile grammars"] = len(beside.seconds)
    figures["their median in milliseconds"] = beside.median()
    figures["without the grammars"] = calm.median()
    figures["answers to hostile grammars"] = ", ".join(
        f"{status}: {number}" for status, number in sorted(statuses.items())
    )
    yield from (*calm.wrong, *beside.wrong)
    if ratio > SLOWER:
        yield f"innocent requests take {ratio:.1f} times as long beside hostile grammars"
    if statuses.keys() - {200, 400, 429, 503}:
        yield f"hostile grammars got {dict(statuses)}"


def hostile_grammars(turn: int) -> list[dict[str, Any]]:
    """Ten sets of sampling parameters, others at each turn, so that no cache knows them."""
    count = 2000 + turn
    keys = {f"a{'?' * 1}{number}{turn}(b?){{0,40}}": {"type": "string"} for number in range(60)}
    names = {f"p{number}_{turn}": {"type": "string"} for number in range(4000)}
    optional = "root ::= " + " ".join(f'("a{turn}"? "b"*)' for _ in range(1000))
    stars = "root ::= " + "(" * 200 + f'"a{turn}"*' + ")*" * 200
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": optional}}
    return [
        {"regex": "a?" * count},
        {"ebnf": f'root ::= e\ne ::= e e | [a-z] | "{turn}"', "max_new_tokens": 200},
        {"regex": "(a?b?c?){400}" + "x" * turn},
        {"json_schema": json.dumps({"type": "object", "patternProperties": keys})},
        {"json_schema": json.dumps({"type": "object", "properties": names})},
        {"json_schema": json.dumps({"type": "string", "pattern": "(a?){999}" * 3 + "b" * turn})},
        {"ebnf": optional},
        {"ebnf": stars},
        {"structural_tag": json.dumps(tag)},
        {"json_schema": json.dumps({"anyOf": [{"properties": names}, {"type": "string"}]})},
    ]


def _bodies(server: _Server, figures: dict[str, Any]) -> Iterator[str]:
    """Bodies of 50 MB that do not end, and innocents beside them."""
    innocents, before, most = _Innocents(server), server.memory(), 0
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {BODY}\r\n\r\n".encode()
    with innocents.asking(), contextlib.ExitStack() as stack:

        def send() -> int:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            connection.settimeout(60)
            with contextlib.suppress(OSError):
                connection.sendall(head)
                for _ in range(BODY // (1 << 20) - 1):
                    connection.sendall(b" " * (1 << 20))
                return 0
            return 1

        refused = sum(_at_once([send] * BODIES))
        most = server.memory()
    figures["unfinished bodies of 50 MiB"] = BODIES
    figures["of them refused while they came"] = refused
    figures["growth of the server in MiB"] = max(0, most - before) >> 20
    yield from innocents.wrong
    if most - before > GROWTH:
        yield f"the server grew by {(most - before) >> 20} MiB"


def _siege(server: _Server, figures: dict[str, Any]) -> Iterator[str]:
    """Connections that say nothing, half of a head, or a body byte by byte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * CONNECTIONS + 500)), hard))
    innocents, before = _Innocents(server), server.memory()
    starts = (
        b"",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n",
    )
    closed, most = 0, 0
    with innocents.asking(), contextlib.ExitStack() as stack:

        def opened(place: int) -> socket.socket | None:
            try:
                one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
                one.sendall(starts[place % len(starts)])
            except OSError:
                return None
            return stack.enter_context(one)

        held = [opened(place) for place in range(CONNECTIONS)]
        until = time.monotonic() + SIEGE_SECONDS
        while time.monotonic() < until:
            for place, one in enumerate(held):
                if one is None or (place % len(starts) and not _sent_byte(one)):
                    closed += 1
                    if one is not None:
                        one.close()
                    held[place] = opened(place)
            most = max(most, server.memory())
            time.sleep(1)
    figures["connections held, slow or silent"] = CONNECTIONS
    figures["seconds"] = SIEGE_SECONDS
    figures["of them closed and opened again"] = closed
    figures["innocent requests beside them"] = len(innocents.seconds)
    figures["median of those in milliseconds"] = innocents.median()
    figures["growth beside them in MiB"] = max(0, most - before) >> 20
    yield from innocents.wrong
    if most - before > GROWTH:
        yield f"the server grew by {(most - before) >> 20} MiB"


def _sent_byte(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"a")
    except OSError:
        return False
    return True
