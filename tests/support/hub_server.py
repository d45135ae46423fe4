"""A loopback hub: Hugging Face and ModelScope over real HTTP, with faults to order and every
request on record.

    with HubServer() as server:
        repo = server.repository("org/name", files={"a/model.pt": data})
        server.fault("flip", path="*model.pt", times=1, at=100)

`server.url` is the hub, on `127.0.0.1`; `server.cdn_url` is a second port under another name,
`localhost`, so that every client takes it for another host. With `tls=True` both speak https;
`server.plain_url` never does.
"""

import os
import socket
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import hub_huggingface
import hub_modelscope
import hub_wire
from hub_faults import Faults
from hub_repositories import HubState, Kind, Repository
from hub_wire import CERTIFICATE, Port, Record, Refused, Reply, Request, server_context

_FOREIGN = ("HF_", "HUGGING", "MODELSCOPE_", "OSCAR_ZOO_HUB")


class HubServer(HubState):
    """Both hubs in this process, in threads; enter it to start."""

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__()
        self.requests: list[Record] = []
        self.failures: list[str] = []
        self._faults = Faults(self)
        self.fault, self.clear_faults = self._faults.add, self._faults.clear
        self._stopping = threading.Event()
        self._sockets: list[socket.socket] = []
        self._folder = tempfile.TemporaryDirectory()
        context = server_context(Path(self._folder.name)) if tls else None
        self._ports = [
            Port(self, "origin", context),
            Port(self, "cdn", context),
            Port(self, "plain"),
        ]
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._ports[0].server_port}"
        self.cdn_url = f"{scheme}://localhost:{self._ports[1].server_port}"
        self.plain_url = f"http://127.0.0.1:{self._ports[2].server_port}"

    def __enter__(self) -> Self:
        for port in self._ports:
            threading.Thread(
                target=port.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()
        if kind is None and self.failures:
            raise AssertionError("the loopback hub failed:\n" + "\n".join(self.failures))

    def stop(self) -> None:
        """End everything, hanging requests too."""
        self._stopping.set()
        for port in self._ports:
            port.shutdown()
            port.close_connections()
            port.server_close()
        for listening in self._sockets:
            listening.close()
        self._folder.cleanup()

    def repository(
        self,
        repo_id: str,
        kind: Kind = "hf",
        *,
        private: bool = False,
        gated: bool = False,
        token: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Repository:
        """The repository, made when there is none; `files` are its first commit, which is empty
        without them."""
        with self.lock:
            repo = self.find(kind, repo_id)
            if repo is None:
                repo = Repository(repo_id, kind, private=private, gated=gated, token=token)
                repo.commit(files or {}, message="First commit")
                self.repositories[kind, repo_id] = repo
            elif files:
                repo.commit(files)
        return repo

    def clear(self) -> None:
        self.requests.clear()

    def hang_accept(self) -> str:
        """Address of a port that takes connections and reads nothing."""
        address = self.closed_port()
        self._sockets[-1].listen(128)
        return address

    def closed_port(self) -> str:
        """Address nobody listens on, kept so."""
        bound = socket.socket()
        self._sockets.append(bound)
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}"

    def environment(self, hf_home: Path) -> dict[str, str]:
        """Variables of a child process whose clients see only this server and keep everything below
        `hf_home`."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_FOREIGN) and not name.lower().endswith(("_proxy", "token"))
        }
        home = hf_home / "home"
        home.mkdir(parents=True, exist_ok=True)
        certificate = Path(self._folder.name) / CERTIFICATE
        if certificate.exists():
            kept |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(certificate))
        return kept | {
            "HOME": str(home),
            "HF_HOME": str(hf_home),
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "MODELSCOPE_ENDPOINT": self.url,
            "MODELSCOPE_CACHE": str(hf_home / "modelscope"),
        }

    def arrive(self, record: Record) -> None:
        self.requests.append(record)

    def answer(self, request: Request) -> Reply:
        """Answer a request through the faults; a bug of ours is a reply too, and fails the test at
        the end."""
        try:
            return self._faults.around(request, lambda: self._answer(request))
        except Exception:
            self.failures.append(f"{request.method} {request.target}\n{traceback.format_exc()}")
            return Reply(500, {"Content-Type": "text/plain"}, self.failures[-1].encode())

    def _answer(self, request: Request) -> Reply:
        routes = hub_huggingface.answer
        match request.segments:
            case ("cdn" | "lfs", *_):
                routes = hub_wire.answer
            case ("api" | "openapi", "v1", *_):
                routes = hub_modelscope.answer
        try:
            return routes(self, request)
        except Refused as refused:
            return refused.reply

    def pause(self, seconds: float | None) -> bool:
        """Wait, or less when the server stops; tells whether it stops."""
        return self._stopping.wait(seconds)
