"""Documents become tokens: plain text as it stands, chats through the model's own template.

An end-of-text token follows each document, unless the template has just written one. Some
tokenizers put a begin-of-text token before any text; here it starts every sequence, not every
document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from oscar_zoo.compute.data.documents import Document, Message
from oscar_zoo.errors import InvalidModel, UsageError
from oscar_zoo.models.chat_template import ChatTemplate
from oscar_zoo.next_step import AddOption

_PIECE = (
    1 << 20
)  # characters tokenized at once: a huge document costs no more than the tokens taken from it
_ENDING = 2  # tokens looked at for an end of text: some templates put a line break behind it


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used.

    Chats also need its `apply_chat_template` and `chat_template`.
    """

    eos_token_id: int | None

    def __call__(
        self, text: str, *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, list[int]]:
        """Token ids of `text` under the key `input_ids`."""
        ...


@dataclass(frozen=True)
class Encoded:
    """One document in tokens.

    Attributes:
        ids: its tokens with the end of text, or the first of them.
        text: the tokenized text, as far as `ids` goes or a little further.
        whole: whether `ids` is all of it.
        templated: whether the chat template was applied.
        answered: whether it holds a turn of the assistant.
    """

    ids: Sequence[int]
    text: str
    whole: bool
    templated: bool
    answered: bool


@dataclass(frozen=True)
class Encoder:
    """Turns documents into tokens.

    Attributes:
        tokenizer: of the model to calibrate.
        chat_template: `None` renders chats and leaves text alone; `True` makes every text a message
            of the user; `False` joins the messages of chats as plain text.
        prefix: tokens that start every sequence; often none.
    """

    tokenizer: Tokenizer
    chat_template: bool | None = None
    prefix: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        bare, full = self._tokens("a"), self._tokens("a", special=True)
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        object.__setattr__(self, "prefix", tuple(full[:start]))

    def encode(self, document: Document, limit: int) -> Encoded:
        """Tokens of `document`, all of them or at least `limit`."""
        messages = self._messages(document)
        text = document.text if messages is None else self._render(messages, document.where)
        ids: list[int] = []
        end = 0
        while end < len(text) and len(ids) < limit:
            start, end = end, end + _PIECE
            ids += self._tokens(text[start:end])
        whole = end >= len(text)
        if messages is not None and self.prefix and tuple(ids[: len(self.prefix)]) == self.prefix:
            del ids[: len(self.prefix)]
        eos = self.tokenizer.eos_token_id
        if whole and eos is not None and not (messages is not None and eos in ids[-_ENDING:]):
            ids.append(eos)
        answered = any(message.role == "assistant" for message in document.messages or ())
        return Encoded(ids, text[:end], whole, messages is not None, answered)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The template of the tokenizer in a process of its own; `None` where it has code."""
        return ChatTemplate.of_tokenizer(self.tokenizer)

    def _messages(self, document: Document) -> tuple[Message, ...] | None:
        """The messages that go through the template; `None` for plain text."""
        if self.chat_template is False:
            return None
        if document.messages is None and self.chat_template:
            return (Message("user", document.text),)
        return document.messages

    def _render(self, messages: Sequence[Message], where: str) -> str:
        tokenizer: Any = self.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"{where} is a chat, and the model's tokenizer has no chat template.",
                next_step=AddOption("--no-chat-template"),
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        asks = messages[-1].role != "assistant"
        try:
            if self._template is not None:
                return self._template.render(turns, add_generation_prompt=asks)
            rendered = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=asks
            )
        except InvalidModel as error:
            error.next_step = AddOption("--no-chat-template")
            raise
        except (
            Exception
        ) as error:  # a template is a program of the model's author and raises whatever it likes
            cause = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise UsageError(
                f"the chat template refuses {where}: {cause}.".replace("..", "."),
                hint="change that record",
                next_step=AddOption("--no-chat-template"),
            ) from None
        return str(rendered)

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
