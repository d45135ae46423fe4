"""What an error suggests is data; the hint is rendered from it."""

import json
from pathlib import Path

import pytest

from oscar_zoo.errors import ArtifactNotFound, LoginRequired, OscarZooError
from oscar_zoo.next_step import (
    PINS,
    AddOption,
    Compute,
    Install,
    ListNames,
    NextStep,
    Pull,
    SuggestedPath,
)


@pytest.mark.parametrize(
    ("step", "alone", "after"),
    [
        (Pull("A:b"), "fetch it: oscar-zoo pull A:b", "to fetch it: oscar-zoo pull A:b"),
        (Compute("A", "make it"), "compute one: make it", "to compute one: make it"),
        (ListNames(), "see what there is: oscar-zoo list", "see what there is: oscar-zoo list"),
        (AddOption("--dtype", "float32"), "add --dtype float32", "or add --dtype float32"),
    ],
)
def test_a_step_alone_and_after_other_advice(step: NextStep, alone: str, after: str) -> None:
    assert OscarZooError("no.", next_step=step).hint == alone
    assert OscarZooError("no.", hint="wait", next_step=step).hint == f"wait; {after}"


def test_a_suggested_path_is_said_with_its_kind() -> None:
    error = OscarZooError("no.", suggestions=(SuggestedPath("./a b", "folder"),))
    assert error.hint == "did you mean the folder './a b'?" and error.suggestions == ("./a b",)
    error.next_step = Compute("a", "make it")
    assert error.hint == "did you mean the folder './a b'? To compute one: make it"


def test_suggestions_come_first_and_keep_commands_as_they_are() -> None:
    error = ArtifactNotFound.for_name("qwen", ("Qwen3-8B", "Qwen3-4B"))
    assert error.suggestions == ("Qwen3-8B", "Qwen3-4B") and error.next_step == ListNames()
    assert error.hint == "did you mean Qwen3-8B or Qwen3-4B? See what there is: oscar-zoo list"
    error.next_step = Compute("Qwen", "oscar-zoo compute Qwen")
    assert str(error.hint).endswith("? To compute one: oscar-zoo compute Qwen")


def test_an_option_of_another_command_says_so() -> None:
    step = AddOption("--allow-poor").of("oscar-zoo compute M")
    assert str(step) == "add --allow-poor (an option of oscar-zoo compute M)"


def test_a_login_is_needed_again_or_only_if_the_repository_is_private() -> None:
    assert LoginRequired.for_hub("H", sent_token=True).hint == "log in: oscar-zoo login"
    asked = LoginRequired.for_hub("H", sent_token=False).hint
    assert asked == "check the name; if it is private, log in: oscar-zoo login"


def test_advising_replaces_everything() -> None:
    error = ArtifactNotFound.for_name("qwen", ("Qwen3-8B",))
    error.advise("wait")
    assert error.hint == "wait" and error.suggestions == () and error.next_step is None


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "'oscar-zoo[serve]'"),
        ("broken", "'oscar-zoo[serve]'"),
        ({"url": "file:///a%20b/zoo", "dir_info": {}}, "'/a b/zoo[serve]'"),
        ({"url": "file:///zoo", "dir_info": {"editable": True}}, "-e '/zoo[serve]'"),
        (
            {"url": "https://h/z.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'oscar-zoo[serve] @ git+https://h/z.git@abc'",
        ),
    ],
)
def test_extras_come_from_where_the_package_came(
    told: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody owns the name on an index yet, so a checkout names itself."""
    place = tmp_path / "oscar_zoo-9.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: oscar-zoo\nVersion: 9\n")
    if told is not None:
        (place / "direct_url.json").write_text(told if told == "broken" else json.dumps(told))
    monkeypatch.syspath_prepend(str(tmp_path))
    error = OscarZooError("no.", next_step=Install("serve"))
    assert error.hint == f"pip install {said} 'sglang==0.5.17'"
    readme = Path(__file__).parents[2] / "README.md"
    assert f"pip install '.[serve]'{PINS['serve']} " in readme.read_text("utf-8")
