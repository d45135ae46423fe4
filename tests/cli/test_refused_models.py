"""What docs/models.md calls refused is refused by `compute`, `eval`, `serve` and `serve --print` in
the sentence that is recorded there, from `config.json` alone."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from architecture_attempts import sentence
from architecture_page import read_records
from architectures import ARCHITECTURES, write_config
from cli_output import parsed
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.registry.architectures import architecture

RECORDS = read_records()
REFUSED = [
    name for name, row in RECORDS.items() if "refused" in (row.compute.outcome, row.serve.outcome)
]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("refused") / "artifact", artifact_files())


def said(*words: object) -> str:
    """The error of a command line that must fail, with what works instead."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert run([*map(str, words), "--json"]) == 1
    error: dict[str, Any] = parsed(out.getvalue())["error"]
    assert "\n" not in error["message"]
    return sentence(error["message"], error["hint"])


@pytest.mark.parametrize("name", REFUSED)
def test_every_command_says_what_the_document_says(
    name: str, artifact: Path, tmp_path: Path
) -> None:
    row, model = RECORDS[name], write_config(name, tmp_path / "model")
    serve = ("serve", artifact, "--model", model, "--device", "cpu")
    assert row.serve.outcome == "refused"
    assert said(*serve) == said(*serve, "--print") == row.serve.said
    if row.compute.outcome == "refused":
        assert said("compute", model, "--output-dir", tmp_path / "made") == row.compute.said
        assert said("eval", artifact, "--model", model) == row.compute.said
    for more in ("--print", "--device=cpu"):  # also when the folder is the target itself
        assert said("serve", model, more) == row.serve.said
    if row.compute.said == row.serve.said:  # what the file alone tells
        assert said("eval", model) == said("pull", model) == row.compute.said
    known = architecture(ARCHITECTURES[name].model_type)
    if known is not None and row.serve.said != row.compute.said:  # of `serve` alone: as `info`
        assert known.serve_gpu.reason and known.serve_gpu.reason in row.serve.said


@pytest.mark.parametrize("more", ["--print", "--device=cpu"])
def test_a_name_that_no_server_takes_is_refused_before_anything_is_looked_for(more: str) -> None:
    reason = "SGLang masks chunks in its FlashAttention backend alone"
    for name in ("Llama-4-Scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct"):
        assert reason in said("serve", name, more) and "compute" not in said("serve", name, more)


def test_info_of_a_folder_says_what_is_wrong_with_its_model(tmp_path: Path) -> None:
    model = write_config(REFUSED[0], tmp_path / "model")
    assert said("info", model) == RECORDS[REFUSED[0]].serve.said
