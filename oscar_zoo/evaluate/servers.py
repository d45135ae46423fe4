"""Measure servers with an INT2 cache, and compare them with the model in this process. Servers run
first and one after the other, so that each has the whole GPU. The reference is loaded when they are
gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.specs import ServingRecipe, read_clip
from oscar_zoo.engines.metrics import recipe_of
from oscar_zoo.engines.requirements import require_serve
from oscar_zoo.engines.served_artifact import recipe_values
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.starting import (
    StartObserver,
    WantedServer,
    log_file,
    own_server,
)
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.launch.variants import ServerVariant, check_flags, variants
from oscar_zoo.engines.vllm.client import VllmClient
from oscar_zoo.errors import FlagRefused, ServerFailed, UsageError
from oscar_zoo.evaluate.in_process import DATA, TASKS, WINDOWS, find_model, load_subject
from oscar_zoo.evaluate.outcome import FailedServer, ServedArtifact, ServerReport, ServerRow
from oscar_zoo.evaluate.params import EvalParams, Servers, flag_of, given, listed, numbers
from oscar_zoo.evaluate.shared import fitting, read_text, ticking
from oscar_zoo.models import hardware
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry.artifacts import Artifact
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.artifact_model import ArtifactModel, both_sides, check_served
from oscar_zoo.serving.records import client_of

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import ModelBlock
    from oscar_zoo.evaluate.server_comparison import ServerQuestions, ServerRun
    from oscar_zoo.models.loading import Dtype

LENGTH, ANSWERS = 2000, 60
"""The defaults of the tokens of a text and of a conversation, and of recall questions."""
RESERVED_POSITIONS = 16
"""Positions of a model that a server keeps for itself."""
POOL_TOKENS = 1 << 18
"""Least size of the cache of a server on a GPU. A small cache starts quickly and leaves memory to
other processes."""


@dataclass(frozen=True)
class Served:
    """What is served: an artifact with both sides, a model, and the recipe in force, on a kind of
    device with the number of its first GPU; `dtype` is that of the server's weights."""

    params: EvalParams
    artifact: Artifact
    choice: ModelChoice
    recipe: ServingRecipe
    device: str
    gpu: int
    dtype: Dtype

    @classmethod
    def of(cls, params: EvalParams, observer: Observer) -> Served:
        artifact, choice = find_model("eval", params, observer)
        clip = read_clip(params.clips[0]) if params.clips else None
        recipe = ArtifactModel.of(artifact, choice).recipe.override(clip=clip)
        both_sides(artifact)
        device, gpu = hardware.pick_serving_device(params.device)
        if params.url is None:
            check_served(choice, params.revision, device)
        dtype: Dtype = params.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        return cls(params, artifact, choice, recipe, device, gpu, dtype)

    def flags(self, *ours: str) -> UserFlags:
        return UserFlags(self.params.engine_flags).after(f"--dtype={self.dtype}", *ours)

    def started_as(self, log: str, *ours: str) -> dict[str, Any]:
        """What a server takes, whatever its cache; `ours` are flags before those of the user."""
        return {
            "model": self.choice.source,
            "revision": self.params.revision,
            "device": self.device,
            "gpu": self.gpu,
            "log": log_file(log),
            "timeout": self.params.timeout,
            "flags": self.flags(*ours),
        }

    def wanted(self, log: str, *ours: str, **others: Any) -> WantedServer:
        """The same with the INT2 cache."""
        common = self.started_as(log, *ours) | others
        return WantedServer(verified=self.artifact.verified, recipe=self.recipe, **common)

    @cached_property
    def block(self) -> ModelBlock:
        """The model, by its configuration."""
        from oscar_zoo.models.model_source import read_model_config

        source, name = self.choice.source, self.choice.model_id
        return read_model_config(source, self.params.revision, name).readable

    @property
    def told(self) -> ServedArtifact:
        return ServedArtifact(self.artifact.label, self.artifact.digest)


def evaluate(params: EvalParams, observer: Observer = SILENT) -> ServerReport:
    """Ask the servers, then the model in this process, and compare their answers."""
    servers = variants_of(params)
    check_flags(UserFlags(params.engine_flags))
    running = running_of(params.url, params)
    if running is None:
        require_serve()
    text = read_text(params.data or DATA, "validation")
    served = Served.of(params, observer)
    questions = _questions(text, served)
    failures, rows = list[FailedServer](), tuple[ServerRow, ...]()
    if running is not None:
        check_recipe(running, served.recipe)
        runs = [_ask(running, questions, observer, radix=True)]
    else:
        runs, failures = ask_own_servers(servers, served, questions, observer)
    if runs:
        from oscar_zoo.evaluate.server_comparison import ReferenceRun, compare
        from oscar_zoo.evaluate.simulated_cache import CacheSpec
        from oscar_zoo.models.memory import memory_errors

        told = runs[0].facts.dtype  # that of the first server, for all
        known = replace(params, dtype=told if told in ("float32", "bfloat16") else served.dtype)  # type: ignore[arg-type]
        model = load_subject(known, served.choice, observer, longest=questions.longest)
        cache = CacheSpec(*both_sides(served.artifact), served.recipe)
        with memory_errors(model.block.id, model.device):
            reference = ReferenceRun(model, cache, questions, counter(observer, "reference", 0))
            rows = tuple(compare(run, reference) for run in runs)
        observer.begin((), timed=False)
    return ServerReport(
        model=served.choice.name,
        artifact=served.told,
        device=served.device,
        recipe=served.recipe,
        texts=len(questions.texts),
        length=questions.longest,
        shared_tokens=questions.shared,
        answers=questions.turns,
        servers=rows,
        failures=tuple(failures),
    )


