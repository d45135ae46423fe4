"""Mistakes of a hurried person, in process: what is said, the exit code, and one JSON object for
programs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import fake_sglang
import pytest
from tiny_artifacts import K_NAME, artifact_files, write_folder

from oscar_zoo.cli import main
from oscar_zoo.cli.main import COMMANDS, run
from oscar_zoo.cli.pasting import measuring

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TAG = "seq512_prompt2_group64"
TINY = "tiny-qwen3-hard"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "artifact", artifact_files())


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hub" / TINY / TAG, artifact_files())
    return tmp_path / "hub"


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Run what must fail with `code`: one line on stderr (returned), nothing on stdout; the same
    facts as JSON."""
    words = [str(argument) for argument in arguments]
    assert run(words) == code
    text = capsys.readouterr()
    assert text.out == "" and text.err.count("\n") == 1 and text.err.startswith("error: "), text
    assert run([*words, "--json"]) == code
    structured = capsys.readouterr()
    assert structured.err == ""
    error = json.loads(structured.out)["error"]
    assert error["code"] and error["message"].strip() and set(error) == {"code", "message", "hint"}
    return text.err


def test_an_empty_argument_is_never_the_current_folder(
    capsys: pytest.CaptureFixture[str], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact)
    for arguments in (
        ["verify", ""],
        ["publish", ""],
        ["compute", "model", "--output-dir="],
        ["list", "--hub", ""],
    ):
        assert "empty" in refused(capsys, 2, *arguments)


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    done = capsys.readouterr()
    assert (
        done.out == ""
        and done.err.startswith("Usage: oscar-zoo")
        and all(name in done.err for name in COMMANDS)
    )


def test_a_bug_is_one_line_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the first line\nthe second")

    monkeypatch.setattr("oscar_zoo.app.browse.describe", broken)
    line = refused(capsys, 1, "info", TINY)
    assert "RuntimeError: the first line" in line and "OSCAR_ZOO_DEBUG=1" in line
    monkeypatch.setenv("OSCAR_ZOO_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run(["info", TINY])


def test_sigterm_is_reported_and_other_exits_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_zoo.app.browse.describe", lambda *_, **__: sys.exit(main.TERMINATED))
    assert "SIGTERM" in refused(capsys, 143, "info", TINY)
    monkeypatch.setattr("oscar_zoo.app.browse.describe", lambda *_, **__: sys.exit(5))
    with pytest.raises(SystemExit):
        run(["info", TINY])


def test_a_cause_and_a_next_step_are_two_sentences(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert f"{tmp_path}/nowhere. Check" in refused(capsys, 3, "verify", f"{tmp_path}/nowhere")


def test_paths_that_are_neither_file_nor_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "broken").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    for command in ("verify", "eval", "serve"):
        assert "neither a file nor a folder" in refused(capsys, 2, command, tmp_path / "pipe.pt")
        for name in ("broken", "loop"):
            assert "leads nowhere" in refused(capsys, 3, command, tmp_path / name)


@pytest.mark.parametrize("command", ["verify", "eval", "serve"])
def test_a_folder_without_rotations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "folder.pt").mkdir()
    assert "no rotation files" in refused(capsys, 3, command, tmp_path / "folder.pt")


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_one_file_where_a_pair_is_needed(
    capsys: pytest.CaptureFixture[str], artifact: Path, command: str
) -> None:
    assert "needs K and V" in refused(capsys, 2, command, artifact / K_NAME)


def test_a_file_where_a_folder_is_meant(capsys: pytest.CaptureFixture[str], artifact: Path) -> None:
    assert "is a file" in refused(capsys, 2, "publish", artifact / K_NAME)
    assert "is a file" in refused(capsys, 2, "compute", artifact / K_NAME)


