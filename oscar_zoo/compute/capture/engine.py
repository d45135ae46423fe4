"""Capture in an inference engine: any model that it serves, on as many GPUs as the model needs.

In the engine a tap sums in every tensor-parallel rank, each on its own device; the sums of the
ranks are joined here (`ranks.py`). What the ranks saved until an interrupt can be resumed
(`rank_store.py`).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.fit_block import Numerics
from oscar_zoo.artifact.specs import Geometry, Harness
from oscar_zoo.compute import coverage
from oscar_zoo.compute.capture import ranks, state
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.engine_job import CaptureJob
from oscar_zoo.compute.capture.engine_session import EngineSession
from oscar_zoo.compute.capture.rank_store import RankStore
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, GeometryMismatch

STORE = "ranks"
"""Folder inside the work folder for the sums that the ranks saved."""


@dataclass(frozen=True)
class EngineFacts:
    """How moments were captured.

    Attributes:
        geometry: of the model, as the engine built it.
        numerics: block of the manifest.
        tensor_parallel: number of ranks.
    """

    geometry: Geometry
    numerics: Numerics
    tensor_parallel: int


def capture_with_engine(
    session: EngineSession,
    sequences: Sequence[Sequence[int]],
    *,
    needs: Set[Need],
    geometry: Geometry | None = None,
    progress: Progress = no_progress,
    resume: bool = False,
) -> tuple[Moments, EngineFacts]:
    """Moments of sequences, from one prefill per sequence and pass.

    Args:
        session: the engine; this is its first job. What an interrupted capture needs to go on is
            kept in its work folder: the sums of the ranks (float64, about 6 MB per layer of 8 KV
            heads of 128). `discard` removes it.
        sequences: token ids; they run one at a time, in order, each in one piece.
        needs: what the fit reads, see `moments.Need`. `weighted` costs a second pass over all
            sequences.
        geometry: what the model must turn out to be; `None` accepts what the engine reports.
        progress: called after every sequence of every pass.
        resume: go on from what is in the work folder, if there is anything. Otherwise the capture
            starts from the beginning.

    Returns:
        Sums on the CPU with full coverage of `needs`, and how they were made.

    Raises:
        UnsupportedModel: MLA, or attention that is not a softmax we know; named.
        GeometryMismatch: the model is not what `geometry` says.
        ComputeFailed: the engine did not start or died, or a head, layer or token was not seen
            exactly once.
        OutputExists: with `resume`, the work folder holds a capture of something else.
        IntegrityError: with `resume`, what is there is damaged.
        StorageError: the disk refused.
    """
    given = tuple(tuple(sequence) for sequence in sequences)
    lengths = [len(sequence) for sequence in given]
    facts = _facts(session, given, needs)
    store = RankStore(session.kept / STORE, facts)
    if not resume:
        store.clear()
    job = CaptureJob(
        store=str(session.kept / STORE),
        facts=facts,
        pace=(state.MIN_SECONDS, state.SHARE),
        sequences=given,
        outputs="outputs" in needs,
        weights="weights" in needs,
        weighted="weighted" in needs,
    )
    progress(job.tokens_done(store.load()), sum(lengths), "engine start")
    ran = str(session.run(job, progress))
    try:
        moments, reports = _join(store, session.tensor_parallel, lengths, weighted=job.weighted)
        if geometry is not None and (
            difference := _geometry_of(geometry).difference(moments.geometry)
        ):
            raise GeometryMismatch(
                f"{session.model} is not the model it was taken for: {difference}.",
                hint="check its config.json",
            )
        coverage.check(moments, needs)
    except (ComputeFailed, GeometryMismatch):
        store.clear()  # all passes are done: a resumed capture would fail here again
        raise
    numerics = Numerics(
        forward_dtype=reports[0].dtype,
        accumulate=reports[0].accumulate,
        engine=Harness(name=session.program.engine, version=ran),
        device=reports[0].device,
    )
    return moments, EngineFacts(moments.geometry, numerics, session.tensor_parallel)


def _join(
    store: RankStore, count: int, lengths: Sequence[int], *, weighted: bool
) -> tuple[Moments, tuple[ranks.RankReport, ...]]:
    """Join what `count` ranks saved last; see `ranks.join_ranks`."""
    if (done := store.load()) is None:
        raise ComputeFailed(
            "the capture is incomplete: no rank handed in sums.", hint="report the model"
        )
    return ranks.join_ranks(done.folder, count, lengths, weighted=weighted)


def discard(work: Path) -> None:
    """Remove what `capture_with_engine` kept in `work`."""
    durable.remove_tree(work / STORE)
    durable.sweep(work, older_than=0)


def _geometry_of(block: Geometry) -> Geometry:
    return Geometry(**{name: getattr(block, name) for name in Geometry.model_fields})


def _facts(
    session: EngineSession, sequences: Sequence[Sequence[int]], needs: Set[Need]
) -> dict[str, str]:
    """Everything that decides the bits of the sums, except the weights.

    A capture is resumed only when all of this is equal; a refusal names the first difference. The
    ranks compare the weights themselves.
    """
    engine = session.program.engine
    arguments = sha256_hex(strict_json.canonical_bytes(list(session.arguments)))
    return {
        "engine": f"{engine} {_version(engine)}",
        "torch": _version("torch"),
        "model": session.model,
        state.DATA: data_fact(sequences),
        "needs": " ".join(sorted(needs)),
        "tensor parallel": str(session.tensor_parallel),
        "engine arguments": arguments[:16],
    }


def data_fact(sequences: Sequence[Sequence[int]]) -> str:
    """What the facts of a capture say of its token ids."""
    return sha256_hex(strict_json.canonical_bytes([list(ids) for ids in sequences]))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
