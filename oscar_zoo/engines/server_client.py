"""A client of a running SGLang server: token ids in, token ids and log-probabilities out.

It speaks plain HTTP with the standard library. Requests go out one at a time unless the caller uses
threads. When two requests share a prefill batch, chunks end elsewhere, and results of an INT2 cache
depend on where chunks end.
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from oscar_zoo.errors import ServerFailed, UsageError

MOST_BYTES = 256 << 20
"""Largest size of one answer in bytes; a log-probability takes about 30."""


INT2 = "oscar_int2"
"""Where a server with our plugin tells about its cache, in the state of a worker."""


@dataclass(frozen=True)
class ServerFacts:
    version: str
    cache_dtype: str
    dtype: str  # of weights and activations
    device: str
    chunk: int  # tokens prefilled at once; `capacity` where prompts are never cut
    page_size: int  # tokens of a page of its cache
    radix: bool  # whether prefixes are reused
    tp: int  # number of tensor-parallel ranks
    capacity: int  # tokens its cache holds
    longest_input: int  # tokens of the longest prompt it takes
    recipe: Mapping[str, Any] = field(default_factory=dict)  # of its INT2 cache, as far as it tells
    engine: str = "SGLang"
    hits: bool = True  # whether log-probabilities of a prompt may start from the cache


@dataclass(frozen=True)
class Scored:
    """Natural log-probabilities of prompt tokens, each given all tokens before it, and how many
    tokens were reused from the cache."""

    values: tuple[float, ...]
    cached: int


@dataclass(frozen=True)
class Answer:
    """Generated tokens, and how many tokens of the prompt came from the prefix cache."""

    ids: tuple[int, ...]
    cached: int


class ServerClient:
    """Requests to one server; one answer may take `timeout` seconds."""

    model_id = "default"
    """What requests call the model; SGLang does not compare it."""

    def __init__(self, url: str, *, timeout: float = 600, key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query:
            raise UsageError(
                f"{url!r} is not the address of a server.",
                hint="for example http://127.0.0.1:30000",
            )
        self.url, self.host, self.port, self.timeout = url.rstrip("/"), host, port or 80, timeout
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def facts(self) -> ServerFacts:
        info = self.get("/get_server_info")
        try:
            capacity, size = int(info["max_total_num_tokens"]), info["chunked_prefill_size"]
            states = info.get("internal_states") or [{}]
            return ServerFacts(
                version=str(info["version"]),
                cache_dtype=str(info["kv_cache_dtype"]),
                dtype=str(info["dtype"]),
                device=str(info["device"]),
                # SGLang says -1 or nothing where there are no chunks.
                chunk=int(size) if size is not None and int(size) > 0 else capacity,
                page_size=int(info["page_size"]),
                radix=not info["disable_radix_cache"],
                tp=int(info["tp_size"]),
                capacity=capacity,
                longest_input=int(info["max_req_input_len"]),
                recipe=dict(states[0].get(INT2, {}).get("recipe", {})),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its description lacks {error}") from None

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("POST", path, dict(body))

    def tokenize(self, text: str) -> list[int]:
        """The tokens of `text`, with the special tokens that a prompt here begins with."""
        answer = self.post("/tokenize", {"model": self.model_id, "prompt": text})
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its tokens lack {error}") from None

    def free_tokens(self) -> tuple[int, ...]:
        """Tokens that a new request could get, by data-parallel rank, those included that the
        prefix cache would give back."""
        try:
            loads = self._json("GET", "/v1/loads")["loads"]
            return tuple(
                int(one["max_total_num_tokens"]) - int(one["num_used_tokens"]) for one in loads
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its load lacks {error}") from None

    def flush(self) -> None:
        try:
            self._read("POST", "/flush_cache?timeout=30", b"")
        except ServerFailed as error:
            if "answered 404" in error.message:
                error.advise("only who runs oscar-zoo serve may empty its cache, on its machine")
            raise

    def healthy(self) -> bool:
        try:
            self._read("GET", "/health", None)
        except ServerFailed:
            return False
        return True

    def score(self, ids: Sequence[int], *, start: int = 0) -> Scored:
        """Log-probabilities of the tokens `start + 1 ..` of a prompt of at least two tokens, as its
        prefill computes them. Tokens before `start` may come from the prefix cache."""
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        meta = self._generate(body)["meta_info"]
        try:
            found = [(value, token) for value, token, *_ in meta["input_token_logprobs"]][1:]
            values, tokens = [float(value) for value, _ in found], [token for _, token in found]
            cached = int(meta["cached_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its log-probabilities lack {error}") from None
        if tokens != list(ids[start + 1 :]) or not all(math.isfinite(value) for value in values):
            raise self.odd(
                f"{len(values)} log-probabilities for {len(ids) - start - 1} tokens, or not of"
                " these"
            )
        return Scored(tuple(values), cached)

    def generate(
        self, ids: Sequence[int], new_tokens: int, *, stop: Collection[int] = ()
    ) -> Answer:
        """The most likely continuation; without `stop` exactly `new_tokens` tokens."""
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        if stop:
            sampling["stop_token_ids"] = sorted(stop)
        answer = self._generate({"input_ids": list(ids), "sampling_params": sampling})
        try:
            return Answer(
                tuple(map(int, answer["output_ids"])), int(answer["meta_info"]["cached_tokens"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its answer lacks {error}") from None

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._json("POST", "/generate", body)
        if not isinstance(answer.get("meta_info"), dict):
            raise self.odd("its answer has no meta_info")
        return answer

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = self._read(method, path, None if body is None else json.dumps(body).encode())
        try:
            answer = json.loads(data)
        except ValueError:
            raise self.odd(f"{path} is not JSON") from None
        if not isinstance(answer, dict):
            raise self.odd(f"{path} is no JSON object")
        return answer

    def _read(self, method: str, path: str, body: bytes | None) -> bytes:
        connection = self.connect()
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            data = response.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailed.for_silence(self.url, error) from None
        finally:
            connection.close()
        if response.status != 200:
            said = " ".join(data[:400].decode("utf-8", "replace").split()).rstrip(".")
            raise ServerFailed(f"{self.url}{path} answered {response.status}: {said}.")
        if len(data) > MOST_BYTES:
            raise self.odd(f"{path} answers more than {MOST_BYTES >> 20} MiB")
        return data

    def odd(self, what: str) -> ServerFailed:
        return ServerFailed(
            f"{self.url} is not the server it should be: {what}.", hint="see its log"
        )
