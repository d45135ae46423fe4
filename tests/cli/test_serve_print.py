"""The command line of `serve`: what `--print` writes runs as it stands in a shell, how a parsed one
is written again, and what SGLang refuses of it."""

import errno
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_child import Cli as FreshCli
from cli_output import Cli
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli
from tiny_artifacts import artifact_files, payload, write_folder
from tiny_models import change_config

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.commands.serve import command
from oscar_zoo.engines import served_artifact, setting_flags, settings
from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.engines.sglang.launch.plan import check_port_free
from oscar_zoo.errors import ServerFailed
from oscar_zoo.models import hardware
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.store import Store
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.serve import with_next_step

ID = ArtifactId("tiny-qwen3-hard", "seq512_prompt2_group64")
PRINT = ("serve", "--print", "--model", MODEL)


@pytest.fixture
def quoted(tmp_path: Path) -> Path:
    """A folder with an artifact whose name a shell would break."""
    return write_folder(tmp_path / "an artifact's folder", artifact_files())


@pytest.fixture
def installed() -> str:
    """The name of an artifact in the store of this test."""
    Store().put(ID, artifact_files(), source="test")
    return ID.reference


@pytest.mark.parametrize("as_json", [False, True])
def test_warnings_about_a_folder_are_told(cli: Cli, tmp_path: Path, as_json: bool) -> None:
    """What `verify` warns of in a folder also stands where people read it, or in the object."""
    folder = write_folder(tmp_path / "rotation", payload(proven=False))
    line = [*PRINT, folder, "--device", "cpu", "--clip", "0.96,0.92"]
    if as_json:
        assert cli.json(0, *line)["warnings"] == ["pair.unproven"]
    else:
        cli(0, *line)
        assert cli.err.startswith("warning: ") and cli.err.count("\n") == 1


def test_the_plugin_reads_what_the_command_names(cli: Cli, quoted: Path) -> None:
    """The flags pass through the plugin's own options, and lead to the artifact with the digest in
    the command."""
    facts = cli.json(0, *PRINT, quoted, "--device", "cuda", "--clip", "0.5,0.25")
    environ: dict[str, str] = {}
    given = dict(part.split("=", 1) for part in facts["argv"][4:])
    for option in setting_flags.OPTIONS.values():
        if option.flag in given:
            setting_flags.write_flag(option, given[option.flag], environ)
    chosen = settings.read_settings(environ)
    served = served_artifact.load(chosen.source, chosen.expected_digest)
    assert served.digest == facts["digest"] and served.where == str(quoted)
    assert (chosen.k_clip, chosen.v_clip) == ((0.5,), (0.25,))
    assert given["--kv-cache-dtype"] == "int2" and given["--host"] == "127.0.0.1"
    assert given["--model-path"] == str(MODEL)
    assert given["--cuda-graph-backend-prefill"] == "disabled"
    assert "--cuda-graph-backend-decode" not in given


def test_an_installed_artifact_goes_by_its_name(cli: Cli, installed: str) -> None:
    facts = cli.json(0, *PRINT, "tiny-qwen3-hard", "--device", "cuda:2", "--", "--tp=2")
    assert f"--oscar-artifact={installed}" in facts["argv"] and facts["argv"][-1] == "--tp=2"
    assert "--base-gpu-id=2" in facts["argv"] and facts["tensor_parallel"] == 2
    assert facts["env"]["OSCAR_ZOO_CACHE"] == os.environ["OSCAR_ZOO_CACHE"]
    chosen = settings.ArtifactSource(artifact=installed)
    assert served_artifact.load(chosen).digest == facts["digest"]


def test_a_tree_has_the_artifact_of_the_model(cli: Cli, tmp_path: Path) -> None:
    """As downloaded from a hub: `<Model>/<tag>`. The model decides; what it leaves open is told."""
    tree = tmp_path / "oscar_rotations"
    mine = write_folder(tree / "tiny-qwen3-hard" / "gpqa_group64", payload())
    write_folder(tree / "Qwen3-8B" / "gpqa_group128", payload())
    asked = ["serve", tree, "--print", "--device", "cuda", "--model"]
    assert f"--oscar-rotation-path={mine}" in cli.json(0, *asked, MODEL)["argv"]
    for model in ("Qwen3-8B", "qwen/qwen3-8b"):  # the one of that name, which has another shape
        assert cli.json(4, *asked, model)["error"]["code"] == "integrity.verification"
    write_folder(tree / "tiny-qwen3-hard" / "other_group64", payload())
    line = cli.refused(2, *asked, MODEL)
    assert "gpqa_group64" in line and "other_group64" in line
    assert "Qwen3-8B/gpqa_group128" in cli.refused(3, *asked, "Qwen3-32B")
    assert "--model MODEL" in cli.refused(2, *asked[:-1])


