"""Whole commands against Hugging Face and ModelScope over loopback HTTP, with both versions of the
real clients, and the dialogue of `login` on a terminal."""

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_output import Cli, parsed
from forked_commands import QuickCli
from hub_server import HubServer
from hub_uses import HUB_2, VERSIONS
from measured_artifacts import key_file, measured_files
from terminal import Terminal
from tiny_artifacts import K_NAME, V_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import REPORT_NAME, Manifest
from oscar_zoo.registry.publish import REPORT_HEAD

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TAG = "seq512_prompt2_group64"
ONE = f"tiny-qwen3-hard/{TAG}"
TOKENS = {"HF_TOKEN": "hf_test", "MODELSCOPE_API_TOKEN": "ms-test"}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def cli(server: HubServer, tmp_path: Path) -> QuickCli:
    (tmp_path / "pyproject.toml").touch()  # a project: it gets a lock
    return QuickCli(server.environment(tmp_path / "hf"), tmp_path)


@pytest.fixture(params=VERSIONS)
def either(request: pytest.FixtureRequest, cli: QuickCli) -> QuickCli:
    """The command line with either version of huggingface_hub."""
    return QuickCli(cli.environment, cli.folder, request.param)


def test_publish_list_pull_and_yank(server: HubServer, either: QuickCli, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "artifact", measured_files()))
    hub = ("--hub", "hf:me/zoo")
    publish = ("publish", folder, *hub, "--allow-warnings")
    assert either(*publish, **TOKENS).code == 3  # no such repository yet
    published = either(*publish, "--create", "--json", **TOKENS)
    assert published.code == 0, published.err
    repo = server.repository("me/zoo")
    commits = len(repo.commits)
    files = {f"{ONE}/{name}" for name in artifact_files()}
    assert {path for path in repo.files() if path.startswith(ONE)} == files
    assert repo.tags == {f"oz-tiny-qwen3-hard-{TAG}": repo.head()}
    assert (either(*publish, **TOKENS).code, len(repo.commits)) == (0, commits)
    other = str(write_folder(tmp_path / "other", measured_files(seed=1)))
    assert either("publish", other, *hub, "--allow-warnings", **TOKENS).code == 7

    listed = either("list", *hub, "--json").json["artifacts"]
    digest = next(row["digest"] for row in listed if row["id"] == ONE)
    pull = ("pull", "tiny-qwen3-hard", *hub)
    (pulled,) = either(*pull, "--json").json["artifacts"]
    assert (pulled["digest"], pulled["revision"]) == (digest, repo.head())
    assert either("verify", "tiny-qwen3-hard", "--json").code == 0

    mirrored = either("mirror", "hf:me/zoo", "ms:me/mirror", "--all", "--create", **TOKENS)
    assert mirrored.code == 0, mirrored.err
    assert set(server.repository("me/mirror", "ms").files()) >= files
    moved = either("pull", "tiny-qwen3-hard", "--hub", "ms:me/mirror", "--no-lock", "--json")
    assert moved.json["artifacts"][0]["digest"] == digest

    yank = ("yank", f"tiny-qwen3-hard:{TAG}", *hub, "--reason", "a bad fit")
    assert either(*yank, **TOKENS).code == 0
    by_digest = ("pull", f"tiny-qwen3-hard@{digest}", *hub, "--no-lock")
    for code, words, cache in (
        (3, (*pull, "--no-lock"), "cache"),
        (0, by_digest, "c2"),
        (0, pull, "cache"),  # the lock of this folder names the digest
    ):
        done = either(*words, OSCAR_ZOO_CACHE=str(tmp_path / cache))
        assert (done.code, "a bad fit" in done.err) == (code, True)
    assert either("unyank", f"tiny-qwen3-hard:{TAG}", *hub, **TOKENS).code == 0
    assert either(*pull, "--no-lock").code == 0


def files_of(seed: int = 0) -> dict[str, bytes]:
    """The bare version of a zoo that knows no manifests."""
    return {f"{ONE}/{name}": data for name, data in payload(seed=seed).items()}


