"""`serve --print`: a command that a shell can run as it stands, for stock SGLang and for the
published fork."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_output import parsed
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang import served_artifact, setting_flags, settings
from oscar_zoo.models import hardware
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.store import Store

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
NAME = "tiny-qwen3-hard:seq512_prompt2_group64"
UNPROVEN = warning_text("pair.unproven")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "an artifact's folder", artifact_files())


@pytest.fixture
def installed() -> str:
    """The name of an artifact in the store of this test."""
    Store().put(
        ArtifactId("tiny-qwen3-hard", "seq512_prompt2_group64"), artifact_files(), source="test"
    )
    return NAME


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `serve --print` writes to stdout; its exit code must be 0."""
    assert run(["serve", "--print", "--model", str(MODEL), *map(str, arguments)]) == 0, (
        capsys.readouterr().err
    )
    return capsys.readouterr().out


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The same as data."""
    facts: dict[str, Any] = parsed(printed(capsys, "--json", *arguments))
    return facts


@pytest.mark.parametrize("as_json", [False, True])
def test_warnings_about_a_folder_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    """What `verify` warns of in a folder also stands where people read it, or in the object."""
    folder = write_folder(tmp_path / "rotation", payload(proven=False))
    line = ["serve", "--print", str(folder), "--model", str(MODEL), "--device", "cpu"]
    assert run([*line, "--clip", "0.96,0.92", *(["--json"] if as_json else [])]) == 0
    out, err = capsys.readouterr()
    if as_json:
        assert parsed(out)["warnings"] == ["pair.unproven"] and "warning: " not in err
    else:
        assert err == f"warning: {UNPROVEN}\n"


def test_the_plugin_reads_what_the_command_names(
    capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    """The flags pass through the plugin's own options, and lead to the artifact with the digest in
    the command."""
    facts = shown(capsys, artifact, "--device", "cuda", "--clip", "0.5,0.25")
    environ: dict[str, str] = {}
    given = dict(part.split("=", 1) for part in facts["argv"][4:])
    for option in setting_flags.OPTIONS.values():
        if option.flag in given:
            setting_flags.write_flag(option, given[option.flag], environ)
    chosen = settings.read_settings(environ)
    served = served_artifact.load(chosen.source, chosen.expected_digest)
    assert served.digest == facts["digest"] and served.where == str(artifact)
    assert (chosen.k_clip, chosen.v_clip) == ((0.5,), (0.25,))
    assert given["--kv-cache-dtype"] == "int2" and given["--host"] == "127.0.0.1"
    assert (
        given["--model-path"] == str(MODEL) and given["--cuda-graph-backend-prefill"] == "disabled"
    )
    assert "--cuda-graph-backend-decode" not in given


def test_an_installed_artifact_goes_by_its_name(
    capsys: pytest.CaptureFixture[str], installed: str
) -> None:
    facts = shown(capsys, "tiny-qwen3-hard", "--device", "cuda:2", "--", "--tp=2")
    assert f"--oscar-artifact={installed}" in facts["argv"] and facts["argv"][-1] == "--tp=2"
    assert "--base-gpu-id=2" in facts["argv"] and facts["tensor_parallel"] == 2
    assert facts["env"]["OSCAR_ZOO_CACHE"] == os.environ["OSCAR_ZOO_CACHE"]
    chosen = settings.ArtifactSource(artifact=installed)
    assert served_artifact.load(chosen).digest == facts["digest"]


@pytest.mark.parametrize(
    ("flags", "told", "instead"),
    [
        (["--tp=3"], "3 GPUs cannot share the 4 query heads and 2 KV heads of", "-- --tp=2"),
        (
            ["--tp", "6", "--dp", "2", "--enable-dp-attention"],
            "3 GPUs of a worker cannot share the 4 query heads and 2 KV heads of",
            "-- --tp=4",
        ),
    ],
)
def test_gpus_that_cannot_share_the_heads_are_refused(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    flags: list[str],
    told: str,
    instead: str,
) -> None:
    """SGLang finds that out when it builds the model, with a bare assertion."""
    line = ["serve", str(artifact), "--model", str(MODEL), "--print", "--device", "cuda", "--"]
    assert run([*line, *flags]) == 2
    said = capsys.readouterr().err
    assert told in said and instead in said and said.count("\n") <= 2


def test_they_are_refused_before_an_artifact_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It might have to be computed first."""
    line = ["serve", "Qwen3-14B", "--print", "--offline", "--device", "cuda"]
    assert run([*line, "--", "--tp", "5"]) == 2
    assert "40 query heads and 8 KV heads of Qwen3-14B" in capsys.readouterr().err
    assert run([*line, "--", "--tp", "4"]) == 5  # there is no artifact here


