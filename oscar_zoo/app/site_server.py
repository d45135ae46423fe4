"""Serve the folder of a site on this machine, to look at it before it is published."""

from __future__ import annotations

import contextlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from oscar_zoo.engines.sglang.launch.plan import check_port_free

_HOST = "127.0.0.1"


class SiteServer:
    """An HTTP server for the files of one folder, on the loopback interface only.

    Args:
        port: to listen on; 0 takes a free one.
    """

    def __init__(self, folder: Path, port: int) -> None:
        handler = partial(_Quiet, directory=str(folder))
        try:
            self._server = ThreadingHTTPServer((_HOST, port), handler)
        except OSError:
            check_port_free(_HOST, port, again=lambda: "oscar-zoo site --serve --port 0")
            raise

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http://{_HOST}:{self._server.server_address[1]}/"

    def run(self) -> None:
        """Answer until Ctrl-C, which is how it ends and no error."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.serve_forever(poll_interval=0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each request and without listings of folders."""

    server_version = "oscar-zoo"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def list_directory(self, path: object) -> None:  # type: ignore[override]
        """A folder without `index.html` is not shown."""
        self.send_error(404)