def test_an_upstream_zoo_without_manifests_is_pinned_on_first_use(
    server: HubServer, either: QuickCli, tmp_path: Path
) -> None:
    repo = server.repository("Zhongzhu/OSCAR-RotationZoo", files=files_of())
    first = either("pull", "tiny-qwen3-hard", "--output", "rotations")
    assert first.code == 0, first.err
    assert "first use" in first.err
    assert {p.name for p in (tmp_path / "rotations" / ONE).iterdir()} == {K_NAME, V_NAME}
    lock = json.loads((tmp_path / "oscar-zoo.lock").read_bytes())["artifacts"][0]
    assert (lock["hub"], lock["revision"]) == ("hf:Zhongzhu/OSCAR-RotationZoo", repo.head())
    server.clear()
    assert either("pull", "tiny-qwen3-hard").code == 0
    assert server.requests == []
    repo.commit(files_of(seed=1))
    changed = either("pull", "tiny-qwen3-hard", "--no-lock", "--json")
    assert changed.code == 4
    assert lock["digest"] in changed.json["error"]["message"]
    accept = either("pull", "tiny-qwen3-hard", "--accept-new-digest", "--json")
    (accepted,) = accept.json["artifacts"]
    assert accepted["digest"] in changed.json["error"]["message"]
    lock = json.loads((tmp_path / "oscar-zoo.lock").read_bytes())["artifacts"][0]
    assert lock["digest"] == accepted["digest"]


def test_a_lock_pulls_from_its_commit_and_says_when_that_is_gone(
    server: HubServer, cli: QuickCli, tmp_path: Path
) -> None:
    repo = server.repository("org/zoo", files=files_of())
    pull = ("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo")
    assert cli(*pull).code == 0
    lock = (tmp_path / "oscar-zoo.lock").read_bytes()
    repo.commit(files_of(seed=1))
    assert cli(*pull, "--locked", OSCAR_ZOO_CACHE=str(tmp_path / "fresh")).code == 0
    repo.rewrite_history()
    gone = cli(*pull, OSCAR_ZOO_CACHE=str(tmp_path / "fresher"))
    assert gone.code == 4 and "no longer has commit" in gone.err
    assert (tmp_path / "oscar-zoo.lock").read_bytes() == lock
    # the listing of the commit is still here
    assert cli("cache", "rm", "tiny-qwen3-hard").code == 0
    gone = cli(*pull)
    assert gone.code == 4 and "no longer has commit" in gone.err


def patient(cli: QuickCli, *, seconds: float) -> None:
    """Configure how long a hub may be silent."""
    (cli.folder / "config").mkdir()
    (cli.folder / "config" / "config.toml").write_text(f"[network]\nread = {seconds}\n")


def test_a_silent_first_hub_is_passed_over(server: HubServer, cli: QuickCli) -> None:
    server.repository("togethercomputer/OSCAR-RotationZoo", "ms", files=files_of())
    patient(cli, seconds=2)
    done = cli("pull", "tiny-qwen3-hard", "--json", HF_ENDPOINT=server.hang_accept())
    assert done.code == 0, done.err
    row = done.json["artifacts"][0]
    assert row["hub"] == "ms:togethercomputer/OSCAR-RotationZoo"
    assert "Hugging Face" in row["notes"][0]


@pytest.mark.parametrize("how", ["closed port", "black hole"])
def test_without_a_network_the_hubs_are_named(server: HubServer, cli: QuickCli, how: str) -> None:
    address = server.closed_port() if how == "closed port" else server.hang_accept()
    patient(cli, seconds=2)
    done = cli("pull", "Qwen3-8B", HF_ENDPOINT=address, MODELSCOPE_ENDPOINT=address)
    assert done.code == 5
    assert "Hugging Face Zhongzhu/OSCAR-RotationZoo" in done.err
    assert "ModelScope togethercomputer/OSCAR-RotationZoo" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", ["pull", "info", "compare Qwen3-8B", "card"])
def test_unknown_names_are_said_to_be_so(server: HubServer, cli: QuickCli, command: str) -> None:
    """The hubs may have it, so it is no exit code 3."""
    address = server.closed_port()
    silent = {"HF_ENDPOINT": address, "MODELSCOPE_ENDPOINT": address}
    done = cli(*command.split(), "Qwen3-9B", "--json", **silent)
    error = done.json["error"]
    assert (done.code, error["code"]) == (5, "network.unreachable")
    assert error["message"].startswith("Qwen3-9B is unknown on this machine, and not every hub")
    assert "Hugging Face Zhongzhu/OSCAR-RotationZoo" in error["message"]
    assert "did you mean" in error["hint"] and "Qwen3-8B" in error["hint"]
    assert "check the network" in error["hint"].casefold()


