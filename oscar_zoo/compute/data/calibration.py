"""From any source to the tokens of a calibration, and to its block in a manifest."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal

from oscar_zoo.artifact.manifest import Calibration, Disjoint, LengthStats
from oscar_zoo.compute.data.documents import Document
from oscar_zoo.compute.data.encoding import Encoder, Tokenizer
from oscar_zoo.compute.data.packing import (
    HELDOUT_SEQUENCES,
    HELDOUT_TOKENS,
    Budget,
    Packed,
    TokenIds,
    pack,
    sequence_sha256,
    sequences_sha256,
)
from oscar_zoo.compute.data.sources import open_source
from oscar_zoo.errors import UsageError


@dataclass(frozen=True)
class HeldOut:
    """Sequences to measure on, none of which was calibrated on; all of one length.

    Attributes:
        sequences: token ids.
    """

    sequences: tuple[TokenIds, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def prompts_sha256(self) -> str:
        """sha256 of the compact JSON list of token-id lists, in order."""
        return sequences_sha256(self.sequences)


@dataclass(frozen=True)
class CalibrationData:
    """Token sequences in the order of the forward passes.

    Attributes:
        sequences: token ids; all of one length but possibly the last of a stream.
        tokens_requested: the budget; more than `tokens_used` when the data ended early.
        source: name of the file, without its folder, or of the dataset.
        seed: of the document order, or `None` for the order of the source.
        heldout: for measuring, or `None` when nothing was asked for or nothing was left.
        revision, split, license: of a dataset, where known.
        content: `mixed` when chats hold turns of an assistant.
        chat_template: whether any document went through the model's chat template.
        disjoint_from: evaluation sets proven disjoint, or `None` when nothing was compared
            (`overlap.check_overlap`).
        overlaps_with: evaluation sets known to overlap.
        texts: the tokenized texts, held-out text included; for comparison only, never published.
        notes: remarks for the user, in sentences.
    """

    sequences: tuple[TokenIds, ...]
    tokens_requested: int
    source: str
    seed: int | None = None
    heldout: HeldOut | None = None
    revision: str | None = None
    split: str | None = None
    license: str | None = None
    content: Literal["prefill", "mixed"] = "prefill"
    chat_template: bool = False
    disjoint_from: tuple[Disjoint, ...] | None = None
    overlaps_with: tuple[str, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def tokens_used(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def prompts_sha256(self) -> str:
        """sha256 of the compact JSON list of token-id lists, in order."""
        return sequences_sha256(self.sequences)

    @property
    def sequence_sha256(self) -> tuple[str, ...]:
        """The sha256 of each sequence's compact JSON list, in order.

        Moments may be added only when their sequences are disjoint, which these hashes show.
        """
        return tuple(sequence_sha256(sequence) for sequence in self.sequences)

    def facts(self) -> Calibration:
        """The calibration block of the manifest."""
        lengths = [len(sequence) for sequence in self.sequences]
        return Calibration(
            dataset=self.source,
            revision=self.revision,
            split=self.split,
            license=self.license,
            prompts_sha256=self.prompts_sha256,
            sequences=len(lengths),
            tokens_requested=self.tokens_requested,
            tokens_used=self.tokens_used,
            length=LengthStats(
                min=min(lengths), median=statistics.median_low(lengths), max=max(lengths)
            ),
            content=self.content,
            chat_template=self.chat_template,
            seed=self.seed,
            disjoint_from=self.disjoint_from,
            overlaps_with=self.overlaps_with,
        )


def load_calibration(
    source: Path | str,
    tokenizer: Tokenizer,
    *,
    tokens: int,
    seq_len: int,
    seed: int | None = None,
    chat_template: bool | None = None,
    heldout_tokens: int = 0,
    context: int | None = None,
) -> CalibrationData:
    """Read `source` and pack `tokens` tokens, or all there are, into sequences of `seq_len`.

    Args:
        tokens: budget, above 0.
        seq_len: tokens of a sequence, above 0; the last one may be shorter.
        seed: shuffles the documents; `None` keeps the order of the source.
        chat_template: `None` renders chats and leaves text alone; see `Encoder` for the other two.
        heldout_tokens: to keep for measuring, in at least 8 sequences of at most `seq_len`; see
            `packing` for the rule.
    """
    check_budget(tokens, seq_len, context)
    opened = open_source(source)
    encoder = Encoder(tokenizer, chat_template)
    budget = Budget.of(tokens, seq_len, heldout_tokens)
    streams = [_ordered(stream, seed, opened.window) for stream in opened.streams]
    packed = [
        pack(stream, encoder, budget.share(at, len(streams))) for at, stream in enumerate(streams)
    ]
    sequences = _dealt([part.sequences for part in packed])
    if not sequences:
        raise UsageError(
            f"{source} has no text to calibrate on.",
            hint='give text, or JSON lines with "text" or "messages"',
        )
    heldout = HeldOut(_dealt([part.heldout for part in packed]))
    documents = [document for part in packed for document in part.documents]
    return CalibrationData(
        sequences,
        tokens,
        opened.name,
        seed,
        heldout=heldout if heldout.sequences else None,
        revision=opened.revision,
        split=opened.split,
        license=opened.license,
        content="mixed" if any(document.answered for document in documents) else "prefill",
        chat_template=any(document.templated for document in documents),
        overlaps_with=opened.overlaps_with,
        texts=(
            *(document.text for document in documents),
            *(t for part in packed for t in part.heldout_texts),
        ),
        notes=(*opened.notes, *(_heldout_notes(heldout, packed) if heldout_tokens > 0 else ())),
    )


def check_budget(tokens: int, seq_len: int, context: int | None = None) -> None:
    """Refuse counts that cannot be; raises `UsageError`."""
    if tokens <= 0:
        raise UsageError(
            f"the number of calibration tokens must be above 0, not {tokens}.",
            hint="16384 is usual",
        )
    if seq_len <= 0:
        raise UsageError(
            f"the sequence length must be above 0, not {seq_len}.", hint="2048 or 4096 is usual"
        )
    if context is not None and seq_len > context:
        raise UsageError(
            f"sequences of {seq_len} tokens are longer than the model's {context}.",
            hint=f"use a sequence length of at most {context}",
        )


def _ordered(
    documents: Iterable[Document], seed: int | None, window: int | None
) -> Iterable[Document]:
    """The documents, shuffled when there is a seed.

    Of an endless source, only the first `window` documents are shuffled.
    """
    if seed is None:
        return documents
    shuffled = list(islice(documents, window))
    random.Random(seed).shuffle(shuffled)
    return shuffled


def _dealt(parts: Sequence[tuple[TokenIds, ...]]) -> tuple[TokenIds, ...]:
    """One sequence of each part in turn."""
    return tuple(
        sequence for row in zip_longest(*parts) for sequence in row if sequence is not None
    )


def _heldout_notes(heldout: HeldOut, packed: Sequence[Packed]) -> tuple[str, ...]:
    notes = []
    number, given_up = len(heldout.sequences), sum(part.given_up for part in packed)
    if not number:
        return ("the data has no text left to hold out, so nothing can be measured on it.",)
    if given_up:
        notes.append(
            f"the data ended early: {given_up:,} tokens were held out instead of calibrated on."
        )
    if number < HELDOUT_SEQUENCES or heldout.tokens < HELDOUT_TOKENS:
        notes.append(
            f"only {heldout.tokens:,} tokens in {number} sequences are held out: figures measured"
            f" on them are rough below {HELDOUT_TOKENS:,} in {HELDOUT_SEQUENCES}."
        )
    return tuple(notes)
