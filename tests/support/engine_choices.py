"""The choice of `auto` with a model in SGLang, in a fork of the process that imported it."""

from __future__ import annotations

import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from forked_python import ForkedPython

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.capture import engine_session
from oscar_zoo.compute.job import compute_artifact
from oscar_zoo.compute.methods import tuned
from oscar_zoo.compute.options import ComputeOptions
from oscar_zoo.compute.select import trial_runner
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.engines.sglang.capture_program import capture_program
from oscar_zoo.engines.sglang.launch.environment import child_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def options(folder: Path) -> ComputeOptions:
    """With the defaults of `compute`, on little text, in float32."""
    return ComputeOptions(
        model=str(EXAMPLES / "models/tiny-qwen3-hard"),
        model_name="tiny-qwen3-hard",
        calib_data=EXAMPLES / "text/calibration.txt",
        calib_tokens=1100,
        recipe=ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92)),
        seq_len=550,
        heldout_tokens=4096,
        dtype="float32",
        fixed_clip=True,
        output_dir=folder / "out",
    )


def less_work() -> None:
    """Few steps and questions: how many there are is not compared."""
    tuned.STEPS = 20
    trial_runner.RECALL_ANSWERS = 8


def choose_in_engine(work: str, out: str) -> None:
    """In the fork: compute with two ranks and pickle the choice in the file `out`."""
    engine_session.subprocess = SimpleNamespace(Popen=ForkedPython, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    less_work()
    env = {
        **child_environment(os.environ, device="cpu", kernels=Path(work)),
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    }
    wanted = options(Path(work))
    program = capture_program(env)
    found = compute_artifact(replace(wanted, engine="sglang", tensor_parallel=2, program=program))
    assert found is not None
    choice: Choice | None = found.choice
    assert choice is not None
    told = {
        "rows": choice.rows,
        "method": choice.chosen.method,
        "base": choice.base,
        "refused": dict(choice.refused),
        "engine": found.manifest.fit.numerics.engine.name if found.manifest.fit.numerics else "",
        "left": [path.name for path in Path(work).iterdir()],
    }
    Path(out).write_bytes(pickle.dumps(told))
