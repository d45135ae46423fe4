from pathlib import Path
from typing import get_args

import pytest
from hub_uses import put_version

from oscar_zoo import paths
from oscar_zoo.artifact.manifest import HubScheme
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.address import open_hub
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.hubs.table import HUBS


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def write(text: str) -> Path:
    """The configuration file of this test."""
    path = paths.config_dir() / address.FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_defaults_are_the_users_zoo_then_the_public_ones() -> None:
    settings = address.Sources()
    assert settings.read == (f"file:{paths.default_zoo_dir()}", *address.PUBLIC)
    assert settings.publish == () and not settings.offline
    assert [hub.name for hub in address.Sources().hubs] == list(settings.read)
    (own,) = address.Sources().publishing_hubs
    assert own.name == f"file:{paths.default_zoo_dir()}"


def test_flags_win_over_the_environment_that_over_files(monkeypatch: pytest.MonkeyPatch) -> None:
    write('hubs = ["hf:stored/zoo", "default"]\npublish = "hf:stored/own"\n')
    assert address.Sources().read == ("hf:stored/zoo", *address.PUBLIC)
    assert address.Sources().publish == ("hf:stored/own",)
    monkeypatch.setenv("OSCAR_ZOO_HUB", "ms:env/zoo, file:/srv/a b  hf:env/zoo@v1")
    assert address.Sources().read == ("ms:env/zoo", "file:/srv/a b", "hf:env/zoo@v1")
    assert address.Sources().publish == address.Sources().read
    assert address.Sources(["hf:flag/zoo"]).read == ("hf:flag/zoo",)


def test_a_hub_without_commits_is_published_to_last() -> None:
    names = [hub.name for hub in address.Sources(["ms:me/zoo", "hf:me/zoo"]).publishing_hubs]
    assert names == ["hf:me/zoo", "ms:me/zoo"]


@pytest.mark.parametrize("variable", ["OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_leaves_hubs_in_folders(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    settings = address.Sources()
    assert settings.offline
    assert [hub.name for hub in address.Sources(offline=settings.offline).hubs] == [
        f"file:{paths.default_zoo_dir()}"
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hubs = 3", "hubs"),
        ("speed = 3", "speed"),
        ("[network]\nread = -1", "read"),
        ("[network]\nconnect = 1e9", "connect"),
        ("[network]\npatience = 2", "network.patience"),
        ("hubs = [", "cannot be read"),
        ("when = 2026-01-01", "cannot be read"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(text: str, named: str) -> None:
    path = write(text)
    with pytest.raises(UsageError) as caught:
        assert address.Sources().network
    assert str(path) in caught.value.message
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_limits_of_requests_are_configured() -> None:
    write("[network]\nread = 6.0\ntries = 2\n")
    limits = address.Sources().network
    assert (limits.read, limits.connect, limits.tries) == (6.0, 10.0, 2)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:/srv/zoo", "/srv/zoo"),
        ("FILE:/srv/zoo", "/srv/zoo"),
        ("file:///srv/my%20zoo", "/srv/my zoo"),
        ("file://localhost/srv/zoo", "/srv/zoo"),
        ("file:zoo", "{cwd}/zoo"),
        ("file:./a b/zoo", "{cwd}/a b/zoo"),
        ("file:~/zoo", "{home}/zoo"),
    ],
)
def test_folders_are_written_in_every_usual_way(
    text: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    hub = open_hub(text)
    assert isinstance(hub, LocalHub)
    assert hub.root == Path(path.format(cwd=tmp_path, home=tmp_path / "home"))
    assert hub.name == f"file:{hub.root}"


@pytest.mark.parametrize(
    "text",
    [
        *("file:", "file://", "file://server/zoo", "/srv/zoo", "ftp://x", "", "zoo", "hf:"),
        *("hf:zoo", "hf:/zoo", "hf:org/", "hf:a/b/c", "hf:org/..", "ms:org/zoo@", "hf:org/zoo@a b"),
        "hf:o/z@../x",
    ],
)
def test_anything_else_is_a_usage_error_that_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_hub(text)
    assert caught.value.hint


def test_a_password_in_what_is_no_hub_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        open_hub("https://user:secret@hub.example/zoo")
    assert "secret" not in caught.value.message
    assert "user" not in caught.value.message


def test_the_first_publish_makes_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_ZOO_DATA", str(tmp_path / "data"))
    hub = open_hub()
    assert hub.artifacts() == ()
    assert not (tmp_path / "data").exists()
    put_version(hub, "Model/tag", {"k.pt": b"1"})
    assert (tmp_path / "data" / "zoo" / "Model" / "tag" / "k.pt").read_bytes() == b"1"


def test_only_kinds_with_an_address_are_remote_and_have_tokens() -> None:
    remote = {scheme for scheme, kind in HUBS.items() if kind.is_remote}
    assert {"hf", "ms"} <= remote and "file" not in remote
    for scheme, kind in HUBS.items():
        assert (kind.credential is not None) == bool(kind.token_step)
        assert kind.credential is None or scheme in remote


def test_manifests_may_name_every_kind_that_copies_are_made_from() -> None:
    """`mirror` writes into the index of the copy on which remote hub the artifact was."""
    assert {*get_args(HubScheme)} == {scheme for scheme, kind in HUBS.items() if kind.is_remote}


def test_a_token_comes_from_a_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    find = HUBS["ms"].credential
    assert find is not None
    found = find()
    assert found is not None and found.source == "MODELSCOPE_API_TOKEN" and found.is_variable
    assert "secret" not in repr(found)
