"""What a server says of itself, read over HTTP from answers of the shape that SGLang gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.ready import read_facts
from oscar_zoo.errors import ServerFailed

KEY = "a key"
ELEMENTS = 36 * 8 * 256
"""Cached numbers of one token of Qwen3-8B."""
GB = 10**9


def worker(slots: int) -> dict[str, Any]:
    memory = {
        "token_slots": slots,
        "slot_bytes": ELEMENTS * 9 // 32,
        "request_rows": 65,
        "found_bytes": 59 * GB,
    }
    recipe = {"sink": 64, "recent": 256, "bits": "2", "k_clip": 0.96, "v_clip": 0.92}
    return {"oscar_int2": {"bits_per_element": 2.25, "recipe": recipe, "memory": memory}}


def pages(*workers: dict[str, Any], **info: Any) -> dict[str, Any]:
    models = {"data": [{"id": "Qwen/Qwen3-8B", "max_model_len": 40960}]}
    return {
        "/server_info": {
            "version": "0.5.23",
            "max_total_tokens": None,
            "internal_states": list(workers),
        }
        | info,
        "/v1/models": models,
    }


Serve = Callable[[dict[str, Any]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[ThreadingHTTPServer] = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                allowed = self.headers["Authorization"] == f"Bearer {KEY}"
                self.send_response(200 if allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps(answers[self.path] if allowed else {}).encode())

            def log_message(self, *_: object) -> None:
                pass

        running.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_capacity_beside_that_of_a_plain_cache(serve: Serve) -> None:
    facts = read_facts(ServerClient(serve(pages(worker(2_500_000))), key=KEY))
    assert (facts.model, facts.version, facts.context) == ("Qwen/Qwen3-8B", "0.5.23", 40960)
    assert (facts.capacity, facts.requests, facts.bits) == (2_500_000, 64, 2.25)
    assert facts.plain_capacity == 59 * GB // (2 * ELEMENTS) == 400_119
    assert (facts.sink, facts.recent, facts.k_clip, facts.v_clip) == (64, 256, 0.96, 0.92)


def test_data_parallel_workers_add_up(serve: Serve) -> None:
    facts = read_facts(ServerClient(serve(pages(worker(100), worker(200))), key=KEY))
    assert (facts.capacity, facts.requests, facts.plain_capacity) == (300, 128, 2 * 400_119)


def test_a_limited_capacity_is_compared_with_nothing(serve: Serve) -> None:
    facts = read_facts(ServerClient(serve(pages(worker(16384), max_total_tokens=16384)), key=KEY))
    assert facts.plain_capacity is None and facts.capacity == 16384


@pytest.mark.parametrize(
    "answers", [pages(), pages({"world_size": 1}), {"/server_info": {}, "/v1/models": {}}]
)
def test_a_server_without_an_int2_cache(serve: Serve, answers: dict[str, Any]) -> None:
    with pytest.raises(ServerFailed, match="does not describe its INT2 cache"):
        read_facts(ServerClient(serve(answers), key=KEY))


def test_a_key_that_is_missing(serve: Serve) -> None:
    with pytest.raises(ServerFailed, match="answered 401"):
        read_facts(ServerClient(serve(pages(worker(1)))))
