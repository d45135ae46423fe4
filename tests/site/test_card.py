"""The card of an artifact and of a hub: read back by the client of Hugging Face, and merged with
what its owner wrote."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_output import Cli
from hub_uses import HARD, publish
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from measured_artifacts import gpqa, write_scores
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo import card
from oscar_zoo.errors import ConflictError
from oscar_zoo.registry.card import BEGIN, END, TAGS
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.local import LocalHub

QWEN = "Qwen3-8B:seq20000_prompt83_group128"


@pytest.fixture
def empty_hub(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return f"file:{tmp_path}/empty"


def front_of(text: str) -> dict[str, Any]:
    """The front matter as YAML."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert found
    value = yaml.safe_load(found[1])
    assert isinstance(value, dict)
    return value


def test_hugging_faces_client_reads_all_metadata_and_writes_the_same(empty_hub: str) -> None:
    text = card(QWEN, hubs=empty_hub).content.decode()
    front = front_of(text)
    assert front["pipeline_tag"] == "text-generation" and front["base_model"] == ["Qwen/Qwen3-8B"]
    assert front["tags"] == list(TAGS) and front["library_name"] == "oscar-zoo"
    read = ModelCard(text, ignore_metadata_errors=False)
    assert read.data.license == "apache-2.0" and read.data.model_name == QWEN
    results = read.data.eval_results
    assert results is not None
    assert [(one.metric_value, one.metric_name) for one in results] == [
        (55.56, "accuracy, INT2 KV cache, upstream"),
        (56.67, "accuracy, BF16 KV cache, upstream"),
    ]
    assert {(one.dataset_type, one.dataset_config) for one in results} == {
        ("Idavidrein/gpqa", "gpqa_diamond")
    }
    assert all(isinstance(one, EvalResult) for one in results)
    own = ModelCardData(
        model_name=QWEN,
        eval_results=results,
        **{k: v for k, v in front.items() if k != "model-index"},
    )
    assert yaml.safe_load(own.to_yaml()) == front


