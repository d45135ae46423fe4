"""Put many clients on an INT2 server of our own, and see what does not hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from oscar_zoo.app.bench_device import pick_device
from oscar_zoo.app.bench_subject import SubjectNames, find_subject
from oscar_zoo.bench import load_run
from oscar_zoo.bench.load_clients import Load
from oscar_zoo.bench.load_run import LoadLimits, LoadReport
from oscar_zoo.engines.requirements import require_serve
from oscar_zoo.engines.sglang.launch import starting
from oscar_zoo.engines.sglang.launch.starting import WantedServer, log_file, own_server
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.serving.running import StartObserver

RANDOM_WEIGHTS = ("--load-format=dummy", "--skip-tokenizer-init")
"""Flags of an engine that fills a model with random numbers."""


@dataclass(frozen=True)
class LoadRequest:
    """What to put on which server.

    Attributes:
        target: name or folder of the artifact; `None` makes one, which needs `dummy_weights`.
        dummy_weights: model whose shape is measured with random weights, or `None`.
        load: what the clients do.
        growth: bytes that memory may grow between the middle and the end of the run.
        model: model to run, or `None` for the artifact's base model.
        revision: commit of a model on a hub.
        extra: engine flags.
        device: `cpu` or `cuda[:N]`; `None` for the first GPU, else the CPU.
        timeout: seconds for the start, and for the answer to one request.
        hubs: hubs to use in place of the configured ones.
        offline: ask no hub.
        again: the command line that takes the FOLDER of a model, for errors.
    """

    load: Load
    target: str | Path | None = None
    dummy_weights: str | Path | None = None
    growth: int = 256 << 20
    model: str | None = None
    revision: str | None = None
    extra: tuple[str, ...] = ()
    device: str | None = None
    timeout: float = 1800.0
    hubs: tuple[str, ...] = ()
    offline: bool = False
    again: str = field(default="--model FOLDER", compare=False)


def load(request: LoadRequest, observer: Observer = SILENT) -> LoadReport:
    """Start an INT2 server, let the clients work with it, and end it with SIGTERM."""
    flags = UserFlags(request.extra)
    names = SubjectNames(request.target, request.dummy_weights, request.model, request.again)
    names.check()
    require_serve()
    longest = request.load.longest + request.load.new_tokens
    with starting.private_folder() as private:
        sources = Sources(request.hubs, offline=request.offline)
        subject = find_subject(names, sources, private, observer, longest=longest)
        device, gpu = pick_device(subject, request.device, flags, observer)
        wanted = WantedServer(
            model=subject.source,
            revision=request.revision,
            verified=subject.artifact.verified,
            recipe=subject.model.recipe,
            device=device,
            log=log_file("bench-load"),
            timeout=request.timeout,
            gpu=gpu,
            flags=flags.after(*RANDOM_WEIGHTS) if subject.random_weights else flags,
        )
        gpus = 0 if device == "cpu" else flags.sizes().tensor_parallel or 1
        with own_server(wanted, StartObserver(subject.model.choice.name, observer)) as started:
            report = load_run.measure(
                started.child,
                started.client,
                request.load,
                LoadLimits(growth=request.growth),
                partial(_tell, observer),
                gpus=range(gpu, gpu + gpus),
            )
    return replace(report, model=subject.model.choice.name)


def _tell(observer: Observer, done: int, total: int, label: str) -> None:
    """Pass progress on; the label of the load itself counts requests, so it is another each
    time."""
    if total:
        observer.advance("clients at work", done, total, "s")
    else:
        observer.advance(label, 0, 0)