def running_of(url: str | None, params: EvalParams, patience: float = 0) -> ServerClient | None:
    """A client of the server at `url`, by the engine that it runs."""
    client = None if url is None else client_of(url, timeout=patience or params.timeout)
    return VllmClient.instead_of(client, asked=params.engine == "vllm")


def variants_of(params: EvalParams) -> tuple[ServerVariant, ...]:
    """The servers to start, one after the other; none with `--url`."""
    lists = ("chunk", "page_size", "radix", "tp")
    changed = [name for name in given(params, Servers) if name in lists]
    if params.url is not None:
        if changed or params.sweep or params.full or params.engine_flags:
            hint = "leave out what is for a new one"
            raise UsageError("--url measures a server as it is.", hint=hint)
        return ()
    if params.sweep:
        if changed:
            option = flag_of(params, changed[0])
            raise UsageError(f"--sweep and {option} exclude each other.", hint="give one of them")
        return sweep(params.device, full=params.full)
    chunks, pages = numbers("--chunk", params.chunk), numbers("--page-size", params.page_size)
    tps, switches = numbers("--tp", params.tp), dict.fromkeys(listed(params.radix))
    if not {*switches} <= {"on", "off"}:
        raise UsageError(
            f"--radix {params.radix!r} is not on, off, or both.", hint="for example --radix on,off"
        )
    return variants(chunks, pages, [one == "on" for one in switches], tps, full=params.full)


def sweep(device: str | None, *, full: bool = False) -> tuple[ServerVariant, ...]:
    on_gpu = hardware.pick_serving_device(device, check=False)[0] != "cpu"
    two = on_gpu and len(hardware.visible(hardware.gpus())) > 1
    return variants((512, 8192), (1, 16), (True, False), (1, 2) if two else (1,), full=full)


def _questions(text: str, served: Served) -> ServerQuestions:
    from oscar_zoo.evaluate.caches import encoder
    from oscar_zoo.evaluate.server_comparison import make_questions
    from oscar_zoo.models.loading import load_tokenizer

    params = served.params
    length = fitting((params.length or LENGTH) + RESERVED_POSITIONS, served.block)
    encode = encoder(load_tokenizer(served.choice.source, revision=params.revision))
    return make_questions(
        encode(text),
        encode,
        tasks=params.tasks or TASKS,
        exact=served.recipe.windows,
        length=length - RESERVED_POSITIONS,
        windows=params.windows or WINDOWS,
        answers=params.answers or ANSWERS,
    )


def ask_own_servers(
    wanted: Sequence[ServerVariant],
    served: Served,
    questions: ServerQuestions,
    observer: Observer,
) -> tuple[list[ServerRun], list[FailedServer]]:
    """Start one server after the other and ask each; the failure of one of several is a result."""
    runs: list[ServerRun] = []
    failures: list[FailedServer] = []
    tokens = max(POOL_TOKENS, 2 * questions.longest)
    pool = () if served.device == "cpu" else (f"--max-total-tokens={tokens}",)
    for variant in wanted:
        environment = variant.environment(served.device)
        ours = ("--oscar-canary-minutes=0", *variant.flags, *pool)
        server = served.wanted("eval-server", *ours, environment=environment)
        try:
            with own_server(server, StartObserver(str(variant), observer)) as started:
                observer.begin((), timed=False)
                runs.append(_ask(started.client, questions, observer, radix=variant.radix))
        except ServerFailed as error:
            if len(wanted) == 1 or isinstance(error, FlagRefused):
                raise
            failures.append(FailedServer(str(variant), error))
            text = f"{variant}: {error.message}"
            observer.note(Note("server.failed", text, {"code": error.code, "hint": error.hint}))
    return runs, failures


def check_recipe(client: ServerClient, recipe: ServingRecipe) -> None:
    told = client.facts().recipe
    for name, value in recipe_of(recipe_values(recipe)).items():
        if told.get(name, value) != value:
            raise UsageError(
                f"the server has {name} {told[name]}, the artifact's recipe says {value}.",
                hint="give the artifact that it serves, or its clip ratios with --clip",
            )


def _ask(
    client: ServerClient, questions: ServerQuestions, observer: Observer, *, radix: bool
) -> ServerRun:
    from oscar_zoo.evaluate.server_comparison import ask

    requests = (len(questions.texts) + questions.turns) * (2 if radix else 1)
    run = ask(client, questions, counter(observer, "requests", requests))
    observer.begin((), timed=False)
    return run


def counter(observer: Observer, label: str, total: int) -> Callable[[], None]:
    """As `ticking`, for what has begun now."""
    observer.advance(label, 0, total)
    return ticking(lambda done, total, _: observer.advance(label, done, total), total)
