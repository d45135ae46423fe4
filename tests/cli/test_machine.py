"""What is on this machine: `cache` with what people see, what programs get and exit codes, and what
`doctor` finds with real hubs over loopback HTTP, telling no secret."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_child import Finished
from cli_output import Cli, parsed
from forked_commands import QuickCli
from hub_server import HubServer
from hub_uses import HARD, VERSIONS, hub_with
from measured_artifacts import measured_files
from tiny_artifacts import K_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.registry.store import Record, Store
from oscar_zoo.serving import doctor
from oscar_zoo.serving.params import DoctorParams

TINY = ArtifactId("tiny-qwen3-hard", "seq512_prompt2_group64")
SECOND = ArtifactId("tiny-qwen3-hard", "second")
THIRD = ArtifactId("tiny-qwen3-hard", "third")
MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


@pytest.fixture
def record() -> Record:
    return Store().put(TINY, artifact_files(), source="file:/zoo").record


def put_second() -> Record:
    files = artifact_files(artifact=str(SECOND), seed=1)
    return Store().put(SECOND, files, source="file:/zoo").record


def damage(record: Record) -> None:
    path = record.path / K_NAME
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])


def test_an_empty_store_is_said_to_be_empty_and_not_created(cli: Cli) -> None:
    for arguments in (["verify"], ["gc"], ["gc", "--dry-run"], ["list"]):
        cli(0, "cache", *arguments)
    assert "Nothing is stored" in cli.err
    assert cli.json(0, "cache", "list")["artifacts"] == []
    assert not Store().root.exists()


def test_list_shows_name_size_source_and_place(cli: Cli, record: Record) -> None:
    text = cli(0, "cache", "list")
    shown = (TINY.reference, record.digest[:19], "file:/zoo", record.fetched[:10], record.path)
    assert all(str(part) in text for part in shown)
    value = cli.json(0, "cache", "list")
    (row,) = value["artifacts"]
    assert (row["digest"], row["path"]) == (record.digest, str(record.path))
    assert row["bytes"] == value["bytes"] == sum(file.size for file in record.files)


def test_verify_names_what_is_damaged_and_how_to_repair_it(cli: Cli, record: Record) -> None:
    second = put_second()
    assert cli.json(0, "cache", "verify")["ok"] is True
    damage(record)
    Store().put(THIRD, {K_NAME: b"no rotation at all", "v.pt": b"neither"}, source="s")
    lost = second.path / "record.json"
    lost.chmod(0o600)
    lost.write_bytes(b"\0" * 10)
    rows = {row["path"]: row for row in cli.json(4, "cache", "verify")["artifacts"]}
    assert [row["repair"] for row in rows.values()] == [
        f"oscar-zoo pull {TINY.reference} --hub file:/zoo",
        f"oscar-zoo pull {THIRD.reference} --hub s",
        "oscar-zoo cache gc, then pull what is missing",
    ]
    assert rows[str(second.path)]["id"] is None and K_NAME in rows[str(record.path)]["problem"]
    assert "0 of 3 artifacts intact" in cli(4, "cache", "verify")
    os.utime(second.path, (time.time() - 7200,) * 2)
    cli(0, "cache", "gc")
    assert not second.path.exists()


def test_gc_says_what_goes_and_how_much(cli: Cli, record: Record) -> None:
    orphan = Store().blobs / ("0" * 64)
    orphan.write_bytes(b"x" * 1234)
    planned = cli.json(0, "cache", "gc", "--dry-run")
    assert orphan.exists() and planned["dry_run"] is True
    assert planned["removed"] == [{"kind": "blob", "path": str(orphan), "bytes": 1234}]
    done = cli.json(0, "cache", "gc")
    assert (done["freed_bytes"], done["exclusive"]) == (1234, True)
    assert done["removed"] == planned["removed"]
    assert not orphan.exists() and Store().open(record.digest).files == artifact_files()


def test_rm_takes_names_as_every_command_and_removes_all_or_none(cli: Cli, record: Record) -> None:
    second = put_second()
    wrong = ((3, [TINY.reference, "nothing"]), (2, [TINY.model]), (3, ["./folder"]), (2, []))
    for code, names in wrong:
        cli.refused(code, "cache", "rm", *names)
    assert set(Store().installed()) == {record, second}
    told = f"Removed {SECOND.reference}  {second.digest}"
    assert told in cli(0, "cache", "rm", "TINY-qwen3-hard:second")
    assert Store().installed() == (record,)
    damage(record)
    value = cli.json(0, "cache", "rm", f"{TINY.model}@{record.digest[:19]}")
    assert [row["id"] for row in value["removed"]] == [str(TINY)]
    assert list(Store().blobs.iterdir()) == [] and Store().installed() == ()


def test_a_store_that_others_can_write_is_refused(cli: Cli, record: Record) -> None:
    Store().root.chmod(0o777)
    for words in (["list"], ["verify"], ["gc"], ["rm", TINY.model]):
        error = cli.json(8, "cache", *words)["error"]
        assert error["code"] == "storage" and error["hint"].startswith("chmod 700")


# Another user, without rights on files but to read the interpreter, which may lie in our home.
AS_OTHER = (
    "setpriv --reuid=54321 --regid=54321 --clear-groups --bounding-set=-all,+dac_read_search"
    " --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
ROOT_ONLY = pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder away")
OTHER = 54321


def by_other(*words: str) -> tuple[int, dict[str, Any]]:
    """What a command of another user ends with and prints."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv")
    command = [*AS_OTHER.split(), sys.executable, "-m", "oscar_zoo", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return done.returncode, parsed(done.stdout.decode())


def shown(folder: Path) -> list[tuple[str, int, int]]:
    """Every path below `folder`, with its owner and size."""
    found = ((path, path.lstat()) for path in sorted(folder.rglob("*")))
    return [(str(path), status.st_uid, status.st_size) for path, status in found]


@ROOT_ONLY
@pytest.mark.parametrize("mode", [0o700, 0o777])
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("", "cache list"),
        ("artifacts", "cache verify"),
        ("blobs", "cache gc"),
        (None, "cache rm tiny-qwen3-hard"),
        ("", "pull tiny-qwen3-hard --hub file:hub"),
        ("blobs/sha256", "pull tiny-qwen3-hard --hub file:hub"),
        ("", f"pull {MODEL} --compute"),
        ("computing", f"pull {MODEL} --compute"),
        ("kernels", f"serve ./artifact --model {MODEL} --device cpu --print"),
    ],
)
def test_a_cache_of_another_user_is_refused_and_left_as_it_is(
    cli: Cli, record: Record, part: str | None, words: str, mode: int
) -> None:
    hub_with(Path("hub"), artifact_files())
    write_folder(Path("artifact"), measured_files())
    if part == "computing":
        Store().remove(record)
    place = record.path if part is None else Store().root / part
    place.mkdir(exist_ok=True)
    place.chmod(mode)
    os.chown(place, OTHER, OTHER)
    before = shown(place)
    error = cli.json(6, *words.split())["error"]
    assert error["code"] == "access.owner" and "OSCAR_ZOO_CACHE" in error["hint"]
    assert f"{place} belongs to uid {OTHER}" in error["message"]
    assert shown(place) == before


