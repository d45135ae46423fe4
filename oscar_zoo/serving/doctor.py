"""What `doctor` finds: one finding per thing that can be right or wrong, none of them with a secret
in it.

Whatever may hang (hubs, the driver of the GPU) runs in parallel and ends within `SECONDS`. Nothing
heavy is imported: versions come from the metadata of packages, their supported ranges from the
metadata of this one, the GPU from its driver.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import computed_field

from oscar_kernels.chips import CHIPS, LOWEST, cards_by_state, kernel_path, state
from oscar_zoo import paths
from oscar_zoo.artifact.outcome import HIDDEN, State, says
from oscar_zoo.engines.requirements import SERIES, vllm_version
from oscar_zoo.engines.sglang.compat.releases import BEYOND, FIRST, installed_from, sglang_version
from oscar_zoo.engines.sglang.launch.preflight import HOST_SHARE
from oscar_zoo.engines.sglang.refusals import SALTED
from oscar_zoo.errors import HubTimeout, MissingDependency, NetworkError, OscarZooError, UsageError
from oscar_zoo.models import hardware
from oscar_zoo.next_step import Install
from oscar_zoo.registry import login
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import Limits, in_parallel, within
from oscar_zoo.registry.hubs.http import is_nearby
from oscar_zoo.registry.hubs.table import HUBS, HubKind
from oscar_zoo.registry.store import Store
from oscar_zoo.serving.params import ENGINES, DoctorParams
from oscar_zoo.version import __version__

SECONDS = 8.0
"""The longest that anything here may take."""
Rows = list[dict[str, str | int | bool | None]]
LITTLE_DISK = 1_000_000_000
"""Less free space than this is a warning."""
_LIBRARIES = {
    "huggingface_hub": "every hub but folders",
    "modelscope-hub": "publishing to ModelScope",
    "torch": "compute, eval and serve",
    "transformers": "compute and eval",
    "triton": "INT2 kernels on a GPU",
}
_EXTRAS = {"modelscope-hub": "modelscope", "torch": "compute", "transformers": "compute"}
_ENDPOINTS = tuple(name for kind in HUBS.values() for name in kind.endpoints)
_SETTINGS = (
    *(f"OSCAR_ZOO_{name}" for name in ("CACHE", "CONFIG", "DATA", "STATE", "HUB", "OFFLINE")),
    *_ENDPOINTS,
    *"MODELSCOPE_PREFER_AI_SITE HF_HUB_OFFLINE HF_HOME HF_TOKEN_PATH".split(),
    *"HF_HUB_DISABLE_IMPLICIT_TOKEN HTTPS_PROXY HTTP_PROXY ALL_PROXY NO_PROXY".split(),
    *"https_proxy http_proxy all_proxy no_proxy".split(),
    *"SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE".split(),
)
"""Variables whose values are shown; no others are."""
_LANGUAGES = {"cuda": "CUDA C++", "triton": "Triton"}

MISSING: Any = object()
_MAYBE: dict[str, Any] = {"exclude_if": lambda value: value is MISSING}
"""Of what is said of some kinds of findings only."""


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that was looked at. What is said beyond the first five keys depends on its kind."""

    topic: Literal["version", "folder", "setting", "token", "hub", "machine"]
    name: Annotated[str, says("What was looked at.")]
    state: State
    detail: Annotated[str, says("What was seen.")]
    step: Annotated[str | None, says("What to do about it.", serialization_alias="next")] = None
    essential: Annotated[bool, *HIDDEN] = False
    """Whether every command needs it."""
    version: Annotated[str | None, says("Installed; null where it is not.", **_MAYBE)] = MISSING
    needed_by: Annotated[str, says("Commands that need the library.", **_MAYBE)] = MISSING
    supported: Annotated[str | None, says("Versions; null where any will do.", **_MAYBE)] = MISSING
    path: Annotated[str, says("Of a file or folder.", **_MAYBE)] = MISSING
    exists: Annotated[bool, says("Whether there is a configuration.", **_MAYBE)] = MISSING
    free_bytes: Annotated[int | None, says("Of its disk or memory, if known.", **_MAYBE)] = MISSING
    writable: Annotated[bool, says("Whether it can be written.", **_MAYBE)] = MISSING
    private: Annotated[bool, says("Whether only its owner can write to it.", **_MAYBE)] = MISSING
    artifacts: Annotated[int, says("How many there are.", **_MAYBE)] = MISSING
    value: Annotated[str, says("Of a variable, without secrets.", **_MAYBE)] = MISSING
    hub: Annotated[str, says("Its scheme or address, without secrets.", **_MAYBE)] = MISSING
    present: Annotated[bool, says("Whether there is a token.", **_MAYBE)] = MISSING
    source: Annotated[str | None, says("Where a token comes from.", **_MAYBE)] = MISSING
    user: Annotated[str, says("Whose token it is, where the hub says so.", **_MAYBE)] = MISSING
    reachable: Annotated[bool | None, says("Null where it was not asked.", **_MAYBE)] = MISSING
    error: Annotated[str, says("Code, where a hub did not answer well.", **_MAYBE)] = MISSING
    milliseconds: Annotated[int, says("Until a hub answered.", **_MAYBE)] = MISSING
    gpus: Annotated[Rows, says("Name and bytes of each NVIDIA GPU.", **_MAYBE)] = MISSING
    torch: Annotated[bool, says("Whether it is installed.", **_MAYBE)] = MISSING
    paths: Annotated[Rows, says("What runs on each kind of GPU that is here.", **_MAYBE)] = MISSING
    known_gpus: Annotated[Rows, says("GPUs that kernels are compiled for.", **_MAYBE)] = MISSING


