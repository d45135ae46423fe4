"""Start a stock engine with an INT2 cache: from a request to a server that is ready, or to the
command that would start it.

First whatever can be refused without an artifact, then the artifact, then what it does not go
together with, and only then a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Annotated, Literal, Self

from pydantic import Field

from oscar_zoo import paths
from oscar_zoo.artifact.artifact_folder import choose_artifact
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import Digest, Level, says
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines import served_artifact
from oscar_zoo.engines.requirements import require_serve, require_vllm
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.sglang.front.access import parse_origin
from oscar_zoo.engines.sglang.front.middleware import PATH
from oscar_zoo.engines.sglang.launch import plan, preflight, starting, user_flags
from oscar_zoo.engines.sglang.launch.plan import HARMFUL_VARIABLES, client_url
from oscar_zoo.engines.sglang.launch.server import Server, check_words
from oscar_zoo.engines.sglang.launch.starting import (
    StartObserver,
    WantedServer,
    own_server,
    read_facts,
)
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.engines.vllm.command import WARNING, CommandOfVllm
from oscar_zoo.errors import (
    AmbiguousName,
    NetworkError,
    OscarZooError,
    PortInUse,
    ServerFailed,
    UsageError,
)
from oscar_zoo.models import hardware
from oscar_zoo.next_step import Compute
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import Artifact, open_folder, open_named
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries
from oscar_zoo.registry.targets import ModelChoice, ModelTarget, NameTarget, PathTarget
from oscar_zoo.registry.verify import artifacts_at
from oscar_zoo.serving import records
from oscar_zoo.serving.artifact_model import check_served
from oscar_zoo.serving.params import Engine, ServeParams
from oscar_zoo.serving.prepared import Prepared, check_asked_gpus, check_wish, prepare
from oscar_zoo.serving.records import DISK_BYTES, HOST_TOKENS, Entry, ServerRecord, key_for
from oscar_zoo.serving.servers import check_port, serve_log

Missing = Callable[
    [ServeParams, ModelTarget | NameTarget, ModelChoice | None, OscarZooError, Observer], Artifact
]
"""What is done where a search found no artifact: one is computed, or the error is raised, with the
next step in it. `ModelChoice` is the model to serve it with, if the user named one."""


def start(params: ServeParams, observer: Observer, missing: Missing) -> RunningServer:
    params.check()
    key = key_for(params.expose, params.api_key_file, make=params.require_key)
    origins = tuple(map(parse_origin, params.allow_origin))
    device, gpu = check_machine(params)
    model, artifact = find(params, observer, missing, device)
    prepared = prepare(params, model, artifact, device, gpu, observer)
    wanted = WantedServer(
        **prepared.options(params),
        other=CommandOfVllm.asked(params, prepared),
        host=params.expose or plan.LOOPBACK,
        verified=artifact.verified,
        log=serve_log(params.port),
        timeout=params.timeout,
        api_key=key,
        origins=origins,
        engine_api=params.engine_api,
        environment={"HF_HUB_OFFLINE": "1"} if params.offline else {},
    )
    return launch(params, prepared, wanted, observer)


def check_machine(params: ServeParams) -> tuple[str, int]:
    """The device to serve on, and the number of its first GPU; refuses what this machine or SGLang
    cannot do, whatever the artifact is."""
    flags = UserFlags(params.of_sglang)
    size = flags.sizes()
    (require_vllm if params.engine == "vllm" else require_serve)()
    check_place(params)
    device, gpu = hardware.pick_serving_device(params.device)
    check_wish(params.drafts, flags, device)
    preflight.check_devices(Layout.of_flags(size, tp=size.tensor_parallel or 1), device, gpu)
    return device, gpu


def check_place(params: ServeParams) -> None:
    """Refuse a port that is taken, but first a name that nobody has an artifact for."""
    host = params.expose or plan.LOOPBACK
    try:
        check_port(host, params.port, lambda port: params.command_line(port=port))
    except PortInUse:
        target, makes = targets.parse(params.target), params.compute or params.ask
        if isinstance(target, NameTarget) and (target.choice is None or not makes):
            with contextlib.suppress(AmbiguousName, NetworkError):
                known_entries([target], Sources(params.hubs, offline=params.offline))
        raise


def find(
    params: ServeParams, observer: Observer, missing: Missing, device: str
) -> tuple[ModelChoice | None, Artifact]:
    """The model that the user named, if any, and the artifact to serve with it."""
    target = targets.parse(params.target)
    again = params.command_line(model="FOLDER")
    model = targets.parse_given_model(params.model, observer, again=again)
    choice = model or target.choice
    check_served(choice, params.revision, device, printed=params.print_only and not params.device)
    check_asked_gpus(choice, device, UserFlags(params.of_sglang).sizes())
    if isinstance(target, PathTarget):
        return model, open_folder(_one_of_tree(target, model), observer)
    try:
        return model, open_named(target, Sources(params.hubs, offline=params.offline), observer)
    except OscarZooError as error:
        return model, missing(params, target, model, error, observer)


def _one_of_tree(target: PathTarget, model: ModelChoice | None) -> Path:
    """The folder of the one artifact at or below a path, or of the one for `model`."""
    place, found = artifacts_at(target.path)
    if len(found) == 1:
        return found[0]
    if model is None:
        one = quote(path_text(found[0]))
        hint = f"say which with --model MODEL, or name one of them, for example {one}"
        raise UsageError(f"{target} holds {len(found)} artifacts.", hint=hint)
    wanted = model.source if Path(model.source).is_dir() else model.model_id
    return choose_artifact(place, found, wanted)


@dataclass(kw_only=True)
class _Served:
    """What is said of a server, whether it runs or could be started."""

    engine: Engine
    artifact: Annotated[str, says("The artifact that is served.")]
    digest: Digest
    model: Annotated[str, says("Absolute path or hub id.")]
    recipe: ServingRecipe
    device: Annotated[str, says("cpu or cuda.")]
    tensor_parallel: Annotated[int, says("GPUs, or parts of a CPU, that share the model.", ge=1)]
    drafts: Annotated[str | None, says("What --drafts chose and why; null without it.")]
    warnings: Annotated[tuple[str, ...], says("Codes of verification, and sentences.")]


@dataclass(kw_only=True)
class ServeCommand(_Served):
    """What oscar-zoo serve --print prints: how a shell starts the server."""

    argv: Annotated[tuple[str, ...], says("The program and its arguments.")]
    env: Annotated[dict[str, str], says("Variables to set.")]
    unset: Annotated[tuple[str, ...], says("Variables to remove: they lower a guard.")]
    schema: Literal["oscar-zoo.serve-command/1"] = "oscar-zoo.serve-command/1"


def command(params: ServeParams, observer: Observer, missing: Missing) -> ServeCommand:
    """The command for stock SGLang with this plugin, which reads and checks the artifact itself.
    Starts no server, and needs no SGLang."""
    params.check()
    device, gpu = hardware.pick_serving_device(params.device, check=False)
    check_wish(params.drafts, UserFlags(params.of_sglang), device)
    try:
        model, artifact = find(params, observer, missing, device)
    except NetworkError as error:
        words = [str(params.target), *(word for hub in params.hubs for word in ("--hub", hub))]
        fetch = f"when a hub answers, fetch it once (oscar-zoo pull {shlex.join(words)}), or "
        if error.suggestions or isinstance(error.next_step, Compute):
            fetch = ""  # nobody is known to have it
        error.advice = f"--print needs its digest: {fetch}name a folder that holds it"
        raise
    prepared = prepare(params, model, artifact, device, gpu, observer)
    folder = None if artifact.installed else str(artifact.path.absolute())
    source = ArtifactSource(artifact=None if folder else artifact.label, folder=folder)
    planned = plan.plan(
        plan.ServeOptions(**prepared.options(params)),
        os.environ,
        rotations=source,
        sha256=served_artifact.digest_to_read(source, artifact.verified),
        kernels=starting.kernels_folder(),
    )
    vllm = CommandOfVllm.asked(params, prepared)
    if params.flags and not vllm:
        check_words(planned)
    planned = vllm.shown(planned) if vllm else planned
    replaced = (WARNING,) if vllm else user_flags.replaced_backends(prepared.flags)
    warnings = (*replaced, *user_flags.check_environment(planned.env))
    for warning in warnings:
        observer.note(Note("server.environment", warning))
    env = dict(planned.sets)
    if artifact.installed and os.environ.get(paths.CACHE):
        env[paths.CACHE] = str(paths.cache_dir())  # absolute, for a shell in any folder
    if params.offline:
        env["HF_HUB_OFFLINE"] = "1"
    return ServeCommand(
        argv=planned.argv,
        env=env,
        unset=tuple(name for name in HARMFUL_VARIABLES if name not in env),
        artifact=artifact.label,
        digest=artifact.verified.digest,
        model=prepared.model,
        recipe=prepared.recipe,
        device=device,
        tensor_parallel=prepared.tensor_parallel,
        drafts=prepared.drafts,
        warnings=(*artifact.warnings, *warnings),
        engine=params.engine,
    )


COUNT_SECONDS = 2.0
"""Seconds that a server may take to say how many requests it answers."""
ANSWER_SECONDS = 60.0
"""Seconds that a server that is ready may take to describe itself."""
NO_MODEL = re.compile(
    r"couldn't connect to|is not a local folder|RepositoryNotFound|LocalEntryNotFound"
)
"""What transformers and the hub's client say when no hub has a model, or none can be asked."""
NO_ACCESS = re.compile(
    r"GatedRepo|gated repo|401 Client Error|403 Client Error|Unauthorized|[Aa]ccess to model \S+ is"
)
"""What they say when a model needs a token: the environment of a server holds none."""
Side = Literal["k", "v"]
Count = Annotated[int, Field(ge=0)]