@ROOT_ONLY
def test_a_cache_that_cannot_be_written_names_the_variable_that_moves_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub_with(tmp_path / "hub", artifact_files())
    monkeypatch.setenv("OSCAR_ZOO_CACHE", str(tmp_path / "missing/cache"))
    code, told = by_other("pull", HARD.model, "--no-lock", "--hub", f"file:{tmp_path / 'hub'}")
    assert code == 8, told
    assert "OSCAR_ZOO_CACHE" in told["error"]["hint"], told


@ROOT_ONLY
@pytest.mark.parametrize(
    ("owner", "planting", "later", "code"),
    [(OTHER, 0o755, 0o755, 6), (0, 0o777, 0o777, 8), (0, 0o777, 0o700, 6)],
    ids=["theirs", "open", "closed too late"],
)
def test_nothing_that_another_user_put_into_a_shared_cache_is_used(
    cli: Cli, tmp_path: Path, owner: int, planting: int, later: int, code: int
) -> None:
    """A process of another user brings a whole entry, which nothing in itself gives away."""
    forged = Store(tmp_path / "forged").put(TINY, artifact_files(seed=9), source="file:/zoo").record
    shared = Store().root
    shared.mkdir()
    os.chown(shared, owner, owner)
    shared.chmod(planting)
    plant = ["cp", "-r", f"{tmp_path / 'forged'}/.", str(shared)]
    subprocess.run([*AS_OTHER.split(), *plant], check=True)
    shared.chmod(later)
    name = TINY.reference
    for words in (
        ["list", "--installed"],
        ["verify", name],
        ["pull", name, "--offline"],
        ["serve", name, "--model", MODEL, "--device", "cpu", "--print"],
        ["eval", name, "--model", MODEL],
        ["cache", "list"],
        ["cache", "rm", name],
    ):
        assert forged.digest not in cli(code, *words, "--json")
    assert (shared / forged.path.relative_to(tmp_path / "forged") / K_NAME).exists()


