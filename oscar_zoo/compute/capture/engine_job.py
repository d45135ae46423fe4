"""The messages between this process and a program with an inference engine.

`capture/engine_session.py` writes an `EngineSetup` to a file and starts the program with that file
as its argument. Then it sends jobs, one JSON object per line on the standard input of the program,
and the next one only after the answer to the last. The program answers with one JSON object per
line on its standard output: `progress` (the arguments of `Progress`), and at the end of a job
`done` (its result) or `failed`. After the last one the program ends. Then a rank or the program
left a report (`ranks.write_failure`), or its log says why.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from oscar_zoo.artifact.specs import Spec
from oscar_zoo.compute.capture.rank_store import Done

Scalar = str | int | float
Tokens = tuple[int, ...]


class EngineSetup(Spec):
    """What the program starts with.

    Attributes:
        folder: private folder for the log, for reports of failures and for rows; removed
            afterwards.
        arguments: the engine's settings, as the command line of its server.
    """

    folder: str
    arguments: tuple[str, ...]


class CaptureJob(Spec):
    """Sum over sequences; the result is the version of the engine.

    Attributes:
        store, facts, pace: arguments of the `RankStore`.
        sequences: token ids.
        outputs, weights: whether the taps also sum attention outputs and output projections.
        weighted: whether to run a second pass for the weighted value sums.
    """

    kind: Literal["capture"] = "capture"
    store: str
    facts: dict[str, str]
    pace: tuple[float, float]
    sequences: tuple[Tokens, ...]
    outputs: bool
    weights: bool
    weighted: bool

    @property
    def passes(self) -> int:
        """Number of passes over all sequences."""
        return 2 if self.weighted else 1

    def tokens_done(self, at: Done | None) -> int:
        """Tokens that are done; each pass counts for an equal share of every token."""
        if at is None:
            return 0
        lengths = list(map(len, self.sequences))
        return (sum(lengths) * (at.number - 1) + sum(lengths[: at.sequences])) // self.passes


class ProjectionsJob(Spec):
    """Write the output projection of every layer to `place`, an empty folder; see `rank_rows`."""

    kind: Literal["projections"] = "projections"
    place: str


class RowsJob(Spec):
    """Run one sequence and write the rows of every layer to `place`, an empty folder; see
    `rank_rows`.

    Attributes:
        queries: whether queries are written too.
    """

    kind: Literal["rows"] = "rows"
    place: str
    ids: Tokens
    queries: bool


class ScoreJob(Spec):
    """Predict the tokens of one sequence; the result is a `Scored` as plain values.

    Attributes:
        cache: folder of `cache_files.write_cache`; empty for the engine's own attention.
        ids: the sequence.
        first: tokens from position `first + 1` on are predicted.
    """

    kind: Literal["score"] = "score"
    cache: str
    ids: Tokens
    first: int


class Scored(Spec):
    """What an engine says of the tokens `first + 1 ..` of a sequence.

    Attributes:
        log_probabilities: natural ones, each given all tokens before it.
        best: the most likely token at each of these places.
    """

    log_probabilities: tuple[float, ...]
    best: Tokens


class EndJob(Spec):
    """Shut the engine down."""

    kind: Literal["end"] = "end"


Job = CaptureJob | ProjectionsJob | RowsJob | ScoreJob | EndJob
JOB: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Field(discriminator="kind")])
"""Reads a job."""
