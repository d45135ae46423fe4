"""Documents become tokens, and these sequences of one length; some are kept out for measuring.

Plain text is tokenized as it stands, chats through the model's own template. An end-of-text token
follows each document, unless the template has just written one. Some tokenizers put a begin-of-text
token before any text; here it starts every sequence, not every document.

The documents of a stream, one after another, are cut into sequences until the budget is spent.
Held-out text comes from the documents after the one in which the budget ended, so holding out text
does not change the calibration sequences. The exception is data that ends too early. Then at most
about a quarter of it, from its end, is held out, and the calibration part is the beginning of what
it would have been. A document is divided between the two parts only when whole documents do not
suffice. A document that was calibrated on is never held out when it occurs again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, Protocol

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.compute.data.documents import Document, Message
from oscar_zoo.errors import InvalidModel, UsageError
from oscar_zoo.models.chat_template import ChatTemplate
from oscar_zoo.next_step import AddOption

TokenIds = tuple[int, ...]
HELDOUT_SEQUENCES, HELDOUT_TOKENS = 8, 4096
"""With less held-out text, a measurement gets a remark."""
_PIECE = 1 << 20
"""Characters tokenized at once: a huge document costs no more than the tokens taken from it."""
_ENDING = 2
"""Tokens looked at for an end of text: some templates put a line break behind it."""
_LONGEST_REST = 1 << 16
"""A longer rest of a document is divided, not skipped to reach the next one."""
_SHARE = 4
"""One part in so many of data that ends early is held out, and a document's start looked for that
near."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used. Chats also need its `apply_chat_template`
    and `chat_template`."""

    eos_token_id: int | None

    def __call__(
        self, text: str, *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, list[int]]:
        """Token ids of `text` under the key `input_ids`."""
        ...


@dataclass(frozen=True)
class Encoded:
    """One document in tokens with the end of text, or the first of them; `text` goes as far or a
    little further. `templated` says whether the chat template was applied, `answered` whether it
    holds a turn of the assistant; `kind` is that of the document."""

    ids: Sequence[int]
    text: str
    whole: bool
    templated: bool
    answered: bool
    kind: str | None = None


@dataclass(frozen=True)
class Encoder:
    """Turns documents into tokens. `chat_template=None` renders chats and leaves text alone; `True`
    makes every text a message of the user; `False` joins the messages of chats as plain text.
    `prefix` starts every sequence, and is often empty."""

    tokenizer: Tokenizer
    chat_template: bool | None = None
    prefix: TokenIds = field(init=False)

    def __post_init__(self) -> None:
        bare, full = self._tokens("a"), self._tokens("a", special=True)
        start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        object.__setattr__(self, "prefix", tuple(full[:start]))

    def encode(self, document: Document, limit: int) -> Encoded:
        """Tokens of `document`, all of them or at least `limit`."""
        messages = None if self.chat_template is False else document.messages
        if self.chat_template and messages is None:
            messages = Document.prompt(document.text, document.where).messages
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
        answered = any(message["role"] == "assistant" for message in document.messages or ())
        return Encoded(ids, text[:end], whole, messages is not None, answered, document.kind)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The template of the tokenizer in a process of its own; `None` where it has code."""
        return ChatTemplate.of_tokenizer(self.tokenizer)

    def _render(self, messages: Sequence[Message], where: str) -> str:
        tokenizer: Any = self.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise UsageError(
                f"{where} is a chat, and the model's tokenizer has no chat template.",
                next_step=AddOption("--no-chat-template"),
            )
        turns, asks = list(messages), messages[-1]["role"] != "assistant"
        try:
            if self._template is not None:
                return self._template.render(turns, add_generation_prompt=asks)
            rendered = tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=asks
            )
        except InvalidModel as error:
            error.next_step = AddOption("--no-chat-template")
            raise
        except Exception as error:  # a template is a program and raises whatever it likes
            cause = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise UsageError(
                f"the chat template refuses {where}: {cause}.".replace("..", "."),
                hint="change that record",
                next_step=AddOption("--no-chat-template"),
            ) from None
        return str(rendered)

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Packed:
    """The sequences that one stream gave, the documents calibrated on and the texts held out, in
    part or whole, the tokens that were held out because the data ended early, and how many tokens
    of each kind were calibrated on and held out."""

    sequences: tuple[TokenIds, ...]
    heldout: tuple[TokenIds, ...]
    documents: tuple[Encoded, ...]
    heldout_texts: tuple[str, ...]
    given_up: int
    kinds: tuple[Counter[str | None], Counter[str | None]]


@dataclass(frozen=True)
class _Placed:
    """A document at its place in the stream of tokens; `digest` is of its text."""

    start: int
    end: int
    encoded: Encoded
    digest: str


