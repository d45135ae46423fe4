"""A client of a vLLM server behind our front, by OpenAI's API: what `eval --url` asks."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oscar_zoo.engines.server_client import Answer, Scored, ServerClient, ServerFacts
from oscar_zoo.engines.sglang.front.middleware import PATH
from oscar_zoo.errors import ServerFailed, UsageError


class VllmClient(ServerClient):
    """Requests share prefixes until the next `flush`. Log-probabilities of a prompt never start
    from the cache, because vLLM computes the whole prompt for them."""

    _salt = ""

    @classmethod
    def instead_of(cls, client: ServerClient | None, *, asked: bool) -> ServerClient | None:
        """A client of the same server, if that runs vLLM, else `client`. `asked` says that a server
        of vLLM was asked for."""
        if client is None:
            if asked:
                hint = "oscar-zoo serve NAME --engine vllm starts a server"
                raise UsageError("--engine vllm needs --url.", hint=hint)
            return None
        try:
            told = client.get(PATH)
        except ServerFailed as error:
            if "answered" not in error.message:
                raise
            told = {}  # no front, so not a server of ours
        if asked and "vllm" not in told:
            hint = "oscar-zoo serve NAME --engine vllm starts one"
            raise ServerFailed(f"{client.url} is no vLLM server of oscar-zoo.", hint=hint)
        if "vllm" not in told:
            return client
        found = cls(client.url, timeout=client.timeout)
        found._headers = client._headers
        found.model_id = str(found.get("/v1/models")["data"][0]["id"])
        return found

    def facts(self) -> ServerFacts:
        told = self.get(PATH)
        try:
            return ServerFacts(**told["cache"], version=told["vllm"], engine="vLLM", hits=False)
        except (KeyError, TypeError) as error:
            raise self.odd(f"its front lacks {error}") from None

    def flush(self) -> None:
        """Find nothing of what was asked before. vLLM empties its cache only for its developers;
        prompts with another salt share nothing."""
        self._salt = secrets.token_hex(16)

    def score(self, ids: Sequence[int], *, start: int = 0) -> Scored:
        answer, cached = self._complete(ids, 1, prompt_logprobs=0)
        try:
            rows = zip(answer["prompt_logprobs"], ids, strict=True)
            values = [float(row[str(token)]["logprob"]) for row, token in [*rows][1 + start :]]
        except (KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its log-probabilities lack {error}") from None
        if not all(map(math.isfinite, values)):
            raise self.odd("a log-probability is no number")
        return Scored(tuple(values), cached)

    def generate(
        self, ids: Sequence[int], new_tokens: int, *, stop: Collection[int] = ()
    ) -> Answer:
        more = {"stop_token_ids": sorted(stop)} if stop else {}
        answer, cached = self._complete(ids, new_tokens, **more)
        return Answer(tuple(map(int, answer["token_ids"])), cached)

    def _complete(self, ids: Sequence[int], new: int, **more: Any) -> tuple[Mapping[str, Any], int]:
        body = {
            "model": self.model_id,
            "prompt": list(ids),
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"cache_salt": self._salt} if self._salt else {}),
        }
        answer = self.post("/v1/completions", body | more)
        try:
            details = answer["usage"]["prompt_tokens_details"] or {}
            return answer["choices"][0], int(details.get("cached_tokens") or 0)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise self.odd(f"its answer lacks {error}") from None
