"""A program in place of SGLang: it becomes healthy, describes an INT2 cache, and then falls over or
stays."""

from __future__ import annotations

import os
import sys

import pytest

from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, Staged, free_port

PROGRAM = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
memory = {"token_slots": 9, "slot_bytes": 320, "request_rows": 2, "found_bytes": 1}
recipe = {"sink": 1, "recent": 2, "bits": "2", "k_clip": 0, "v_clip": 0}
cache = {"bits_per_element": 2.5, "recipe": recipe, "memory": memory}
PAGES = {
    "/health": {},
    "/server_info": {"version": "0", "internal_states": [{"oscar_int2": cache}]},
    "/v1/models": {"data": [{"id": "m"}]},
    "/oscar_front": {"front": json.loads(pathlib.Path(sys.argv[3]).read_text())["id"],
                     "requests": 2},
}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps(PAGES[self.path]).encode())
        self.server.done = self.path == "/v1/models" and sys.argv[2] == "dies"
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler); server.done = False
while not server.done:
    server.handle_request()
sys.stderr.write("RuntimeError: it fell over.\\n"); sys.exit(3)
"""


def take_its_place(monkeypatch: pytest.MonkeyPatch, *, dies: bool) -> int:
    """Let every server be this program; returns the port that it listens on.

    Args:
        dies: whether it falls over when it has described itself.
    """
    port = free_port()
    argv = (sys.executable, "-P", "-c", PROGRAM, str(port), "dies" if dies else "stays")

    def plan(_: object, staged: Staged, __: object) -> LaunchPlan:
        return LaunchPlan((*argv, staged.front), dict(os.environ), f"http://127.0.0.1:{port}")

    monkeypatch.setattr("oscar_zoo.serving.serve.require_serve", lambda: None)
    monkeypatch.setattr("oscar_zoo.engines.sglang.launch.plan.plan", plan)
    return port
