"""What servers answer: one that runs already, or servers of our own, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.starting import WantedServer, log_file, own_server
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.launch.variants import ServerVariant
from oscar_zoo.engines.sglang.layer_values import one_or_text
from oscar_zoo.engines.sglang.served_artifact import recipe_values
from oscar_zoo.errors import FlagRefused, OscarZooError, ServerFailed, UsageError
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.running import StartObserver

if TYPE_CHECKING:
    from oscar_zoo.evaluate.server_tasks import ServerQuestions, ServerRun
    from oscar_zoo.models.loading import Dtype

POOL_TOKENS = 1 << 18
"""Least size of the cache of a server on a GPU. A small cache starts quickly and leaves memory to
other processes."""


@dataclass(frozen=True)
class ServerSubject:
    """What is served, with what, and what it is asked.

    Attributes:
        artifact: it holds both sides.
        choice: the model.
        revision: of a model on a hub.
        recipe: serving recipe in force.
        device, gpu: kind of device, and number of the first GPU.
        dtype: of the server's weights.
        questions: what every server is asked.
    """

    artifact: Artifact
    choice: ModelChoice
    revision: str | None
    recipe: ServingRecipe
    device: str
    gpu: int
    dtype: Dtype
    questions: ServerQuestions


@dataclass(frozen=True)
class ServerFailure:
    """A server that gave no answers.

    Attributes:
        variant: which one.
        error: why.
    """

    variant: ServerVariant
    error: OscarZooError


def ask_running(client: ServerClient, subject: ServerSubject, observer: Observer) -> ServerRun:
    """Ask a server that runs already."""
    check_recipe(client, subject.recipe)
    return _ask(client, subject.questions, observer, radix=True)


def ask_own_servers(
    wanted: Sequence[ServerVariant],
    subject: ServerSubject,
    flags: UserFlags,
    timeout: float,
    observer: Observer,
) -> tuple[list[ServerRun], list[ServerFailure]]:
    """Start one server after the other and ask each; the failure of one of several is a result."""
    runs: list[ServerRun] = []
    failures: list[ServerFailure] = []
    for variant in wanted:
        server = _wanted_server(variant, subject, flags, timeout)
        try:
            with own_server(server, StartObserver(str(variant), observer)) as started:
                observer.begin((), timed=False)
                runs.append(_ask(started.client, subject.questions, observer, radix=variant.radix))
        except ServerFailed as error:
            if len(wanted) == 1 or isinstance(error, FlagRefused):
                raise
            failures.append(ServerFailure(variant, error))
            text = f"{variant}: {error.message}"
            observer.note(Note("server.failed", text, {"code": error.code, "hint": error.hint}))
    return runs, failures


def _wanted_server(
    variant: ServerVariant, subject: ServerSubject, flags: UserFlags, timeout: float
) -> WantedServer:
    tokens = max(POOL_TOKENS, 2 * subject.questions.longest)
    pool = () if subject.device == "cpu" else (f"--max-total-tokens={tokens}",)
    return WantedServer(
        log=log_file("eval-server"),
        environment=variant.environment(subject.device),
        model=subject.choice.source,
        revision=subject.revision,
        verified=subject.artifact.verified,
        recipe=subject.recipe,
        device=subject.device,
        flags=flags.after(*variant.flags, f"--dtype={subject.dtype}", *pool),
        timeout=timeout,
        gpu=subject.gpu,
    )


def check_recipe(client: ServerClient, recipe: ServingRecipe) -> None:
    """Refuse a running server whose settings differ from those of the reference."""
    values = recipe_values(recipe)
    assert values.k_clip is not None and values.v_clip is not None
    ours = {
        "sink": values.sink,
        "recent": values.recent,
        "bits": str(values.bits),
        "k_clip": one_or_text(values.k_clip),
        "v_clip": one_or_text(values.v_clip),
    }
    told = client.facts().recipe
    for name, value in ours.items():
        if told.get(name, value) != value:
            raise UsageError(
                f"the server has {name} {told[name]}, the artifact's recipe says {value}.",
                hint="give the artifact that it serves, or its clip ratios with --clip",
            )


def _ask(
    client: ServerClient, questions: ServerQuestions, observer: Observer, *, radix: bool
) -> ServerRun:
    from oscar_zoo.evaluate.server_tasks import ask, requests_of

    run = ask(client, questions, counter(observer, "requests", requests_of(questions, radix=radix)))
    observer.begin((), timed=False)
    return run


def counter(observer: Observer, label: str, total: int) -> Callable[[], None]:
    """A callback that counts one more of `total`."""
    done = 0
    observer.advance(label, done, total)

    def tick() -> None:
        nonlocal done
        done += 1
        observer.advance(label, done, total)

    return tick


def serving_dtype(wanted: Dtype, device: str) -> Dtype:
    """The type in which a server keeps weights when `wanted` is `auto`: bfloat16, or float32 on a
    CPU."""
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else "bfloat16"
