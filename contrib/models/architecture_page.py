"""`docs/models.md`: what works with every architecture, from the recorded attempts. Pure."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from architecture_attempts import Attempt, Outcome
from architectures import ARCHITECTURES

from oscar_zoo.engines.sglang.refusals import MISREAD
from oscar_zoo.registry.architectures import architecture

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/models.md"
RECORDS = ROOT / "tests/architectures/results.json"
WORDS: Mapping[Outcome, str] = {
    "works": "works",
    "refused": "refused",
    "fails": "fails",
    "stock fails": "not in SGLang",
    "stock differs": "as stock",
    "not tried": "not tried",
}
NOT_TRIED = Attempt("not tried")
CPU_COLUMNS = ("compute", "evaluate", "serve")
COLUMNS = (*CPU_COLUMNS, "gpu")

HEAD = """# Models

This page says what works with each architecture. `make models` writes it: it makes a small random
model of every architecture, computes and measures a rotation for it, starts a server, and compares
the answer with that of transformers. What works there is expected of every model of the
architecture. Its heads may have any width that is a power of two, and most multiples of 8, such as
80, 96, 160 and 192; a width without a known Hadamard matrix, such as 88, is refused. What was tried
on GPUs with models of real sizes is in [gpu-check.md](gpu-check.md).

The first column names architectures, not names for `pull`: those are what `oscar-zoo list` and
`oscar-zoo list --family NAME` show. Every other model is computed by its id on Hugging Face or from
its folder, as `oscar-zoo compute ORG/NAME` or `oscar-zoo compute ./my-model`.
"""
LEGEND = """A model with images is computed, measured and served with text. What is *refused* is
refused in one sentence before weights are read; the reasons are below. *Not in SGLang* means that
SGLang itself does not start with this model there. *As stock* means that the tokens are those of
SGLang without an INT2 cache, which are not those of transformers. On a CPU, models are served in
32 bits and tokens must be equal. On a GPU they are served in bfloat16, and the logit of every token
must be within rounding of the best one. *Perplexity alone* means that no tokens were compared: a
server had the perplexity of the reference within 0.5 % ([gpu-check.md](gpu-check.md)).
"""


@dataclass(frozen=True)
class Row:
    """The attempts with one architecture, and with which releases, on which GPU."""

    compute: Attempt = NOT_TRIED
    evaluate: Attempt = NOT_TRIED
    serve: Attempt = NOT_TRIED
    releases: str = ""
    gpu: Attempt = NOT_TRIED
    gpu_releases: str = ""


def read_records(path: Path = RECORDS) -> dict[str, Row]:
    """The recorded rows by the name of an architecture; none where there is no file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_bytes())
    return {
        name: Row(
            **{column: Attempt(**row[column]) for column in COLUMNS},
            releases=row["releases"],
            gpu_releases=row["gpu_releases"],
        )
        for name, row in rows.items()
    }