def test_a_tree_has_the_artifact_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As downloaded from a hub: `<Model>/<tag>`. The model decides; what it leaves open is told."""
    tree = tmp_path / "oscar_rotations"
    mine = write_folder(tree / "tiny-qwen3-hard" / "gpqa_group64", payload())
    write_folder(tree / "Qwen3-8B" / "gpqa_group128", payload())
    asked = ["serve", str(tree), "--print", "--json", "--device", "cuda", "--model"]
    assert run([*asked, str(MODEL)]) == 0
    assert f"--oscar-rotation-path={mine}" in parsed(capsys.readouterr().out)["argv"]
    for model in ("Qwen3-8B", "qwen/qwen3-8b"):  # the one of that name, which has another shape
        assert run([*asked, model]) == 4
        assert parsed(capsys.readouterr().out)["error"]["code"] == "integrity.verification"
    write_folder(tree / "tiny-qwen3-hard" / "other_group64", payload())
    assert run(["serve", str(tree), "--model", str(MODEL), "--print"]) == 2
    assert "gpqa_group64" in (line := capsys.readouterr().err) and "other_group64" in line
    assert run(["serve", str(tree), "--model", "Qwen3-32B", "--print"]) == 3
    assert "Qwen3-8B/gpqa_group128" in capsys.readouterr().err
    assert run(["serve", str(tree), "--print"]) == 2
    assert "--model MODEL" in capsys.readouterr().err


def test_a_shell_gets_exactly_that(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text is given to a real shell; a stand-in for the interpreter writes down what
    arrives."""
    stand_in = tmp_path / "python $(touch x) 'here'"
    stand_in.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:],"
        " dict(os.environ)]))\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    arguments = (artifact, "--device", "cuda", "--", '--served-model-name=a "b" $c')
    facts, text = shown(capsys, *arguments), printed(capsys, *arguments)
    done = subprocess.run(
        ["sh", "-c", text], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    argv, environ = json.loads(done.stdout)
    assert argv == facts["argv"][1:] and not (tmp_path / "x").exists()
    assert facts["env"].items() <= environ.items()
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in facts["unset"]
    assert not set(facts["unset"]) & environ.keys()


def test_it_starts_nothing_and_needs_neither_torch_nor_sglang(installed: str) -> None:
    code = (
        "import sys\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n      "
        "  if name.split('.')[0] in ('torch', 'sglang', 'transformers', 'triton'):\n           "
        " raise ModuleNotFoundError(name)\nsys.meta_path.insert(0, Absent())\nfrom"
        f" oscar_zoo.cli.main import run\nsys.exit(run(['serve', {installed!r}, '--model',"
        f" {str(MODEL)!r}, '--print', '--device', 'cuda']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sglang.launch_server" in done.stdout and shlex.split(done.stdout)[0] == "env"


def test_no_key_is_ever_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], artifact: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("secret-canary")
    base = ["serve", str(artifact), "--model", str(MODEL), "--print"]
    assert run([*base, "--expose", "0.0.0.0", "--api-key-file", str(key)]) == 2
    captured = capsys.readouterr()
    assert "secret-canary" not in captured.out + captured.err and "--config FILE" in captured.err


def test_the_zoo_says_on_how_many_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "default_device", lambda: "cpu")
    recipe = Catalog.packaged().recipe("Qwen3-32B")
    assert recipe is not None
    folder = str(write_folder(tmp_path / "Qwen3-32B", payload(geometry=recipe.geometry)))
    command = ["serve", folder, "--print", "--json"]
    answers = []
    for more in (
        ["--device", "cuda"],
        ["--device", "cuda", "--", "--tp=2"],
        [],
    ):
        assert run([*command, *more]) == 0
        answers.append(parsed(capsys.readouterr().out))
    assert [one["tensor_parallel"] for one in answers] == [4, 2, 1]  # the last is for this CPU
    assert "--tp-size=4" in answers[0]["argv"]
    assert not any("--tp-size" in part for part in answers[1]["argv"])
    assert answers[0]["model"] == recipe.hf_id


def test_without_network_it_says_what_the_command_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither a manifest of the package nor a digest alone makes a command that would run."""
    assert run(["serve", "Qwen3-8B", "--print", "--offline", "--device", "cuda"]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "Qwen3-8B is not on this machine" in line
    assert "--print needs its digest: fetch it once (oscar-zoo pull Qwen3-8B)" in line
    assert line.endswith("or name a folder that holds it") and len(line) < 200


def test_what_to_fetch_is_on_the_hub_that_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--print", "--offline", "--device", "cuda", "--hub", "hf:org/zoo"]
    assert run(["serve", "Qwen3-8B", *words]) == 5
    assert "(oscar-zoo pull Qwen3-8B --hub hf:org/zoo)" in capsys.readouterr().err


def test_where_the_model_is_here_the_same_command_computes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--print", "--offline", "--device", "cpu"]
    folder = str(MODEL)
    assert run(["serve", folder, *words]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert f"oscar-zoo serve {folder} " in line and " --print --compute --offline" in line
    assert "oscar-zoo pull" not in line


def test_a_relative_store_is_found_from_every_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSCAR_ZOO_CACHE", "here/store")
    files = artifact_files()
    Store().put(ArtifactId("tiny-qwen3-hard", "seq512_prompt2_group64"), files, source="test")
    facts = shown(capsys, NAME, "--offline", "--device", "cuda")
    assert facts["env"]["OSCAR_ZOO_CACHE"] == str(tmp_path / "here/store")
    assert "=here" not in printed(capsys, NAME, "--offline", "--device", "cuda")
