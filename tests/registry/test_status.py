from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hub_uses import HARD, publish, pull, put_version
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo.artifact.manifest import Status
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, InvalidName, UsageError
from oscar_zoo.registry import changes
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.store import Store
from oscar_zoo.site.status import ChangedVersion, set_status

OTHER = "tiny-qwen3-hard:other"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHub:
    """A hub with two published versions of one model, and one that is in no index."""
    monkeypatch.setattr(changes, "_JITTER_SECONDS", 0)
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    publish(write_folder(tmp_path / "one", artifact_files()), hub)
    publish(
        write_folder(tmp_path / "two", artifact_files(artifact="tiny-qwen3-hard/other", seed=1)),
        hub,
    )
    put_version(hub, "Bare/tag", payload(seed=2))
    return hub


def index_of(hub: LocalHub) -> Index:
    hub.refresh()
    return Index.from_bytes(hub.root_file("index.json") or b"")


def yank(hub: LocalHub, name: str = HARD.reference, reason: str = "wrong data") -> ChangedVersion:
    return set_status(hub, name, "yanked", reason=reason)


def test_a_yank_changes_the_index_and_nothing_else(tmp_path: Path, hub: LocalHub) -> None:
    files = {path: path.read_bytes() for path in hub.root.rglob("*.*") if path.parent != hub.root}
    before, began = index_of(hub), datetime.now(UTC)
    result = yank(hub)
    assert (result.id, result.changed, result.serial) == (HARD, True, before.serial + 1)
    days = [moment.strftime("%Y-%m-%d") for moment in (began, datetime.now(UTC))]
    assert result.status in [Status(state="yanked", reason="wrong data", date=day) for day in days]
    after_ = index_of(hub)
    assert after_.serial == before.serial + 1
    assert {
        path: path.read_bytes() for path in hub.root.rglob("*.*") if path.parent != hub.root
    } == files
    entry, old = after_.entry(HARD), before.entry(HARD)
    assert entry is not None and old is not None
    assert entry == old.model_copy(update={"status": result.status})
    assert "yanked: wrong data" in (hub.root / "README.md").read_text()


def test_a_yanked_version_is_not_found_by_name_and_served_by_digest(
    tmp_path: Path, hub: LocalHub
) -> None:
    digest = yank(hub).digest
    with pytest.raises(ArtifactNotFound, match="wrong data"):
        pull(HARD.reference, hub, Store(tmp_path / "cache"))
    pulled = pull(f"tiny-qwen3-hard@{digest}", hub, Store(tmp_path / "cache"))
    assert pulled.artifact.record.id == HARD
    assert any("wrong data" in warning for warning in pulled.warnings)
    assert set_status(hub, HARD.reference, "active").status.state == "active"
    assert pull(HARD.reference, hub, Store(tmp_path / "other")).artifact.record.digest == digest


def test_the_state_it_has_already_is_success_and_writes_nothing(hub: LocalHub) -> None:
    yank(hub)
    serial = index_of(hub).serial
    again = yank(hub, reason="  wrong\n data ")
    assert (again.changed, again.serial) == (False, serial)
    assert yank(hub, reason="another reason").changed
    assert not set_status(hub, OTHER, "active").changed
    assert index_of(hub).serial == serial + 1


def test_a_reason_is_needed_and_a_version_cannot_replace_itself(hub: LocalHub) -> None:
    before = index_of(hub)
    for state in ("yanked", "deprecated"):
        for reason in (None, "", "  "):
            with pytest.raises(UsageError) as caught:
                set_status(hub, OTHER, state, reason=reason)  # type: ignore[arg-type]
            assert "--reason" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="itself"):
        set_status(hub, OTHER, "deprecated", reason="old", replaced_by="tiny-qwen3-hard/OTHER")
    with pytest.raises(ArtifactNotFound, match="missing"):
        set_status(hub, OTHER, "deprecated", reason="old", replaced_by="tiny-qwen3-hard:missing")
    assert index_of(hub) == before


def test_a_deprecated_version_names_what_to_use_instead(hub: LocalHub) -> None:
    result = set_status(hub, OTHER, "deprecated", reason="old", replaced_by=str(HARD))
    assert result.status.replaced_by == HARD.reference
    entry = index_of(hub).entry(result.id)
    assert entry is not None and entry.status == result.status


def test_an_artifact_that_is_in_no_index_gets_an_entry(hub: LocalHub) -> None:
    bare = hub.artifacts()[0]
    assert index_of(hub).entry(bare) is None
    result = yank(hub, "Bare:tag")
    assert result.id == bare
    entry = index_of(hub).entry(bare)
    assert entry is not None
    assert (entry.digest, entry.manifest_sha256, entry.model) == (result.digest, None, None)
    assert {f.path: f.sha256 for f in entry.files} == {f.path: f.sha256 for f in hub.files(bare)}


@pytest.mark.parametrize(
    "name",
    [
        "tiny-qwen3-hard:other",
        "TINY-qwen3-hard:Other",
        "tiny-qwen3-hard/other",
        "oscar-zoo/tiny-qwen3-hard:other",
    ],
)
def test_a_version_is_named_by_its_reference_or_id_in_any_case(hub: LocalHub, name: str) -> None:
    assert yank(hub, name).id.tag == "other"


def test_a_version_is_named_by_its_digest(hub: LocalHub) -> None:
    entry = index_of(hub).artifacts[0]
    for name in (entry.digest, entry.digest[:19], f"{entry.artifact_id.model}@{entry.digest[:20]}"):
        assert set_status(hub, name, "yanked", reason=name).id == entry.artifact_id
    put_version(hub, "Bare/twin", payload(seed=2))
    twin = yank(hub, "Bare:twin").digest
    with pytest.raises(AmbiguousName, match="Bare:twin"):
        yank(hub, twin)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tiny-qwen3-hard", AmbiguousName),
        ("Bare", UsageError),
        ("Bare:other", ArtifactNotFound),
        ("nothing:tag", ArtifactNotFound),
        ("other-org/tiny-qwen3-hard:other", ArtifactNotFound),
        ("sha256:" + "0" * 64, ArtifactNotFound),
        ("sha256:12", InvalidName),
        ("a/b/c", InvalidName),
    ],
)
def test_a_name_that_is_not_exactly_one_version_is_refused(
    hub: LocalHub, name: str, error: type[Exception]
) -> None:
    before = index_of(hub)
    with pytest.raises(error):
        yank(hub, name)
    assert index_of(hub) == before
