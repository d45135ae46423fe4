"""`list` and `info`, in process, over hubs in folders and the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_output import Cli
from documents import ROOT
from hub_uses import HARD, hub_with
from measured_artifacts import measured_files
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run

HARD_FOLDER = "examples/models/tiny-qwen3-hard"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def test_measured_quality_is_shown_everywhere_and_apart_from_scores(
    cli: Cli, tmp_path: Path
) -> None:
    folder, hub = write_folder(tmp_path / "made", measured_files()), f"file:{tmp_path}/hub"
    cli(0, "publish", folder, "--hub", hub, "--create", "--allow-warnings")
    head, *rows = cli(0, "list", "--hub", hub).splitlines()
    assert (
        head.split()
        == "MODEL TAG FMT BITS PERPLEXITY RECALL BF16 → INT2 GPQA BF16 → INT2 STATUS".split()
    )
    row = next(line for line in rows if line.startswith(HARD.model))
    assert (
        "+0.90 %" in row and "99.2 → 98.4 %" in row and "not reported" in row
    )  # GPQA stays what it is
    assert "measured by oscar-zoo on held-out text" in cli.out

    listed = next(r for r in cli.json(0, "list", "--hub", hub)["artifacts"] if r["id"] == str(HARD))
    assert (listed["measured"]["change_percent"], listed["measured"]["recall_bf16"]) == (0.9, 0.992)
    assert listed["scores"] == []

    by = "measured by tests on 4,096 held-out tokens"
    assert f"+0.90 %, standard error 0.11), {by}" in cli(0, "info", HARD.model, "--hub", hub)
    assert cli.json(0, "info", HARD.model, "--hub", hub)["measured"][str(HARD)]["tokens"] == 4096
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "(+0.90 %, standard error 0.11); recall BF16 99.2 %" in card and by in card


def test_a_version_that_was_yanked_is_marked_wherever_it_is_named(
    cli: Cli, tmp_path: Path, own_state: Path
) -> None:
    """An installed one by every verb that takes its name, a locked one by `list` too."""
    folder, hub = write_folder(tmp_path / "made", measured_files()), f"file:{tmp_path}/hub"
    cli(0, "publish", folder, "--hub", hub, "--create", "--allow-warnings")
    Path("pyproject.toml").touch()  # a project
    cli(0, "pull", HARD.model, "--hub", hub)
    assert cli.json(0, "list")["warnings"] == []
    cli(0, "yank", HARD.reference, "--hub", hub, "--reason", "wrong data")
    sentence = f"{HARD.reference} is yanked: wrong data"
    serve = ("serve", HARD.model, "--model", ROOT / HARD_FOLDER, "--device", "cuda", "--print")
    pull = ("pull", HARD.model)
    for words in (pull, (*pull, "--offline"), (*pull, "--locked"), ("info", HARD.model), serve):
        cli(0, *words)
        assert cli.err.splitlines().count(f"warning: {sentence}") == 1, words
    assert cli.json(0, *serve)["warnings"][0] == sentence
    assert cli.json(0, *pull)["artifacts"][0]["warnings"][0] == sentence
    assert cli.json(0, "info", HARD.model)["warnings"] == [sentence]
    assert cli.json(0, "verify", HARD.model, folder)["warnings"] == [sentence]
    shutil.rmtree(own_state / "cache")  # as on the machine of somebody who cloned the project
    for words in (("list",), ("list", "--family", "Qwen3"), ("list", "--offline")):
        assert cli.json(0, *words)["warnings"] == [f"oscar-zoo.lock: {sentence}"], words
    lock = Path("oscar-zoo.lock").read_text()
    Path("oscar-zoo.lock").write_text("broken")
    assert "oscar-zoo.lock is not JSON" in (cli(0, "list"), cli.err)[1]
    Path("oscar-zoo.lock").write_text(lock)
    locked = cli.json(0, *pull, "--locked", "--hub", hub)["artifacts"][0]
    assert locked["warnings"] == [sentence]


def test_a_named_hub_shows_what_it_has_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    one = f"file:{hub_with(tmp_path / 'one', artifact_files()).root}"
    two = f"file:{hub_with(tmp_path / 'two', artifact_files(seed=1)).root}"
    other = f"file:{hub_with(tmp_path / 'other', artifact_files(artifact='alone/tag'), 'alone/tag').root}"  # noqa: E501
    cli(0, "pull", HARD.model, "--hub", one)
    cli(0, "pull", "alone", "--hub", other)

    def rows(*words: str) -> dict[str, str]:
        value = cli.json(0, "list", *words)
        assert value["recipes_without_artifact"] == [] or "--hub" not in words
        return {row["id"]: row["status"] for row in value["artifacts"]}

    assert rows("--hub", one) == {str(HARD): "installed"}
    assert rows("--hub", two) == {str(HARD): "local"}  # installed are other bytes, of another hub
    assert rows("--hub", one, "--hub", other) == {str(HARD): "installed", "alone/tag": "installed"}
    assert rows("--hub", one, "--installed") == {str(HARD): "installed"}
    assert rows("--hub", two, "--installed") == {}
    everything = rows("--offline")
    assert {str(HARD), "alone/tag"} < everything.keys() and any(
        name.startswith("Qwen3-8B/") for name in everything
    )
    assert "Recipes" not in cli(0, "list", "--hub", one)


def test_info_describes_the_rotation_in_a_folder(cli: Cli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "rotation", artifact_files())
    facts = cli.json(0, "info", folder)
    assert [row["id"] for row in facts["artifacts"]] == [str(HARD)] and facts["offered"] == []
    assert facts["recipe"]["name"] == HARD.model and facts["memory"]["int2_token_bytes"] == 320
    shown = cli(0, "info", folder)
    assert "digest       sha256:" in shown and "serving      INT2, group 64" in shown
    (folder / "oscar.json").unlink()
    error = cli.json(3, "info", folder)["error"]
    assert "has no oscar.json" in error["message"] and "compute" in error["hint"]
    error = cli.json(2, "info", next(folder.glob("k_*.pt")))["error"]
    assert str(folder) in error["hint"]


def test_info_tells_of_a_folder_whose_files_are_damaged(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "rotation", artifact_files())
    assert cli.json(0, "info", folder)["warnings"] == []
    assert "files        verified to level" in cli(0, "info", folder)
    path = next(folder.glob("k_*.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    (warning,) = cli.json(0, "info", folder)["warnings"]
    assert "failed verification" in warning and f"oscar-zoo verify {folder}" in warning
    assert run(["info", str(folder)]) == 0
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "failed verification" in captured.err
    assert "files        FAILED" in captured.out and "verified to level" not in captured.out
    path.unlink()
    assert cli.json(0, "info", folder)["warnings"]


def test_what_fits_a_gpu_is_an_estimate_from_shapes(cli: Cli, tmp_path: Path) -> None:
    hub = f"file:{hub_with(tmp_path / 'hub', artifact_files()).root}"
    memory = cli.json(0, "info", "Qwen3-8B", "--hub", hub, "--gpu-memory", "80GB")["memory"]
    # 36 layers, 8 heads, K and V of 128: 32 bytes of codes and 4 of scales a row, or 256 bytes in
    # BF16
    assert (memory["int2_token_bytes"], memory["bf16_token_bytes"]) == (
        36 * 8 * 2 * 36,
        36 * 8 * 2 * 256,
    )
    assert memory["window_bytes_per_request"] == (256 + 2 * 64) * memory["bf16_token_bytes"]
    (card,) = memory["gpus"]
    left = 0.85 * (80 << 30) - memory["weights_bytes"]
    each = left // card["requests"]
    assert card["bf16_tokens"] == card["requests"] * int(each // memory["bf16_token_bytes"])
    each -= memory["window_bytes_per_request"]
    assert card["int2_tokens"] == card["requests"] * int(each // memory["int2_token_bytes"])
    four = cli.json(0, "info", "Qwen3-32B", "--hub", hub, "--gpu-memory", "80GB")["memory"]
    assert four["gpus"][0]["gpus"] == 4 and four["gpus"][0]["int2_tokens"] > card["int2_tokens"]
    shown = cli(0, "info", "Qwen3-8B", "--hub", hub, "--gpu-memory", "12 GiB")
    assert "estimate: weights 16.4 GB" in shown and "no, weights and windows" in shown
    assert "weights not known" in cli(0, "info", "GLM-4.6", "--hub", hub, "--gpu-memory", "24")
    for text in ("much", "0", "-3GB", "24TB", ""):
        cli(2, "info", "Qwen3-8B", "--hub", hub, f"--gpu-memory={text}")


def test_a_family_is_listed_with_its_recipes_and_nothing_else(cli: Cli) -> None:
    shown = cli(0, "list", "--family", "qwen3", "--offline")
    assert "Qwen3-8B" in shown and "Qwen3-0.6B" in shown
    assert "Qwen3.5" not in shown and "GLM" not in shown
    value = cli.json(0, "list", "--family", "gemma", "--offline")
    assert value["artifacts"] == [] and "gemma-3-4b-it" in value["recipes_without_artifact"]
    assert all(name.startswith("gemma") for name in value["recipes_without_artifact"])
    assert cli.json(0, "list", "--family", "qwen3", "--installed")["artifacts"] == []
    cli(2, "list", "--family", "gema", "--offline")
    assert "Did you mean Gemma-" in cli.err
    everything = cli(0, "list", "--offline")
    assert "LFM2" in everything and "LFM2-1.2B" not in everything and "--family NAME" in everything


def test_info_of_a_model_without_a_recipe_says_what_works_for_its_kind(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (ROOT / HARD_FOLDER / "config.json").read_bytes()
    folder = tmp_path / "my model"
    fetched = tmp_path / "hub/models--someone--New-8B"
    for place in (folder, fetched / "snapshots" / ("a" * 40)):
        place.mkdir(parents=True)
        (place / "config.json").write_bytes(config)
    (fetched / "refs").mkdir()
    (fetched / "refs/main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, step in (
        (str(folder), f"compute '{folder}'"),
        ("someone/New-8B", "pull someone/New-8B --compute"),
    ):
        shown = cli(0, "info", name, "--offline")
        assert f"  model        {name}; the zoo has no recipe for it\n" in shown
        works = "works, tried with a trained example of this architecture"
        assert f"  compute      {works}\n" in shown and f"serve on GPU {works} on an H100" in shown
        assert shown.endswith(f"make one: oscar-zoo {step}\n")
        found = cli.json(0, "info", name, "--offline")
        assert found["model"] == {"source": name, "model_type": "qwen3"}
        assert found["recipe"] is None and found["works"]["compute"]["state"] == "works"
    (folder / "config.json").write_bytes(config.replace(b'"qwen3"', b'"brand_new"'))
    shown = cli(0, "info", folder, "--offline")
    assert "  architecture brand_new, which nobody has tried\n" in shown
    known = cli.json(0, "info", "Qwen3-8B", "--offline")["model"]
    assert known == {"source": "Qwen/Qwen3-8B", "model_type": "qwen3"}
