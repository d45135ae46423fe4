"""Capture in an inference engine: any model that it serves, on as many GPUs as the model needs.

This module knows no engine. It is given an `EngineProgram`, starts it in a process group of its
own, and reads its news. In the engine a tap sums in every tensor-parallel rank, each on its own
device; the sums of the ranks are joined here (`ranks.py`). An engine may kill the process that
holds it when it breaks, so this process must be another one to report the reason. The program ends
when this process ends, whatever the cause, and what the ranks saved until then can be resumed
(`rank_store.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.fit_block import Numerics
from oscar_zoo.artifact.specs import Geometry, Harness
from oscar_zoo.compute import coverage
from oscar_zoo.compute.capture import ranks, state
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.engine_job import CaptureJob, Scalar
from oscar_zoo.compute.capture.rank_store import Done, RankStore
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, GeometryMismatch, MissingDependency

STORE = "ranks"
"""Folder inside the work folder for the sums that the ranks saved."""
TAIL_BYTES = 65_536
NAMES_ERROR = re.compile(
    r"(?:\[[^\]]*\] )?(?:Exception: )?([\w.]*(?:Error|Exception|Mismatch)\b: .+)"
)
"""The last line of a traceback in a log."""


class TokenSequences(Protocol):
    """The part of `compute.data.CalibrationData` that is used."""

    @property
    def sequences(self) -> Sequence[Sequence[int]]:
        """Token ids, in the order of the forward passes."""
        ...


@dataclass(frozen=True)
class EngineProgram:
    """A program that holds an inference engine and runs a `CaptureJob`.

    Attributes:
        engine: name of the engine's distribution, recorded in manifests.
        title: the engine's name in messages.
        command: starts the program; the path of the job's file is appended.
        environment: the whole environment of the program.
        arguments: `(model, tokens of the longest sequence, ranks, given) -> CaptureJob.engine`;
            raises `UsageError` when `given` sets what the capture must decide.
    """

    engine: str
    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    arguments: Callable[[str, int, int, Mapping[str, Scalar]], dict[str, Scalar]]


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
    model: str,
    data: TokenSequences,
    *,
    program: EngineProgram,
    needs: Set[Need],
    tensor_parallel: int = 1,
    geometry: Geometry | None = None,
    engine: Mapping[str, Scalar] | None = None,
    progress: Progress = no_progress,
    work: Path | None = None,
    resume: bool = False,
) -> tuple[Moments, EngineFacts]:
    """Moments of `data`, from one prefill per sequence and pass in an engine of their own.

    Args:
        model: local folder or Hugging Face id.
        data: the sequences; they run one at a time, in order, each in one piece.
        program: the engine.
        needs: what the fit reads, see `moments.Need`. `weighted` costs a second pass over all
            sequences.
        tensor_parallel: number of ranks; may be above the number of KV heads.
        geometry: what the model must turn out to be; `None` accepts what the engine reports.
        engine: further arguments of the engine, such as `device`, `dtype`, `revision`.
        progress: called after every sequence of every pass.
        work: folder for what an interrupted capture needs to go on: the sums of the ranks (float64,
            about 6 MB per layer of 8 KV heads of 128). `discard` removes it. `None` keeps nothing.
        resume: go on from what is in `work`, if there is anything. Otherwise the capture starts
            from the beginning.

    Returns:
        Sums on the CPU with full coverage of `needs`, and how they were made.

    Raises:
        MissingDependency: the engine is not installed.
        UsageError: `engine` sets an argument that the capture must decide.
        UnsupportedModel: MLA, sliding windows, or attention that is not plain softmax; named.
        GeometryMismatch: the model is not what `geometry` says.
        ComputeFailed: the engine did not start or died, or a head, layer or token was not seen
            exactly once.
        OutputExists: with `resume`, `work` holds a capture of something else.
        IntegrityError: with `resume`, what is in `work` is damaged.
        StorageError: the disk refused.
    """
    if importlib.util.find_spec(program.engine) is None:
        raise MissingDependency.for_extra(program.engine, "serve")
    sequences = tuple(tuple(sequence) for sequence in data.sequences)
    lengths = [len(sequence) for sequence in sequences]
    local = Path(model).expanduser()
    where = (
        str(local.resolve()) if local.is_dir() else model
    )  # the child runs in a folder of its own
    arguments = program.arguments(where, max(lengths), tensor_parallel, engine or {})
    facts = _facts(program.engine, where, tensor_parallel, arguments, sequences, needs)
    with _folders(work) as (kept, folder):
        store = RankStore(kept, facts)
        if not resume:
            store.clear()
        job = CaptureJob(
            folder=str(folder),
            store=str(kept),
            facts=facts,
            pace=(state.MIN_SECONDS, state.SHARE),
            engine=arguments,
            sequences=sequences,
            outputs="outputs" in needs,
            weights="weights" in needs,
            weighted="weighted" in needs,
        )
        ran = _run_child(program, job, store.load(), where, progress)
        try:
            moments, reports = _join(store, tensor_parallel, lengths, weighted=job.weighted)
            if geometry is not None and (
                difference := _geometry_of(geometry).difference(moments.geometry)
            ):
                raise GeometryMismatch(
                    f"{model} is not the model it was taken for: {difference}.",
                    hint="check its config.json",
                )
            coverage.check(moments, needs)
        except (ComputeFailed, GeometryMismatch):
            store.clear()  # all passes are done: a resumed capture would fail here again
            raise
    numerics = Numerics(
        forward_dtype=reports[0].dtype,
        accumulate=reports[0].accumulate,
        engine=Harness(name=program.engine, version=ran),
        device=reports[0].device,
    )
    return moments, EngineFacts(moments.geometry, numerics, tensor_parallel)


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
    engine: str,
    model: str,
    tensor_parallel: int,
    arguments: Mapping[str, Scalar],
    sequences: Sequence[Sequence[int]],
    needs: Set[Need],
) -> dict[str, str]:
    """Everything that decides the bits of the sums, except the weights.

    A capture is resumed only when all of this is equal; a refusal names the first difference. The
    ranks compare the weights themselves.
    """
    return {
        "engine": f"{engine} {_version(engine)}",
        "torch": _version("torch"),
        "model": model,
        "data": sha256_hex(strict_json.canonical_bytes([list(ids) for ids in sequences])),
        "needs": " ".join(sorted(needs)),
        "tensor parallel": str(tensor_parallel),
        "engine arguments": sha256_hex(strict_json.canonical_bytes(dict(arguments)))[:16],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


@contextlib.contextmanager
def _folders(work: Path | None) -> Iterator[tuple[Path, Path]]:
    """The folder that is kept, and a private folder that is removed when the block ends."""
    with contextlib.ExitStack() as stack:
        if work is None:
            base = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="oscar-zoo-capture-"))
            )
        else:
            base = work.absolute()
            with durable.storage_errors(f"cannot write to {base}"):
                durable.make_folders(base)
        # when both processes are killed the private folder stays, and `discard` removes it
        prefix = f"{durable.TEMP_PREFIX}capture-"
        private = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=prefix, dir=base, ignore_cleanup_errors=True)
        )
        yield base / STORE, Path(private)


def _run_child(
    program: EngineProgram, job: CaptureJob, at: Done | None, model: str, progress: Progress
) -> str:
    """Run the program to its end; returns the version of the engine.

    Raises:
        UnsupportedModel, OutputExists, IntegrityError, StorageError, ComputeFailed: as reported by
            a rank, by the engine, or in its log.
    """
    folder = Path(job.folder)
    place, log = folder / "job.json", folder / "engine.log"
    place.write_text(job.model_dump_json(), encoding="utf-8")
    command = [*program.command, str(place)]
    env = {**program.environment, ranks.VARIABLE: "1"}
    progress(job.tokens_done(at), sum(map(len, job.sequences)), "engine start")
    news: dict[str, Any] = {}
    with log.open("wb") as stream, _child(command, env, folder, stream.fileno()) as child:
        for line in child.stdout or ():
            news = json.loads(line)
            if "progress" in news:
                progress(*news["progress"])
    ranks.raise_failure(folder)
    if "version" in news:
        return str(news["version"])
    cause = news.get("error") or _cause(log) or "no error in its log"
    raise ComputeFailed(
        f"{program.title} could not run {model}: {cause}.", hint=_hint(program, cause)
    )


@contextlib.contextmanager
def _child(
    command: list[str], env: Mapping[str, str], folder: Path, log: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The started program; its whole process group is killed when the block ends."""
    pipe = subprocess.PIPE
    # nothing is written to standard input; its end tells the child that this process is gone
    child = subprocess.Popen(
        command,
        env=dict(env),
        cwd=folder,
        stdin=pipe,
        stdout=pipe,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for end in (child.stdin, child.stdout):
            if end is not None:
                end.close()


def _cause(log: Path) -> str:
    """The last error in the log, without a full stop; empty when there is none."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = stream.read().decode("utf-8", "replace").splitlines()
    errors = [match[1] for line in lines if (match := NAMES_ERROR.match(line.strip()))]
    return errors[-1][:400].rstrip(".") if errors else ""


def _hint(program: EngineProgram, cause: str) -> str:
    if "memory" in cause.lower():
        return (
            "use more GPUs (tensor parallel), shorter sequences, or a smaller mem_fraction_static"
        )
    if "oscar_tap" in cause:
        return (
            "the plugin was not loaded: pip install oscar-zoo beside a supported version of"
            f" {program.engine}"
        )
    return f"try to serve the model with this {program.title} first"
