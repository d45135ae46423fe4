"""Capture through stock SGLang: any model that it serves, on as many tensor-parallel GPUs as the
model needs.

`capture_with_sglang` starts an offline engine in a child process and talks to its ranks by
`collective_rpc`; the tap of the plugin (`engines/sglang/tap.py`, found by SGLang itself) sums in
the ranks, each on its own device, and the parent joins what they wrote (`ranks.py`). The child is
`sglang_process.py` run as a program, in a process group of its own: SGLang kills the process that
holds a broken engine, and ours has to say why. It ends with its parent, whatever ends that one;
what the ranks saved until then is gone on with (`rank_store.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.manifest import Numerics
from oscar_zoo.artifact.specs import Geometry, Harness
from oscar_zoo.compute.capture import engine_job, ranks, state
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.capture.engine_job import CaptureJob, Scalar
from oscar_zoo.compute.capture.rank_store import Done, RankStore
from oscar_zoo.compute.moments import Moments, Need
from oscar_zoo.errors import ComputeFailed, GeometryMismatch, MissingDependency, UsageError

ROOM = 512
"""Tokens of context and cache beyond the longest sequence; SGLang needs a few, and whole pages of
up to 128."""
STORE = "ranks"
"""Folder in the work folder, of what the ranks saved."""
TAIL_BYTES = 65_536
NAMES_ERROR = re.compile(
    r"(?:\[[^\]]*\] )?(?:Exception: )?([\w.]*(?:Error|Exception|Mismatch)\b: .+)"
)
"""A line of a log that ends a traceback."""


class TokenSequences(Protocol):
    """What is needed of `compute.data.CalibrationData`."""

    @property
    def sequences(self) -> Sequence[Sequence[int]]:
        """Token ids, in the order of the forward passes."""
        ...


@dataclass(frozen=True)
class SglangFacts:
    """How moments were captured.

    Attributes:
        geometry: of the model, as the engine built it.
        numerics: block of the manifest.
        tensor_parallel: number of ranks.
    """

    geometry: Geometry
    numerics: Numerics
    tensor_parallel: int


def capture_with_sglang(
    model: str,
    data: TokenSequences,
    *,
    needs: Set[Need],
    environment: Mapping[str, str],
    tensor_parallel: int = 1,
    geometry: Geometry | None = None,
    engine: Mapping[str, Scalar] | None = None,
    progress: Progress = no_progress,
    work: Path | None = None,
    resume: bool = False,
) -> tuple[Moments, SglangFacts]:
    """Moments of `data`, from one prefill per sequence and pass in an SGLang engine of its own.

    Args:
        model: local folder or Hugging Face id.
        data: sequences run one at a time, in order, in one piece.
        needs: what the fit reads, see `moments.Need`; `weighted` costs a second pass over all
            sequences.
        environment: the engine's whole environment; `launch.environment.child_environment` of the
            engine makes one.
        tensor_parallel: number of ranks; may be above the number of KV heads.
        geometry: what the model must turn out to be; `None` takes the engine's word.
        engine: further arguments of `sglang.Engine`, such as `device`, `dtype`, `revision`,
            `mem_fraction_static`.
        progress: told after every sequence of every pass.
        work: folder for what an interrupted capture needs to go on, the ranks' sums (float64, about
            6 MB per layer of 8 KV heads of 128); `discard` removes that again. `None` keeps
            nothing.
        resume: go on from what is in `work`, if anything is; without it the capture starts anew.

    Returns:
        Sums on the CPU with full coverage of `needs`, and how they were made.

    Raises:
        MissingDependency: sglang is not installed.
        UsageError: `engine` sets what the capture must decide.
        UnsupportedModel: MLA, sliding windows, or attention that is not plain softmax; named.
        GeometryMismatch: the model is not what `geometry` says.
        ComputeFailed: the engine did not start or died, or a head, layer or token was not seen
            exactly once.
        OutputExists: with `resume`, `work` holds a capture of something else.
        IntegrityError: with `resume`, what is in `work` is damaged.
        StorageError: the disk refused.
    """
    if importlib.util.find_spec("sglang") is None:
        raise MissingDependency.for_extra("sglang", "serve")
    sequences = tuple(tuple(sequence) for sequence in data.sequences)
    lengths = [len(sequence) for sequence in sequences]
    local = Path(model).expanduser()
    where = (
        str(local.resolve()) if local.is_dir() else model
    )  # the child runs in a folder of its own
    arguments = _engine_arguments(where, max(lengths), tensor_parallel, engine or {})
    facts = _facts(arguments, sequences, needs)
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
        ran = _run_child(job, store.load(), environment, progress)
        try:
            moments, reports = _join(store, tensor_parallel, lengths, weighted=job.weighted)
            if geometry is not None and (
                difference := _geometry_of(geometry).difference(moments.geometry)
            ):
                raise GeometryMismatch(
                    f"{model} is not the model it was taken for: {difference}.",
                    hint="check its config.json",
                )
            moments.check_coverage(needs)
        except (ComputeFailed, GeometryMismatch):
            store.clear()  # all was done, and going on from there would end here again
            raise
    numerics = Numerics(
        forward_dtype=reports[0].dtype,
        accumulate=reports[0].accumulate,
        engine=Harness(name="sglang", version=ran),
        device=reports[0].device,
    )
    return moments, SglangFacts(moments.geometry, numerics, tensor_parallel)


def _join(
    store: RankStore, count: int, lengths: Sequence[int], *, weighted: bool
) -> tuple[Moments, tuple[ranks.RankReport, ...]]:
    """What `count` ranks saved last; see `ranks.join_ranks`."""
    if (done := store.load()) is None:
        raise ComputeFailed(
            "the capture is incomplete: no rank handed in sums.", hint="report the model"
        )
    return ranks.join_ranks(done.folder, count, lengths, weighted=weighted)


def discard(work: Path) -> None:
    """Remove what `capture_with_sglang` kept in `work`."""
    durable.remove_tree(work / STORE)
    durable.sweep(work, older_than=0)


def _geometry_of(block: Geometry) -> Geometry:
    return Geometry(**{name: getattr(block, name) for name in Geometry.model_fields})


def _engine_arguments(
    model: str, longest: int, ranks_wanted: int, given: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Every sequence in one piece, alone, without graphs or prefix cache; `given` on top.

    Raises:
        UsageError: `given` has one of these.
    """
    fixed: dict[str, Scalar] = {
        "model_path": model,
        "tp_size": ranks_wanted,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "kv_cache_dtype": "auto",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": longest + ROOM,
        "max_prefill_tokens": longest + ROOM,
        "max_total_tokens": longest + ROOM,
        "max_running_requests": 1,
        "context_length": longest + ROOM,
        "log_level": "info",
    }
    if refused := sorted(fixed.keys() & given.keys()):
        raise UsageError(
            f"calibration sets {refused[0]} of the engine itself.", hint="leave it out"
        )
    return {"random_seed": 0, "watchdog_timeout": 3600, **fixed, **given}


