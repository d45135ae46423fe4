from __future__ import annotations

from pathlib import Path

import pytest
from hub_uses import put_version

from oscar_zoo.errors import UsageError
from oscar_zoo.registry.hubs.address import open_hub
from oscar_zoo.registry.hubs.local import LocalHub


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
    "text", ["file:", "file://", "file://server/zoo", "/srv/zoo", "ftp://x", "", "zoo"]
)
def test_anything_else_is_a_usage_error_that_says_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_hub(text)
    assert "file:" in (caught.value.hint or "")


def test_a_password_in_what_is_no_hub_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        open_hub("https://user:secret@hub.example/zoo")
    assert "secret" not in caught.value.message
    assert "user" not in caught.value.message


def test_the_default_zoo_is_created_by_the_first_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSCAR_ZOO_DATA", str(tmp_path / "data"))
    hub = open_hub()
    assert hub.artifacts() == ()
    assert not (tmp_path / "data").exists()
    put_version(hub, "Model/tag", {"k.pt": b"1"})
    assert (tmp_path / "data" / "zoo" / "Model" / "tag" / "k.pt").read_bytes() == b"1"
