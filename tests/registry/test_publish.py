from pathlib import Path

import pytest
from hub_uses import publish, put_version
from scripted_hub import ScriptedHub, index_of, killed_at, lose_reply
from tiny_artifacts import K_NAME, V_NAME, artifact_files, manifest, payload, write_folder

from oscar_zoo import errors
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.card import BEGIN
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.site.status import set_status

HARD = ArtifactId.parse("tiny-qwen3-hard/seq512_prompt2_group64")
TAG = "oz-tiny-qwen3-hard-seq512_prompt2_group64"


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    return LocalHub(tmp_path / "hub", must_exist=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "out", artifact_files())


def test_the_index_says_what_was_published(tmp_path: Path, hub: LocalHub, folder: Path) -> None:
    result = publish(folder, hub, aliases=("hard", "tiny"))
    index, files = index_of(hub), artifact_files()
    entry = index.entry(HARD)
    assert entry is not None
    assert (index.serial, entry.digest, entry.aliases) == (1, result.digest, ("hard", "tiny"))
    assert {f.path: f.sha256 for f in entry.files} == {
        n: sha256_hex(files[n]) for n in (K_NAME, V_NAME)
    }
    assert entry.manifest_sha256 == sha256_hex(files[FILE_NAME])
    assert entry.model == "oscar-zoo/tiny-qwen3-hard"
    assert entry.summary is not None and entry.summary.method == "oscar"
    publish(write_folder(tmp_path / "other", artifact_files(artifact="tiny-qwen3-hard/other")), hub)
    assert (index_of(hub).serial, len(index_of(hub).artifacts)) == (2, 2)
    assert index_of(hub).entry(HARD) == entry
    card = (hub.root / "README.md").read_text()
    assert "seq512_prompt2_group64" in card and "other" in card


def test_publishing_twice_is_success_and_writes_nothing(hub: LocalHub, folder: Path) -> None:
    def times() -> dict[Path, int]:
        paths = [path for path in hub.root.rglob("*") if path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in paths}

    first = publish(folder, hub)
    before = times()
    second = publish(folder, hub)
    assert second.already_published and times() == before
    assert (second.digest, second.revision) == (first.digest, first.revision)


def test_the_same_content_computed_anew_is_already_published(tmp_path: Path, hub: LocalHub) -> None:
    files = artifact_files()
    publish(write_folder(tmp_path / "one", files), hub)
    first = Manifest.from_bytes(files[FILE_NAME])
    later = first.model_copy(update={"created": "2030-01-01T00:00:00Z"})
    again = publish(write_folder(tmp_path / "two", files | {FILE_NAME: later.to_bytes()}), hub)
    assert again.already_published
    assert hub.fetch(HARD, FILE_NAME, limit=1 << 20) == files[FILE_NAME]
    entry = index_of(hub).entry(HARD)
    assert entry is not None and entry.manifest_sha256 == sha256_hex(files[FILE_NAME])
    clip = first.recipe.clip.model_copy(update={"k": 0.5})
    other = first.model_copy(update={"recipe": first.recipe.model_copy(update={"clip": clip})})
    with pytest.raises(errors.VersionExists, match=r"oscar\.json"):
        publish(write_folder(tmp_path / "three", files | {FILE_NAME: other.to_bytes()}), hub)


def test_other_bytes_under_one_id_are_refused(tmp_path: Path, hub: LocalHub, folder: Path) -> None:
    publish(folder, hub)
    before = index_of(hub)
    with pytest.raises(errors.VersionExists) as caught:
        publish(write_folder(tmp_path / "two", artifact_files(seed=1)), hub)
    assert str(HARD) in caught.value.message and K_NAME in caught.value.message
    assert "tag" in (caught.value.hint or "")
    assert index_of(hub) == before


@pytest.mark.parametrize("name", [K_NAME, FILE_NAME])
def test_a_version_damaged_on_the_hub_is_another(hub: LocalHub, folder: Path, name: str) -> None:
    publish(folder, hub)
    (hub.root / str(HARD) / name).write_bytes(b"half")
    with pytest.raises(errors.VersionExists, match=name):
        publish(folder, hub)


def test_a_name_that_differs_only_in_case_is_refused(hub: LocalHub, folder: Path) -> None:
    put_version(hub, "Tiny-Qwen3-Hard/seq512_prompt2_group64", artifact_files())
    with pytest.raises(errors.VersionExists, match="Tiny-Qwen3-Hard/seq512_prompt2_group64"):
        publish(folder, hub)


def test_a_deleted_version_comes_back_alike(tmp_path: Path, hub: LocalHub, folder: Path) -> None:
    digest = publish(folder, hub, aliases=("hard",)).digest
    for path in sorted((hub.root / str(HARD)).iterdir()):
        path.unlink()
    with pytest.raises(errors.VersionExists, match=digest):
        publish(write_folder(tmp_path / "two", artifact_files(seed=1)), hub)
    assert not publish(folder, hub).already_published
    entry = index_of(hub).entry(HARD)
    assert entry is not None and entry.aliases == ("hard",)


@pytest.mark.parametrize("name", ["index.json", "README.md"])
def test_a_missing_index_or_card_is_repaired(hub: LocalHub, folder: Path, name: str) -> None:
    publish(folder, hub)
    before = (hub.root / name).read_bytes()
    (hub.root / name).unlink()
    assert publish(folder, hub).already_published
    assert (hub.root / name).read_bytes() == before