@ROOT_ONLY
def test_two_users_each_need_a_cache_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: Record
) -> None:
    hub_with(tmp_path / "hub", artifact_files())
    Store().root.chmod(0o755)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    for name in ("STATE", "DATA"):
        monkeypatch.setenv(f"OSCAR_ZOO_{name}", str(theirs / name))
    pull = ("pull", TINY.model, "--no-lock", "--hub", f"file:{tmp_path / 'hub'}")
    code, told = by_other(*pull)
    assert (code, told["error"]["code"]) == (6, "access.owner")
    monkeypatch.setenv("OSCAR_ZOO_CACHE", str(theirs / "cache"))
    code, told = by_other(*pull)
    assert (code, told["artifacts"][0]["digest"]) == (0, record.digest)


def killed_in(folder: Path) -> Path:
    """What a process left in `folder` that was killed while it worked on it."""
    program = (
        "import os, signal, sys, pathlib; from oscar_zoo.artifact import durable;"
        " place = durable.temp_path(pathlib.Path(sys.argv[1])); place.mkdir();"
        " print(place, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert left.is_dir()
    return left


def test_a_killed_command_removes_its_rest_later(cli: Cli, tmp_path: Path, own_state: Path) -> None:
    hub = hub_with(tmp_path / "hub", artifact_files())
    copy = tmp_path / "copy"
    mirror = ("mirror", f"file:{hub.root}", f"file:{copy}", "--all", "--create")
    cli(0, *mirror)
    left = killed_in(copy)
    cli(0, *mirror, "--dry-run")
    assert left.exists()
    cli(0, *mirror)  # everything is there already
    assert not left.exists()
    cli(0, "pull", HARD.model, "--hub", f"file:{hub.root}")
    left = killed_in(own_state / "cache" / "artifacts")
    cli(3, "cache", "rm", "another")  # it was removed before the kill
    assert not left.exists()
    cli(0, "verify", HARD.model)


BOTH = "hf:org/zoo ms:org/zoo"
CANARY = "hf_CANARY0123456789abcdefghijklmnop"
MS_CANARY = "ms-CANARY01-2345-6789-abcd-efghijklmnop"
CARDS = "".join(f"echo '{i}, GPU-{i}f, NVIDIA H200, 143771, 143000'\n" for i in range(2))
Driver = Callable[..., dict[str, dict[str, Any]]]
SECRETS = {"HF_TOKEN": CANARY, "MODELSCOPE_API_TOKEN": MS_CANARY}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as started:
        for kind in ("hf", "ms"):
            files = {f"model/tag/{name}": data for name, data in payload().items()}
            started.repository("org/zoo", kind, files=files)  # type: ignore[arg-type]
        yield started


@pytest.fixture
def quick(server: HubServer, tmp_path: Path) -> QuickCli:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("[network]\nread = 20\ntries = 1\n")
    return QuickCli(server.environment(tmp_path / "hf"), tmp_path)


def findings(done: Finished, topic: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in done.json["findings"] if row["topic"] == topic}


@pytest.mark.parametrize("version", VERSIONS)
def test_hubs_that_answer_are_counted(server: HubServer, quick: QuickCli, version: int) -> None:
    quick = QuickCli(quick.environment, quick.folder, version)
    done = quick("doctor", "--json", OSCAR_ZOO_HUB=BOTH, **SECRETS)
    assert done.code == 0 and done.err == "" and done.json["usable"] is True
    hubs = findings(done, "hub")
    assert [(name, row["state"], row["artifacts"]) for name, row in hubs.items()] == [
        ("hf:org/zoo", "ok", 1),
        ("ms:org/zoo", "ok", 1),
    ]
    assert all(type(row["milliseconds"]) is int for row in hubs.values())
    tokens = findings(done, "token")
    assert tokens["Hugging Face"]["source"] == "HF_TOKEN"
    assert tokens["Hugging Face"]["user"] == "tester"
    assert tokens["ModelScope"]["source"] == "MODELSCOPE_API_TOKEN"
    assert findings(done, "version")["huggingface_hub"]["version"].startswith(f"{version}.")
    assert findings(done, "setting")["HF_ENDPOINT"]["value"] == server.url


def test_people_get_a_state_and_a_next_step_per_line(server: HubServer, quick: QuickCli) -> None:
    (quick.folder / "empty").mkdir()
    done = quick("doctor", "--hub", f"file:{quick.folder}/empty", "--hub", "hf:org/missing")
    assert done.code == 1 and done.err == "Usable; 1 failed.\n"
    states = ("ok   ", "warning   ", "FAILED   ", "not checked   ", "            next: ")
    assert all(line.startswith(states) for line in done.out.splitlines())
    assert f"ok          hub      file:{quick.folder}/empty: 0 artifacts" in done.out
    assert "FAILED      hub      hf:org/missing: Hugging Face org/missing does not" in done.out


@pytest.mark.parametrize(
    ("group", "version", "state", "holds"),
    [
        (64, "0.5.21", "ok", "57GiB"),
        (8, "0.5.21", "ok", "7GiB"),
        (1, "0.5.21", "warning", "limit of this container"),
        (64, "0.5.17", "ok", "pip install"),
    ],
)
def test_why_a_machine_has_no_cache_on_the_host(
    group: int, version: str, state: str, holds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free(cgroup: Path | None = None) -> int:
        return (group if cgroup is None else 64) << 30

    monkeypatch.setattr(doctor.hardware, "available_ram", free)
    monkeypatch.setattr(releases, "version", lambda name: version)
    (found,) = (one for one in doctor.engine() if one.name == "host cache")
    assert (found.state, found.free_bytes) == (state, group << 30)
    assert holds in f"{found.detail}; {found.step}"


def test_a_hub_that_hangs_in_any_other_way_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.05)
    monkeypatch.setattr(
        "oscar_zoo.registry.hubs.local.LocalHub.artifacts", lambda hub: os.read(pipe[0], 1)
    )
    pipe = os.pipe()
    try:
        found = [
            f
            for f in doctor.examine(DoctorParams(("file:/somewhere",))).findings
            if f.topic == "hub"
        ]
    finally:
        os.close(pipe[1])
    assert [f.state for f in found] == ["failed"] and "did not answer within 0 s" in found[0].detail


def test_offline_no_hub_is_asked(server: HubServer, quick: QuickCli) -> None:
    for arguments, variables in (
        (["--offline"], {}),
        ([], {"OSCAR_ZOO_OFFLINE": "1"}),
        ([], {"HF_HUB_OFFLINE": "1"}),
    ):
        done = quick("doctor", "--json", *arguments, OSCAR_ZOO_HUB=BOTH, **SECRETS, **variables)
        assert done.code == 0
        assert {row["state"] for row in findings(done, "hub").values()} == {"not checked"}
    assert server.requests == []


def test_refused_tokens_and_those_others_read_are_named(server: HubServer, quick: QuickCli) -> None:
    def told(**variables: str) -> dict[str, Any]:
        done = quick("doctor", "--json", OSCAR_ZOO_HUB="file:.", **variables)
        assert CANARY not in done.out + done.err
        return findings(done, "token")["Hugging Face"]

    server.fault("status", "/api/whoami-v2", code=401)
    row = told(**SECRETS)
    assert (row["state"], row["next"]) == ("failed", "replace or unset HF_TOKEN")
    server.clear_faults()
    saved = Path(quick.environment["HF_HOME"]) / "token"
    for mode, state in ((0o600, "ok"), (0o644, "warning")):
        saved.write_text(CANARY)
        saved.chmod(mode)
        row = told()
        assert (row["state"], row["source"], row["present"]) == (state, str(saved), True)


@pytest.mark.parametrize("broken", ["file in the way", "writable by others", "configuration"])
def test_what_every_command_needs_decides_the_verdict(quick: QuickCli, broken: str) -> None:
    cache = quick.folder / "cache"
    if broken == "file in the way":
        cache.write_bytes(b"")
    elif broken == "writable by others":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        (quick.folder / "config" / "config.toml").write_text("hubs = 3\n")
    done = quick("doctor", "--offline", "--json")
    assert done.code == 1 and done.json["usable"] is False
    failed = [row for row in done.json["findings"] if row["state"] == "failed"]
    assert failed and all(row["next"] for row in failed)
    if broken == "configuration":  # one verdict on one file
        assert sum("config.toml" in row["name"] + row["detail"] for row in failed) == 1
    text = quick("doctor", "--offline")
    assert text.code == 1 and "FAILED" in text.out and text.err.startswith("Not usable")


HEAVY = """
import sys
from oscar_zoo.cli.main import run
assert run(["doctor", "--offline", "--json"]) == 0
heavy = {"torch", "transformers", "sglang", "triton", "modelscope_hub", "huggingface_hub"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_nothing_is_created_and_nothing_heavy_is_imported(quick: QuickCli) -> None:
    before = set(quick.folder.rglob("*"))
    command = [sys.executable, "-c", HEAVY]
    done = subprocess.run(
        command, env=quick.variables, cwd=quick.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(quick.folder.rglob("*")) == before


@pytest.fixture
def driver(quick: QuickCli, tmp_path: Path) -> Driver:
    """What `doctor` says of the machine where `nvidia-smi` is this script."""

    def found(script: str, **variables: str) -> dict[str, dict[str, Any]]:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}")
        tool.chmod(0o755)
        path = f"{tool.parent}:{os.environ['PATH']}"
        return findings(quick("doctor", "--offline", "--json", PATH=path, **variables), "machine")

    return found


def test_the_driver_names_the_gpus_and_sees_no_token(driver: Driver, tmp_path: Path) -> None:
    row = driver(f"env > {tmp_path}/seen\n{CARDS}", **SECRETS)["GPU"]
    assert row["gpus"] == [{"name": "NVIDIA H200", "memory_bytes": 143771 << 20}] * 2
    assert "PATH=" in (seen := (tmp_path / "seen").read_text()) and "CANARY" not in seen
    assert driver("echo no devices were found\nexit 6\n")["GPU"]["gpus"] == []


@pytest.mark.parametrize(
    ("capability", "state", "words"),
    [
        ("9.0", "ok", "decode in CUDA C++, write in CUDA C++, the rest in Triton; measured"),
        ("8.9", "ok", "write in Triton, the rest in Triton; its kernels ran on an H200"),
        ("7.5", "warning", "none for compute capability 7.5"),
    ],
)
def test_the_path_of_the_kernels_is_that_of_the_gpu(
    capability: str, state: str, words: str, driver: Driver
) -> None:
    asked = f"case $* in *compute_cap*) echo {capability};; *) {CARDS.strip()};; esac\n"
    row = driver(asked)["INT2 kernels"]
    assert (row["state"], row["paths"][0]["compute_capability"]) == (state, capability)
    assert words in row["detail"] and (row["next"] is None) == (state == "ok")
    known = [(one["name"], one["state"]) for one in row["known_gpus"]]
    assert ("RTX 4090", "its kernels ran on an H200, not on the card") in known
    assert ("H200", "measured on H100 and H200 only") in known


@pytest.mark.parametrize("debug", ["0", "1"])
def test_no_command_shows_a_secret(server: HubServer, quick: QuickCli, debug: str) -> None:
    Store(quick.folder / "cache").put(
        ArtifactId("model", "tag"), artifact_files(), source="hf:org/zoo"
    )
    server.fault("status", "/api/models/org/closed*", code=401)
    server.fault("status", "/api/whoami-v2", code=500)
    port = server.closed_port().rpartition(":")[2]
    variables = SECRETS | {
        "OSCAR_ZOO_DEBUG": debug,
        "OSCAR_ZOO_HUB": (
            f"hf:org/zoo,hf:org/closed,ms:org/missing,https://someone:{CANARY}@example.org/zoo"
        ),
        "HF_ENDPOINT": server.url,
        "MODELSCOPE_ENDPOINT": f"http://someone:{MS_CANARY}@127.0.0.1:{port}",
        "HTTPS_PROXY": f"http://{CANARY}@127.0.0.1:{port}",
        "ALL_PROXY": "",
    }
    for words in (["doctor"], ["cache", "list"], ["login"], ["login", "ms"]):
        for more in ([], ["--json"]):
            done = quick(*words, *more, **variables)
            assert "CANARY" not in done.out + done.err, (words, more)
            assert done.out or done.err
    done = quick("doctor", **variables)
    assert "http://***@127.0.0.1" in done.out and "HF_TOKEN" in done.out
    assert ": not a hub\n" in done.out
    own = [path.read_bytes() for path in quick.folder.rglob("*") if path.is_file()]
    assert not any(b"CANARY" in content for content in own)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:secret@host:8080/path?token=abc#x", "https://***@host:8080/path?***"),
        ("user:secret@proxy:3128", "***@proxy:3128"),
        ("hf:org/name@main", "hf:org/name@main"),
        ("file:/srv/zoo hf:org/name", "file:/srv/zoo hf:org/name"),
        ("file:/a/very/long/path/" + "x" * 90, "file:/a/very/long/path/" + "x" * 90),
        (f"hf:{CANARY}/name", "hf:hf_***/name"),
    ],
)
def test_masking_keeps_what_people_need(text: str, shown: str) -> None:
    assert doctor.masked(text) == shown
