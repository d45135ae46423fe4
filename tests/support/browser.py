"""A page in a real browser: what its script tells at the end."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
SECONDS = 120
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@dataclass
class Page:
    """A page on a port of loopback, under every name; its script posts JSON to `/said`."""

    port: int
    _said: queue.Queue[Any] = field(repr=False)

    def opened(self, url: str, folder: Path, *flags: str) -> Any:
        """Open `url`, which leads to the page, and wait for what its script says.

        Args:
            folder: an empty one for the browser.
        """
        assert BROWSER is not None
        command = [BROWSER, *FLAGS, f"--user-data-dir={folder}", *flags, url]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
            try:
                return self._said.get(timeout=SECONDS)
            finally:
                process.terminate()


@contextlib.contextmanager
def serving(html: str) -> Iterator[Page]:
    """Serve the page `html` while the block runs."""
    said: queue.Queue[Any] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(html.encode())

        def do_POST(self) -> None:
            said.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Page(server.server_port, said)
    finally:
        server.shutdown()
        server.server_close()