def test_an_index_that_is_none_or_too_new_is_not_overwritten(hub: LocalHub, folder: Path) -> None:
    publish(folder, hub)
    for data, reason in ((b"{}", "index.version"), (b"[", "json.syntax")):
        (hub.root / "index.json").write_bytes(data)
        with pytest.raises(errors.MalformedFile, match=str(hub.root)) as caught:
            publish(folder, hub)
        assert caught.value.reason == reason
        assert (hub.root / "index.json").read_bytes() == data


def test_a_card_with_damaged_markers_is_left_alone_and_told(hub: LocalHub, folder: Path) -> None:
    hub.root.mkdir()
    card = BEGIN + b"\nmine\n"
    (hub.root / "README.md").write_bytes(card)
    result = publish(folder, hub)
    assert "README.md was left as it is" in result.warnings[0]
    assert (hub.root / "README.md").read_bytes() == card
    assert index_of(hub).entry(HARD) is not None


def test_a_yanked_version_stays_yanked_when_published_again(hub: LocalHub, folder: Path) -> None:
    publish(folder, hub)
    set_status(hub, str(HARD), "yanked", reason="wrong data")
    assert publish(folder, hub, aliases=("more",)).already_published
    entry = index_of(hub).entry(HARD)
    assert entry is not None
    assert (entry.status.state, entry.status.reason) == ("yanked", "wrong data")
    assert entry.aliases == ("more",)


def damaged() -> dict[str, tuple[dict[str, bytes], type[Exception], str]]:
    """What is no artifact to publish: its files, the error, and what that names."""
    files, bare = artifact_files(), payload()
    swapped = {K_NAME: bare[V_NAME], V_NAME: bare[V_NAME]}
    swapped[FILE_NAME] = manifest(swapped).to_bytes()
    return {
        "a missing file": (
            {n: files[n] for n in (K_NAME, FILE_NAME)},
            errors.PathNotFound,
            "v_rotation",
        ),
        "an unlisted file": (files | {"third.pt": files[K_NAME]}, errors.UsageError, r"third\.pt"),
        "values for keys": (swapped, errors.VerificationFailed, "verification"),
    }


@pytest.mark.parametrize("what", damaged())
def test_no_part_of_an_artifact_reaches_a_hub(tmp_path: Path, hub: LocalHub, what: str) -> None:
    files, error, said = damaged()[what]
    with pytest.raises(error, match=said) as caught:
        publish(write_folder(tmp_path / "out", files), hub)
    assert caught.value.hint  # type: ignore[attr-defined]
    assert not hub.root.exists()


@pytest.mark.parametrize(
    "alias", ["Qwen3-8B", "qwen/qwen3-8b", "a:b", "a@sha256:000000000000", "a b", "tiny-qwen3-two"]
)
def test_an_alias_must_be_a_plain_name_that_is_free(
    tmp_path: Path, hub: LocalHub, folder: Path, alias: str
) -> None:
    other = write_folder(tmp_path / "other", artifact_files(artifact="tiny-qwen3-two/tag"))
    publish(other, hub, aliases=("Taken",))
    with pytest.raises(errors.UsageError):
        publish(folder, hub, aliases=(alias,))
    assert index_of(hub).entry(HARD) is None


def test_a_proposal_whose_reply_is_lost_is_not_sent_twice(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub", lose_reply)
    with pytest.raises(errors.NetworkError, match="not known whether"):
        publish(folder, hub, propose=True)
    assert len(hub.commits) == 1


def test_a_dry_run_says_exactly_what_would_be_sent(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub")
    plan = publish(folder, hub, dry_run=True, aliases=("hard",)).plan
    assert plan is not None
    assert (hub.commits, hub.tags, hub.folder.root.exists()) == ([], {}, False)
    publish(folder, hub, aliases=("hard",))
    (change,) = hub.commits
    sent = [(path, sha256_hex(data), len(data)) for path, data in sorted(change.paths.items())]
    assert [(f.path, f.sha256, f.size) for f in plan.files] == sent
    assert (plan.message, plan.parent) == (change.message, change.parent)
    assert (plan.tag, plan.serial) == (TAG, 1)
    again = publish(folder, hub, dry_run=True, aliases=("hard",))
    assert again.already_published and again.plan is not None
    assert (again.plan.files, again.plan.message, again.plan.serial) == ((), None, 1)


def test_a_repository_is_created_on_request_only(tmp_path: Path, folder: Path) -> None:
    hub = ScriptedHub(tmp_path / "hub", exists=False)
    for dry_run in (False, True):
        with pytest.raises(errors.RepositoryNotFound, match="org/zoo") as caught:
            publish(folder, hub, dry_run=dry_run)
        assert "--create" in (caught.value.hint or "")
    assert publish(folder, hub, create=True, dry_run=True).plan is not None
    assert (hub.created, hub.exists) == (0, False)
    assert publish(folder, hub, create=True).tag == TAG
    assert hub.created == 1


def test_a_killed_publisher_is_repaired_by_publishing_again(tmp_path: Path, folder: Path) -> None:
    for number in range(1, 400):
        hub = LocalHub(tmp_path / f"hub{number}", must_exist=False)
        killed = killed_at(number, lambda hub=hub: publish(folder, hub))  # type: ignore[misc]
        assert hub.artifacts() in ((), (HARD,))
        assert index_of(hub).serial in (0, 1)
        publish(folder, hub)
        entry = index_of(hub).entry(HARD)
        assert entry is not None and (hub.root / "README.md").exists()
        assert {f.path: f.sha256 for f in entry.files}.items() <= {
            f.path: f.sha256 for f in hub.files(HARD)
        }.items()
        if not killed:
            break
    assert 30 < number < 399
