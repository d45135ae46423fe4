"""The servers of a benchmark, one after the other: of our own, or such as run already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.server_answers import check_recipe
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.starting import (
    StockServer,
    WantedServer,
    log_file,
    own_server,
    stock_server,
)
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import UsageError
from oscar_zoo.observer import Observer
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.records import client_of
from oscar_zoo.serving.running import StartObserver

LABELS = {"int2": "INT2", "bf16": "BF16", "fp8": "FP8"}


@dataclass(frozen=True)
class BenchmarkServers:
    """What is served, and where.

    Attributes:
        artifact: of the INT2 cache; it holds both sides.
        choice, revision: the model.
        recipe: serving recipe in force.
        device, gpu: kind of device, and number of the first GPU.
        flags: engine flags, the same for every server.
        timeout: seconds that the start of a server may take.
        patience: seconds that one answer may take.
        urls: servers that run already, by cache.
    """

    artifact: Artifact
    choice: ModelChoice
    revision: str | None
    recipe: ServingRecipe
    device: str
    gpu: int
    flags: UserFlags
    timeout: float
    patience: float
    urls: dict[str, str]

    @contextmanager
    def serving(self, cache: str, observer: Observer) -> Iterator[ServerClient]:
        """A client of the server with this cache; a server of our own ends with the block."""
        if cache in self.urls:
            client = client_of(self.urls[cache], timeout=self.patience)
            self._check(cache, client)
            yield client
            return
        news = StartObserver(f"{self.choice.name} with a cache of {LABELS[cache]}", observer)
        log = log_file(f"eval-{cache}")
        started = (
            own_server(
                WantedServer(
                    model=self.choice.source,
                    revision=self.revision,
                    verified=self.artifact.verified,
                    recipe=self.recipe,
                    device=self.device,
                    log=log,
                    timeout=self.timeout,
                    gpu=self.gpu,
                    flags=self.flags,
                ),
                news,
            )
            if cache == "int2"
            else stock_server(
                StockServer(
                    cache=cache,  # type: ignore[arg-type]
                    model=self.choice.source,
                    revision=self.revision,
                    device=self.device,
                    log=log,
                    timeout=self.timeout,
                    gpu=self.gpu,
                    flags=self.flags,
                ),
                news,
            )
        )
        with started as server:
            observer.begin((), timed=False)
            key = server.administration_key
            yield ServerClient(server.url, timeout=self.patience, key=key)

    def version(self, installed: str) -> str:
        """The release of SGLang that serves; `installed` here, unless a server runs already."""
        if not self.urls:
            return installed
        versions = {client_of(url).facts().version for url in self.urls.values()}
        if len(versions) > 1:
            raise UsageError(
                f"the servers run SGLang {' and '.join(sorted(versions))}.",
                hint="compare servers of one release",
            )
        return versions.pop()

    def _check(self, cache: str, client: ServerClient) -> None:
        if cache == "int2":
            check_recipe(client, self.recipe)
        told = client.facts().cache_dtype
        if (told == "int2") != (cache == "int2"):
            raise UsageError(
                f"{client.url} has a cache of {told}, not of {LABELS[cache]}.",
                hint="--url is the INT2 server, --base-url the BF16 server",
            )