@dataclass(kw_only=True)
class ReadyServer(_Served):
    """What oscar-zoo serve prints when the server answers; it goes on running, or with --detach in
    the background."""

    model_id: Annotated[str, says("The id that requests name.")]
    level: Level
    version: Annotated[str, says("Of the engine.")]
    ranks: Annotated[int, says("Of the whole server, with those of --pp and --dp.", ge=1)]
    bits: Annotated[float, says("With scales and offsets.", alias="bits_per_element")]
    code_bits: Annotated[str, says("2, or of keys/values (4/2), or lists of layers (4,2x35/2).")]
    windows: Annotated[
        dict[Literal["sink", "recent"], Count], says("First and last tokens stay uncompressed.")
    ]
    clip: Annotated[dict[Side, float | str], says("0 is none; a text has those of layers.")]
    capacity: Annotated[Count, says("Tokens that the cache holds.", alias="capacity_tokens")]
    plain_capacity: Annotated[
        Count | None,
        says(
            "That a BF16 cache of the same memory would hold; null where a flag limits the"
            " capacity.",
            alias="bf16_capacity_tokens",
        ),
    ]
    requests: Annotated[Count, Field(alias="max_running_requests")]
    host_tokens: Annotated[Count, HOST_TOKENS] = 0
    disk_bytes: Annotated[Count, DISK_BYTES] = 0
    context: Annotated[Count | None, says("Of a request, where known.", alias="context_tokens")]
    curl: Annotated[str, says("A request that a shell runs as it stands.")]
    key_file: Annotated[Path | None, says("Private file with the key that requests need, or null.")]
    stop_command: Annotated[str, says("The command that ends the server.", alias="stop")]
    url: Annotated[str, says("Of its API, as http://HOST:PORT/v1.")]
    log: Annotated[Path, says("What the engine prints.")]
    seconds: Annotated[float, says("That the start took.", ge=0)]
    pid: Annotated[int, says("Of the process that supervises the server.", ge=0)]
    schema: Literal["oscar-zoo.serve/1"] = "oscar-zoo.serve/1"


