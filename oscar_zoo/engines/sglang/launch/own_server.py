"""The one way to start a server of our own: stage the rotations, plan the command, start, watch.

`serve`, `bench load` and `eval` all start their servers here. A server is gone when the block
ends, whatever happens inside. Nothing here prints; the caller hears of the start through
`StartNews`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from oscar_zoo import paths
from oscar_zoo.artifact.durable import make_folders
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.front.middleware import PATH as FRONT
from oscar_zoo.engines.sglang.front.settings import FrontSettings
from oscar_zoo.engines.sglang.launch import flag_refusals, plan, ports, server, staging
from oscar_zoo.engines.sglang.launch.phases import PhaseReader
from oscar_zoo.engines.sglang.launch.rank_port import rank_port
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import ServerFailed
from oscar_zoo.models.chat_template import check_template_of


class StartNews(Protocol):
    """Hears what happens while a server starts."""

    def starting(self, log: Path) -> None:
        """The server is about to start and writes to `log`."""

    def phase(self, name: str, seconds: float) -> None:
        """About twice a second: what the server is doing, and the seconds since its start."""

    def warn(self, text: str) -> None:
        """A warning about the flags or the environment, as one sentence."""


@dataclass(frozen=True)
class WantedServer:
    """A server to start.

    Attributes:
        model: local folder or hub id, at `revision`.
        verified: the artifact; it must hold K and V.
        recipe: serving recipe in force.
        device: `cpu` or `cuda`.
        log: file for everything that the server prints.
        timeout: seconds that its start may take, and that one answer to `client` may take.
        gpu: number of the first GPU.
        tensor_parallel: number of GPUs, unless `flags` say one.
        flags: engine flags of the user.
        host: address to listen on.
        port: port to listen on, or `None` for any free one.
        api_key: key that requests must carry, or `None`.
        origins: origins of pages that may ask and read.
        engine_api: see `FrontSettings`.
        name: how the server calls the artifact to those who ask.
        served_name: what requests call the model, unless `flags` say it.
        environment: variables for the server beside those of this process.
    """

    model: str
    revision: str | None
    verified: Verified
    recipe: ServingRecipe
    device: str
    log: Path
    timeout: float
    gpu: int = 0
    tensor_parallel: int = 1
    flags: UserFlags = field(default_factory=UserFlags)
    host: str = plan.LOOPBACK
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    origins: tuple[str, ...] = ()
    engine_api: bool = False
    name: str | None = None
    served_name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class StartedServer:
    """A server that is ready.

    Attributes:
        child: the process.
        url: where a client on this machine reaches it, without `/v1`.
        client: a client that carries the administration key of the server.
        administration_key: this key; `None` where the server is not one of ours.
    """

    child: server.Server
    url: str
    client: ServerClient
    administration_key: str | None = field(default=None, repr=False)


@contextmanager
def own_server(wanted: WantedServer, news: StartNews) -> Iterator[StartedServer]:
    """Start `wanted` and wait until it is healthy."""
    if Path(wanted.model).is_dir() and wanted.flags.text("--load-format") != "dummy":
        from oscar_zoo.models.loading import check_weights  # imports transformers

        check_weights(Path(wanted.model))
    check_template_of(wanted.model, wanted.revision)
    with staging.private_folder() as private:
        staged = private / "rotations"
        digest = staging.stage_rotations(wanted.verified, staged)
        front = FrontSettings.make(
            wanted.host, wanted.origins, wanted.api_key, engine_api=wanted.engine_api
        )
        options = _options(wanted, staged, digest, *staging.write_front(private, front))
        planned = plan.plan(options, {**os.environ, **wanted.environment})
        planned = replace(planned, secrets=front.secrets)
        warnings = flag_refusals.check_environment(planned.env)
        for warning in (*flag_refusals.replaced_backends(wanted.flags), *warnings):
            news.warn(warning)
        news.starting(wanted.log)
        with server.running(planned, wanted.log) as child:
            child.wait_until_healthy(wanted.timeout, follow_start(wanted.log, news))
            staging.check_unchanged(staged, digest)
            url = ports.client_url(planned.url)
            key = front.administration_key
            client = ServerClient(url, timeout=wanted.timeout, key=key)
            _check_front(client, front)
            yield StartedServer(child, url, client, key)


def log_file(name: str) -> Path:
    """The log called `name`, in a folder that only this user may enter."""
    folder = paths.state_dir() / "logs"
    make_folders(folder, mode=0o700)
    return folder / f"{name}.log"


def follow_start(log: Path, news: StartNews) -> Callable[[float], None]:
    """A callback for the seconds of a start that adds the phase shown by `log`."""
    phases = PhaseReader(log)
    return lambda seconds: news.phase(phases.current(), seconds)


def _check_front(client: ServerClient, front: FrontSettings) -> None:
    """Raise `ServerFailed` unless the settings `front` are in force in the server."""
    if client.get(FRONT).get("front") != front.id:
        raise ServerFailed(
            "the server runs without its front, so every route of SGLang would be open.",
            hint="report this with its log",
        )


def _options(
    wanted: WantedServer, staged: Path, digest: str, front: Path, engine: Path
) -> plan.ServeOptions:
    port = ports.free_port() if wanted.port is None else wanted.port
    ranks = rank_port(wanted.flags, wanted.tensor_parallel, listens=port)
    return plan.ServeOptions(
        model=wanted.model,
        revision=wanted.revision,
        rotations=ArtifactSource(folder=str(staged)),
        rotations_sha256=digest,
        recipe=wanted.recipe,
        kernels=staging.kernels_folder(),
        device=wanted.device,
        gpu=wanted.gpu,
        tensor_parallel=wanted.tensor_parallel,
        host=wanted.host,
        port=port,
        config_file=engine,
        front=str(front),
        copy_of=wanted.verified.digest,
        name=wanted.name,
        served_name=wanted.served_name,
        flags=wanted.flags.after(*ranks),
    )