def test_an_interrupted_pull_leaves_none(server: HubServer, cli: QuickCli, tmp_path: Path) -> None:
    files = {f"{ONE}/{n}": d for n, d in artifact_files().items()}
    server.repository("org/zoo", files=files)
    slow = server.fault("slow", f"*{V_NAME}", bytes_per_second=2_000)
    child = cli.start("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo")
    while not slow.hits:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130
    assert err.strip().count("\n") == 0  # after the line that the terminal has ended for ^C
    assert not list((tmp_path / "cache").glob("artifacts/*/*/.complete"))
    assert not (tmp_path / "oscar-zoo.lock").exists()
    server.clear_faults()
    assert cli("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo").code == 0
    assert cli("verify", "tiny-qwen3-hard").code == 0


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("scheme", ["hf", "ms", "file"])
def test_the_report_goes_up_beside_the_manifest_and_a_pull_leaves_it_out(
    server: HubServer, cli: QuickCli, tmp_path: Path, scheme: str, signed: bool
) -> None:
    files = measured_files()
    folder = str(write_folder(tmp_path / "artifact", files))
    digest = Manifest.from_bytes(files["oscar.json"]).digest
    page = f"{REPORT_HEAD.decode()}<title>x</title></head><body>{digest}</body></html>".encode()
    (tmp_path / "artifact.report.html").write_bytes(page)
    keys = {**TOKENS, "OSCAR_ZOO_SIGN_KEY": str(key_file(tmp_path / "zoo.pem"))}
    keys, more = (keys, ["--sign"]) if signed else (TOKENS, [])
    hub = f"file:{tmp_path / 'hub'}" if scheme == "file" else f"{scheme}:me/zoo"
    words = ("publish", folder, "--hub", hub, "--create", "--json", *more)
    (planned,) = cli(*words, "--dry-run", **keys).json["hubs"]
    path = f"{ONE}/{REPORT_NAME}"
    assert {f["path"]: f["sha256"] for f in planned["plan"]["files"]}[path] == sha256_hex(page)
    for already in (False, True):
        done = cli(*words, **keys)
        assert done.code == 0, done.out
        assert done.json["hubs"][0]["already_published"] is already
    if scheme == "file":
        assert (tmp_path / "hub" / path).read_bytes() == page
        assert cli("verify", str((tmp_path / "hub" / path).parent)).code == 0
    else:
        assert server.repository("me/zoo", scheme).files()[path] == page
    pulled = cli("pull", ONE, "--hub", hub, "--no-lock", "--output", "copy", "--json")
    assert pulled.code == 0, pulled.out
    assert (tmp_path / "copy" / ONE / K_NAME).exists()
    assert not list(tmp_path.glob("c*/**/*.html"))
    mirrored = cli("mirror", hub, f"file:{tmp_path / 'mirror'}", "--all", "--create", **keys)
    assert mirrored.code == 0, mirrored.err
    assert not list((tmp_path / "mirror").rglob("*.html"))


@pytest.mark.parametrize("damage", ["<script>alert(1)</script>", "of other bytes"])
def test_a_page_that_is_no_report_stays_here(cli: QuickCli, tmp_path: Path, damage: str) -> None:
    files = measured_files()
    folder = str(write_folder(tmp_path / "artifact", files))
    digest = Manifest.from_bytes(files["oscar.json"]).digest or ""
    page = (
        f"{damage}{REPORT_HEAD.decode()}{digest}"
        if "script" in damage
        else f"{REPORT_HEAD.decode()}{digest[::-1]}"
    )
    (tmp_path / "artifact.report.html").write_text(page)
    done = cli("publish", folder, "--hub", f"file:{tmp_path / 'hub'}", "--create")
    assert done.code == 0 and "artifact.report.html" in done.err
    assert not list((tmp_path / "hub").rglob("*.html"))


TOKEN = "hf_CANARYfromthekeyboard"
KEPT = ("OSCAR_ZOO_CACHE", "OSCAR_ZOO_DATA", "OSCAR_ZOO_STATE", "OSCAR_ZOO_CONFIG")


