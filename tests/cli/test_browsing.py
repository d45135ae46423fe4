"""`list`, `search` and `info`, in process, over hubs in folders and the store: what is found, in
which order, and what is said of it."""

import re
import shutil
from pathlib import Path

import pytest
from cli_output import Cli
from documents import ROOT
from hub_uses import HARD, hub_with, put_version
from measured_artifacts import SELECTION, measured_files
from tiny_artifacts import artifact_files, payload, write_folder

import oscar_zoo
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.hubs.local import LocalHub

HARD_FOLDER = "examples/models/tiny-qwen3-hard"
BETTER, BARE = "Qwen3-8B/seq512_prompt3_group64-wush", "Some-Model/seq512_prompt4_group64"
QWEN = "Qwen3-8B/seq20000_prompt83_group128"
SMALL = SELECTION["chosen"] | {"change_percent": -0.1, "recall": 0.9}


def test_measured_quality_is_shown_apart_from_scores(cli: Cli, tmp_path: Path) -> None:
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
    assert f"+0.90 %, standard error 0.11 %), {by}" in cli(0, "info", HARD.model, "--hub", hub)
    assert cli.json(0, "info", HARD.model, "--hub", hub)["measured"][str(HARD)]["tokens"] == 4096
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "(+0.90 %, standard error 0.11 %); recall BF16 99.2 %" in card and by in card


def test_a_yanked_version_is_marked_everywhere(cli: Cli, tmp_path: Path, own_state: Path) -> None:
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
    assert cli.json(0, *pull, "--locked", "--hub", hub)["artifacts"][0]["warnings"] == [sentence]


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
    assert {str(HARD), "alone/tag"} < everything.keys()
    assert any(name.startswith("Qwen3-8B/") for name in everything)
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
    assert str(folder) in cli.json(2, "info", next(folder.glob("k_*.pt")))["error"]["hint"]


def test_info_tells_of_a_folder_whose_files_are_damaged(cli: Cli, tmp_path: Path) -> None:
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
    out = cli(0, "info", folder)
    assert "warning: " in cli.err and "failed verification" in cli.err
    assert "files        FAILED" in out and "verified to level" not in out
    path.unlink()
    assert cli.json(0, "info", folder)["warnings"]


def test_a_family_is_listed_with_its_recipes_and_nothing_else(cli: Cli) -> None:
    shown = cli(0, "list", "--family", "qwen3", "--offline")
    assert "Qwen3-8B" in shown and "Qwen3-0.6B" in shown
    assert "Qwen3.5" not in shown and "GLM" not in shown
    value = cli.json(0, "list", "--family", "gemma", "--offline")
    assert value["artifacts"] == [] and "gemma-3-4b-it" in value["recipes_without_artifact"]
    assert all(name.startswith("gemma") for name in value["recipes_without_artifact"])
    assert cli.json(0, "list", "--family", "qwen3", "--installed")["artifacts"] == []
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
    awq = b'{"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64},'
    (folder / "config.json").write_bytes(config.replace(b"{", awq, 1))
    found = cli.json(0, "info", folder, "--offline", "--gpu", "RTX 4090")
    states = [one["state"] for one in found["works"].values()]
    assert states == ["does not work", "does not work", "not tried", "works"]
    assert found["memory"]["gpus"][0]["int2_tokens"] > 0
    assert cli(0, "info", folder, "--offline").endswith(f"serve ROTATION --model '{folder}'\n")
    (folder / "config.json").write_bytes(config.replace(b'"qwen3"', b'"brand_new"'))
    shown = cli(0, "info", folder, "--offline")
    assert "  architecture brand_new, which nobody has tried\n" in shown
    known = {"source": "Qwen/Qwen3-8B", "model_type": "qwen3"}
    assert cli.json(0, "info", "Qwen3-8B", "--offline")["model"] == known


@pytest.fixture
def three(tmp_path: Path) -> str:
    """A hub of three: two with figures, of which one is for a model of the zoo, and one without a
    manifest."""
    made = LocalHub(tmp_path / "hub", must_exist=False)
    put_version(made, HARD, measured_files())
    better = measured_files(SELECTION | {"chosen": SMALL}, artifact=BETTER, seed=1)
    put_version(made, BETTER, better)
    put_version(made, BARE, payload(seed=2))
    return made.name


def ids(cli: Cli, *words: str) -> list[str]:
    return [row["id"] for row in cli.json(0, *words)["artifacts"]]


