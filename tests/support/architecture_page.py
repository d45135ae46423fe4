"""`docs/models.md`: what works with every architecture, from the recorded attempts. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from architecture_attempts import Attempt, Outcome
from architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/models.md"
RECORDS = ROOT / "tests/architectures/results.json"
WORDS: Mapping[Outcome, str] = {
    "works": "works",
    "refused": "refused",
    "fails": "fails",
    "stock fails": "not on a CPU",
    "stock differs": "as stock",
    "not tried": "not tried",
}
COLUMNS = ("compute", "evaluate", "serve")

HEAD = """# Models

This page says what works with each architecture. `make models` writes it: it makes a small random
model of every architecture, computes and measures a rotation for it, starts a server on the CPU,
and compares the answer with that of transformers. What works there is expected of every model of
the architecture, as long as its `head_dim` is a power of two. What was tried on GPUs is in
[gpu-check.md](gpu-check.md).
"""
LEGEND = """A model with images is computed, measured and served with text. What is *refused* is
refused in one sentence before weights are read; the reasons are below. *Not on a CPU* means that
SGLang itself does not start with this model without a GPU. *As stock* means that the tokens are
those of SGLang without an INT2 cache, which are not those of transformers. Tried with
"""


@dataclass(frozen=True)
class Row:
    """The attempts with one architecture, and the releases of transformers and SGLang in them."""

    compute: Attempt
    evaluate: Attempt
    serve: Attempt
    releases: str


def read_records(path: Path = RECORDS) -> dict[str, Row]:
    """The recorded rows by the name of an architecture; none where there is no file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_bytes())
    return {
        name: Row(*(Attempt(**row[column]) for column in COLUMNS), row["releases"])
        for name, row in rows.items()
    }


def write_records(rows: Mapping[str, Row], path: Path = RECORDS) -> None:
    """Record rows, in the order of the table; those of architectures that are gone are dropped."""
    kept = {name: asdict(rows[name]) for name in ARCHITECTURES if name in rows}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def page(rows: Mapping[str, Row]) -> str:
    """The document."""
    lines = ["| models | `model_type` | compute | eval | serve on a CPU |", "|---|---|---|---|---|"]
    lines += [_line(name, rows[name]) for name in ARCHITECTURES if name in rows]
    releases = " and ".join(dict.fromkeys(row.releases for row in rows.values()))
    legend = _wrapped(f"{LEGEND} {releases}.") + "\n"
    return "\n".join([HEAD, "\n".join(lines) + "\n", legend, _reasons(rows)])


def _line(name: str, row: Row) -> str:
    tiny = ARCHITECTURES[name]
    words = [WORDS[getattr(row, column).outcome] for column in COLUMNS]
    return f"| {tiny.models} | `{tiny.model_type}` | {' | '.join(words)} |"


def _reasons(rows: Mapping[str, Row]) -> str:
    """Every sentence once, with the models of which it is said."""
    said: dict[str, dict[str, None]] = {}
    for name in ARCHITECTURES:
        for column in COLUMNS if name in rows else ():
            if sentence := getattr(rows[name], column).said:
                said.setdefault(sentence, {})[ARCHITECTURES[name].models] = None
    entries = [_wrapped(f"- {', '.join(models)}: {text}", "  ") for text, models in said.items()]
    return "\n".join(["## What is refused, and why", "", *entries, ""])


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