def _facts(
    arguments: Mapping[str, Scalar], sequences: Sequence[Sequence[int]], needs: Set[Need]
) -> dict[str, str]:
    """Everything that decides the bits of the sums, in words, but for the weights, which the ranks
    compare."""
    rest = {
        name: value for name, value in arguments.items() if name not in ("model_path", "tp_size")
    }
    return {
        "engine": f"sglang {_version('sglang')}",
        "torch": _version("torch"),
        "model": str(arguments["model_path"]),
        "data": sha256_hex(strict_json.canonical_bytes([list(ids) for ids in sequences])),
        "needs": " ".join(sorted(needs)),
        "tensor parallel": str(arguments["tp_size"]),
        "engine arguments": sha256_hex(strict_json.canonical_bytes(rest))[:16],
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


@contextlib.contextmanager
def _folders(work: Path | None) -> Iterator[tuple[Path, Path]]:
    """What is kept, and what is gone when the block ends; the second also ends with the child."""
    with contextlib.ExitStack() as stack:
        if work is None:
            base = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="oscar-zoo-capture-"))
            )
        else:
            base = work.absolute()
            with durable.storage_errors(f"cannot write to {base}"):
                durable.make_folders(base)
        # what a kill of both processes leaves, `discard` sweeps
        prefix = f"{durable.TEMP_PREFIX}capture-"
        private = stack.enter_context(
            tempfile.TemporaryDirectory(prefix=prefix, dir=base, ignore_cleanup_errors=True)
        )
        yield base / STORE, Path(private)


def _run_child(
    job: CaptureJob, at: Done | None, environment: Mapping[str, str], progress: Progress
) -> str:
    """Run the child until it is done; the version of sglang.

    Raises:
        UnsupportedModel, OutputExists, IntegrityError, StorageError, ComputeFailed: what a rank,
            the engine, or its log says.
    """
    folder = Path(job.folder)
    place, log = folder / "job.json", folder / "engine.log"
    place.write_text(job.model_dump_json(), encoding="utf-8")
    env = {**environment, ranks.VARIABLE: "1", "SGLANG_PLUGINS": "oscar"}
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = (
        "1"  # a sequence may be as long as the model's context
    )
    progress(job.tokens_done(at), sum(map(len, job.sequences)), "engine start")
    news: dict[str, Any] = {}
    with log.open("wb") as stream, _child([str(place)], env, folder, stream.fileno()) as child:
        for line in child.stdout or ():
            news = json.loads(line)
            if "progress" in news:
                progress(*news["progress"])
    ranks.raise_failure(folder)
    if "sglang" in news:
        return str(news["sglang"])
    cause = news.get("error") or _cause(log) or "no error in its log"
    raise ComputeFailed(
        f"SGLang could not run {job.engine['model_path']}: {cause}.", hint=_hint(cause)
    )


@contextlib.contextmanager
def _child(
    arguments: list[str], env: Mapping[str, str], folder: Path, log: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The child with news on its standard output; its whole process group is gone when the block
    ends."""
    command = [sys.executable, "-P", "-m", engine_job.__name__, *arguments]
    pipe = subprocess.PIPE
    # standard input is never written: its end tells the child that this process is gone
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


def _hint(cause: str) -> str:
    if "memory" in cause.lower():
        return (
            "use more GPUs (tensor parallel), shorter sequences, or a smaller mem_fraction_static"
        )
    if "oscar_tap" in cause:
        return "the plugin was not loaded: pip install oscar-zoo beside an sglang that it supports"
    return "try to serve the model with this SGLang first"
