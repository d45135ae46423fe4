"""An estimate of the duration of a computation, before it starts.

The work is counted from the model's outline and the token budget, without reading weights. The
speed of matrix products is measured on the device in a fraction of a second. Slow disks, downloads
and other users of the machine are left out, so the result only tells minutes from hours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.compute.capture.rows import MOST_TOKENS
from oscar_zoo.compute.methods import tuned
from oscar_zoo.compute.methods.table import TABLE
from oscar_zoo.compute.options import INSTEAD, LONGEST_DEFAULT, Job
from oscar_zoo.evaluate.shared import Phase, Progress
from oscar_zoo.models.memory import default_device
from oscar_zoo.models.model_source import ModelConfig, model_size

LOAD, CAPTURE, FIT, ROWS, TUNE, WRITE = "load", "capture", "fit", "rows", "tune", "write"
HELD_OUT, ERRORS, PERPLEXITY = "held-out rows", "errors", "perplexity"
RECALL, MORE_RECALL = "recall", "more recall"
GAINS, VERIFY = "bits by layer", "bits verified"
"""Names of phases."""
MEASURED_PASSES = {HELD_OUT: 1, ERRORS: 2, PERPLEXITY: 8, RECALL: 2, MORE_RECALL: 1}
"""How often `auto` reads as many tokens as are held out, in each of its phases; it drops candidates
early. About what SmolLM2-135M and the example model took on two cores."""
FAST_PASSES = {HELD_OUT: 1, ERRORS: 9}
"""As `MEASURED_PASSES`, with `fast`."""


USUAL_LAYERS = 36
"""Full-attention layers, where only shares of a usual computation are wanted."""
GAIN_TOKENS = 4096
"""Tokens on which the divergence is measured, where held-out text has more; a raise alone takes
half of them, and answers. On SmolLM2-135M that takes four of ten minutes (two cores, CPU)."""
VERIFY_PASSES = 2
"""Reads of as many tokens as are held out, to verify bits once."""


REFIT_PHASES = (Phase(FIT, "", 6), Phase(WRITE, "", 2))


def expected_phases(job: Job) -> tuple[Phase, ...]:
    """The phases of `compute_artifact(job)`, in order; their `seconds` are only shares."""
    phases = [Phase(LOAD, "", 5), Phase(CAPTURE, "tokens", 20), Phase(FIT, "", 5)]
    phases += [Phase(ROWS, "sequences", 10), Phase(TUNE, "steps", 20)] if tunes(job) else []
    if job.auto:
        passes = FAST_PASSES if job.fast else MEASURED_PASSES
        phases += [
            Phase(name, "layers" if name == ERRORS else "sequences", times)
            for name, times in passes.items()
        ]
    if job.wish is not None or may_raise(job):
        gains = 3 if job.wish is not None and not job.wish.measures else 2 * USUAL_LAYERS
        phases += [Phase(GAINS, "sequences", gains), Phase(VERIFY, "sequences", VERIFY_PASSES)]
    return (*phases, Phase(WRITE, "", 2))


def may_raise(job: Job) -> bool:
    """Whether 4 bits are measured where 2 fail their gates: layers get them, or the error names the
    budget that passes. It measures as much as if that had been asked for."""
    return job.auto and not (job.fast or job.allow_poor)


def tunes(job: Job) -> bool:
    """Whether the job asks for a method that is tuned."""
    if job.auto:
        return job.tune and not job.fast and not job.latent
    return TABLE[job.method].tune is not None


EFFICIENCY = 0.4
"""Share of the speed of one large matrix product that a whole forward pass reaches; measured."""
DISK_BYTES_PER_SECOND = 1e9
SECONDS_PER_FIT = 0.01
"""Seconds of all methods for one 128 x 128 matrix; one method was measured at 2.1 ms."""
ASSEMBLE_SECONDS = 1.0
"""Seconds to put the artifact together in memory and verify it, which belongs to the fit."""
WRITE_SECONDS = 3.0
"""Seconds to write the moments and the artifact, and to draw the report."""
TUNING_EFFICIENCY = {"cpu": 0.4, "cuda": 0.2}
"""Share of the speed of a large matrix product that tuning reaches, of the products alone."""
SECONDS_PER_STEP = {"cpu": 5e-4, "cuda": 1.5e-3}
"""Seconds of one tuning step of some layers, at least, however small they are."""
LONGEST_TUNING = 900.0
"""Seconds of tuning up to which `auto` tries it."""
START_SECONDS = 3.0
_PROBE = {"cpu": (512, 1024), "cuda": (4096, 4096)}
"""Rows and columns of the product that is timed: long enough for a clock, short enough to wait
for."""
_BYTES = {"float32": 4, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Estimate:
    """The phases of a computation, in order, and the bytes of weights to read, and to download if
    they are not on this machine."""

    phases: tuple[Phase, ...]
    weight_bytes: int

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(phase.seconds for phase in self.phases)


def estimate(job: Job, model: ModelConfig) -> Estimate | None:
    """Estimate the cost of `compute_artifact(job)`; `None` when the model's size is not known."""
    block, size = model.block, model_size(model.parsed, model.block.id)
    if size is None:
        return None
    stored = block.weights.dtype if block.weights and block.weights.dtype else "bfloat16"
    bytes_each = 1 if block.weights and block.weights.quantization else _BYTES.get(stored, 2)
    dtype = getattr(torch, stored if job.dtype == "auto" else job.dtype, torch.bfloat16)
    device = default_device() if job.device == "auto" else job.device
    model_speed = matmul_speed(device, dtype if bytes_each > 1 else torch.bfloat16)
    exact_speed = matmul_speed(device, torch.float32)
    longest = (block.rope and block.rope.max_position) or LONGEST_DEFAULT
    length = min(job.seq_len or LONGEST_DEFAULT, longest)
    layers, both = len(block.attention_layers), block.head_dim + block.v_head_dim
    # Operations of one token: one query over all keys; causal attention and two for each weight;
    # and the float64 outer products of its rows.
    attention = 2.0 * layers * block.num_q_heads * both * length
    forward = (2.0 * size.active + attention / 2) / (EFFICIENCY * model_speed)
    rows = 2 * block.num_q_heads + 4 * block.num_kv_heads
    sums = 2.0 * layers * rows * block.head_dim**2
    simulated = forward + attention / exact_speed
    fit = SECONDS_PER_FIT * (block.head_dim / 128) ** 3 * 2 * layers * block.num_kv_heads
    cost = {
        LOAD: START_SECONDS + size.parameters * bytes_each / DISK_BYTES_PER_SECOND,
        CAPTURE: job.calib_tokens * (forward + sums / (exact_speed / 2)),
        FIT: ASSEMBLE_SECONDS + (fit if job.auto else fit / 4),
    }
    if tunes(job):
        tuning = tuning_seconds(block, device)
        if not job.auto or tuning <= LONGEST_TUNING:
            cost |= {ROWS: min(job.calib_tokens, MOST_TOKENS) * forward, TUNE: tuning}
    if job.auto:
        passes = FAST_PASSES if job.fast else MEASURED_PASSES
        cost |= {name: job.heldout_tokens * times * simulated for name, times in passes.items()}
    wish = job.wish or (INSTEAD if may_raise(job) else None)
    if wish is not None:
        # A raise in one layer needs only the layers from there on, on average half of them, and a
        # third of what it reads are answers.
        raises = 2 * len(block.attention_layers) // 3 if wish.measures else 0
        rounds = 1 if wish.bits is not None and job.auto else 2
        cost[GAINS] = min(GAIN_TOKENS, job.heldout_tokens) * (3 + raises) * simulated
        cost[VERIFY] = job.heldout_tokens * VERIFY_PASSES * rounds * simulated
    cost[WRITE] = WRITE_SECONDS
    known = {phase.name: phase for phase in expected_phases(job)}
    phases = tuple(replace(known[name], seconds=seconds) for name, seconds in cost.items())
    return Estimate(phases, size.parameters * bytes_each)


