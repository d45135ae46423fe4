"""Requests that a server must refuse, and the field that each answer must name. Without the
checks of the plugin many of them end the whole server."""

import contextlib
import json
import queue
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import MODEL
from raw_server import RawServer, Seen, answer

HUGE = 10**15
VOCABULARY = json.loads((MODEL / "config.json").read_text())["vocab_size"]
Case = tuple[str, dict[str, Any], str]
"""Path, body, and the name of the field."""


def native(field: str, **given: Any) -> Case:
    prompt = {} if {"input_ids", "text"} & given.keys() else {"input_ids": [5, 6, 7]}
    return "/generate", {"sampling_params": {"max_new_tokens": 2}, **prompt, **given}, field


def sampled(field: str, **given: Any) -> Case:
    return native(field, sampling_params={"max_new_tokens": 2, **given})


def completion(field: str, **given: Any) -> Case:
    body = {"model": "default", "prompt": "Hello", "max_tokens": 2, **given}
    return "/v1/completions", body, field


def chat(field: str, **given: Any) -> Case:
    message = {"role": "user", "content": "Hello"}
    body = {"model": "default", "messages": [message], "max_tokens": 2, **given}
    return "/v1/chat/completions", body, field


def tagged(content: dict[str, Any]) -> Case:
    tag = json.dumps({"type": "structural_tag", "format": content})
    return sampled("structural_tag", structural_tag=tag)


