"""The client against a real HTTP server on loopback that answers what SGLang answers, and much
else."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from raw_server import RawServer, Seen, answer

from oscar_zoo.engines.server_client import Answer, Scored, ServerClient
from oscar_zoo.errors import ServerFailed, UsageError

INFO = {
    "version": "0.5.17",
    "kv_cache_dtype": "int2",
    "dtype": "float32",
    "device": "cpu",
    "chunked_prefill_size": 512,
    "page_size": 16,
    "disable_radix_cache": False,
    "tp_size": 2,
    "max_total_num_tokens": 1000,
    "max_req_input_len": 90,
}
LOADS = {
    "loads": [
        {"max_total_num_tokens": 1000, "num_used_tokens": 30},
        {"max_total_num_tokens": 9, "num_used_tokens": 0},
    ]
}
Serve = Callable[[dict[str, Any]], ServerClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with an answer (a status, or JSON, or text) per path."""
    with ExitStack() as stack:

        def start(answers: dict[str, Any]) -> ServerClient:
            def handle(connection: socket.socket, seen: Seen) -> None:
                found = answers[seen.target.partition("?")[0]]
                found = found(json.loads(seen.body)) if callable(found) else found
                status = f"{found} Status" if isinstance(found, int) else "200 OK"
                text = found if isinstance(found, str) else json.dumps(found)
                connection.sendall(answer(text.encode(), status=status))

            return ServerClient(stack.enter_context(RawServer(handle)).url, timeout=300)

        yield start


def scored(values: list[float | None], tokens: list[int], cached: int = 3) -> dict[str, Any]:
    pairs = [[value, token, None] for value, token in zip(values, tokens, strict=True)]
    return {"meta_info": {"input_token_logprobs": pairs, "cached_tokens": cached}}


def test_it_reads_what_a_server_says_of_itself(serve: Serve) -> None:
    answers = {"/get_server_info": INFO, "/v1/loads": LOADS, "/health": 503, "/flush_cache": 200}
    client = serve(answers)
    facts = client.facts()
    told = facts.chunk, facts.page_size, facts.radix, facts.tp, facts.capacity
    assert told == (512, 16, True, 2, 1000)
    for size in (-1, None):
        whole = serve({"/get_server_info": {**INFO, "chunked_prefill_size": size}})
        assert whole.facts().chunk == 1000
    assert client.free_tokens() == (970, 9)
    assert facts.recipe == {}
    ours = {**INFO, "internal_states": [{"oscar_int2": {"recipe": {"sink": 64}}}]}
    assert serve({"/get_server_info": ours}).facts().recipe == {"sink": 64}
    assert not client.healthy()
    client.flush()


def test_scores_belong_to_the_tokens_that_were_asked_for(serve: Serve) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 1
        start, ids = body["logprob_start_len"], body["input_ids"]
        return scored([None, *(-0.5 * token for token in ids[start + 1 :])], ids[start:])

    client = serve({"/generate": answer})
    assert client.score([7, 8, 9]) == Scored((-4.0, -4.5), 3)
    assert client.score([7, 8, 9], start=1) == Scored((-4.5,), 3)


@pytest.mark.parametrize(
    "answer",
    [
        scored([None, -1.0], [7, 8]),
        scored([None, -1.0, -2.0], [7, 8, 10]),
        scored([None, -1.0, float("nan")], [7, 8, 9]),
        scored([None, -1.0, None], [7, 8, 9]),
        {"meta_info": {}},
        {"text": "hello"},
        [1],
        "no JSON",
    ],
)
def test_other_answers_are_no_scores(serve: Serve, answer: Any) -> None:
    with pytest.raises(ServerFailed, match="is not the server it should be"):
        serve({"/generate": answer}).score([7, 8, 9])


def test_generation_has_a_fixed_length_unless_it_may_stop(serve: Serve) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body["sampling_params"])
        return {"output_ids": [4, 5], "meta_info": {"cached_tokens": 1}}

    client = serve({"/generate": answer})
    for stop in ({}, {"stop": [9, 3]}):
        assert client.generate([1, 2], 2, **stop) == Answer((4, 5), 1)
    fixed = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    assert bodies == [fixed, {**fixed, "stop_token_ids": [3, 9]}]


def test_refusals_and_silence_are_one_line(serve: Serve) -> None:
    with pytest.raises(ServerFailed, match=r"/flush_cache.* answered 400"):
        serve({"/flush_cache": 400}).flush()
    less = {name: value for name, value in INFO.items() if name != "chunked_prefill_size"}
    with pytest.raises(ServerFailed, match="its description lacks 'chunked_prefill_size'"):
        serve({"/get_server_info": less}).facts()
    with pytest.raises(ServerFailed, match="does not answer: nobody listens"):
        ServerClient("http://127.0.0.1:9").facts()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:30000", "https://127.0.0.1", "http://", "http://h:x", "http://h/v1", "file:///x"],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        ServerClient(url)