@dataclass(frozen=True)
class DoctorReport:
    """What oscar-zoo doctor prints."""

    findings: list[DoctorFinding]
    schema: Literal["oscar-zoo.doctor/1"] = "oscar-zoo.doctor/1"

    @computed_field(description="Whether commands can work here.")  # type: ignore[prop-decorator]
    @property
    def usable(self) -> bool:
        return not any(one.essential and one.state == "failed" for one in self.findings)


def _finding(topic: str, name: str, **facts: Any) -> Callable[..., DoctorFinding]:
    """What takes the rest of a finding: its state, what was seen, and the next step."""
    return partial(DoctorFinding, topic, name, **facts)  # type: ignore[arg-type]


def examine(params: DoctorParams) -> DoctorReport:
    """Look at everything; takes little more than `SECONDS` at most, and changes nothing."""
    slow: list[Callable[[], DoctorFinding]] = []
    problem: OscarZooError | None = None
    try:
        configured = address.Sources(params.hubs, offline=params.offline)
        limits = configured.network
    except OscarZooError as error:
        problem = error
    found = [*versions(), *folders(), *settings(problem)]
    if problem is None:
        slow += [partial(_hub, text, configured, limits) for text in configured.read]
        slow += [
            partial(_token, kind, configured.offline) for kind in HUBS.values() if kind.credential
        ]
    found += in_parallel([*slow, gpu], workers=len(slow) + 1)
    return DoctorReport([*found, *engine()])


def versions() -> Iterator[DoctorFinding]:
    for name, version in {"oscar-zoo": __version__, "Python": platform.python_version()}.items():
        yield DoctorFinding("version", name, "ok", version, version=version)
    ranges = _ranges()
    for name, needed_by in _LIBRARIES.items():
        installed, wanted = _version(name), ranges.get(name)
        facts = {"version": installed, "needed_by": needed_by, "supported": wanted}
        say = _finding("version", name, **facts)
        if installed is None:
            step = str(Install(_EXTRAS[name])) if name in _EXTRAS else None
            yield say("ok", f"not installed; needed only for {needed_by}", step)
        elif wanted is not None and not SpecifierSet(wanted).contains(installed, prereleases=True):
            yield say("failed", f"{installed} is outside {wanted}", f"pip install '{name}{wanted}'")
        else:
            yield say("ok", installed)


def folders() -> Iterator[DoctorFinding]:
    """Cache, state and data: whether they can be written, how much room there is, whether the store
    is private."""
    places = {"cache": paths.cache_dir(), "state": paths.state_dir(), "data": paths.data_dir()}
    for name, path in places.items():
        problem, free = _room(path)
        facts: dict[str, Any] = {"path": str(path), "free_bytes": free}
        say = _finding("folder", name, **facts, writable=problem is None)
        if problem is not None:
            step = f"check its owner and permissions, or point OSCAR_ZOO_{name.upper()} elsewhere"
            yield say("failed", f"{path}: {problem}", step, essential=name != "data")
        elif free is not None and free < LITTLE_DISK:
            detail = f"{path}, only {free / 1e6:.0f} MB free"
            yield say("warning", detail, "oscar-zoo cache gc, or free some space")
        else:
            yield say("ok", f"{path}{'' if free is None else f', {free / 1e9:.0f} GB free'}")
    store = Store()
    say = _finding("folder", "store", path=str(store.root))
    try:
        count = len(store.installed())
    except OscarZooError as error:
        yield say("failed", error.message, error.hint, essential=True, private=False)
    else:
        yield say("ok", f"private, {_counted(count)}", private=True, artifacts=count)