class RunningServer(ReadyServer):
    """A server that is ready, and `facts`, what it says of itself. Use it as a context manager, or
    call `stop`."""

    def __init__(
        self, facts: ReadyServer, child: Server, client: ServerClient, entry: Entry, ends: ExitStack
    ) -> None:
        super().__init__(**vars(facts))
        self.facts = facts
        self._child, self._client, self._entry, self._ends = child, client, entry, ends

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.__exit__(kind, error, trace)

    def wait(self, draining: Callable[[int | None], None] = lambda requests: None) -> None:
        """Block until the server ends by itself; SIGTERM lets running requests finish, and
        `draining` is called before they do, with their number where the server tells it.

        Raises:
            ServerFailed: the server ended, with the cause from its log.
            SystemExit: SIGTERM to this process; the server has drained.
            KeyboardInterrupt: Ctrl-C.
        """
        status = self._child.wait(lambda: draining(self._running_requests()))
        self._entry.ended(self._child.cause().text, status)
        raise self._child.failure("the server ended")

    def _running_requests(self) -> int | None:
        try:
            return int(self._client.get(PATH)["requests"])
        except (ServerFailed, KeyError):
            return None

    def stop(self) -> None:
        """End the server and everything that it started; nothing happens the second time."""
        self._ends.close()