def test_the_card_of_a_folder_is_written_and_written_again(cli: Cli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made", artifact_files())
    target = folder / "README.md"
    assert "1 artifact" in cli(0, "card", folder, "--output", target)
    first = target.read_bytes()
    assert front_of(first.decode())["base_model"] == ["oscar-zoo/tiny-qwen3-hard"]
    mine = first.replace(b"---\n# oscar", b"---\nlicense: other\ndatasets:\n- mine\n# oscar", 1)
    mine = mine.replace(b"tags:\n- sglang\n", b"tags:\n- old\n") + b"\n## My notes\r\n\xff"
    target.write_bytes(mine)
    facts = cli.json(0, "card", folder, "--output", target, "--hub", f"file:{tmp_path}")
    assert facts["output"] == str(target) and len(facts["artifacts"]) == 1
    after = target.read_bytes()
    assert after.endswith(b"\n## My notes\r\n\xff") and b"--hub file:" in after
    front = front_of(after.decode("utf-8", "replace"))
    assert (front["license"], front["datasets"], front["tags"]) == ("other", ["mine"], list(TAGS))
    assert after.count(b"license:") == 1  # the owner's


@pytest.mark.parametrize(
    "damaged",
    [
        END + b"\n" + BEGIN,
        b"---\n# oscar-zoo:begin\n---\n# Mine\n",
        b"---\n# oscar-zoo:end\n# oscar-zoo:begin\n---\n",
    ],
    ids=["section", "metadata", "order"],
)
def test_damaged_markers_are_refused(tmp_path: Path, empty_hub: str, damaged: bytes) -> None:
    target = tmp_path / "README.md"
    target.write_bytes(damaged)
    with pytest.raises(ConflictError, match="once each"):
        card(QWEN, hubs=empty_hub, output=target)
    assert target.read_bytes() == damaged


@pytest.mark.parametrize(
    ("front", "kept"),
    [
        (b"", {}),
        (b"---\nlicense: other\ntags:\n- mine\n---\n", {"license": "other", "tags": ["mine"]}),
        (b"---\r\nlanguage: en\r\n---\r\n", {"language": "en"}),
    ],
    ids=["none", "own", "crlf"],
)
def test_a_card_that_somebody_wrote_gets_metadata_and_a_section(
    cli: Cli, tmp_path: Path, front: bytes, kept: dict[str, Any]
) -> None:
    folder, target = write_folder(tmp_path / "made", artifact_files()), tmp_path / "README.md"
    words = b"# Mine\r\n\r\nwords \xc3\xa9\n"
    target.write_bytes(front + words)
    cli(0, "card", folder, "--output", target)
    first = target.read_bytes()
    assert words in first and first.count(b"---\n# oscar") + first.count(b"---\r\n") <= 2
    read = ModelCard(first.decode(), ignore_metadata_errors=False).data.to_dict()
    assert kept.items() <= read.items() and read["base_model"] == ["oscar-zoo/tiny-qwen3-hard"]
    cli(0, "card", folder, "--output", target)
    assert target.read_bytes() == first
    start = front.removesuffix(b"---\r\n").removesuffix(b"---\n")
    assert first.startswith(start) and BEGIN in first[first.index(words) :]


def test_what_hugging_faces_client_saves_is_written_again(cli: Cli, tmp_path: Path) -> None:
    """Its writer drops comments, and so the markers of the metadata; all keys are the owner's
    then."""
    folder, target = write_folder(tmp_path / "made", artifact_files()), tmp_path / "README.md"
    cli(0, "card", folder, "--output", target)
    loaded = ModelCard.load(target)
    loaded.data["license"] = "mit"
    loaded.save(target)
    saved = target.read_bytes()
    cli(0, "card", folder, "--output", target)
    assert target.read_bytes() == saved


def test_the_report_of_a_folder_is_attached(cli: Cli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "my rotation", artifact_files())
    for suffix in ("html", "png", "json"):
        (tmp_path / f"my rotation.report.{suffix}").write_bytes(suffix.encode())
    assert ".report" not in cli(0, "card", folder)
    shown = cli(0, "card", folder, "--output", folder / "README.md")
    assert shown.endswith("README.md: 1 artifact, its report beside it: 3 files\n")
    text = (folder / "README.md").read_text()
    assert "![Report of the fit: methods, spectra, clips](my%20rotation.report.png)\n" in text
    page, numbers = "(my%20rotation.report.html)", "(my%20rotation.report.json)"
    assert f"[Report of the fit]{page}, [its numbers]{numbers}\n" in text
    assert (folder / "my rotation.report.png").read_bytes() == b"png"
    cli(0, "verify", folder)
    cli(0, "publish", folder, "--hub", f"file:{tmp_path}/hub", "--create", "--unmeasured")
    (tmp_path / "my rotation.report.png").unlink()
    (tmp_path / "my rotation.report.png").symlink_to(tmp_path / "my rotation.report.json")
    facts = cli.json(0, "card", folder, "--output", tmp_path / "README.md")
    assert facts["report"] == [f"{tmp_path}/my rotation.report.{kind}" for kind in ("html", "json")]
    assert "![Report" not in facts["card"]


def test_a_score_of_other_settings_is_named_so_and_kept_from_hubs(cli: Cli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "made", artifact_files())
    digest = Version.of(HARD, artifact_files()).digest
    changed = gpqa(digest, value=60.0, stderr=2.46, recipe_changes={"clip": "1,1"})
    write_scores(folder / "scores.json", changed, digest=digest)
    text = cli(0, "card", folder)
    assert "60.00 ± 2.46, n 198, 2 runs, measured, with clip 1,1 |" in text
    assert "model-index" not in front_of(text)


def test_publish_keeps_the_card_that_the_command_writes(cli: Cli, tmp_path: Path) -> None:
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    ids = [f"tiny-qwen3-hard/seq512_prompt{n}_group64" for n in (2, 3)]
    for seed, name in enumerate(ids):
        folder = write_folder(tmp_path / f"made{seed}", artifact_files(artifact=name, seed=seed))
        publish(folder, hub, create=seed == 0)
    kept = (tmp_path / "hub/README.md").read_text()
    assert cli(0, "card", "--hub", hub.name) == kept
    assert cli(0, "card", tmp_path / "hub") == kept
    assert cli.json(0, "card", "--hub", hub.name)["artifacts"] == ids
    front = front_of(kept)
    assert "model-index" not in front  # nobody has measured anything
    assert cli.json(2, "card")["error"]["code"] == "usage"