def test_a_shell_gets_exactly_that(
    cli: Cli, quoted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the interpreter writes down what arrives from a real shell."""
    stand_in = tmp_path / "python $(touch x) 'here'"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:],"
        " dict(os.environ)]))\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    words = (*PRINT, quoted, "--device", "cuda", "--", '--served-model-name=a "b" $c')
    facts, shell = cli.json(0, *words), ["sh", "-c", cli(0, *words)]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=tmp_path, check=True)
    argv, environ = json.loads(done.stdout)
    assert argv == facts["argv"][1:] and not (tmp_path / "x").exists()
    assert facts["env"].items() <= environ.items()
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in facts["unset"]
    assert not set(facts["unset"]) & environ.keys()


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sglang", "transformers", "triton"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from oscar_zoo.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def test_it_starts_nothing_and_needs_neither_torch_nor_sglang(installed: str) -> None:
    words = [sys.executable, "-c", ABSENT, *map(str, PRINT), installed, "--device", "cuda"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sglang.launch_server" in done.stdout and shlex.split(done.stdout)[0] == "env"


def test_no_key_is_ever_printed(tmp_path: Path, cli: Cli, artifact: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-canary")
    cli(2, *PRINT, artifact, "--expose", "0.0.0.0", "--api-key-file", key)
    assert "secret-canary" not in cli.out + cli.err
    for words in (["--api-key", "secret-canary"], ["--api-key=secret-canary"]):
        line = cli.refused(2, "serve", "X", *words)
        assert "goes behind --" in line and "canary" not in line


def test_the_zoo_knows_the_gpus(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "default_device", lambda: "cpu")
    recipe = Catalog.packaged().recipe("Qwen3-32B")
    assert recipe is not None
    folder = write_folder(tmp_path / "Qwen3-32B", payload(geometry=recipe.geometry))
    gpus = ("--device", "cuda")
    asked = (gpus, (*gpus, "--", "--tp=2"), ())
    answers = [cli.json(0, "serve", folder, "--print", *more) for more in asked]
    assert [one["tensor_parallel"] for one in answers] == [4, 2, 1]  # the last is for this CPU
    assert "--tp-size=4" in answers[0]["argv"] and answers[0]["model"] == recipe.hf_id
    assert not any("--tp-size" in part for part in answers[1]["argv"])


def test_a_relative_store_is_found_from_every_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSCAR_ZOO_CACHE", "here/store")
    Store().put(ID, artifact_files(), source="test")
    words = (*PRINT, ID.reference, "--offline", "--device", "cuda")
    assert cli.json(0, *words)["env"]["OSCAR_ZOO_CACHE"] == str(tmp_path / "here/store")
    assert "=here" not in cli(0, *words)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("X -- --tp 2", ("--tp", "2")),
        ("-- X 2", ("2",)),
        ("X --print -- a -- b", ("a", "--", "b")),
        ("X --", ()),
    ],
)
def test_words_behind_the_dashes_go_to_sglang(text: str, flags: tuple[str, ...]) -> None:
    request = parse(text.split())
    assert (request.target, request.flags) == ("X", flags)


@pytest.mark.parametrize("words", [["serve"], ["serve", "--print"], ["bench", "serve"]])
def test_offline_asks_no_hub(words: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.setenv(variable, "")  # so that what the command sets is gone afterwards
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    for module in ("serving.serve", "evaluate.bench.measuring"):
        monkeypatch.setattr(f"oscar_zoo.{module}.require_serve", lambda: None)
    error = cli.json(5, *words, "Qwen3-8B", "--offline", "--device", "cpu")["error"]
    assert error["code"] == "network.offline"


def parse(words: list[str]) -> ServeParams:
    """The parameters of a command line without `serve`."""
    values = command.make_context("serve", words).params
    return ServeParams(**{x: y for x, y in values.items() if x not in ("quiet", "as_json")})


@pytest.mark.parametrize(
    "text",
    [
        "Qwen3-8B",
        r"./a\ b --model ./m --revision abc --port 31000 --clip 0.9,0.8 --device cuda:1 -- --tp=2"
        " --name='x y'",
        "X --expose 0.0.0.0 --api-key-file key --timeout 60.5 --hub file:/a --hub hf:b/c --json"
        " --quiet",
        "X --compute --calib-data manuals --detach --offline",
        "X --drafts",
        "--drafts ngram X -- --tp=2",
        "X --engine-api --port 31000",
    ],
)
def test_a_request_as_a_command_line_again(text: str) -> None:
    request = parse(shlex.split(text))
    assert parse(request.arguments()[1:]) == request
    assert parse(shlex.split(request.command_line())[2:]) == request
    other = parse(request.arguments(port=4711, detach=False, json=True)[1:])
    assert other == replace(request, port=4711, detach=False)


def test_a_taken_port_shows_a_free_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_zoo.serving.serve.require_serve", lambda: None)
    bind, more = plan._bind_error, ["--clip", "0.9,0.9", "--", "--tp=2"]
    low = OSError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(plan, "_bind_error", lambda x, port: low if port < 9 else bind(x, port))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for code, wanted in ((2, 1), (7, port)):
            line = cli.refused(code, "serve", "Qwen3-8B", "--port", wanted, *more).strip()
            again = parse(shlex.split(line.rpartition("oscar-zoo serve ")[2]))
            check_port_free("127.0.0.1", again.port)
            assert (again.target, again.flags) == ("Qwen3-8B", ("--tp=2",))
            assert again.clip == Clip(k=0.9, v=0.9) and again.port > 1023
        more = ["--offline", "--device", "cpu", "--port", port]
        for options in ([], ["--detach"]):  # a name that nobody has is said before the port
            cli.refused(3, "serve", "Nobody-9B", *more, *options)
            cli.refused(7, "serve", "Qwen3-8B", *more, *options)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "if a/b lies in a folder: oscar-zoo serve X --model DIR --port 31000",
        ),
        (
            "OSError: a/b is not a local folder and is not a valid model identifier",
            "oscar-zoo serve X --model DIR --port 31000",
        ),
        (
            "OSError: You are trying to access a gated repo. 401 Client Error.",
            "hf download a/b, then serve it with --offline",
        ),
        (
            "GatedRepoError: 403 Client Error. Access to model a/b is restricted and you are not",
            "the server has no token of yours",
        ),
        ("ValueError: --frob", None),
    ],
)
def test_a_model_not_fetched_has_a_next_step(tmp_path: Path, said: str, step: str | None) -> None:
    failed = ServerFailed(f"the server ended: {said}.", hint="log: x")
    again = parse(["X", "--port", "31000"]).command_line(model="DIR")
    told = with_next_step(failed, "a/b", again)
    assert told.message == failed.message and str(told.hint).endswith("log: x")
    assert told.hint == failed.hint if step is None else step in str(told.hint)
    assert with_next_step(failed, str(tmp_path), again) is failed


@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("serve ./artifact --model MODEL", "--page-size=two"),
        ("serve ./artifact --model MODEL --print", "--no-such-flag=1"),
        ("eval ./artifact --model MODEL --engine sglang", "--no-such-flag=1"),
        ("bench serve --dummy-weights tiny-qwen3-hard --caches=bf16,int2", "--no-such-flag=1"),
    ],
)
def test_sglang_s_parser_ends_with_2(words: str, flag: str, tmp_path: Path, artifact: Path) -> None:
    (tmp_path / "tmp").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "OSCAR_ZOO_PORT": os.environ["OSCAR_ZOO_PORT"]}
    # What `--print` asks the parser in is a fresh process in no other test.
    started = FreshCli if "--print" in words else ForkedCli
    run = started(environment(HF_HUB_OFFLINE="1", **own), tmp_path)
    done = run(*words.replace("MODEL", str(MODEL)).split(), "--json", "--", flag)
    assert done.code == 2, done.err
    error = done.json["error"]
    assert error["code"] == "usage.engine_flag" and "launch_server --help" in error["hint"]
    assert flag.lstrip("-").partition("=")[0] in error["message"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_model_in_float16_is_told(cli: Cli, quoted: Path, tmp_path: Path, engine: str) -> None:
    """As checkpoints of AWQ and GPTQ say; the kernels are for bfloat16."""
    model = shutil.copytree(MODEL, tmp_path / "model-awq")
    line = ("serve", "--print", quoted, "--model", model, "--engine", engine)
    for dtype, told in (("bfloat16", False), ("float16", True)):
        change_config(model, dtype=dtype)
        cli(0, *line, "--device", "cuda")
        assert ("float16" in cli.err) == told
        cli(0, *line, "--device", "cuda", "--", "--dtype=bfloat16")
        assert "float16" not in cli.err
        cli(0, *line, "--device", "cpu")
        assert "float16" not in cli.err
