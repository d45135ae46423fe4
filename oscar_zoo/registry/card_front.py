"""The front matter of a card: what hubs read of it, such as tags, base models and scores.

The keys stand between two comments. Those outside them are the owner's, stay as they are, and come
first: a key that the owner has is not written. Texts are JSON strings, which YAML reads as they
are, and contain nothing that is not seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.card_table import CardRow, license_of
from oscar_zoo.registry.score_file import in_order, is_of_recipe

BEGIN = b"# oscar-zoo:begin"
END = b"# oscar-zoo:end"
TAGS = ("sglang", "kv-cache", "int2", "oscar", "quantization")
_BLOCK = re.compile(rb"\A---[ \t]*\r?\n(.*?\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_KEY = re.compile(rb"^([A-Za-z_-]+)[ \t]*:", re.MULTILINE)
_SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_GPQA = "Idavidrein/gpqa"
"""Data set of all tasks whose name begins with `gpqa_`, which are its parts."""
_LONGEST = 120
_NOT_PLAIN = re.compile(r"[^\w .,+/()%-]|(?<=www)\.", re.IGNORECASE)


def whole(rows: Sequence[CardRow]) -> str:
    """The front matter of a new card, with both of its lines."""
    return f"---\n{_kept(rows, frozenset())}\n---\n"


def merged(card: bytes, rows: Sequence[CardRow]) -> bytes:
    """`card` with new keys between the markers of its front matter; `card` itself where it has
    none, or not one of each in order."""
    found = _BLOCK.match(card)
    if found is None or BEGIN not in found[1] or is_damaged(card):
        return card
    front = found[1]
    begin, end = front.find(BEGIN), front.find(END)
    before, after = front[:begin], front[end + len(END) :]
    taken = frozenset(key.decode() for key in _KEY.findall(before + after))
    keys = _kept(rows, taken).encode()
    return card[: found.start(1)] + before + keys + after + card[found.end(1) :]


def with_metadata(card: bytes, rows: Sequence[CardRow]) -> bytes:
    """`merged`, for an owner who asks for the metadata: front matter is added where `card` has
    none, and the markers where its front matter has none."""
    found = _BLOCK.match(card)
    if found is None:
        return whole(rows).encode() + b"\n" + card
    front = found[1]
    if BEGIN in front or END in front:
        return merged(card, rows)
    keys = _kept(rows, frozenset(key.decode() for key in _KEY.findall(front)))
    if "\n" not in keys.removeprefix(f"{BEGIN.decode()}\n"):  # the owner has every key
        return card
    return card[: found.end(1)] + keys.encode() + b"\n" + card[found.end(1) :]


def is_damaged(card: bytes) -> bool:
    """Whether the markers in the front matter of `card` do not enclose exactly one part."""
    found = _BLOCK.match(card)
    front = found[1] if found else b""
    if BEGIN not in front and END not in front:
        return False
    return front.count(BEGIN) != 1 or front.count(END) != 1 or front.find(END) < front.find(BEGIN)


def _kept(rows: Sequence[CardRow], taken: frozenset[str]) -> str:
    """The keys between the markers, without those that are `taken`."""
    license_id = license_of(rows)
    known = license_id is not None and _SPDX.fullmatch(license_id) is not None
    models = sorted({row.model for row in rows if row.model and _REPO.fullmatch(row.model)})
    index = [entry for row in rows if (entry := _evaluations(row)) is not None]
    keys: dict[str, Any] = {
        "pipeline_tag": "text-generation",
        "library_name": "oscar-zoo",
        "license": license_id.lower() if known and license_id else None,
        "base_model": models,
        "tags": list(TAGS),
        "model-index": index,
    }
    lines = [line for key, value in keys.items() if key not in taken for line in _lines(key, value)]
    return "\n".join([BEGIN.decode(), *lines, END.decode()])


def _lines(key: str, value: Any) -> Iterable[str]:
    """One key in YAML; a list has an item in each line."""
    if not value:
        return
    if isinstance(value, str):
        yield f"{key}: {value}"
        return
    yield f"{key}:"
    for item in value:
        plain = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        yield f"- {plain}"


def _evaluations(row: CardRow) -> dict[str, Any] | None:
    """An entry of `model-index`: every value of INT2 under the recipe with its BF16 value; `None`
    without scores."""
    shown = [score for score in in_order(row.scores) if is_of_recipe(score)]
    if not shown or row.status.state == "yanked":
        return None
    return {"name": row.id.reference, "results": [_result(row, score) for score in shown]}


def _result(row: CardRow, score: Score) -> dict[str, Any]:
    task = _text(score.task)
    dataset: dict[str, Any] = {"name": task, "type": re.sub(r"[^A-Za-z0-9._/-]+", "-", task)}
    if re.fullmatch(r"gpqa_[a-z]+", task):
        dataset |= {"type": _GPQA, "config": task}
    if re.fullmatch(r"[0-9a-f]{40}", score.dataset_revision or ""):
        dataset["revision"] = score.dataset_revision
    pair = [("INT2", score), *([("BF16", score.baseline)] if score.baseline else [])]
    metrics = [
        {
            "type": _text(one.metric),
            "value": round(one.value, 4),
            "name": _text(f"{one.metric}, {kind} KV cache, {score.who or score.reporter}"),
        }
        for kind, one in pair
        if one.value is not None and abs(one.value) < 1e15
    ]
    name = f"{task}, {row.id.reference}"
    return {
        "task": {"type": "text-generation", "name": name},
        "dataset": dataset,
        "metrics": metrics,
    }


def _text(words: str) -> str:
    """`words` in one line of letters, digits and a few signs: nothing that a hub could take for
    markup or for a link."""
    kept = " ".join(_NOT_PLAIN.sub(" ", words).split())
    return kept[:_LONGEST].rstrip() or "-"