class Login(Terminal):
    """`oscar-zoo ARGUMENTS` on a terminal."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        super().__init__(["-m", "oscar_zoo", *arguments], environment)

    def paste(self, answer: str) -> None:
        """Choose to paste a token, and type `answer` where it is asked for."""
        self.see("Paste an access token")
        while "not be visible" not in self.seen:  # a menu drops what comes too early
            self.press(b"2") if self.is_silent(0.2) else self.read()
        self.press(b"\x15" + answer.encode())  # Ctrl-U: the last key may have come too late

    def interrupt(self) -> int:
        """Press Ctrl-C where a token is asked for, again when nothing comes of it; the exit
        code."""
        self.paste("\x03")
        while self.is_silent(5):
            self.press(b"\x03")
        return self.end()


def environment(server: HubServer, home: Path, version: int = 1, **more: str) -> dict[str, str]:
    extra = {"PYTHONPATH": str(HUB_2)} if version == 2 else {}
    state = {name: os.environ[name] for name in KEPT}
    return server.environment(home) | state | extra | {"TERM": "xterm", "PYTHON_COLORS": "0"} | more


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pasted_token_is_checked_and_kept_by_the_client_alone(
    server: HubServer, tmp_path: Path, version: int, own_state: Path
) -> None:
    terminal = Login(["login"], environment(server, tmp_path, version))
    terminal.paste(TOKEN + "\n")
    assert terminal.end() == 0, terminal.text
    assert "Logged in to Hugging Face as tester" in terminal.text and TOKEN not in terminal.text
    saved = tmp_path / "token"
    assert saved.read_text() == TOKEN and stat.S_IMODE(saved.stat().st_mode) == 0o600
    ours = [path.read_bytes() for path in own_state.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in ours)
    again = Login(["login", "--json"], environment(server, tmp_path, version))
    assert again.end() == 0
    assert parsed(again.text) == {
        "schema": "oscar-zoo.login/1",
        "hub": "hf",
        "user": "tester",
        "source": str(saved),
    }


def test_a_token_that_the_hub_refuses_is_not_kept(server: HubServer, tmp_path: Path) -> None:
    server.fault("status", "/api/whoami-v2", code=401)
    terminal = Login(["login"], environment(server, tmp_path, OSCAR_ZOO_DEBUG="0"))
    terminal.paste(TOKEN + "\n")
    assert terminal.end() == 6, terminal.text
    assert "refused the token" in terminal.text and TOKEN not in terminal.text
    assert not (tmp_path / "token").exists()


def test_a_refused_variable_is_named_since_it_would_win(server: HubServer, tmp_path: Path) -> None:
    server.fault("status", "/api/whoami-v2", code=401)
    terminal = Login(["login"], environment(server, tmp_path, HF_TOKEN=TOKEN))
    assert terminal.end() == 6
    assert "HF_TOKEN" in terminal.text and TOKEN not in terminal.text


def test_a_dead_hub_ends_who_one_is(server: HubServer, tmp_path: Path, own_state: Path) -> None:
    (own_state / "config").mkdir()
    (own_state / "config" / "config.toml").write_text("[network]\nread = 0.5\n")
    terminal = Login(
        ["login"], environment(server, tmp_path, HF_TOKEN=TOKEN, HF_ENDPOINT=server.hang_accept())
    )
    assert terminal.end() == 5
    assert "Hugging Face" in terminal.text and "8 s" not in terminal.text


def test_ctrl_c_leaves_no_token(server: HubServer, tmp_path: Path) -> None:
    terminal = Login(["login"], environment(server, tmp_path))
    assert terminal.interrupt() == 130
    assert not (tmp_path / "token").exists()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_without_a_terminal_the_variable_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    token: str | None,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    line = Cli(capsys).refused(2, "login")
    assert "terminal" in line and "HF_TOKEN" in line and TOKEN not in line


def test_modelscope_takes_its_variable_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli = Cli(capsys)
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    line = cli.refused(2, "login", "ms")
    assert "MODELSCOPE_API_TOKEN" in line and "pickle" in line
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    assert "MODELSCOPE_API_TOKEN" in cli(0, "login", "ms") and TOKEN not in cli.out + cli.err
    assert cli.json(0, "login", "ms")["source"] == "MODELSCOPE_API_TOKEN"


@pytest.mark.parametrize("files", [{}, {"config.json": (MODEL / "config.json").read_bytes()}])
def test_gguf_alone_is_refused(server: HubServer, cli: QuickCli, files: dict[str, bytes]) -> None:
    server.repository("me/tiny-GGUF", files={"Q4_1/tiny.gguf": b"GGUF", **files})
    told = cli("compute", "me/tiny-GGUF", "--calib-tokens", "64", "--output-dir", "out", "--json")
    assert (told.code, told.json["error"]["code"]) == (1, "unsupported.model"), told.out