def tuning_seconds(block: ModelBlock, device: str) -> float:
    """Time to tune both sides of all layers, in seconds. A CPU tunes one layer after the other, a
    GPU several at once."""
    kind, numel = torch.device(device).type, MOST_TOKENS * block.num_kv_heads * block.head_dim
    at_once = tuned.layers_at_once(torch.device(device), numel)
    calls = 2 * -(-len(block.attention_layers) // at_once)
    heads = 2 * len(block.attention_layers) * block.num_kv_heads
    flops = 8.0 * tuned.STEPS * tuned.BATCH * heads * block.head_dim**2  # four products
    speed = TUNING_EFFICIENCY[kind] * matmul_speed(device, torch.float32)
    return flops / speed + tuned.STEPS * calls * SECONDS_PER_STEP[kind]


def matmul_speed(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product on `device`, measured now."""
    rows, width = _PROBE[torch.device(device).type]
    left = torch.ones(rows, width, dtype=dtype, device=device)
    right = torch.ones(width, width, dtype=dtype, device=device)

    def run() -> float:
        began = time.perf_counter()
        (left @ right)[0, 0].item()  # reading a number waits for the device
        return max(time.perf_counter() - began, 1e-7)

    run()
    # The median, because the best run would hide that other programs use the machine.
    return 2.0 * rows * width * width / median(run() for _ in range(5))


class Meter:
    """Progress over several phases. The total of each phase is known when it starts, and may not be
    reached."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, phase: str, total: int, *, share: int = 1) -> None:
        """Begin a phase of `total` units, each done after `share` ticks."""
        self._phase, self._total, self._done, self._share = phase, total, 0, share
        if total:
            self._progress(0, total, phase)

    def tick(self) -> None:
        """Count one share of a unit."""
        self._done += 1
        self.at(self._done // self._share, self._total)

    def at(self, done: int, total: int) -> None:
        """Report that `done` units are finished."""
        self._progress(min(done, total), total, self._phase)