def write_records(rows: Mapping[str, Row], path: Path = RECORDS) -> None:
    """Record rows, in the order of the table; those of architectures that are gone are dropped."""
    kept = {name: asdict(rows[name]) for name in ARCHITECTURES if name in rows}
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def page(rows: Mapping[str, Row]) -> str:
    """The document."""
    lines = [
        "| models | `model_type` | compute | eval | serve on a CPU | serve on a GPU |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_line(name, rows[name]) for name in ARCHITECTURES if name in rows]
    tried = [_tried("On a CPU", [row.releases for row in rows.values()])]
    tried += [_tried("On a GPU", [row.gpu_releases for row in rows.values()])]
    legend = _wrapped(" ".join([LEGEND, *tried])) + "\n"
    refused = _reasons(rows, "refused", "What is refused, and why")
    fails = _reasons(rows, "fails", "What fails")
    misread = [_wrapped(f"- {one.sentence} Instead: {one.instead}.", "  ") for one in MISREAD]
    by_value = "\n".join(["## What is refused for a value of config.json", "", *misread, ""])
    return "\n".join([HEAD, "\n".join(lines) + "\n", legend, *refused, by_value, *fails])


def _line(name: str, row: Row) -> str:
    tiny = ARCHITECTURES[name]
    words = [WORDS[_outcome(row, column)] for column in COLUMNS]
    known = architecture(tiny.model_type)
    if words[-1] == WORDS["not tried"] and known and known.serve_gpu.tested:
        words[-1] = "perplexity alone"
    return f"| {tiny.models} | `{tiny.model_type}` | {' | '.join(words)} |"


def _outcome(row: Row, column: str) -> Outcome:
    """What `config.json` alone refuses is refused on any device, but for what needs a GPU."""
    attempt: Attempt = getattr(row, column)
    refused = column == "gpu" and attempt == NOT_TRIED and row.serve.outcome == "refused"
    refused = refused and "on a GPU only" not in row.serve.said
    return "refused" if refused else attempt.outcome


def _tried(where: str, releases: list[str]) -> str:
    """With which releases, each once; nothing where nothing was tried."""
    found = " and ".join(one for one in dict.fromkeys(releases) if one)
    return f"{where}, all this was tried with {found}." if found else ""


def _reasons(rows: Mapping[str, Row], outcome: Outcome, title: str) -> list[str]:
    """A section with every sentence once, and the models of which it is said; none without."""
    said: dict[str, dict[str, None]] = {}
    for name in ARCHITECTURES:
        for column in COLUMNS if name in rows else ():
            attempt: Attempt = getattr(rows[name], column)
            if attempt.outcome == outcome:
                said.setdefault(attempt.said, {})[ARCHITECTURES[name].models] = None
    entries = [_wrapped(f"- {', '.join(models)}: {text}", "  ") for text, models in said.items()]
    return ["\n".join([f"## {title}", "", *entries, ""])] if entries else []


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


RESULT, OUTPUT = "attempt.json", "attempt.log"
"""What an attempt writes into its folder at its end, and everything that it prints."""
KEPT = ("*.log", "*.stderr")


def all_attempts(
    names: Sequence[str],
    command: Callable[[str, Path], Sequence[str]],
    folder: Path,
    *,
    jobs: int,
    limit: float,
    logs: Path | None = None,
    ended: Callable[[Path], None] = lambda folder: None,
) -> Iterator[tuple[str, Attempt]]:
    """Run one command per name, and yield what came of each as soon as it is known.

    Args:
        command: makes the command line from a name and the folder of that name, which is empty. It
            writes an attempt to `RESULT` there.
        folder: of all these folders.
        jobs: how many run side by side.
        limit: seconds for one of them.
        logs: gets a folder with the logs of every attempt that failed.
        ended: called with the folder of a process that crashed or was killed.
    """

    def one(name: str) -> tuple[str, Attempt]:
        own = folder / name
        own.mkdir(parents=True)
        attempt = _attempt(command(name, own), own, limit)
        if not (own / RESULT).exists():
            ended(own)
        if logs is not None:
            _keep(own, logs / name, failed=attempt.outcome in ("fails", "stock fails"))
        shutil.rmtree(own, ignore_errors=True)
        return name, attempt

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, name) for name in names]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def write_attempt(attempt: Attempt, folder: Path) -> None:
    """Write the result of a process."""
    (folder / RESULT).write_text(json.dumps([attempt.outcome, attempt.said]), "utf-8")


def _attempt(command: Sequence[str], folder: Path, limit: float) -> Attempt:
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Attempt("fails", f"The attempt took more than {limit:.0f} seconds.")
    if not (folder / RESULT).exists():
        return Attempt("fails", f"The attempt ended with status {status}.")
    return Attempt(*json.loads((folder / RESULT).read_text("utf-8")))


def _keep(folder: Path, logs: Path, *, failed: bool) -> None:
    """Replace what is in `logs` by the logs in `folder`, or by nothing where nothing failed."""
    shutil.rmtree(logs, ignore_errors=True)
    found = [path for kind in KEPT for path in folder.rglob(kind)] if failed else []
    for path in found:
        logs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, logs / "-".join(path.relative_to(folder).parts))
