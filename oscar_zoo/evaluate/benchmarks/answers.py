"""Answers of servers, kept as they come, so that an interrupted run goes on where it stopped.

The file is a chain of gzip members, one for each answer, which `zcat` reads as lines of JSON. A
line has its own SHA-256. What a killed process left unfinished at the end is cut off when the file
is opened again; damage anywhere else is an error.
"""

from __future__ import annotations

import gzip
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import OscarZooError, StorageError, UsageError

FORMAT = "oscar-zoo.answers/1"
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Key:
    """Which answer: of which cache (`arm`), in the repeat with which seed, to what (the SHA-256 of
    `request_key`), and its number when a task asks the same several times."""

    arm: str
    seed: int
    request: str
    number: int = 0


@dataclass(frozen=True)
class Answer:
    """What a server said: `finish` is `length` when the generation cap cut it; the log-probability
    is that of a given continuation, where nothing was generated."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""
    log_probability: float | None = None


class Answers:
    """The kept answers of one run, in a file that is made when it is missing. Safe to call from
    several threads."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path, self._lock = path, threading.Lock()
        self._kept: dict[Key, Answer] = {}
        header = {"format": FORMAT, "settings": dict(settings)}
        lines, whole = _read(path) if path.exists() else ([], 0)
        if lines and lines[0] != header:
            raise UsageError(
                f"{path} holds answers to other questions or of other settings.",
                hint="move it away, or give --fresh",
            )
        for line in lines[1:]:
            self._kept[Key(**line["key"])] = Answer(**line["answer"])
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if path.stat().st_size != whole:
            os.truncate(self._descriptor, whole)
        if not lines:
            self._append(header)

    @property
    def day(self) -> str:
        return datetime.fromtimestamp(self._path.stat().st_mtime, UTC).strftime("%Y-%m-%d")

    def get(self, key: Key) -> Answer | None:
        return self._kept.get(key)

    def keep(self, key: Key, answer: Answer) -> None:
        """Write one more answer; raises `StorageError`."""
        with self._lock:
            if self._descriptor < 0:
                return  # it came after the end of the run
            self._append(_plain(key, answer))
            self._kept[key] = answer

    def close(self) -> None:
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, value: dict[str, Any]) -> None:
        with durable.storage_errors(f"cannot write {self._path}"):
            line = {**value, "sha256": sha256_hex(strict_json.canonical_bytes(value))}
            data = gzip.compress(strict_json.canonical_bytes(line) + b"\n", mtime=0)
            while data:
                data = data[os.write(self._descriptor, data) :]


@contextmanager
def open_answers(
    path: Path, settings: Mapping[str, Any], *, fresh: bool = False
) -> Iterator[Answers]:
    """The answers in `path`, for this process alone."""
    with durable.storage_errors(f"cannot write {path}"):
        durable.make_folders(path.parent, mode=0o700)
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    with durable.held_descriptor(descriptor, timeout=0) as state:
        if state == "late":
            raise UsageError(
                "another command is asking the same questions now.", hint="wait for its end"
            )
        with durable.storage_errors(f"cannot write {path}"):
            if fresh:
                path.unlink(missing_ok=True)
            answers = Answers(path, settings)
        try:
            yield answers
        finally:
            answers.close()


def request_key(request: Mapping[str, Any]) -> str:
    return sha256_hex(strict_json.canonical_bytes(dict(request)))


def responses_bytes(kept: Iterable[tuple[Key, Answer]]) -> bytes:
    """Answers as one gzip file of lines of JSON, in the given order: the same answers give the same
    bytes, in whatever order they came."""
    lines = (strict_json.canonical_bytes(_plain(*one)) + b"\n" for one in kept)
    return gzip.compress(b"".join(lines), mtime=0)


def _plain(key: Key, answer: Answer) -> dict[str, Any]:
    return {"key": asdict(key), "answer": asdict(answer)}


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of all whole members, and the size of these members in bytes."""
    data, lines, at = path.read_bytes(), list[dict[str, Any]](), 0
    while at < len(data):
        member = zlib.decompressobj(_GZIP)
        try:
            text = member.decompress(data[at:])
        except zlib.error:
            raise _damaged(path, at) from None
        if not member.eof:
            break  # the last one, which a killed process began
        try:
            line = dict(strict_json.loads(text, what=str(path)))  # type: ignore[arg-type]
        except (OscarZooError, TypeError, ValueError):
            raise _damaged(path, at) from None
        if line.pop("sha256", None) != sha256_hex(strict_json.canonical_bytes(line)):
            raise _damaged(path, at)
        lines.append(line)
        at = len(data) - len(member.unused_data)
    return lines, at


def _damaged(path: Path, at: int) -> StorageError:
    return StorageError(
        f"{path} is damaged at byte {at}.", hint="move it away; its questions are asked again"
    )


@dataclass(frozen=True)
class Generation:
    """How answers are generated, the same for every cache: a `temperature` of 0 is for the most
    likely one; the rest is as in `generation_config.json`, where `top_k` -1 is off; `thinking` is
    what the chat template is told, `None` for its default."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    thinking: bool | None = None

    @property
    def sampling(self) -> dict[str, float]:
        if self.temperature == 0:
            return {"temperature": 0.0, "repetition_penalty": self.repetition_penalty}
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: float(getattr(self, name)) for name in names}


def chat_request(
    messages: Sequence[Mapping[str, str]], generation: Generation, seed: int
) -> dict[str, Any]:
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


def ask(client: ServerClient, request: Mapping[str, Any]) -> Answer:
    """The server's answer to messages, or the log-probability of a continuation behind its
    context."""
    if "messages" not in request:  # spaces between the two belong to the continuation
        context, continuation = request["context"], request["continuation"]
        whole, before = client.tokenize(context + continuation), client.tokenize(context.rstrip())
        scored = client.score(whole, start=max(1, len(before)) - 1)
        return Answer("", "scored", len(whole), 0, log_probability=sum(scored.values))
    said = client.post("/v1/chat/completions", {"model": client.model_id, **request})
    try:
        choice, usage = said["choices"][0], said["usage"]
        message = choice["message"]
        thoughts, text = _split(
            message.get("reasoning_content") or message.get("reasoning") or "",
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
        raise client.odd(f"its answer lacks {error}") from None


def _split(reasoning: str, content: str, *, asked_to_think: bool | None) -> tuple[str, str]:
    """Reasoning and answer, also of a server that does not separate them; reasoning that the
    generation cap has cut has no answer behind it."""
    head, end, tail = content.rpartition("</think>")
    if end:
        return reasoning + head, tail.strip()
    if content.lstrip().startswith("<think>") or (asked_to_think and not reasoning):
        return reasoning + content, ""
    return reasoning, content
