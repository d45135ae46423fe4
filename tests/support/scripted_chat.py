"""A server on loopback with the part of SGLang's API that benchmarks use. It answers by rule: the
same question with the same seed has the same answer."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO = {
    "version": "0.5.21",
    "dtype": "float32",
    "device": "cpu",
    "page_size": 1,
    "chunked_prefill_size": 512,
    "disable_radix_cache": False,
    "tp_size": 1,
    "max_total_num_tokens": 9000,
    "max_req_input_len": 2042,
}


class ScriptedChat(ThreadingHTTPServer):
    """Keeps the bodies of the chat requests in `asked`; those after `silent_after` of them wait
    until the server ends."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, cache: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.info = {**INFO, "kv_cache_dtype": cache}
        self.asked, self.silent_after = list[dict[str, Any]](), math.inf
        self.stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """A choice that depends on the question, the seed and the cache, behind some thoughts."""
        self.asked.append(body)
        if len(self.asked) > self.silent_after:
            self.stopped.wait()
        told = json.dumps([body["messages"], body["seed"], self.info["kv_cache_dtype"]])
        number = hashlib.sha256(told.encode()).digest()[0]
        cut = number % 5 == 0
        letter = "ABCD"[number % 4]
        text = "<think>Let me see" if cut else f"<think>So.</think>\n\nThe answer is ({letter})."
        return {
            "choices": [
                {
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": "length" if cut else "stop",
                }
            ],
            "usage": {"prompt_tokens": 300 + number, "completion_tokens": 50 + number},
        }


@contextmanager
def scripted_chat(cache: str) -> Iterator[ScriptedChat]:
    """A running server, which ends with the block."""
    server = ScriptedChat(cache)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedChat

    def do_GET(self) -> None:
        self._send(self.server.info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(self.server.reply(body))

    def _send(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...