def test_a_manifest_means_its_folder_and_a_linked_folder_its_target(
    capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(artifact)
    for path in (artifact / "oscar.json", tmp_path / "link"):
        assert run(["verify", str(path)]) == 0
        assert capsys.readouterr().out.startswith(f"{artifact}  OK")


@pytest.mark.parametrize("command", ["pull", "info"])
@pytest.mark.parametrize("path", ["./artifact", "/tmp/artifact", "~/artifact", "artifact/"])
def test_a_path_where_a_name_is_needed(
    capsys: pytest.CaptureFixture[str], command: str, path: str
) -> None:
    line = refused(capsys, 2, command, path)
    assert "is a path" in line and "oscar-zoo verify" in line


def test_a_folder_given_as_a_hub_names_the_right_form(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    assert f"file:{hub}" in refused(capsys, 2, "list", "--hub", hub)


def test_a_very_long_name(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a" * 5000, "/" + "a" * 5000):
        assert len(refused(capsys, 2 if text[0] == "a" else 1, "verify", text)) < 500


def test_an_unknown_tag_lists_the_tags_there_are(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    for command in ("info", "pull"):
        assert TAG in refused(capsys, 3, command, f"{TINY}:seq1", "--hub", f"file:{hub}")
    assert "seq20000_prompt83_group128" in refused(capsys, 3, "info", "Qwen3-8B:seq1")


def test_a_list_for_an_unknown_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--for", "qwen3-7b"]) == 0
    done = capsys.readouterr()
    assert done.out == "" and "qwen3-7b" in done.err and "Qwen3-8B" in done.err


def test_list_shows_format_and_bits_of_what_is_here(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    for arguments in (["--hub", f"file:{hub}"], []):
        assert run(["list", "--json", *arguments]) == 0
        row = next(r for r in json.loads(capsys.readouterr().out)["artifacts"] if r["tag"] == TAG)
        assert (row["format_version"], row["bits_per_element"], row["method"]) == (1, 2.5, "oscar")
        assert run(["pull", TINY, "--hub", f"file:{hub}"]) == 0
        capsys.readouterr()


def test_list_survives_a_manifest_that_is_none(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    (hub / TINY / TAG / "oscar.json").write_text("{")
    assert run(["list", "--hub", f"file:{hub}"]) == 0
    assert TAG in capsys.readouterr().out


def test_a_rotten_entry_of_the_store(
    capsys: pytest.CaptureFixture[str], hub: Path, tmp_path: Path
) -> None:
    """`verify` fails with both digests and the next command, `info` and `list` still work, `pull`
    repairs."""
    pull = ["pull", TINY, "--hub", f"file:{hub}"]
    assert run(pull) == 0
    entry = next(Path(os.environ["OSCAR_ZOO_CACHE"]).rglob(f"artifacts/*/*/{K_NAME}"))
    entry.chmod(0o600)
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    capsys.readouterr()
    assert run(["verify", TINY, "--json"]) == 4
    result = json.loads(capsys.readouterr().out)["results"][0]
    assert (
        result["outcome"] == "digest_mismatch"
        and len(result["want"]) == 64
        and result["got"] != result["want"]
    )
    assert run(["verify", TINY]) == 4
    assert f"oscar-zoo pull {TINY}:{TAG}" in capsys.readouterr().err
    for arguments in (["info", TINY], ["list", "--installed"]):
        assert run(arguments) == 0
        assert TAG in capsys.readouterr().out
    entry.unlink()
    assert "missing" in refused(capsys, 4, "eval", TINY, "--model", "Qwen3-8B")
    assert run(pull) == 0 and run(["verify", TINY]) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code", "seen"),
    [
        (["list"], 1, "error: no space left"),
        (["list", "--json"], 1, "error: no space left"),
        (["info", "Qwen3-9B", "--json"], 3, "error: no artifact is called"),
    ],
)
def test_output_that_cannot_be_written_is_an_error(
    words: list[str], code: int, seen: str, unbuffered: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from oscar_zoo.cli.main import main; main()", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
        )
    assert done.returncode == code and done.stderr.startswith(seen) and done.stderr.count("\n") == 1


def test_a_server_that_dies_while_serving(
    capsys: pytest.CaptureFixture[str], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs still get one object; the cause goes to stderr, and the exit code says it."""
    port = fake_sglang.take_its_place(monkeypatch, dies=True)
    command = [
        "serve",
        str(artifact),
        "--model",
        str(MODEL),
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    assert run([*command, "--json"]) == 1
    done = capsys.readouterr()
    assert json.loads(done.out)["url"] == f"http://127.0.0.1:{port}/v1"
    assert (
        done.err.count("\n") == 1 and "status 3" in done.err and "it fell over. Log: " in done.err
    )
    assert run([*command, "-q"]) == 1
    assert "it fell over. Log: " in capsys.readouterr().err


def test_an_address_of_another_machine(
    capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret")
    expose = ["--api-key-file", tmp_path / "key", "--expose"]
    for address in ("192.0.2.1", "no.such.host.invalid", "2001:db8::1"):
        line = refused(capsys, 2, "serve", artifact, "--model", MODEL, *expose, address)
        assert f"{address} is not an address of this machine" in line


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("config.json", b"{bad", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("config.json", b'{"num_hidden_layers": "four"}', "four"),
        ("tokenizer.json", b"nope", "tokenizer"),
        ("model.safetensors", b"", "weights"),
    ],
)
def test_a_model_with_a_damaged_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes, cause: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    if content.startswith(b'{"'):
        content = json.dumps(json.loads((MODEL / name).read_bytes()) | json.loads(content)).encode()
    (model / name).write_bytes(content)
    line = refused(
        capsys, 1, "compute", model, "--calib-tokens", 64, "--output-dir", tmp_path / "out"
    )
    assert cause in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "code"), [("hi", 1), ("one two three", 1), ("", 2)])
def test_a_text_too_short_to_fit_anything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, code: int
) -> None:
    (tmp_path / "text.txt").write_text(text)
    command = [
        "compute",
        MODEL,
        "--calib-data",
        tmp_path / "text.txt",
        "--output-dir",
        tmp_path / "out",
    ]
    assert "text.txt" in refused(capsys, code, *command) and not (tmp_path / "out").exists()


def test_closed_and_full_streams_are_no_tracebacks() -> None:
    program = f"{sys.executable} -c 'from oscar_zoo.cli.main import main; main()'"
    for redirection in (">&-", "2>&-", ">&- 2>&-", "--json >&-", "--json >/dev/full"):
        done = subprocess.run(
            ["bash", "-c", f"{program} list {redirection}"], capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr and "internal" not in done.stderr, (
            redirection,
            done.stderr,
        )
        assert done.returncode == ("/dev/full" in redirection), redirection


def test_a_reader_that_goes_ends_it_as_sigpipe_would() -> None:
    """As in `oscar-zoo list | head -1`: quietly, and with the exit code of other tools."""
    for more in ([], ["--json"]):
        ours, theirs = os.pipe()
        os.close(ours)
        command = [
            sys.executable,
            "-c",
            "from oscar_zoo.cli.main import main; main()",
            "list",
            *more,
        ]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        assert (done.returncode, done.stderr) == (141, b"")


def test_an_artifact_of_another_model_says_so(
    capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    assert run(["verify", str(artifact), "--model", "Qwen3-8B"]) == 4
    assert "it does not fit Qwen3-8B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "code", "word"),
    [("frob", 2, "not a device"), ("cuda:99", 1, "no device cuda:99"), ("mps", 2, "not supported")],
)
def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    tmp_path: Path,
    device: str,
    code: int,
    word: str,
) -> None:
    assert word in refused(capsys, code, "eval", artifact, "--model", MODEL, "--device", device)
    assert word in refused(
        capsys, code, "compute", MODEL, "--device", device, "--output-dir", tmp_path / "out"
    )


def test_a_digest_and_a_model_id_that_are_none(
    capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    for digest in ("zz", "sha256:3f9a", "0" * 63):
        assert "64 hex digits" in refused(capsys, 2, "verify", artifact, "--digest", digest)
    for name in ("../x", "a/b/c", "a b"):
        assert "not a" in refused(
            capsys, 2, "compute", MODEL, "--model-id", name, "--output-dir", artifact / "x"
        )
    assert not (artifact / "x").exists()


def test_a_model_that_cannot_be_fetched(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "network" in refused(
        capsys, 5, "compute", "no-such-org/no-such-model", "--output-dir", tmp_path / "out"
    )


def test_missing_text_is_named_before_the_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    text = tmp_path / "missing.jsonl"
    told = refused(capsys, 3, "compute", "Qwen/Qwen3-8B", "--calib-data", text)
    assert f"no such calibration file: {text}" in told


@pytest.mark.parametrize("variable", ["OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"])
def test_what_asked_for_offline_mode_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    assert "without --offline" in refused(capsys, 5, "pull", "Qwen3-8B", "--offline")
    monkeypatch.setenv(variable, "1")
    told = refused(capsys, 5, "pull", "Qwen3-8B")
    assert f"nset {variable}" in told and "--offline" not in told


def test_a_wrong_name_in_the_store_brings_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, 3, "verify", "qwen3-7b")
    assert "Did you mean " in told and "Qwen3-8B" in told
    assert "Fetch it: oscar-zoo pull Qwen3-8B" in refused(capsys, 3, "verify", "Qwen3-8B")


def test_a_model_on_no_hub_needs_its_folder(
    capsys: pytest.CaptureFixture[str], hub: Path, artifact: Path, tmp_path: Path
) -> None:
    """The zoo knows it by an id that no hub has: every printed command says where its folder
    goes."""
    cause = f"the checkpoint of {TINY} is on no hub. Give its folder: oscar-zoo"
    assert f"{cause} compute FOLDER" in refused(
        capsys, 2, "compute", TINY, "--output-dir", tmp_path / "out"
    )
    assert f"{cause} pull FOLDER --compute" in refused(capsys, 2, "pull", TINY, "--compute")
    assert f"{cause} serve {TINY} --model FOLDER" in refused(capsys, 2, "serve", TINY, "--print")
    assert run(["info", TINY]) == run(["info", "Qwen3.5-4B"]) == 0
    told = capsys.readouterr().out
    assert "weights 6.9 MB in BF16" in told
    assert (
        "make one: oscar-zoo compute FOLDER" in told
        and "oscar-zoo pull Qwen3.5-4B --compute" in told
    )
    assert run(["pull", TINY, "--hub", f"file:{hub}"]) == 0
    told = capsys.readouterr().err
    assert measuring(Path("made"), f"oscar-zoo/{TINY}").endswith(
        "oscar-zoo eval ./made --model FOLDER"
    )
    assert (
        f"give the folder of the model: oscar-zoo serve {TINY}:{TAG} --model FOLDER" in told
        and "Next" not in told
    )
    for what in (TINY, artifact):
        for more in ("--print", "--device=cpu"):
            assert f"{cause} serve {what} --model FOLDER" in refused(capsys, 2, "serve", what, more)
        assert f"{cause} eval {what} --model FOLDER" in refused(capsys, 2, "eval", what)


def test_a_folder_in_an_error_begins_with_a_dot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `dmg` would be read as a name by the command that the line proposes."""
    monkeypatch.chdir(tmp_path)
    files = artifact_files()
    write_folder(Path("rotation"), files)
    write_folder(Path("bare"), {name: data for name, data in files.items() if name != "oscar.json"})
    write_folder(Path("my dmg"), files | {K_NAME: files[K_NAME][:-200]})
    for command in (
        ["publish", "./my dmg", "--hub", "file:./hub"],
        ["serve", "./my dmg", "--print"],
    ):
        line = refused(capsys, 4, *command)
        assert (
            "error: ./my dmg failed verification" in line and "oscar-zoo verify './my dmg'" in line
        )
    Path("Qwen3-8B").mkdir()
    for command in (["serve", "./Qwen3-8B", "--print"], ["verify", "./Qwen3-8B"]):
        assert "no rotation files in ./Qwen3-8B" in refused(capsys, 3, *command)
    assert "no such artifact folder: ./nope" in refused(capsys, 3, "publish", "nope")
    assert "error: ./bare has no oscar.json" in refused(
        capsys, 2, "publish", "bare", "--hub", "file:./hub"
    )
    compute = ["compute", MODEL, "--calib-tokens", "64", "--output-dir"]
    assert "error: ./rotation already holds an artifact" in refused(capsys, 7, *compute, "rotation")
    assert "error: ./Qwen3-8B/x holds other files" in refused(
        capsys, 7, *compute, _with_a_file("Qwen3-8B/x")
    )


def _with_a_file(folder: str) -> str:
    write_folder(Path(folder), {"a.txt": b""})
    return folder


def test_a_copy_that_is_here_while_no_hub_answers(
    capsys: pytest.CaptureFixture[str], hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is a command that runs."""
    assert run(["pull", TINY, "--hub", f"file:{hub}", "--no-lock"]) == 0
    capsys.readouterr()
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        line = refused(capsys, 5, "pull", TINY, "--hub", "hf:org/zoo")
    command = line.rstrip().rpartition("to use it: oscar-zoo ")[2].partition(";")[0]
    assert command == f"pull {TINY} --offline"
    assert run(command.split()) == 0 and "Already here and intact" in capsys.readouterr().out
