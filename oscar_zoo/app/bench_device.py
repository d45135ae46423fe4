"""The device that a benchmark runs on, and refusals of what does not fit there or takes hours.

On a CPU the memory is judged as `serve` judges it. `serve` also takes a large model on a CPU that
nobody named, because a server may be asked for one answer; a benchmark asks for thousands.
"""

from __future__ import annotations

from dataclasses import replace

from oscar_zoo.app.bench_subject import Subject
from oscar_zoo.engines.sglang import concurrency
from oscar_zoo.engines.sglang.flags import ITEMSIZES, SizeFlags
from oscar_zoo.engines.sglang.launch import preflight
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import UnsupportedMachine
from oscar_zoo.models.hardware import pick_serving_device
from oscar_zoo.observer import Note, Observer
from oscar_zoo.serving.memory import needs_of_choice
from oscar_zoo.serving.prepared import ArtifactModel, stored_weights_of

LARGE = 2 * 10**9
"""Bytes of weights from which a CPU is measured only when it was named."""


def pick_device(
    subject: Subject, wanted: str | None, flags: UserFlags, observer: Observer
) -> tuple[str, int]:
    """Kind and number of the device that `subject` is measured on.

    Args:
        wanted: as the user wrote it, or `None` for the first GPU, else the CPU.
    """
    device, gpu = pick_serving_device(wanted)
    if device == "cpu":
        if wanted is None:
            _check_named(subject, observer)
        _check_memory(subject, flags.sizes())
    return device, gpu


def usual_requests(model: ArtifactModel, size: SizeFlags, device: str, gpu: int) -> int:
    """The number of concurrent requests of an INT2 server with these flags on this machine."""
    if model.geometry is None:
        return concurrency.UNKNOWN
    return _demand(model, size, device, gpu).usual_requests


def _check_named(subject: Subject, observer: Observer) -> None:
    name = subject.model.choice.name
    needs = needs_of_choice(subject.model.choice)
    weights = None if needs is None else needs.weights
    if weights is not None and weights.nbytes > LARGE:
        raise UnsupportedMachine(
            f"no GPU was found, and {name} on a CPU takes hours"
            f" ({weights.nbytes / 1e9:.1f} GB of weights).",
            hint="to do it all the same: --device cpu",
        )
    if subject.random_weights:
        observer.note(_on_cpu(name))


def _on_cpu(model: str) -> Note:
    """The remark, made before the servers start, that no GPU was found for `model`."""
    text = (
        f"no GPU was found: {model} runs on the CPU, which takes long for long prompts; Ctrl-C"
        " stops it, and --device cpu says that it is meant."
    )
    return Note("bench.on_cpu", text, {"model": model})


def _check_memory(subject: Subject, size: SizeFlags) -> None:
    """Refuse a model whose weights do not fit on the CPU; raises `NotEnoughMemory`."""
    model = subject.model
    if model.geometry is None:
        return
    weights, kind = stored_weights_of(model.choice, model.config)
    demand = replace(
        _demand(model, replace(size, requests=1), "cpu", 0),
        weights=weights,
        itemsize=None if kind is None else ITEMSIZES.get(kind, 2),
    )
    preflight.check_memory(demand, preflight.free_memory("cpu", 0, 1))


def _demand(model: ArtifactModel, size: SizeFlags, device: str, gpu: int) -> preflight.ServerDemand:
    assert model.geometry is not None, "the callers look at it"
    parallel = size.tensor_parallel or 1
    layout = concurrency.Layout.of_flags(size, tp=parallel)
    return preflight.ServerDemand(
        model=model.choice.name,
        geometry=model.geometry,
        windows=model.recipe.windows,
        weights=None,
        itemsize=None,
        device=device,
        gpu=gpu,
        tensor_parallel=parallel,
        flags=size,
        memory=concurrency.gpu_memory(gpu, layout.gpus),
    )
