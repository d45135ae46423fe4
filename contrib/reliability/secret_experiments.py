"""S12: tokens and keys that nobody sees, whatever a command does and however a hub answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_faults import state
from experiment import Found, Scale
from hub_repositories import Kind
from hub_server import HubServer
from hub_uses import HUB_2
from many_commands import Done, Job, ManyCommands
from measured_artifacts import measured, measured_files, write_scores
from tiny_artifacts import write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.changes import Version

CANARIES = {
    "HF_TOKEN": "hf_CanaryOfHuggingFace0123456789",
    "MODELSCOPE_API_TOKEN": "ms-canary-of-modelscope-0123456789",
}
MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
KINDS: tuple[Kind, ...] = ("hf", "ms")
KEY = "key-canary-of-a-server-0123456789"
FIRST, SECOND = "tiny-qwen3-hard/first", "tiny-qwen3-hard/second"
NAME, NEXT = "tiny-qwen3-hard:first", "tiny-qwen3-hard:second"
SEEN_IN_CHILD = "a secret is among the arguments of a child"
MODES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "plain": ((), {}),
    "json": (("--json",), {}),
    "debug": ((), {"OSCAR_ZOO_DEBUG": "1"}),
}
TARGETS = ("same", "port", "cdn", "http", "//127.0.0.1:1/x", "gopher://127.0.0.1/x")
"""Where a hub sends clients; see `hub_faults.redirect`."""
PATHS = {"listing": "*/api/*", "listing of ModelScope": "*/v1/*", "file": "*.pt", "all": "*"}


def commands(hub: str, folder: Path) -> Iterator[tuple[str, ...]]:
    """Every command that knows a secret, or could meet one."""
    to, key = ("--hub", hub), ("--api-key-file", str(folder / "key"))
    yield ("list", *to)
    yield ("info", NAME, *to)
    yield ("pull", NAME, *to)
    yield ("pull", NAME, *to, "--no-lock", "--output", "./out")
    yield ("scores", NAME, *to)
    yield ("scores", "add", NAME, "./scores.json", *to)
    yield ("publish", "./made", *to)
    yield ("publish", "./made", *to, "--create")
    yield ("yank", NAME, *to, "--reason", "wrong")
    yield ("unyank", NAME, *to)
    yield ("deprecate", NAME, *to, "--reason", "old")
    yield ("mirror", hub, "file:./copy", "--all", "--create")
    yield ("mirror", "file:./here", hub, "--all", "--create")
    yield ("card", "./made")
    yield ("verify", NAME)
    yield ("cache", "list")
    yield ("login",)
    yield ("login", "ms")
    yield ("doctor", *to)
    yield ("serve", "./made", "--print", "--device", "cpu", "--model", str(MODEL))
    yield ("serve", "./made", "--print", "--expose", "0.0.0.0", *key)
    yield ("chat", "1", *key)


@dataclass(frozen=True)
class Situation:
    """How a hub behaves; `begin` switches it on.

    Attributes:
        token: that the repository wants, or `None` for anybody's.
    """

    name: str
    begin: Callable[[HubServer], object]
    token: str | None = None


def _fault(kind: str, path: str | None = "*", **given: Any) -> Callable[[HubServer], object]:
    return lambda server: server.fault(kind, path, **given)


def _echo(code: int) -> Callable[[HubServer], object]:
    """A hub that repeats the token that it was sent."""
    return _fault("status", code=code, body=f"You sent {' and '.join(CANARIES.values())}.")


SITUATIONS = (
    Situation("honest", lambda server: None),
    Situation("a repository of others", lambda server: None, token="another-token"),
    *(Situation(f"status {code}", _fault("status", code=code)) for code in (401, 403, 500)),
    *(Situation(f"status {code} with an echo", _echo(code)) for code in (400, 401, 404)),
    Situation("a web page", _fault("html")),
    Situation("resets", _fault("reset")),
    Situation("cut files", _fault("cut", "*.pt", after=100)),
    *(
        Situation(f"{name} redirected to {to}", _fault("redirect", path, to=to))
        for name, path in PATHS.items()
        for to in TARGETS
    ),
)
FEW = ("honest", "status 401 with an echo")


def stay_secret(scale: Scale) -> Found:
    """Every command in every situation, on both hubs, with text, JSON and tracebacks."""
    situations = [one for one in SITUATIONS if scale.whole or one.name in FEW]
    runs, refusals = 0, 0
    violations: list[str] = []
    with ExitStack() as stack:
        server = stack.enter_context(HubServer())
        for client, path in {"1": None, "2": HUB_2}.items():
            if path is not None and not (scale.whole and path.is_dir()):
                continue
            environment = server.environment(scale.work / f"hf{client}") | CANARIES
            environment |= {} if path is None else {"PYTHONPATH": str(path)}
            many = stack.enter_context(ManyCommands(scale.work / f"out{client}", environment))
            for number, situation in enumerate(situations):
                both = scale.whole and client == "1"
                every_mode = both and "redirected" not in situation.name
                for kind in KINDS if both else (KINDS[0 if scale.whole else number % 2],):
                    folder = scale.work / f"{client}-{kind}-{number}"
                    for words, done in _all(server, many, situation, kind, folder, every_mode):
                        runs, refusals = runs + 1, refusals + (done.code != 0)
                        label = f"{situation.name} on {kind}, {' '.join(words)[:60]}"
                        violations += [f"{label}: {line}" for line in _wrong(done, server)]
                        server.clear()
                    where = f"{situation.name} on {kind}"
                    violations += [f"{where}: {line}" for line in _written(folder)]
    if refusals > 0.9 * runs:
        violations.append(f"{refusals} of {runs} commands did nothing")
    figures = {"situations": len(situations), "commands": runs, "refused or failed": refusals}
    return Found(figures, tuple(violations))


def _all(
    server: HubServer,
    many: ManyCommands,
    situation: Situation,
    kind: Kind,
    folder: Path,
    every_mode: bool,
) -> Iterator[tuple[tuple[str, ...], Done]]:
    """The commands one after the other, as each leaves it to the next."""
    _fill(folder)
    repository = f"org/{folder.name}"
    files = {f"{FIRST}/{n}": data for n, data in measured_files(artifact=FIRST).items()}
    private = situation.token is not None
    server.repository(repository, kind, files=files, private=private, token=situation.token)
    situation.begin(server)
    for number, words in enumerate(commands(f"{kind}:{repository}", folder)):
        modes = MODES if every_mode else [tuple(MODES)[number % len(MODES)]]
        for mode in modes:
            more, variables = MODES[mode]
            job = Job(
                (*words, *more),
                str(folder),
                {**state(folder), **variables},
                before=f"{__name__}:watch_children",
            )
            yield words, many([job])[0]
    server.clear_faults()


def _fill(folder: Path) -> None:
    (folder / "home/config").mkdir(parents=True)
    (folder / "home/config/config.toml").write_text("[network]\nread = 5\ntries = 2\n")
    (folder / "pyproject.toml").touch()
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    files = measured_files(artifact=SECOND, seed=1)
    write_folder(folder / "made", files)
    write_folder(folder / "here" / SECOND, files)
    digest = Version.of(ArtifactId.parse(FIRST), measured_files(artifact=FIRST)).digest
    write_scores(
        folder / "scores.json", measured(digest), digest=digest, artifact=ArtifactId.parse(FIRST)
    )


def _wrong(done: Done, server: HubServer) -> Iterator[str]:
    for stream, text in {"stdout": done.out, "stderr": done.err}.items():
        for secret in (*CANARIES.values(), KEY):
            if secret in text:
                line = next(line for line in text.splitlines() if secret in line)
                yield f"{secret[:9]}.. is on {stream}: {line[:200]}"
    if SEEN_IN_CHILD in done.err:
        yield SEEN_IN_CHILD
    strangers = {one.path for one in server.requests if one.credentials and one.host != "origin"}
    if strangers:
        yield f"a token went to another host: {sorted(strangers)[:3]}"


def _written(folder: Path) -> Iterator[str]:
    """Files of the user that hold a secret, but for the one that he wrote himself."""
    secrets = [secret.encode() for secret in (*CANARIES.values(), KEY)]
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / "key":
            data = path.read_bytes()
            if any(secret in data for secret in secrets):
                yield f"{path.relative_to(folder)} holds a secret"


def watch_children() -> None:
    """In a command: say when a child would be started with a secret among its arguments."""
    secrets = (*CANARIES.values(), KEY)

    def hook(event: str, arguments: Any) -> None:
        if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
            words = arguments[1] if len(arguments) > 1 else arguments[0]
            if any(secret in str(words) for secret in secrets):
                os.write(sys.stderr.fileno(), f"{SEEN_IN_CHILD}\n".encode())

    sys.addaudithook(hook)
