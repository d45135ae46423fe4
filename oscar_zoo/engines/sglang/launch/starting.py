"""The one way to start a server of our own: stage the rotations, plan the command, start it, watch
it, and ask what it is.

`serve`, `bench load` and `eval` all start their servers here. A server loads a private copy that is
written from verified arrays, never a downloaded file. The plugin compares the digest of the copy
with the bytes that it read, and it is checked again when the server is ready, so the verified bytes
are the served ones. A server is gone when the block ends, whatever happens inside. Nothing here
prints; an observer hears of the start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from oscar_zoo import paths
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import artifact_digest, file_digest, read_file
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines.served_artifact import LATENTS
from oscar_zoo.engines.server_client import INT2, ServerClient
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.sglang.front.access import FrontSettings
from oscar_zoo.engines.sglang.front.middleware import PATH as FRONT
from oscar_zoo.engines.sglang.launch import plan, server, user_flags
from oscar_zoo.engines.sglang.launch.server_log import PhaseReader
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.sizing import device_flags
from oscar_zoo.errors import DigestMismatchError, ServerFailed, VerificationFailed
from oscar_zoo.models.chat_template import check_template_of
from oscar_zoo.observer import Note, Observer

PREFIX = "oscar-zoo-serve-"
FILES = {"k": "k_rotation.pt", "v": "v_rotation.pt"}
StockCache = Literal["bf16", "fp8"]
BACKENDS = {"cuda": "flashinfer", "cpu": "torch_native"}
"""Attention backend of a stock server, by device."""
NO_PLUGIN = "none"
"""Value of SGLANG_PLUGINS that names no plugin."""
CACHE_TYPES: dict[StockCache, str] = {"bf16": "auto", "fp8": "fp8_e4m3"}
"""Values of `--kv-cache-dtype`; `auto` is the type of the weights."""
PLAIN_BYTES = 2
"""Bytes of one number in a BF16 cache."""


class StartObserver:
    """Tells an observer how the start of a server for `label` goes on."""

    def __init__(self, label: str, observer: Observer) -> None:
        self._label, self._observer = label, observer

    def starting(self, log: Path, engine: str) -> None:
        text = f"Starting {engine} for {self._label} (log: {log})"
        self._observer.note(Note("server.starting", text, {"log": str(log)}, kind="step"))

    def phase(self, name: str, seconds: float) -> None:
        """About twice a second: what the server is doing, and the seconds since its start."""
        self._observer.advance(name, int(seconds), 0, "s")

    def warn(self, text: str) -> None:
        self._observer.note(Note("server.environment", text))


class OtherEngine(Protocol):
    def started(self, planned: plan.LaunchPlan) -> plan.LaunchPlan:
        """The plan of its server, out of that for SGLang."""
        ...

    def facts(self, client: ServerClient) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class WantedServer(plan.ServeOptions):
    """A server to start, with a verified artifact that holds K and V. Its start, and one answer to
    its client, may take `timeout` seconds; `environment` has variables beside those of this
    process; for `origins` and `engine_api` see `FrontSettings`. `other` is an engine in
    place of SGLang."""

    verified: Verified
    log: Path
    timeout: float
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    origins: tuple[str, ...] = ()
    engine_api: bool = False
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    other: OtherEngine | None = None


@dataclass(frozen=True)
class StockServer:
    """Stock SGLang without our plugin, on loopback: what an INT2 server is compared with. Fields as
    those of `WantedServer`; `cache` is the type of its cache."""

    cache: StockCache
    model: str
    revision: str | None
    device: str
    log: Path
    timeout: float
    gpu: int = 0
    flags: UserFlags = field(default_factory=UserFlags)


@dataclass(frozen=True)
class StartedServer:
    """A server that is ready: its process, where a client on this machine reaches it (without
    `/v1`), and a client with its administration key, which only a server of ours has."""

    child: server.Server
    url: str
    client: ServerClient
    administration_key: str | None = field(default=None, repr=False)


@contextlib.contextmanager
def own_server(wanted: WantedServer, news: StartObserver) -> Iterator[StartedServer]:
    if Path(wanted.model).is_dir() and wanted.flags.text("--load-format") != "dummy":
        from oscar_zoo.models.loading import check_weights  # imports transformers

        check_weights(Path(wanted.model))
    check_template_of(wanted.model, wanted.revision)
    with private_folder() as private:
        folder = private / "rotations"
        digest = stage_rotations(wanted.verified, folder)
        front = FrontSettings.make(
            wanted.host, wanted.origins, wanted.api_key, engine_api=wanted.engine_api
        )
        settings, engine = write_front(private, front)
        port = wanted.port or plan.free_port()
        ranks = plan.rank_port(wanted.flags, wanted.tensor_parallel, listens=port)
        options = replace(wanted, port=port, flags=wanted.flags.after(*ranks))
        planned = plan.plan(
            options,
            {**os.environ, **wanted.environment},
            rotations=ArtifactSource(folder=str(folder)),
            sha256=digest,
            kernels=kernels_folder(),
            copy_of=wanted.verified.digest,
            config_file=engine,
            front=str(settings),
        )
        warnings = user_flags.check_environment(planned.env)
        for warning in (*user_flags.replaced_backends(wanted.flags), *warnings):
            news.warn(warning)
        planned = planned if wanted.other is None else wanted.other.started(planned)
        planned = replace(planned, secrets=front.secrets)
        with _healthy(planned, wanted.log, wanted.timeout, news) as (child, url):
            check_unchanged(folder, digest)
            key = front.administration_key
            client = ServerClient(url, timeout=wanted.timeout, key=key)
            if client.get(FRONT).get("front") != front.id:
                raise ServerFailed(
                    "the server runs without its front, so every route of it would be open.",
                    hint="report this with its log",
                )
            yield StartedServer(child, url, client, key)


@contextlib.contextmanager
def stock_server(wanted: StockServer, news: StartObserver) -> Iterator[StartedServer]:
    planned = _stock_plan(wanted, plan.free_port())
    with _healthy(planned, wanted.log, wanted.timeout, news) as (child, url):
        yield StartedServer(child, url, ServerClient(url, timeout=wanted.timeout))


def _stock_plan(wanted: StockServer, port: int) -> plan.LaunchPlan:
    flags = {
        "--model-path": wanted.model,
        "--host": plan.LOOPBACK,
        "--port": str(port),
        "--attention-backend": BACKENDS[wanted.device],
        "--kv-cache-dtype": CACHE_TYPES[wanted.cache],
        **device_flags(wanted.device),
    }
    argv = plan.server_words(wanted.device, wanted.gpu, wanted.revision, flags)
    argv += [*plan.rank_port(wanted.flags, listens=port), *wanted.flags.words]
    kernels = kernels_folder()
    env = plan.child_environment(os.environ, device=wanted.device, kernels=kernels)
    sets = plan.set_variables(device=wanted.device, kernels=kernels) | {"SGLANG_PLUGINS": NO_PLUGIN}
    return plan.LaunchPlan(tuple(argv), env | sets, plan.url(plan.LOOPBACK, port), sets)


@contextlib.contextmanager
def _healthy(
    planned: plan.LaunchPlan, log: Path, timeout: float, news: StartObserver
) -> Iterator[tuple[server.Server, str]]:
    """The child of a plan once it is healthy, and where a client on this machine reaches it."""
    news.starting(log, planned.engine)
    phases = PhaseReader(log)
    with server.running(planned, log) as child:
        child.wait_until_healthy(timeout, lambda seconds: news.phase(phases.current(), seconds))
        yield child, plan.client_url(planned.url)


def log_file(name: str) -> Path:
    folder = paths.logs_dir()
    durable.make_folders(folder, mode=0o700)
    return folder / f"{name}.log"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new 0700 folder in the temporary directory; gone afterwards. Its name holds the process id
    and the pid namespace, so that the next start removes what a killed process left, a key file
    maybe, and keeps the folders of other containers."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_namespace()}-{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kernels_folder() -> Path:
    """The folder of compiled kernels, which stay from one start to the next; only this user may
    enter it."""
    folder = paths.cache_dir() / "kernels"
    durable.refuse_links(folder.parent, folder.name)
    with durable.storage_errors(f"cannot make {folder}", cache=True):
        durable.check_private(folder.parent)
        durable.make_folders(folder, mode=0o700)
        durable.check_private(folder, open_to=0o077)
    return folder


def _sweep(parent: Path) -> None:
    ours = f"{PREFIX}{_namespace()}-"
    for folder in parent.glob(f"{ours}[0-9]*-*"):
        pid = folder.name.removeprefix(ours).partition("-")[0]
        with contextlib.suppress(OSError):
            if (
                folder.lstat().st_uid == os.getuid()
                and pid.isdigit()
                and not Path("/proc", pid).exists()
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def stage_rotations(verified: Verified, folder: Path) -> str:
    """Write the canonical K and V files of `verified`, or the one of latents, into the new folder
    `folder`, with mode 0400 in 0700, and return the digest over them, `sha256:<hex>`."""
    if verified.k is None or verified.v is None:
        raise VerificationFailed(
            "an artifact to serve needs a K and a V rotation.", hint="give a folder with a K/V pair"
        )
    folder.mkdir(mode=0o700)
    files = {FILES["k"]: verified.k, FILES["v"]: verified.v}
    for name, rotations in ({LATENTS: verified.k} if verified.k is verified.v else files).items():
        durable.write_new(folder / name, rotation_bytes(rotations), mode=0o400)
    return folder_digest(folder)


def write_front(folder: Path, front: FrontSettings) -> tuple[Path, Path]:
    """Write the settings of a server's front, and the engine's configuration file with the keys
    that the engine knows; both with mode 0600."""
    settings, engine = folder / "front.json", folder / "engine.yaml"
    durable.write_new(settings, front.to_bytes(), mode=0o600)
    keys = {"api-key": front.engine_key, "admin-api-key": front.administration_key}
    lines = [f'{name}: "{key}"\n' for name, key in keys.items() if key is not None]
    durable.write_new(engine, "".join(lines).encode(), mode=0o600)
    return settings, engine


def folder_digest(folder: Path) -> str:
    """Digest of the staged files as they are on disk now."""
    names = [LATENTS] if (folder / LATENTS).exists() else FILES.values()
    return artifact_digest([file_digest(name, read_file(folder / name)) for name in names])


def check_unchanged(folder: Path, digest: str) -> None:
    now = folder_digest(folder)
    if now != digest:
        raise DigestMismatchError.for_content(
            "the served copy of the rotations", want=digest, got=now
        )


def read_facts(client: ServerClient) -> dict[str, Any]:
    """What a running server says of itself in `/server_info` and `/v1/models`: `model_id`, the id
    that requests name; `capacity` in tokens and concurrent `requests`, over all data-parallel
    workers; `plain_capacity`, tokens that a BF16 cache of the same memory would hold, `None` where
    a flag limited the capacity; what the host's memory and files hold; and its settings."""
    info, models = client.get("/server_info"), client.get("/v1/models")
    try:
        model = models["data"][0]
        states = [state[INT2] for state in info["internal_states"]]
        recipe, memories = states[0]["recipe"], [state["memory"] for state in states]
        bits = float(states[0]["bits_per_element"])
        plain = sum(_plain_tokens(memory, bits) for memory in memories)
        clips = {side: recipe[f"{side}_clip"] for side in ("k", "v")}
        return {
            "model_id": str(model["id"]),
            "engine": "sglang",
            "version": str(info["version"]),
            "capacity": sum(int(memory["token_slots"]) for memory in memories),
            "plain_capacity": plain if info.get("max_total_tokens") is None else None,
            "bits": bits,
            "windows": {name: int(recipe[name]) for name in ("sink", "recent")},
            "code_bits": str(recipe["bits"]),
            "clip": {k: v if isinstance(v, str) else float(v) for k, v in clips.items()},
            "requests": sum(int(memory["request_rows"]) - 1 for memory in memories),
            "host_tokens": sum(int(memory["host_tokens"]) for memory in memories),
            "disk_bytes": max(int(memory["disk_bytes"]) for memory in memories),
            "context": int(model["max_model_len"]) if model.get("max_model_len") else None,
        }
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"{client.url} does not describe its INT2 cache: {type(error).__name__} {error}.",
            hint="see its log",
        ) from None


def _plain_tokens(memory: Mapping[str, Any], bits: float) -> int:
    elements = round(8 * int(memory["slot_bytes"]) / bits)
    return int(memory["found_bytes"]) // (PLAIN_BYTES * elements)
