"""A conversation with a running server, or what answers as one does, part by part."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from oscar_zoo.artifact.outcome import says
from oscar_zoo.errors import ServerFailed

SECONDS = 600.0
"""Seconds that a server may be silent."""
MOST_LINE = 1 << 20
"""Maximum size of one event of a stream, in bytes."""
DATA, DONE = b"data: ", b"[DONE]"
Turns = list[dict[str, str]]
Events = Callable[[Turns], Iterator[bytes]]
"""Asks the last of some turns; the events of the answer."""


@dataclass(frozen=True)
class Usage:
    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]


@dataclass
class Answer:
    """What oscar-zoo chat prints for one question; until its end, as far as it has arrived."""

    model_id: Annotated[str, says("The id that the request named.")]
    port: Annotated[int | None, says("Of the server; null in this process.", ge=0)]
    text: Annotated[str, Field(serialization_alias="answer")] = ""
    reasoning: Annotated[str, says("What it thought first, where it tells it apart.")] = ""
    cut: Annotated[bool, says("Whether the answer reached the limit of --max-tokens.")] = False
    usage: Annotated[Usage | None, says("Null where the server does not tell.")] = None
    first_seconds: Annotated[float | None, says("To the first part of it.", ge=0)] = None
    seconds: Annotated[float, says("From the question to the end.", ge=0)] = 0.0
    schema: Literal["oscar-zoo.chat/1"] = "oscar-zoo.chat/1"

    def add(self, event: bytes, seconds: float) -> str:
        """Take one event, `seconds` after the question; returns the text to show."""
        try:
            value = json.loads(event)
            if "error" in value:
                raise ServerFailed(f"the server broke off: {_message(event)}")
            if usage := value.get("usage"):
                self.usage = Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
            said = ""
            for choice in value["choices"][:1]:  # the event with the usage has none
                delta = choice["delta"]  # SGLang has another name for thoughts than vLLM
                thought = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
                text = str(delta.get("content") or "")
                self.reasoning, self.text = self.reasoning + thought, self.text + text
                self.cut = self.cut or choice.get("finish_reason") == "length"
                said = thought + text
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerFailed(
                f"the server sent something that is no chat event: {type(error).__name__}."
            ) from None
        if said and self.first_seconds is None:
            self.first_seconds = seconds
        self.seconds = seconds
        return said


class ChatSession:
    """One conversation."""

    def __init__(self, events: Events, model: str, port: int | None = None) -> None:
        self._events, self._turns = events, Turns()
        self.answer = Answer(model, port)
        """The last answer."""

    def ask(self, text: str) -> Iterator[str]:
        """Ask `text` after all earlier turns, and yield the parts of the answer.

        A turn that fails, or whose iterator is closed early, is forgotten.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        answer = self.answer = Answer(self.answer.model_id, self.answer.port)
        asked = time.monotonic()
        for event in self._events(turns):
            yield answer.add(event, time.monotonic() - asked)
        self._turns = [*turns, {"role": "assistant", "content": answer.reasoning + answer.text}]

    def forget(self) -> None:
        self._turns = []


def server_events(
    url: str, model: str, key: str | None, most: int, turns: Turns
) -> Iterator[bytes]:
    """Those of a server; `most` is the maximum number of tokens of an answer."""
    address, asked = urlsplit(url), {"model": model, "messages": turns, "max_tokens": most}
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=SECONDS)
    try:
        connection.request("POST", f"{address.path}/chat/completions", json.dumps(asked), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ServerFailed(
                f"the server answered {response.status}: {_message(response.read(MOST_LINE))}"
            )
        while line := response.readline(MOST_LINE):
            if line.startswith(DATA) and (event := line[len(DATA) :].strip()) != DONE:
                yield event
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed.for_silence("the server", error) from None
    finally:
        connection.close()


def _message(body: bytes) -> str:
    try:
        value = json.loads(body)
        inner = value.get("error", value)
        text = inner.get("message", inner) if isinstance(inner, dict) else inner
    except (AttributeError, ValueError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:400]
