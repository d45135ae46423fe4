"""What a benchmark measures: artifact, model, servers, and the questions with their settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo import paths
from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.app.benchmark_request import BenchmarkRequest, generation_of, seeds_of
from oscar_zoo.app.benchmark_servers import BenchmarkServers
from oscar_zoo.app.server_answers import serving_dtype
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang.compat.versions import sglang_version
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.evaluate.benchmarks.tasks import Benchmark
from oscar_zoo.models.hardware import device_name, pick_serving_device
from oscar_zoo.observer import Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.prepared import ArtifactModel, both_sides, model_for

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.harness import LoadedTask
    from oscar_zoo.evaluate.benchmarks.run import Settings


@dataclass(frozen=True)
class PreparedTask:
    """A benchmark before anything is asked.

    Attributes:
        task: its questions.
        settings: how they are asked.
        model: that answers, by its configuration.
        place: the file of kept answers.
        identity: what decides the answers, beside what each question says itself.
    """

    task: LoadedTask
    settings: Settings
    model: ModelBlock
    place: Path
    identity: dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        artifact: of the INT2 cache; it holds both sides.
        choice: the model.
        recipe: serving recipe in force.
        servers: that answer.
        engine: release of SGLang.
        hardware: that servers of our own run on; `None` for servers that run already.
    """

    artifact: Artifact
    choice: ModelChoice
    recipe: ServingRecipe
    servers: BenchmarkServers
    engine: str
    hardware: str | None


def find_subject(request: BenchmarkRequest, flags: UserFlags, observer: Observer) -> Subject:
    """Find artifact, model and servers; nothing is started."""
    from oscar_zoo.models.model_hub import check_fetchable

    named = targets.parse_given_model(request.model, observer, again=request.again)
    artifact = open_artifact(targets.parse(request.artifact), Sources(request.hubs), observer)
    choice = model_for(artifact, named, observer, again=request.again)
    recipe = ArtifactModel.of(artifact, choice).recipe.override(clip=request.clip)
    both_sides(artifact)
    check_fetchable(choice.source, request.revision)
    device, gpu = pick_serving_device(request.device)
    dtype = serving_dtype(request.dtype, device)
    urls = {"int2": request.url, "bf16": request.base_url}
    servers = BenchmarkServers(
        artifact=artifact,
        choice=choice,
        revision=request.revision,
        recipe=recipe,
        device=device,
        gpu=gpu,
        flags=flags.after(f"--dtype={dtype}"),
        timeout=request.timeout,
        patience=max(request.timeout, float(request.max_new_tokens or 32768)),
        urls={cache: url for cache, url in urls.items() if url is not None},
    )
    if request.url is not None:
        return Subject(artifact, choice, recipe, servers, servers.version(""), None)
    gpus = flags.sizes().tensor_parallel or 1
    hardware = f"{gpus} x {device_name(device, gpu)}" if gpus > 1 else device_name(device, gpu)
    return Subject(artifact, choice, recipe, servers, sglang_version(), hardware)


def prepare(
    one: Benchmark, request: BenchmarkRequest, subject: Subject, observer: Observer
) -> PreparedTask:
    """Load the questions, decide how they are asked, and where answers are kept."""
    from oscar_zoo.evaluate.benchmarks.data import read_rows
    from oscar_zoo.evaluate.benchmarks.harness import harness_version, load_task
    from oscar_zoo.evaluate.benchmarks.run import Settings
    from oscar_zoo.models.config_file import read_generation_config
    from oscar_zoo.models.model_source import inspect_model

    observer.advance(f"reading {one.name}", 0, 0)
    rows = None if request.data is None else read_rows(request.data)
    task = load_task(one, rows, limit=request.limit)
    choice = subject.choice
    authors = read_generation_config(choice.source, request.revision)
    block = inspect_model(choice.source, revision=request.revision, model_id=choice.model_id)
    context = block.rope.max_position if block.rope else None
    generation = generation_of(request, one, authors, context)
    settings = Settings(
        generation,
        seeds_of(request, one, generation),
        limit=request.limit,
        concurrency=request.concurrency,
        run_code=request.run_code,
    )
    identity = {
        "task": one.name,
        "data": task.revision,
        "model": choice.model_id,
        "model_config": block.config_sha256,
        "model_revision": block.revision,
        "artifact": subject.artifact.digest,
        "recipe": subject.recipe.model_dump(mode="json"),
        "harness": harness_version().version,
        "engine": subject.engine,
        "hardware": subject.hardware,
        "flags": [] if request.url else list(subject.servers.flags.words),
        "urls": subject.servers.urls,
    }
    name = f"{one.name}-{sha256_hex(strict_json.canonical_bytes(identity))[:12]}"
    return PreparedTask(
        task, settings, block, folder_of(subject) / f"{name}.answers.jsonl.gz", identity
    )


def folder_of(subject: Subject) -> Path:
    """Where answers and scores of an artifact are kept."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", subject.artifact.id or subject.choice.name)
    return paths.state_dir() / "benchmarks" / f"{name}-{subject.artifact.digest[7:19]}"
