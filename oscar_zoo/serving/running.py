"""A server that runs, in the hands of the process that started it: its start as news to an
`Observer`, its record, and its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.front.middleware import PATH
from oscar_zoo.engines.sglang.launch.server import Server
from oscar_zoo.engines.sglang.launch.starting import (
    ReadyFacts,
    WantedServer,
    own_server,
    read_facts,
)
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import Note, Observer
from oscar_zoo.serving import records
from oscar_zoo.serving.prepared import Prepared
from oscar_zoo.serving.records import Entry, ServerRecord

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


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready. Use it as a context manager, or call `stop`.

    Attributes:
        url: its API, `http://HOST:PORT/v1`.
        log: everything that the engine printed.
        pid: the process that supervises the server, which is this one.
        artifact, digest: label and digest of the artifact.
        level: how thoroughly the artifact was verified.
        model: the model as it was loaded: a folder or a hub id.
        tensor_parallel: ranks that share the model, each on a GPU or a part of the CPU.
        ranks: of the whole server: `tensor_parallel` times the groups that share the layers, times
            the replicas.
        drafts: what `drafts` chose for speculative decoding, in words; `None` without it.
        facts: what the server says of itself.
        key_file: private file with the key that requests need while the server runs; `None` when
            they need none.
        seconds: how long the start took.
        warnings: codes of verification, and sentences about the status of the artifact.
    """

    url: str
    log: Path
    pid: int
    artifact: str
    digest: str
    level: str
    model: str
    recipe: ServingRecipe
    device: str
    tensor_parallel: int
    ranks: int
    drafts: str | None
    facts: ReadyFacts
    key_file: Path | None
    seconds: float
    warnings: tuple[str, ...]
    _child: Server = field(repr=False)
    _client: ServerClient = field(repr=False)
    _entry: Entry = field(repr=False)
    _ends: ExitStack = field(repr=False)

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
        status = self._child.wait(lambda: draining(self._requests()))
        self._entry.ended(self._child.cause().text, status)
        raise self._child.failure("the server ended")

    def _requests(self) -> int | None:
        """How many requests are being answered."""
        try:
            return int(self._client.get(PATH)["requests"])
        except (ServerFailed, KeyError):
            return None

    def stop(self) -> None:
        """End the server and everything that it started; nothing happens the second time."""
        self._ends.close()


def launch(
    wanted: WantedServer, prepared: Prepared, observer: Observer, *, again: str, drafts: str | None
) -> RunningServer:
    """Start `wanted`, which serves what was `prepared`, and wait until it is ready."""
    try:
        return _started(wanted, prepared, observer, drafts)
    except ServerFailed as error:
        raise with_next_step(error, prepared.choice.source, again) from None


def _started(
    wanted: WantedServer, prepared: Prepared, observer: Observer, drafts: str | None
) -> RunningServer:
    began, artifact = time.monotonic(), prepared.artifact
    record = ServerRecord.of_this_process(
        host=wanted.host,
        port=wanted.port,
        model=prepared.choice.model_id,
        artifact=artifact.label,
        log=wanted.log,
    )
    with ExitStack() as stack:
        entry = stack.enter_context(records.registered(record))
        news = StartObserver(prepared.choice.source, observer)
        started = stack.enter_context(own_server(wanted, news))
        client = ServerClient(started.url, timeout=ANSWER_SECONDS, key=started.administration_key)
        facts = read_facts(client)
        client.timeout = COUNT_SECONDS
        entry.keep_keys(wanted.api_key, started.administration_key)
        entry.change(state="ready", model=facts.model)
        observer.begin((), timed=False)
        return RunningServer(
            url=entry.record.url,
            log=wanted.log,
            pid=entry.record.process.pid,
            artifact=artifact.label,
            digest=artifact.verified.digest,
            level=artifact.verified.level,
            model=prepared.choice.source,
            recipe=prepared.recipe,
            device=prepared.device,
            tensor_parallel=prepared.tensor_parallel,
            ranks=Layout.of_flags(wanted.flags.sizes(), tp=prepared.tensor_parallel).gpus,
            drafts=drafts,
            facts=facts,
            key_file=entry.record.key_file if wanted.api_key else None,
            seconds=time.monotonic() - began,
            warnings=artifact.warnings,
            _child=started.child,
            _client=client,
            _entry=entry,
            _ends=stack.pop_all(),
        )


class StartObserver:
    """Passes the news of `own_server` on; its methods are those of `StartNews`."""

    def __init__(self, label: str, observer: Observer) -> None:
        self._label, self._observer = label, observer

    def starting(self, log: Path) -> None:
        text = f"Starting SGLang for {self._label} (log: {log})"
        self._observer.note(Note("server.starting", text, {"log": str(log)}, kind="step"))

    def phase(self, name: str, seconds: float) -> None:
        self._observer.advance(name, int(seconds), 0, "s")

    def warn(self, text: str) -> None:
        self._observer.note(Note("server.environment", text))


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
