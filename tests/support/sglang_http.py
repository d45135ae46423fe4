"""SGLang's own HTTP server with our plugin, forked from the process that imported SGLang."""

import contextlib
import http.client
import json
import os
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sglang_forks
from engines import MODEL, folder_of

from oscar_zoo.engines.sglang.front.access import FrontSettings
from oscar_zoo.engines.sglang.launch.plan import free_port
from oscar_zoo.engines.sglang.sizing import CPU_FLAGS, CPU_SWITCHES

PATIENCE = 300.0


@dataclass
class HttpServer:
    """A server on loopback that takes requests."""

    release: str  # of SGLang
    port: int
    log: Path
    headers: dict[str, str] = field(default_factory=dict)  # sent with every request
    front: FrontSettings | None = None  # where a file has its settings
    pid: int = 0  # of its first process

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON (or text) and headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **self.headers, **(headers or {})})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(text), response.headers
        except ValueError:
            return response.status, text.decode("utf-8", "replace"), response.headers

    def listeners(self) -> dict[str, list[str]]:
        """The addresses that its processes listen on, by the port of each."""
        first = psutil.Process(self.pid)
        found: dict[str, list[str]] = {}
        for process in (first, *first.children(recursive=True)):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM):
                    found.setdefault(str(one.laddr.port), []).append(one.laddr.ip)
        return found

    def canary(self, wanted: Callable[[Any], bool]) -> Any:
        """What the front says of the canary, as soon as it is as wanted."""
        deadline = time.monotonic() + PATIENCE
        while True:
            told = self.ask("GET", "/oscar_front")[1].get("canary")
            if told and wanted(told):
                return told
            assert time.monotonic() < deadline, told
            time.sleep(0.2)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body)[:2]

    def tokens(self, prompt: list[int], new: int = 8) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        status, answer = self.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        assert status == 200, answer
        return list(answer["output_ids"])


@contextlib.contextmanager
def http_server(
    release: str, folder: Path, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[HttpServer]:
    """`python -m sglang.launch_server` for the example model; gone when the block ends."""
    port, log = free_port(), folder / "server.log"
    argv = [f"--model-path={MODEL}", f"--port={port}", *CPU_SWITCHES]
    argv += [f"{name}={value}" for name, value in CPU_FLAGS.items()]
    forks = sglang_forks.connect(folder_of(release))
    given = {"argv": [*argv, *flags]}
    call = threading.Thread(
        target=forks.call, args=("sglang_http:serve", folder, log, env), kwargs=given, daemon=True
    )
    call.start()
    server = HttpServer(release, port, log)
    try:
        _wait(server, call)
        server.pid = forks.running
        yield server
    finally:
        forks.kill()
        call.join(PATIENCE)
        forks.close()


def serve(argv: list[str]) -> None:
    """In the fork: SGLang's program."""
    import engine_child

    engine_child.fork_workers()
    sys.argv = ["sglang.launch_server", *argv]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def routes(out: str) -> None:
    """In a fork: write the method and the path of every route to the file `out`."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils import add_prometheus_middleware
    from starlette.routing import Mount, WebSocketRoute

    add_prometheus_middleware(app)
    found, left = [], [*app.router.routes]
    while left:
        route = left.pop()
        if hasattr(route, "original_router"):  # how newer versions of FastAPI include a router
            left += route.original_router.routes
        elif isinstance(route, WebSocketRoute):
            found.append(("WEBSOCKET", route.path))
        elif isinstance(route, Mount):
            found.append(("GET", route.path))
        else:
            found += [(method, route.path) for method in route.methods]
    Path(out).write_text(json.dumps(found))


def _wait(server: HttpServer, call: threading.Thread) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and call.is_alive():
        with contextlib.suppress(OSError, http.client.HTTPException):
            if server.ask("GET", "/health")[0] == 200:
                return
        time.sleep(0.05)
    said = server.log.read_text()[-4000:] if server.log.exists() else ""
    raise AssertionError(f"the server is not ready:\n{said}")
