"""A server that runs, in the hands of the process that started it: its start as news to an
`Observer`, its record, and its end."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

from pydantic import Field

from oscar_zoo.artifact.outcome import Digest, Level, says
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.front.middleware import PATH
from oscar_zoo.engines.sglang.launch.plan import client_url
from oscar_zoo.engines.sglang.launch.server import Server
from oscar_zoo.engines.sglang.launch.starting import (
    StartObserver,
    WantedServer,
    own_server,
    read_facts,
)
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import Observer
from oscar_zoo.serving import records
from oscar_zoo.serving.params import ServeParams
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
Side = Literal["k", "v"]
Count = Annotated[int, Field(ge=0)]


@dataclass
class ReadyServer:
    """What oscar-zoo serve prints when the server answers; it goes on running, or with --detach in
    the background."""

    model_id: Annotated[str, says("The id that requests name.")]
    model: Annotated[str, says("The model as it was loaded: a folder or a hub id.")]
    artifact: Annotated[str, says("The artifact that is served.")]
    digest: Digest
    level: Level
    recipe: ServingRecipe
    sglang: Annotated[str, says("Version.")]
    device: Annotated[str, says("cpu or cuda.")]
    tensor_parallel: Annotated[
        int, says("Ranks that share the model, each on a GPU or on a part of the CPU.", ge=1)
    ]
    ranks: Annotated[int, says("Of the whole server, with those of --pp and --dp.", ge=1)]
    drafts: Annotated[
        str | None, says("What --drafts chose for speculative decoding and why; null without it.")
    ]
    bits: Annotated[
        float, says("Of the cache, scales and offsets included.", alias="bits_per_element")
    ]
    code_bits: Annotated[
        str,
        says(
            "Bits of a code: 2, or of keys and values (4/2), with a list where layers differ"
            " (4,2x35/2)."
        ),
    ]
    windows: Annotated[
        dict[Literal["sink", "recent"], Count], says("First and last tokens stay uncompressed.")
    ]
    clip: Annotated[
        dict[Side, float | str],
        says("Clip ratios; 0 means no clipping. A text lists those of layers that differ."),
    ]
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
    context: Annotated[
        Count | None,
        says("Of the longest request; null where the engine does not say.", alias="context_tokens"),
    ]
    curl: Annotated[str, says("A request that a shell runs as it stands.")]
    key_file: Annotated[Path | None, says("Private file with the key that requests need, or null.")]
    stop_command: Annotated[str, says("The command that ends the server.", alias="stop")]
    url: Annotated[str, says("Of its API, as http://HOST:PORT/v1.")]
    log: Annotated[Path, says("What the engine prints.")]
    seconds: Annotated[float, says("That the start took.", ge=0)]
    pid: Annotated[int, says("Of the process that supervises the server.", ge=0)]
    warnings: Annotated[
        tuple[str, ...],
        says("Codes of verification, and sentences about the status of the artifact."),
    ]
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
    )
    with ExitStack() as stack:
        entry = stack.enter_context(records.registered(record))
        try:
            started = stack.enter_context(own_server(wanted, StartObserver(source, observer)))
            client = ServerClient(
                started.url, timeout=ANSWER_SECONDS, key=started.administration_key
            )
            told = read_facts(client)
        except ServerFailed as error:
            raise with_next_step(error, source, params.command_line(model="DIR")) from None
        client.timeout = COUNT_SECONDS
        entry.keep_keys(wanted.api_key, started.administration_key)
        entry.change(state="ready", model=told["model_id"])
        observer.begin((), timed=False)
        kept = entry.record.key_file if wanted.api_key else None
        key_file = params.api_key_file or kept
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
    """A request that a shell runs as it stands, to the API at `url`.

    A key is read from `key_file` when it runs, and reaches curl through a pipe: arguments are
    visible to every local user.
    """
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
