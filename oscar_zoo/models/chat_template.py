"""Chats through the template of a model, which is a program of its author: in a process of its own
with bounded time and memory.

Templates may come from strangers. A loop in one can take for ever, one multiplication can, and a
text can grow until nothing is left; so what we render is rendered by `template_child`. SGLang
renders in its own process; `check_template` tries a model's template before a server starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oscar_zoo import children
from oscar_zoo.artifact.files import read_file
from oscar_zoo.children import Child
from oscar_zoo.errors import InvalidModel, MalformedFile, PathNotFound
from oscar_zoo.models import template_child
from oscar_zoo.models.model_hub import kept_config

MAX_TEMPLATE = 1 << 20
"""Largest template in characters; the largest seen have some 30,000."""
FILE_NAMES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Where a model's folder may have its template, the first that has one."""

_TRANSFORMERS = "transformers.tokenization_utils_base"
_TRUSTED = "use the model of a publisher whom you trust"


class TemplateRefused(ValueError):
    """A template raised an error for a chat; the message is its own."""


class ChatTemplate:
    """A template in a process that is started at the first chat and ends with this object."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        cpu_seconds: int = template_child.CPU_SECONDS,
    ) -> None:
        self._start = {"template": source, "variables": dict(variables)}
        self._seconds = cpu_seconds
        self._process: Child[bytes] | None = None

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> ChatTemplate | None:
        """That of `tokenizer`, or `None` where it renders by code of its own."""
        call = getattr(type(tokenizer), "apply_chat_template", None)
        if getattr(call, "__module__", None) != _TRANSFORMERS:
            return None
        try:
            source = tokenizer.get_chat_template()
        except ValueError as error:
            raise InvalidModel(str(error).splitlines()[0], hint="give it a default") from None
        check_size(source, "the chat template of the model")
        return cls(source, {k: str(v) for k, v in tokenizer.special_tokens_map.items()})

    def render(self, turns: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        process = self._process or self._started()
        chat = {"messages": list(turns), "add_generation_prompt": add_generation_prompt}
        return self._asked(process, chat)

    def _started(self) -> Child[bytes]:
        process = children.start(
            children.python(template_child.__file__, str(self._seconds), isolated=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ("TZ",) if name in os.environ},
        )
        self._process = process
        weakref.finalize(self, _end, process)
        self._asked(process, self._start)
        return process

    def _asked(self, process: Child[bytes], question: object) -> str:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()  # the system ends a process that takes too long
        except BrokenPipeError:
            line = b""
        answer = json.loads(line) if line.endswith(b"\n") else {"error": template_child.TOO_MUCH}
        error = answer.get("error")
        if error is None:
            return str(answer["text"])
        if error == template_child.TOO_MUCH:
            self._process = None
            _end(process)
            most = f"{self._seconds} s, {template_child.MEMORY_BYTES >> 20} MiB or"
            most += f" {template_child.MAX_TEXT >> 20} million characters"
            message = "the chat template of the model does not come to an end: it needs more than"
            raise InvalidModel(f"{message} {most} for one chat.", hint=_TRUSTED)
        raise TemplateRefused(error)


def check_template_of(model: str, revision: str | None) -> None:
    folder: Path | None = Path(model)
    if not os.path.isdir(model):  # noqa: PTH112  (any text: no errors)
        folder = kept_config(model, revision)
    if folder is not None:
        check_template(folder, model)


def check_template(folder: Path, where: str) -> None:
    """Try the chat template of a model's folder with one short chat, whatever it answers."""
    source = _template_in(folder)
    if source is None:
        return
    check_size(source, f"the chat template of {where}")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    try:
        ChatTemplate(source, tokens).render(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True
        )
    except TemplateRefused:
        return  # it wants another chat, or a token that this one does not give


def check_size(source: str, what: str) -> None:
    if len(source) > MAX_TEMPLATE:
        message = f"{what} has {len(source):,} characters, at most {MAX_TEMPLATE:,} are taken."
        raise InvalidModel(message, hint=_TRUSTED)


def _template_in(folder: Path) -> str | None:
    for name in FILE_NAMES:
        try:
            # resolved: files in the cache of a hub's client are links
            data = read_file((folder / name).resolve())
            if name.endswith(".jinja"):
                return data.decode("utf-8", "replace")
            value = json.loads(data)
        except (PathNotFound, MalformedFile, ValueError, RecursionError):
            continue  # what is no JSON is left to its reader
        found = value.get("chat_template") if isinstance(value, dict) else None
        if isinstance(found, list):
            named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def _end(process: Child[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue
    process.wait()
