"""A conversation with a running server; parts of an answer arrive while it is generated."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

from oscar_zoo.errors import ServerFailed

SECONDS = 600.0
"""Seconds that a server may be silent."""
MOST_LINE = 1 << 20
"""Maximum size of one event of a stream, in bytes."""
DATA, DONE = b"data: ", b"[DONE]"


class ChatSession:
    """One conversation with a server.

    Args:
        url: URL of its API, `http://HOST:PORT/v1`.
        model: id of the model.
        key: the API key, if the server needs one.
        most: maximum number of tokens of an answer.
    """

    def __init__(self, url: str, model: str, *, key: str | None, most: int) -> None:
        self._address = urlsplit(url)
        self._fixed = {"model": model, "stream": True, "max_tokens": most}
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._turns: list[dict[str, str]] = []
        self.cut = False
        """Whether the last answer ended because it reached the maximum length."""

    def ask(self, text: str) -> Iterator[str]:
        """Ask `text` after all earlier turns, and yield the parts of the answer.

        A turn that fails, or whose iterator is closed early, is forgotten.

        Raises:
            ServerFailed: the server does not answer, or refuses.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        self.cut = False
        said = []
        for part in self._stream(turns):
            said.append(part)
            yield part
        self._turns = [*turns, {"role": "assistant", "content": "".join(said)}]

    def forget(self) -> None:
        """Start a new conversation."""
        self._turns = []

    def _stream(self, turns: list[dict[str, str]]) -> Iterator[str]:
        host, port = self._address.hostname or "", self._address.port
        connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
        body = json.dumps({**self._fixed, "messages": turns})
        try:
            connection.request(
                "POST", f"{self._address.path}/chat/completions", body, self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                raise ServerFailed(
                    f"the server answered {response.status}: {_message(response.read(MOST_LINE))}"
                )
            while line := response.readline(MOST_LINE):
                if line.startswith(DATA) and (event := line[len(DATA) :].strip()) != DONE:
                    text, ended = _part(event)
                    self.cut = ended == "length"
                    yield text
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
            raise ServerFailed(
                f"the server does not answer: {cause}.", hint="see what runs: oscar-zoo ps"
            ) from None
        finally:
            connection.close()


def _part(event: bytes) -> tuple[str, str | None]:
    """The text of one event, and the reason why the answer ends with it, if it does."""
    try:
        value = json.loads(event)
        if "error" in value:
            raise ServerFailed(f"the server broke off: {_message(event)}")
        choice = value["choices"][0]
        text = str(choice["delta"].get("reasoning_content") or "") + str(
            choice["delta"].get("content") or ""
        )
        return text, choice.get("finish_reason")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"the server sent something that is no chat event: {type(error).__name__}."
        ) from None


def _message(body: bytes) -> str:
    """The message of an error, in one line."""
    try:
        value = json.loads(body)
        inner = value.get("error", value)
        text = inner.get("message", inner) if isinstance(inner, dict) else inner
    except (AttributeError, ValueError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:400]