def sequences_sha256(sequences: Sequence[TokenIds]) -> str:
    """sha256 of the compact JSON list of token-id lists, in order."""
    return sha256_hex(strict_json.canonical_bytes([list(sequence) for sequence in sequences]))


def pack(
    documents: Iterable[Document],
    encoder: Encoder,
    tokens: int,
    length: int,
    heldout_tokens: int = 0,
) -> Packed:
    """Cut a stream of documents into sequences of `length`, the last of which may be shorter, as
    the module docstring says, reading no more than needed. At least `heldout_tokens` are held out,
    in `HELDOUT_SEQUENCES` or more."""
    start = encoder.prefix  # which is no part of the stream
    full, rest = divmod(tokens, length)
    wanted = full * max(1, length - len(start)) + (max(1, rest - len(start)) if rest else 0)
    number, body = 0, 1
    if heldout_tokens > 0:
        longest = min(length, max(1, heldout_tokens // HELDOUT_SEQUENCES))
        number = max(HELDOUT_SEQUENCES, -(-heldout_tokens // longest))
        body = max(1, longest - len(start))
    placed = _read(documents, encoder, wanted, number * body)
    total = placed[-1].end if placed else 0
    most = min(wanted, total)

    def packed(cut: int, begin: int) -> Packed:
        """Calibrate on the tokens before `cut`, hold out those from `begin` on. Documents that also
        occur before `cut` are not held out."""
        before = [item for item in placed if item.start < cut]
        stream = islice(chain.from_iterable(item.encoded.ids for item in before), cut)
        sequences = tuple(_sequences(stream, start, tokens, length))
        used = {item.digest for item in before}
        kept = [
            item
            for item in placed
            if item.end > begin and (item.start < cut or item.digest not in used)
        ]
        pairs = [
            (token, item.encoded.kind)
            for item in kept
            for token in item.encoded.ids[max(0, begin - item.start) :]
        ]
        ids = [token for token, _ in pairs]
        # shorter than wished, rather than fewer than `HELDOUT_SEQUENCES`
        each = max(1, min(body, len(ids) // min(max(1, number), HELDOUT_SEQUENCES)))
        heldout = [
            start + tuple(ids[at * each : (at + 1) * each])
            for at in range(min(number, len(ids) // each))
        ]
        read = (item.encoded.kind for item in before for _ in item.encoded.ids)
        known = set(sequences)
        return Packed(
            sequences,
            tuple(one for one in heldout if one not in known),
            tuple(item.encoded for item in before),
            tuple(item.encoded.text for item in kept),
            most - cut,
            (Counter(islice(read, cut)), Counter(kind for _, kind in pairs[: len(heldout) * each])),
        )

    found = packed(*_division(placed, wanted, number * body))
    return found if found.heldout else packed(most, total)


def _read(
    documents: Iterable[Document], encoder: Encoder, wanted: int, needed: int
) -> list[_Placed]:
    """Documents until `wanted` tokens are there, and `needed` more for holding out. The second part
    starts with a new document when one begins nearby."""
    placed: list[_Placed] = []
    seen: set[str] = set()
    total, boundary = 0, None
    for document in documents:
        digest = sha256_hex(document.text.encode())
        if boundary is not None and digest in seen:
            continue
        seen.add(digest)
        spare = needed + _LONGEST_REST if needed else 0
        limit = wanted - total + spare if boundary is None else boundary + needed - total
        encoded = encoder.encode(document, limit)
        placed.append(_Placed(total, total + len(encoded.ids), encoded, digest))
        total += len(encoded.ids)
        if boundary is None and total >= wanted:
            boundary = total
        if not encoded.whole or (boundary is not None and total - boundary >= needed):
            break
    return placed


def _division(placed: Sequence[_Placed], wanted: int, needed: int) -> tuple[int, int]:
    """Where the part to calibrate on ends, and where the part to hold out starts."""
    total = placed[-1].end if placed else 0
    if needed <= 0:
        return min(wanted, total), total
    reserve = min(needed, max(total - wanted, total // _SHARE))
    cut = min(wanted, total - reserve)
    starts = [item.start for item in placed if item.start > 0]
    for start in starts:
        if start >= cut and total - start >= reserve:
            return cut, start
    near = max((start for start in starts if cut - reserve // _SHARE <= start <= cut), default=cut)
    return (near, near) if cut < wanted else (cut, cut)


def _sequences(
    stream: Iterator[int], prefix: TokenIds, tokens: int, length: int
) -> Iterator[TokenIds]:
    """Sequences until the budget is spent or the stream ends."""
    while tokens > 0:
        wanted = min(length, tokens)
        body = tuple(islice(stream, max(1, wanted - len(prefix))))
        if not body:
            return
        sequence = (prefix + body)[:wanted]
        tokens -= len(sequence)
        yield sequence
