from pathlib import Path
from typing import Any

import pytest
from hub_uses import HARD, publish, put_version
from scripted_hub import ScriptedHub, index_of
from tiny_artifacts import K_NAME, V_NAME, artifact_files, manifest, payload, write_folder

from oscar_zoo import errors
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs.base import Change
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.mirror import MirrorResult, copy_all
from oscar_zoo.site.status import set_status

BARE = ArtifactId("Bare", "tag")


@pytest.fixture
def source(tmp_path: Path) -> LocalHub:
    """A hub with a published version, and one without manifest and index entry, as the public zoos
    have them."""
    hub = LocalHub(tmp_path / "source", must_exist=False)
    publish(write_folder(tmp_path / "one", artifact_files()), hub, aliases=("hard",))
    put_version(hub, BARE, payload(seed=2))
    return hub


@pytest.fixture
def target(tmp_path: Path) -> LocalHub:
    return LocalHub(tmp_path / "target", must_exist=False)


def content(hub: LocalHub) -> dict[str, bytes]:
    return {str(p.relative_to(hub.root)): p.read_bytes() for p in hub.root.glob("*/*/*")}


def outcomes(results: tuple[MirrorResult, ...]) -> dict[str, str]:
    return {str(result.id): result.outcome for result in results}


def test_everything_is_copied_byte_for_byte(source: LocalHub, target: LocalHub) -> None:
    seen: list[MirrorResult] = []
    results = copy_all(source, target, told=seen.append)
    assert outcomes(results) == {"Bare/tag": "copied", str(HARD): "copied"}
    assert tuple(seen) == results and content(target) == content(source)
    assert results[0].warnings == ()
    assert results[0].size == sum(map(len, payload(seed=2).values()))


def test_what_the_index_says_goes_along(source: LocalHub, target: LocalHub) -> None:
    set_status(source, HARD.reference, "yanked", reason="wrong data")
    copy_all(source, target)
    assert index_of(target).entry(HARD) == index_of(source).entry(HARD)
    bare = index_of(target).entry(BARE)
    assert bare is not None and (bare.manifest_sha256, bare.model, bare.hubs) == (None, None, {})
    assert index_of(target).serial == 2


def test_a_copy_of_a_remote_hub_says_where_it_came_from(source: LocalHub, target: LocalHub) -> None:
    copy_all(ScriptedHub(source.root, name="hf:org/zoo@main"), target, [HARD.reference])
    entry = index_of(target).entry(HARD)
    assert entry is not None
    assert {hub: place.repo for hub, place in entry.hubs.items()} == {"hf": "org/zoo"}


def test_mirroring_again_copies_nothing(source: LocalHub, target: LocalHub) -> None:
    remote = ScriptedHub(target.root)
    copy_all(source, remote)
    remote.commits.clear()
    assert set(outcomes(copy_all(source, remote)).values()) == {"already there"}
    assert remote.commits == []


@pytest.mark.parametrize(
    ("names", "copied"),
    [
        (["bare"], {"Bare/tag"}),
        (["Bare:tag", "Bare/tag"], {"Bare/tag"}),
        ([HARD.reference, "Bare"], {"Bare/tag", str(HARD)}),
        (["oscar-zoo/tiny-qwen3-hard"], {str(HARD)}),
    ],
)
def test_names_choose_versions(
    source: LocalHub, target: LocalHub, names: list[str], copied: set[str]
) -> None:
    assert set(outcomes(copy_all(source, target, names))) == copied
    assert {str(a) for a in target.artifacts()} == copied


def test_other_content_on_the_target_is_refused(source: LocalHub, target: LocalHub) -> None:
    put_version(target, HARD, artifact_files(seed=5))
    before = content(target)
    with pytest.raises(errors.VersionExists, match=str(HARD)):
        copy_all(source, target, [HARD.reference])
    assert content(target) == before


def test_what_fails_verification_is_not_written(source: LocalHub, target: LocalHub) -> None:
    files = payload(seed=4)
    swapped = {K_NAME: files[V_NAME], V_NAME: files[V_NAME]}
    swapped[FILE_NAME] = manifest(swapped, artifact="Swapped/tag").to_bytes()
    put_version(source, "Swapped/tag", swapped)
    with pytest.raises(errors.VerificationFailed, match="Swapped"):
        copy_all(source, target)
    assert [str(a) for a in target.artifacts()] == ["Bare/tag"]
    assert [e.id for e in index_of(target).artifacts] == ["Bare/tag"]


def test_a_source_that_contradicts_its_index_is_refused(source: LocalHub, target: LocalHub) -> None:
    changed = artifact_files(seed=6)
    for name, data in changed.items():
        (source.root / str(HARD) / name).write_bytes(data)
    with pytest.raises(errors.DigestMismatchError, match="index"):
        copy_all(source, target, [HARD.reference])
    assert not target.root.exists()


def test_bytes_that_change_while_fetched_are_refused(source: LocalHub, target: LocalHub) -> None:
    class Moving(ScriptedHub):
        def fetch(self, artifact: ArtifactId, path: str, **more: Any) -> bytes:
            data = self.folder.fetch(artifact, path, **more)
            return data[:-1] + b"?" if path == K_NAME else data

    with pytest.raises(errors.DigestMismatchError, match=K_NAME):
        copy_all(Moving(source.root), target, ["Bare"])
    assert not target.root.exists()


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_target_that_rots_is_caught(source: LocalHub, target: LocalHub, when: str) -> None:
    """When it is read back, and by the comparison of both hubs at the end."""

    def spoil(*_: object) -> None:
        path = target.root / "Bare/tag" / V_NAME
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    def rots(hub: ScriptedHub, change: Change) -> Any:
        commit = hub.write(change)
        spoil()
        return commit

    with pytest.raises(
        errors.DigestMismatchError, match=V_NAME if when == "at once" else "Bare/tag"
    ):
        if when == "at once":
            copy_all(source, ScriptedHub(target.root, rots), ["Bare"])
        else:
            copy_all(source, target, ["Bare"], told=spoil)


def test_dry_runs_and_proposals_leave_the_target_alone(source: LocalHub, target: LocalHub) -> None:
    dry = copy_all(source, target, dry_run=True)
    assert set(outcomes(dry).values()) == {"would be copied"}
    assert not target.root.exists()
    remote = ScriptedHub(target.root)
    proposed = copy_all(source, remote, ["Bare"], propose=True)
    assert outcomes(proposed) == {"Bare/tag": "proposed"} and proposed[0].proposal
    assert not target.root.exists()
    copy_all(source, target, ["Bare"])
    again = copy_all(source, target, dry_run=True)
    assert outcomes(again) == {"Bare/tag": "already there", str(HARD): "would be copied"}


def test_a_hub_is_no_mirror_of_itself_or_of_nothing(source: LocalHub, target: LocalHub) -> None:
    with pytest.raises(errors.UsageError, match="itself"):
        copy_all(source, LocalHub(source.root))
    with pytest.raises(errors.PathNotFound):
        copy_all(LocalHub(target.root), source)
