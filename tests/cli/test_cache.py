"""`oscar-zoo cache`: what people see, what programs get, and exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli, parsed
from hub_uses import HARD, hub_with
from measured_artifacts import measured_files
from tiny_artifacts import K_NAME, artifact_files, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.store import Record, Store

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


def test_rm_takes_names_like_every_other_command_and_removes_all_or_nothing(
    cli: Cli, record: Record
) -> None:
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


def test_the_same_command_removes_what_it_left_when_it_was_killed(
    cli: Cli, tmp_path: Path, own_state: Path
) -> None:
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
