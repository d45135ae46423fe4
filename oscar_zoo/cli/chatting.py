"""`chat`: questions to a server that runs, line by line; answers appear while they are made."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import ServerFailed

NEW = "/new"
"""The line that starts another conversation."""
PROMPT = "> "
SECONDS = 600.0
"""How long a server may be silent."""
MOST_LINE = 1 << 20
"""Bytes of one event of a stream."""
DATA, DONE = b"data: ", b"[DONE]"


class ChatSession:
    """One conversation with a server.

    Args:
        url: of its API, `http://HOST:PORT/v1`.
        model: id of the model.
        key: of the API, where it wants one.
        most: tokens of an answer.
    """

    def __init__(self, url: str, model: str, *, key: str | None, most: int) -> None:
        self._address = urlsplit(url)
        self._fixed = {"model": model, "stream": True, "max_tokens": most}
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._turns: list[dict[str, str]] = []
        self.cut = False
        """Whether the last answer ended because it was as long as allowed."""

    def ask(self, text: str) -> Iterator[str]:
        """Parts of the answer to `text`, which has all turns before it in mind.

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
        """Start again."""
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
    """The text of one event, and why the answer ends with it, if it does."""
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
            f"the server sent something else than a chat: {type(error).__name__}."
        ) from None


def _message(body: bytes) -> str:
    """What an error says, in one line."""
    try:
        value = json.loads(body)
        inner = value.get("error", value)
        text = inner.get("message", inner) if isinstance(inner, dict) else inner
    except (AttributeError, ValueError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:400]


def talk(chat: ChatSession) -> None:
    """Send lines of stdin to the server and write its answers to stdout, until the input ends.

    On a terminal Ctrl-C ends an answer, and an error is told; elsewhere both end the chat.

    Raises:
        ServerFailed: see `Conversation.ask`.
    """
    people = sys.stdin.isatty()
    while (line := _line(people)) is not None:
        text = line.strip()
        if text == NEW:
            chat.forget()
        elif text:
            try:
                _show(chat.ask(text))
                if chat.cut:
                    terminal.note("note: the answer was cut off; for longer ones: --max-tokens N")
            except ServerFailed as error:
                if not people:
                    raise
                terminal.print_error(error.code, error.message, error.hint, as_json=False)
            except KeyboardInterrupt:
                if not people:
                    raise
                sys.stdout.write("\n")


def _line(people: bool) -> str | None:
    """The next line of stdin; `None` at its end."""
    if not people:
        return sys.stdin.readline() or None
    try:
        return input(PROMPT)
    except EOFError:
        sys.stdout.write("\n")
        return None


def _show(parts: Iterator[str]) -> None:
    """Write an answer as it comes, without control characters."""
    for part in parts:
        sys.stdout.write(
            "\n".join(terminal.printable(line) for line in part.replace("\t", "    ").split("\n"))
        )
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
