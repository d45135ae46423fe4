"""Questions to a server: an answer in chat form, or the log-probability of a given continuation.

Requests of a benchmark are plain values, so that they have a key under which answers are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import ServerFailed
from oscar_zoo.evaluate.benchmarks.answers import Answer

_THOUGHTS_END = "</think>"
_THOUGHTS = re.compile(r"\s*<think>")


@dataclass(frozen=True)
class Generation:
    """How answers are generated, the same for every cache.

    Attributes:
        max_new_tokens: tokens of an answer at most, with its reasoning.
        temperature: 0 for the most likely answer.
        top_p, top_k, min_p, repetition_penalty: as in `generation_config.json`; `top_k` -1 is off.
        thinking: what the chat template is told, or `None` for its default.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """The values that decide how a token is drawn, for requests and records."""
        if self.temperature == 0:
            return {"temperature": 0.0, "repetition_penalty": self.repetition_penalty}
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: float(getattr(self, name)) for name in names}


def chat_request(
    messages: Sequence[Mapping[str, str]], generation: Generation, seed: int
) -> dict[str, Any]:
    """What is asked for one answer, in the words of the chat completions API."""
    sampling: dict[str, Any] = dict(generation.sampling)
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    thinking = generation.thinking
    template = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    return {
        "messages": [dict(message) for message in messages],
        "max_tokens": generation.max_new_tokens,
        "seed": seed,
        **sampling,
        **({"chat_template_kwargs": template} if template else {}),
    }


def continuation_request(context: str, continuation: str) -> dict[str, Any]:
    """What is asked for the log-probability of `continuation` behind `context`."""
    return {"context": context, "continuation": continuation}


def ask(client: ServerClient, request: Mapping[str, Any]) -> Answer:
    """The server's answer to a request of this module."""
    if "messages" in request:
        return _chat(client, request)
    return _log_probability(client, request["context"], request["continuation"])


def _chat(client: ServerClient, request: Mapping[str, Any]) -> Answer:
    said = client.post("/v1/chat/completions", {"model": "default", **request})
    try:
        choice, usage = said["choices"][0], said["usage"]
        message = choice["message"]
        thoughts, text = _split(
            message.get("reasoning_content") or "",
            message.get("content") or "",
            asked_to_think=(request.get("chat_template_kwargs") or {}).get("enable_thinking"),
        )
        return Answer(
            text=text,
            finish=str(choice["finish_reason"]),
            prompt_tokens=int(usage["prompt_tokens"]),
            completion_tokens=int(usage["completion_tokens"]),
            reasoning=thoughts,
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"{client.url} is not the SGLang server it should be: its answer lacks {error}.",
            hint="see its log",
        ) from None


def _split(reasoning: str, content: str, *, asked_to_think: bool | None) -> tuple[str, str]:
    """Reasoning and answer, also of a server that does not separate them.

    Reasoning that the generation cap has cut has no answer behind it.
    """
    head, end, tail = content.rpartition(_THOUGHTS_END)
    if end:
        return reasoning + head, tail.strip()
    if _THOUGHTS.match(content) or (asked_to_think and not reasoning):
        return reasoning + content, ""
    return reasoning, content


def _log_probability(client: ServerClient, context: str, continuation: str) -> Answer:
    """The sum over the tokens of `continuation`; spaces between the two belong to it."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole, before = client.tokenize(context + continuation), client.tokenize(context)
    start = max(1, len(before))
    scored = client.score(whole, start=start - 1)
    return Answer(
        text="",
        finish="scored",
        prompt_tokens=len(whole),
        completion_tokens=0,
        log_probability=sum(scored.values),
    )