def settings(problem: OscarZooError | None = None) -> Iterator[DoctorFinding]:
    """What changes what commands do: the configuration, and variables without the credentials in
    their addresses."""
    path = paths.config_dir() / address.FILE_NAME
    there = path.exists()
    say = _finding("setting", address.FILE_NAME, path=str(path), exists=there)
    if problem is not None:
        yield say("failed", masked(problem.message), problem.hint, essential=True)
    else:
        yield say("ok", str(path) if there else f"none at {path}")
    for name in _SETTINGS:
        value = os.environ.get(name, "").strip()
        if not value:
            continue
        shown = masked(value)
        say = _finding("setting", name, value=shown)
        if name in _ENDPOINTS and not _is_safe(value):
            yield say("warning", f"{shown}: no token is sent without TLS", "use an https address")
        else:
            yield say("ok", shown)


def _hub(text: str, configured: address.Sources, limits: Limits) -> DoctorFinding:
    title = masked(text)
    say = _finding("hub", title, hub=title)
    if configured.offline and address.is_remote(text):
        return say("not checked", "offline mode", reachable=None)
    start = time.monotonic()
    try:
        hub = address.open_hub(text, network=limits)
        late = HubTimeout.for_hub(hub.title, f"did not answer within {SECONDS:.0f} s")
        count = len(within(SECONDS, hub.artifacts, error=lambda: late))
    except OscarZooError as error:
        reachable = not isinstance(error, NetworkError)
        # What is no hub may be anything, a token too: it is not repeated.
        detail = "not a hub" if isinstance(error, UsageError) else masked(error.message)
        return say("failed", detail, error.hint, reachable=reachable, error=error.code)
    milliseconds = round(1000 * (time.monotonic() - start))
    detail = f"{_counted(count)}, answered in {milliseconds} ms"
    return say("ok", detail, reachable=True, milliseconds=milliseconds, artifacts=count)


def _token(kind: HubKind, offline: bool) -> DoctorFinding:
    title, found = kind.title, kind.credential() if kind.credential else None
    source = found.source if found else None
    facts: dict[str, Any] = {"hub": kind.scheme, "present": bool(found), "source": source}
    say = _finding("token", title, **facts)
    if found is None:
        step = f"{kind.token_step}, to publish there"
        return say("ok", "none; public zoos are read without", step)
    if found.exposed:
        return say("warning", f"in {source}, which other users can read", f"chmod 600 {source}")
    if not kind.tells_user or offline:
        return say("ok", f"from {source}")
    late = HubTimeout.for_hub(title, f"did not say within {SECONDS:.0f} s whose it is")
    try:
        user = within(SECONDS, login.whoami, error=lambda: late)
    except OscarZooError as error:
        return say("not checked", f"from {source}; {masked(error.message)}", error.hint)
    if user is None:
        step = f"replace or unset {source}" if found.is_variable else kind.token_step
        return say("failed", f"from {source}; {title} refuses it", step)
    return say("ok", f"from {source}, of {user}", user=user)


def gpu() -> DoctorFinding:
    cards, models = hardware.gpus(), hardware.driver_models()
    rows: Rows = [{"name": card.name, "memory_bytes": card.memory} for card in cards]
    say = _finding("machine", "GPU", gpus=rows)
    if cards:
        sizes = (f"{card.name} with {card.memory / (1 << 30):.0f} GiB" for card in cards)
        return say("ok", ", ".join(sizes))
    if models:
        detail = f"{', '.join(models)}, but nvidia-smi does not work"
        return say("warning", detail, "check the driver: nvidia-smi")
    return say("ok", "none by NVIDIA; compute and eval run on the CPU")


def engine() -> Iterator[DoctorFinding]:
    """Engines in their supported ranges, and the path that the INT2 kernels take on these GPUs."""
    first, beyond = (".".join(map(str, version)) for version in (FIRST, BEYOND))
    ranges = {sglang_version: f">={first},<{beyond}", vllm_version: f"{SERIES}.*"}
    for (package, name), version in zip(ENGINES.items(), ranges, strict=True):
        say = _finding("machine", name, version=_version(package), supported=ranges[version])
        try:
            yield say("ok", f"{version()}, supported")
        except MissingDependency as error:
            yield say("ok", "not installed; only serve needs it", error.hint)
        except OscarZooError as error:
            yield say("failed", error.message, error.hint)
    yield _host()
    yield _kernels()


