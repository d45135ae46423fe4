"""Capture through stock SGLang: any model that it serves, on as many tensor-parallel GPUs as the model needs.

`capture_with_sglang` starts an offline engine in a child process and talks to its ranks by `collective_rpc`; the tap
of the plugin (`sglang_plugin/tap.py`, found by SGLang itself) sums in the ranks, each on its own device, and the
parent joins what they wrote (`ranks.py`). The child is this module run as a program, in a process group of its own:
SGLang kills the process that holds a broken engine, and ours has to say why. It ends with its parent, whatever ends
that one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from oscar_zoo.artifact.manifest import Numerics
from oscar_zoo.artifact.specs import Geometry, Harness, Spec
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.base import Progress, no_progress
from oscar_zoo.compute.moments import Moments, Need
from oscar_zoo.errors import ComputeFailed, GeometryMismatch, MissingDependency, UsageError

ROOM = 512
"""Tokens of context and cache beyond the longest sequence; SGLang needs a few, and whole pages of up to 128."""
TAIL_BYTES = 65_536
NAMES_ERROR = re.compile(r"(?:\[[^\]]*\] )?(?:Exception: )?([\w.]*(?:Error|Exception|Mismatch)\b: .+)")
"""A line of a log that ends a traceback."""

Scalar = str | int | float | bool | None


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


class _Job(Spec):
    """What the child is told."""

    folder: str
    engine: dict[str, Scalar]
    sequences: tuple[tuple[int, ...], ...]
    outputs: bool
    weights: bool
    weighted: bool


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
) -> tuple[Moments, SglangFacts]:
    """Moments of `data`, from one prefill per sequence and pass in an SGLang engine of its own.

    Args:
        model: local folder or Hugging Face id.
        data: sequences run one at a time, in order, in one piece.
        needs: what the fit reads, see `moments.Need`; `weighted` costs a second pass over all sequences.
        environment: the engine's whole environment; `sglang_plugin.launch.child_environment` makes one.
        tensor_parallel: number of ranks; may be above the number of KV heads.
        geometry: what the model must turn out to be; `None` takes the engine's word.
        engine: further arguments of `sglang.Engine`, such as `device`, `dtype`, `revision`, `mem_fraction_static`.
        progress: told after every sequence of every pass.
        work: folder for the ranks' sums (float64, about 6 MB per layer of 8 KV heads of 128), removed afterwards; by
            default the system's folder for temporary files.

    Returns:
        Sums on the CPU with full coverage of `needs`, and how they were made.

    Raises:
        MissingDependency: sglang is not installed.
        UsageError: `engine` sets what the capture must decide.
        UnsupportedModel: MLA, sliding windows, or attention that is not plain softmax; named.
        GeometryMismatch: the model is not what `geometry` says.
        ComputeFailed: the engine did not start or died, or a head, layer or token was not seen exactly once.
    """
    if importlib.util.find_spec("sglang") is None:
        raise MissingDependency.for_extra("sglang", "serve")
    sequences = tuple(tuple(sequence) for sequence in data.sequences)
    lengths = [len(sequence) for sequence in sequences]
    local = Path(model).expanduser()
    where = str(local.resolve()) if local.is_dir() else model  # the child runs in a folder of its own
    arguments = _engine_arguments(where, max(lengths), tensor_parallel, engine or {})
    with tempfile.TemporaryDirectory(prefix="oscar-zoo-capture-", dir=work and work.resolve()) as name:
        folder = Path(name)
        job = _Job(
            folder=name,
            engine=arguments,
            sequences=sequences,
            outputs="outputs" in needs,
            weights="weights" in needs,
            weighted="weighted" in needs,
        )
        version = _run_child(job, folder, environment, progress)
        moments, reports = ranks.join_ranks(folder, tensor_parallel, lengths, weighted=job.weighted)
    if geometry is not None and (difference := _geometry_of(geometry).difference(moments.geometry)):
        raise GeometryMismatch(
            f"{model} is not the model it was taken for: {difference}.", hint="check its config.json"
        )
    moments.check_coverage(needs)
    numerics = Numerics(
        forward_dtype=reports[0].dtype,
        accumulate="float64",
        engine=Harness(name="sglang", version=version),
        device=reports[0].device,
    )
    return moments, SglangFacts(moments.geometry, numerics, tensor_parallel)


def _geometry_of(block: Geometry) -> Geometry:
    return Geometry(**{name: getattr(block, name) for name in Geometry.model_fields})


def _engine_arguments(model: str, longest: int, ranks_wanted: int, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
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
        raise UsageError(f"calibration sets {refused[0]} of the engine itself.", hint="leave it out")
    return {"random_seed": 0, "watchdog_timeout": 3600, **fixed, **given}


# --- the parent ----------------------------------------------------------------------------------------------------


def _run_child(job: _Job, folder: Path, environment: Mapping[str, str], progress: Progress) -> str:
    """Run this module as a program until it is done; the version of sglang.

    Raises:
        UnsupportedModel, ComputeFailed: what a rank, the engine, or its log says.
    """
    place, log = folder / "job.json", folder / "engine.log"
    place.write_text(job.model_dump_json(), encoding="utf-8")
    env = {**environment, ranks.VARIABLE: "1", "SGLANG_PLUGINS": "oscar"}
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # a sequence may be as long as the model's context
    progress(0, sum(map(len, job.sequences)), "engine start")
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
    raise ComputeFailed(f"SGLang could not run {job.engine['model_path']}: {cause}.", hint=_hint(cause))


@contextlib.contextmanager
def _child(arguments: list[str], env: Mapping[str, str], folder: Path, log: int) -> Iterator[subprocess.Popen[bytes]]:
    """The child with news on its standard output; its whole process group is gone when the block ends."""
    command = [sys.executable, "-P", "-m", __spec__.name, *arguments]
    pipe = subprocess.PIPE
    # standard input is never written: its end tells the child that this process is gone
    child = subprocess.Popen(
        command, env=dict(env), cwd=folder, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
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
        return "use more GPUs (tensor parallel), shorter sequences, or a smaller mem_fraction_static"
    if "oscar_tap" in cause:
        return "the plugin was not loaded: pip install oscar-zoo beside an sglang that it supports"
    return "try to serve the model with this SGLang first"


# --- the child -----------------------------------------------------------------------------------------------------


def _main() -> None:
    """Run the job of the file that is named on the command line; news go out as lines of JSON."""
    job = _Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    threading.Thread(target=_end_with_parent, args=(job.folder,), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # what SGLang prints belongs in the log

        def tell(**news: Any) -> None:
            out.write(json.dumps(news) + "\n")
            out.flush()

        try:
            tell(sglang=_drive(job, lambda *state: tell(progress=state)))
        except Exception as error:  # the engine's own error types are not public
            tell(error=" ".join(f"{type(error).__name__}: {error}".split())[:400].rstrip("."))


def _end_with_parent(folder: str) -> None:
    """End everything when nobody holds the other end of standard input any more, and remove what nobody else would."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _drive(job: _Job, progress: Progress) -> str:
    """One pass or two through one engine; the version of sglang."""
    import sglang

    engine = sglang.Engine(**job.engine)
    try:
        call = _caller(engine, job)
        passes = 2 if job.weighted else 1
        done, total = 0, sum(map(len, job.sequences))
        for number in range(1, passes + 1):
            if number == 1:
                call("start", outputs=job.outputs, weights=job.weights)
            else:
                call("weigh")
            for sequence in job.sequences:
                engine.generate(input_ids=[list(sequence)], sampling_params={"temperature": 0.0, "max_new_tokens": 1})
                call("check")
                done += len(sequence)
                progress(done // passes, total, f"pass {number} of {passes}")
        call("save")
    finally:
        engine.shutdown()
    return str(sglang.__version__)


def _caller(engine: Any, job: _Job) -> Callable[..., None]:
    """Calls a method of the tap on all ranks; SGLang passes on the errors of the first one, the others leave files."""

    def call(step: str, **options: bool) -> None:
        engine.collective_rpc(f"oscar_tap_{step}", folder=job.folder, **options)
        ranks.raise_failure(Path(job.folder))

    return call


if __name__ == "__main__":
    _main()