def launch(
    params: ServeParams, prepared: Prepared, wanted: WantedServer, observer: Observer
) -> RunningServer:
    source, artifact, began = prepared.choice.source, prepared.artifact, time.monotonic()
    record = ServerRecord.of_this_process(
        host=wanted.host,
        port=wanted.port,
        model=prepared.choice.model_id,
        artifact=artifact.label,
        log=wanted.log,
        engine=params.engine,
    )
    with ExitStack() as stack:
        entry = stack.enter_context(records.registered(record))
        try:
            started = stack.enter_context(own_server(wanted, StartObserver(source, observer)))
            client = ServerClient(
                started.url, timeout=ANSWER_SECONDS, key=started.administration_key
            )
            told = wanted.other.facts(client) if wanted.other else read_facts(client)
        except ServerFailed as error:
            raise with_next_step(error, source, params.command_line(model="DIR")) from None
        client.timeout = COUNT_SECONDS
        entry.keep_keys(wanted.api_key, started.administration_key)
        tiers = {name: told.get(name, 0) for name in ("host_tokens", "disk_bytes")}
        entry.change(state="ready", model=told["model_id"], **tiers)
        observer.begin((), timed=False)
        key_file = params.api_key_file or (entry.record.key_file if wanted.api_key else None)
        ready = ReadyServer(
            **told,
            model=source,
            artifact=artifact.label,
            digest=artifact.verified.digest,
            level=artifact.verified.level,
            recipe=prepared.recipe,
            device=prepared.device,
            tensor_parallel=prepared.tensor_parallel,
            ranks=Layout.of_flags(wanted.flags.sizes(), tp=prepared.tensor_parallel).gpus,
            drafts=prepared.drafts,
            curl=curl_line(client_url(entry.record.url), told["model_id"], key_file),
            key_file=None if key_file is None else key_file.absolute(),
            stop_command=f"oscar-zoo stop {wanted.port}",
            url=entry.record.url,
            log=wanted.log,
            seconds=round(time.monotonic() - began, 1),
            pid=entry.record.process.pid,
            warnings=artifact.warnings,
        )
        return RunningServer(ready, started.child, client, entry, stack.pop_all())


def curl_line(url: str, model: str, key_file: Path | None) -> str:
    """A request that a shell runs as it stands, to the API at `url`. A key is read from `key_file`
    when it runs, and reaches curl through a pipe: arguments are visible to every local user."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    key = header = ""
    if key_file is not None:
        place = shlex.quote(str(key_file.absolute()))
        key, header = f"printf 'Authorization: Bearer %s' \"$(cat {place})\" | ", "-H @- "
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    address = shlex.quote(f"{url}/chat/completions")
    return f"{key}curl {address} {header}-H 'Content-Type: application/json' -d {data}"


def with_next_step(error: ServerFailed, source: str, again: str) -> ServerFailed:
    """The same error; with the next step where the model `source` could not be fetched."""
    if Path(source).is_dir():
        return error
    if NO_ACCESS.search(error.message):
        step = (
            f"the server has no token of yours; fetch {source} with it: hf download {source},"
            " then serve it with --offline"
        )
    elif NO_MODEL.search(error.message):
        step = f"if {source} lies in a folder: {again}"
    else:
        return error
    return ServerFailed(error.message, hint=f"{step}; {error.hint}")