def _host() -> DoctorFinding:
    """How much `serve --host-cache` may take, which is why a machine cannot have one, and whether
    files can keep it."""
    free, machine = hardware.available_ram(), hardware.available_ram(cgroup=Path(os.devnull))
    most, limited = int(HOST_SHARE * free) >> 30, free < machine
    why = f"{free / 1e9:.1f} GB free" + " within the limit of this container" * limited
    say = _finding("machine", "host cache", free_bytes=free)
    if most < 2:  # a GB for the pages of one GPU; see `preflight.host_cache_flag`
        ways = "raise the memory of the container" if limited else "end what takes the memory"
        return say("warning", f"{why}, too little for serve --host-cache", ways)
    older = installed_from((0,)) and not installed_from(SALTED)
    detail = f"{why}: serve --host-cache {most}GiB at most"
    detail += "; --disk-cache needs a later SGLang" * older
    return say("ok", detail, f"pip install 'sglang>={_dotted(SALTED)}'" if older else None)


def _kernels() -> DoctorFinding:
    capabilities = sorted(set(hardware.compute_capabilities()))
    ways = [(capability, kernel_path(capability)) for capability in capabilities]
    torch, paths = _version("torch") is not None, list[dict[str, Any]]()
    known = "; ".join(f"{told}: {', '.join(names)}" for told, names in cards_by_state().items())
    told = list[str]()
    for capability, found in ways:
        dotted = _dotted(capability)
        none = {"decode": None, "write": None, "measured": False}
        paths.append({"compute_capability": dotted, **(asdict(found) if found else none)})
        told.append(
            f"decode in {_LANGUAGES[found.decode]}, write in {_LANGUAGES[found.write]}, the rest in"
            f" Triton; {state(capability)} (compute capability {dotted})"
            if found
            else f"none for compute capability {dotted}"
        )
    cards = [
        {"name": name, "compute_capability": _dotted(capability), "state": state(capability)}
        for capability, chip in CHIPS.items()
        for name in chip.names
    ]
    anywhere = f"CUDA C++ and Triton on a GPU, plain torch on a CPU; {known}"
    detail = "; ".join(told) or anywhere if torch else "none without torch"
    facts: dict[str, Any] = {"torch": torch, "paths": paths, "known_gpus": cards}
    say = _finding("machine", "INT2 kernels", **facts)
    if all(found is not None for _, found in ways):
        return say("ok", detail)
    lowest = f"a GPU from compute capability {_dotted(LOWEST)} on"
    return say("warning", detail, f"{lowest} ({known}), or --device cpu")


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _counted(artifacts: int) -> str:
    return f"{artifacts} artifact{'' if artifacts == 1 else 's'}"


def masked(text: str) -> str:
    """`text` without what may be a secret: user, password and query of an address, and what looks
    like a token."""
    text = re.sub(r"(^|//|[\s,'\"])[^/\s,'\"@]*@", r"\1***@", text)
    text = re.sub(r"(://[^\s?#]*)[?#]\S*", r"\1?***", text)
    return re.sub(r"\b(hf_|ms-)[A-Za-z0-9-]{8,}", r"\1***", text)


def _is_safe(endpoint: str) -> bool:
    parts = urlsplit(endpoint if "//" in endpoint else f"https://{endpoint}")
    return parts.scheme.lower() == "https" or is_nearby(endpoint)


def _room(folder: Path) -> tuple[str | None, int | None]:
    """Why `folder` cannot be written, if so, and the bytes free there; creates nothing."""
    there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"x")
            probe.flush()
        return None, shutil.disk_usage(there).free
    except OSError as error:
        return f"cannot be written: {error.strerror or error}", None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ranges() -> dict[str, str]:
    """Supported versions by library, as this package declares them; the first declaration
    counts."""
    found: dict[str, str] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("oscar-zoo") or []:
            wanted = Requirement(line)
            if wanted.specifier:
                found.setdefault(canonicalize_name(wanted.name), str(wanted.specifier))
    names = {name: canonicalize_name(name) for name in _LIBRARIES}
    return {name: found[key] for name, key in names.items() if key in found}