SLOW_GRAMMAR = "root ::= " + '("a"? "b"*) ' * 2000
BAD = {
    "a token beyond the vocabulary": native("input_ids", input_ids=[99999999]),
    "the first token beyond it": native("input_ids", input_ids=[5, VOCABULARY]),
    "a negative token": native("input_ids", input_ids=[-1]),
    "the largest integer": native("input_ids", input_ids=[2**63 - 1]),
    "one bad prompt of several": native("input_ids", input_ids=[[1], [99999999]]),
    "an empty prompt": native("input_ids", input_ids=[]),
    "an empty prompt of several": native("input_ids", input_ids=[[5], []]),
    "no prompts": native("input_ids", input_ids=[[]]),
    "a bad prompt of a completion": completion("prompt", prompt=[99999999]),
    "bad prompts of a completion": completion("prompt", prompt=[[1, 2], [99999999]]),
    "a negative token of a completion": completion("prompt", prompt=[-5]),
    "a bad prompt of n samples": native(
        "input_ids", input_ids=[99999999], sampling_params={"n": 2, "max_new_tokens": 1}
    ),
    "log-probabilities of too many tokens": native(
        "logprob_start_len", return_logprob=True, top_logprobs_num=100000, logprob_start_len=-9
    ),
    "more log-probabilities than tokens": native(
        "top_logprobs_num", return_logprob=True, top_logprobs_num=1025
    ),
    "a negative number of log-probabilities": native(
        "top_logprobs_num", return_logprob=True, top_logprobs_num=-1
    ),
    "a negative start": native("logprob_start_len", return_logprob=True, logprob_start_len=-9),
    "a start behind the prompt": native(
        "logprob_start_len", return_logprob=True, logprob_start_len=99
    ),
    "a list for one prompt": native(
        "top_logprobs_num", return_logprob=True, top_logprobs_num=[1, 2, 3]
    ),
    "log-probabilities of a token that is none": native(
        "token_ids_logprob", return_logprob=True, token_ids_logprob=[99999999]
    ),
    "too many samples": sampled("n", n=100000),
    "no sample": sampled("n", n=0),
    "half a sample": sampled("n", n=1.5),
    "too many answers": native(
        "n", input_ids=[[5]] * 100, sampling_params={"n": 100, "max_new_tokens": 1}
    ),
    "too many prompts": native("input_ids", input_ids=[[5]] * 2000),
    "a negative length": sampled("max_new_tokens", max_new_tokens=-1),
    "a length of many digits": sampled("max_new_tokens", max_new_tokens=HUGE),
    "a length that is text": sampled("max_new_tokens", max_new_tokens="a"),
    "half a token": sampled("max_new_tokens", max_new_tokens=1.5),
    "at least more than at most": sampled("min_new_tokens", min_new_tokens=5, max_new_tokens=2),
    "a long stop string": sampled("stop", stop=["x" * 100000]),
    "many stop strings": sampled("stop", stop=["x"] * 1000),
    "a stop number": sampled("stop", stop=[5]),
    "a stop token beyond": sampled("stop_token_ids", stop_token_ids=[99999999]),
    "a stop token of many digits": sampled("stop_token_ids", stop_token_ids=[10**30]),
    "stop tokens that are text": sampled("stop_token_ids", stop_token_ids="abc"),
    "a stop expression that is none": sampled("stop_regex", stop_regex="("),
    "a stop expression without an end": sampled("stop_regex", stop_regex="(a+)+$"),
    "a stop expression with many ways": sampled("stop_regex", stop_regex="(a|a){1,40}b"),
    "a stop expression that is long": sampled("stop_regex", stop_regex="a" * 1000),
    "an expression that takes minutes to compile": sampled("regex", regex="a?" * 2000),
    "a long expression": sampled("regex", regex="a" * 200000),
    "a number for an expression": sampled("regex", regex=5),
    "a schema that is none": sampled("json_schema", json_schema="{"),
    "a schema that takes minutes to compile": sampled(
        "json_schema",
        json_schema=json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2500)}}),
    ),
    "a deep schema": sampled("json_schema", json_schema='{"not":' * 200 + "{}" + "}" * 200),
    "a grammar that takes minutes to compile": sampled("ebnf", ebnf=SLOW_GRAMMAR),
    "a tag with such a grammar": tagged({"type": "grammar", "grammar": SLOW_GRAMMAR}),
    "a schema with such a pattern": sampled(
        "json_schema", json_schema=json.dumps({"type": "string", "pattern": "(a?b?){3000}"})
    ),
    "a grammar that takes longer with each token": sampled(
        "ebnf", ebnf="root ::= e\ne ::= e e | [a-z]"
    ),
    "a tag that takes longer with each token": tagged(
        {"type": "star", "content": {"type": "star", "content": {"type": "any_text"}}}
    ),
    "a tag that is none": sampled("structural_tag", structural_tag="x"),
    "a temperature that is text": sampled("temperature", temperature="x"),
    "a tiny temperature": sampled("temperature", temperature=5e-6),
    "a negative temperature": sampled("temperature", temperature=-1),
    "no share of the tokens": sampled("top_p", top_p=0),
    "a top of many digits": sampled("top_k", top_k=HUGE, temperature=1),
    "a top that is broken": sampled("top_k", top_k=1.5, temperature=1),
    "a tiny penalty": sampled("repetition_penalty", repetition_penalty=1e-30),
    "a penalty that is text": sampled("presence_penalty", presence_penalty="a"),
    "a bias beyond the vocabulary": sampled("logit_bias", logit_bias={"99999999": 1}),
    "a bias for no token": sampled("logit_bias", logit_bias={"a": 1}),
    "a bias that is text": sampled("logit_bias", logit_bias={"5": "b"}),
    "a bias that is null": sampled("logit_bias", logit_bias={"5": None}),
    "a bias that is infinite": sampled("logit_bias", logit_bias={"5": 1e300}),
    "a list of biases": sampled("logit_bias", logit_bias=[1]),
    "a seed of many digits": sampled("sampling_seed", sampling_seed=2**63, temperature=1),
    "no tokens between parts": sampled("stream_interval", stream_interval=0),
    "a parameter that is none": sampled("unknown", unknown=1),
    "what SGLang decides": sampled("is_normalized", is_normalized=True),
    "where stop strings end": sampled("stop_str_max_len", stop_str_max_len=HUGE),
    "nested parameters": sampled("custom_params", custom_params={"a": [[[[[[1]]]]]]}),
    "a session that is none": native("session_params", session_params={"x": 1}),
    "a long id": native("rid", rid="x" * 100000),
    "other servers": native("bootstrap_host", bootstrap_host="x", bootstrap_room=5),
    "vectors": native("positional_embed_overrides", positional_embed_overrides=[1]),
    "a priority of many digits": native("priority", priority=HUGE),
    "a long text": native("text", text="a " * 500000),
    "no text": native("text", text=[""]),
    "too many log-probabilities of a completion": completion("top_logprobs", logprobs=100000),
    "too many samples of a completion": completion("n", n=100000),
    "a negative length of a completion": completion("max_tokens", max_tokens=-5),
    "many stop strings of a completion": completion("stop", stop=["x"] * 1000),
    "a bias of a completion": completion("logit_bias", logit_bias={"99999999": 5}),
    "too many samples of a chat": chat("n", n=100000),
    "too many log-probabilities of a chat": chat(
        "top_logprobs", logprobs=True, top_logprobs=100000
    ),
    "a negative bias of a chat": chat("logit_bias", logit_bias={"-5": 1}),
    "text of a token that is none": (
        "/detokenize",
        {"model": "default", "tokens": [5, 99999999]},
        "tokens",
    ),
    "no videos for two prompts": native("video_data", input_ids=[[5], [6]], video_data=[]),
    "a seed of a chat": chat("seed", seed=2**63),
}


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

    def handle(connection: socket.socket, seen: Seen) -> None:
        if seen.method == "POST":
            said.put(json.loads(seen.body))
        kind = "text/html; charset=utf-8"
        connection.sendall(answer(html.encode(), Content_Type=kind))

    with RawServer(handle) as server:
        yield Page(server.port, said)