def test_the_best_comes_first_and_the_unknown_last(cli: Cli, three: str) -> None:
    assert ids(cli, "list", "--hub", three) == [BETTER, BARE, str(HARD)]
    assert ids(cli, "list", "--hub", three, "--sort", "perplexity") == [BETTER, str(HARD), BARE]
    assert ids(cli, "list", "--hub", three, "--sort", "recall") == [str(HARD), BETTER, BARE]
    size = cli.json(0, "list", "--hub", three, "--sort", "size")["artifacts"]
    known = [row["bytes"] for row in size if row["bytes"] is not None]
    assert known == sorted(known) and len(known) == 2 and size[-1]["id"] == BARE
    upstream = ids(cli, "list", "--offline", "--sort", "gpqa")
    assert upstream[0].startswith("GLM-4.7-FP8/") and upstream.index(QWEN) < len(upstream) - 1
    first = cli(0, "list", "--hub", three, "--sort", "perplexity").splitlines()[1]
    assert first.startswith("Qwen3-8B ") and "-0.10 %" in first


def test_filters_choose_and_all_of_them_have_to_fit(cli: Cli, three: str) -> None:
    def chosen(*filters: str) -> list[str]:
        words = [word for text in filters for word in ("--filter", text)]
        return ids(cli, "list", "--hub", three, *words)

    assert chosen("family=qwen3") == [BETTER]
    assert chosen("tag=*WUSH") == [BETTER]
    assert chosen("model=[qs]*") == [BETTER, BARE]
    assert chosen("method=oscar", "model=tiny*") == [str(HARD)]
    assert chosen("format=1") == [BETTER, str(HARD)]
    assert chosen("bits=2.?") == [BETTER, str(HARD)]
    assert chosen("status=local", "state=active") == [BETTER, BARE, str(HARD)]
    assert chosen("method=oscar", "family=Gemma*") == []
    assert cli(0, "list", "--hub", three, "--filter", "family=Gemma") == ""
    assert cli.err == "No artifacts that fit family=Gemma. See all: oscar-zoo list\n"
    assert "Recipes without" not in cli(0, "list", "--offline", "--filter", "family=Qwen3")


def test_search_wants_every_word_somewhere(cli: Cli, three: str) -> None:
    assert ids(cli, "search", "qwen/qwen3-8b", "WUSH", "--hub", three) == [BETTER]
    assert ids(cli, "search", "oscar prompt2", "--hub", three) == [str(HARD)]
    assert ids(cli, "list", "oscar", "prompt2", "--hub", three) == [str(HARD)]
    digest = cli.json(0, "list", "--hub", three)["artifacts"][0]["digest"]
    assert ids(cli, "search", digest[7:19], "--hub", three) == [BETTER]
    assert "seq512_prompt3_group64-wush" in cli(0, "search", "wush", "--hub", three)
    assert QWEN in ids(cli, "search", "gpqa_diamond", "--offline")
    for word, name in (("gemma-3", "gemma-3-4b-it"), ("mla", "GLM-4.7-Flash")):
        assert name in cli.json(0, "search", word, "--offline")["recipes_without_artifact"]
    assert "gemma-3-4b-it" in cli(0, "search", "gemma-3", "--offline")


def test_a_size_is_found_by_its_number_and_not_by_its_letters(cli: Cli, three: str) -> None:
    found = cli.json(0, "search", "7b", "--offline")["recipes_without_artifact"]
    assert found and all(re.search(r"(?<![\d.])([67]\.\d|7)B", name) for name in found), found
    assert QWEN in ids(cli, "search", "qwen3", "8b", "--offline")


def test_a_size_is_that_of_a_model_and_not_of_a_tag(cli: Cli, tmp_path: Path) -> None:
    made = LocalHub(tmp_path / "hub", must_exist=False)
    for name in ("Some-Model/seq512_prompt4_group64-7b", "My-7B/seq512_prompt4_group64"):
        put_version(made, name, payload(seed=2))
    assert ids(cli, "search", "7b", "--hub", made.name) == ["My-7B/seq512_prompt4_group64"]
    assert len(ids(cli, "search", "group64-7b", "--hub", made.name)) == 1


def test_search_that_finds_nothing_says_so_and_what_may_be_meant(cli: Cli, three: str) -> None:
    assert cli(0, "search", "tiny-qwen3-hart", "--hub", three) == ""
    assert cli.err.startswith("Nothing has all of the words tiny-qwen3-hart. Did you mean tiny-q")


def test_python_finds_and_sorts(three: str) -> None:
    rows = oscar_zoo.list_artifacts(hubs=three, filters=["method=oscar"], sort="recall").rows
    assert [row["id"] for row in rows] == [str(HARD), BETTER]
    assert [row["id"] for row in oscar_zoo.search("some-model", hubs=three).rows] == [BARE]
    with pytest.raises(UsageError):
        oscar_zoo.list_artifacts(hubs=three, sort="best")


def test_what_cannot_be_listed_as_it_should_is_still_told(cli: Cli, tmp_path: Path) -> None:
    cli(0, "list", "--for", "qwen3-7b")
    assert cli.out == "" and "qwen3-7b" in cli.err and "Qwen3-8B" in cli.err
    folder = write_folder(tmp_path / "hub" / str(HARD), artifact_files())
    (folder / "oscar.json").write_text("{")
    assert HARD.tag in cli(0, "list", "--hub", f"file:{tmp_path}/hub")
