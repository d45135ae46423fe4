"""What was seen before decides what may be used: lock, known artifacts, index, offline,
failover."""

from pathlib import Path

import pytest
from hub_uses import HARD, hub_with, plan, pull, put_version
from tiny_artifacts import FILE_NAME, artifact_files, payload

from oscar_zoo import errors, paths
from oscar_zoo.artifact.manifest import Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.fetch import PullResult
from oscar_zoo.registry.hubs.base import INDEX_NAME
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index, IndexEntry
from oscar_zoo.registry.pins import LOCK_NAME, PinFile
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import Trust

NAME = "tiny-qwen3-hard"


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    return hub_with(tmp_path / "hub", artifact_files())


@pytest.fixture
def lock(tmp_path: Path) -> PinFile:
    return PinFile(tmp_path / "project" / LOCK_NAME)


class TroubledHub(LocalHub):
    """A hub in a folder that raises `trouble` when it is asked anything."""

    trouble: errors.OscarZooError = errors.HubUnreachable.for_hub(
        "the first hub", "connection refused"
    )
    asked = 0

    def root_file(self, path: str) -> bytes | None:
        self.asked += 1
        raise self.trouble


def troubled(root: Path, trouble: errors.OscarZooError | None = None) -> TroubledHub:
    hub = TroubledHub(root, must_exist=False)
    hub.trouble = trouble or TroubledHub.trouble
    return hub


def entry(
    files: dict[str, bytes], *, state: str = "active", aliases: tuple[str, ...] = ()
) -> IndexEntry:
    """The index entry of `files` as `HARD`."""
    reason = None if state == "active" else "a bad fit"
    status = Status(state=state, reason=reason)  # type: ignore[arg-type]
    made = Version.of(HARD, files).entry(aliases=aliases)
    return made.model_copy(update={"status": status, "summary": None})


def write_index(hub: LocalHub, *entries: IndexEntry, serial: int | None = None) -> None:
    index = Index.empty()
    for one in entries:
        index = index.with_entry(one)
    if serial is not None:
        index = index.model_copy(update={"serial": serial})
    (hub.root / INDEX_NAME).write_bytes(index.to_bytes())
    hub.refresh()


def test_pulls_pin_for_projects_and_users(hub: LocalHub, store: Store, lock: PinFile) -> None:
    record = pull(NAME, hub, store, trust=Trust(lock=lock)).artifact.record
    for file in (lock, PinFile.known()):
        pin = file.read().pin(HARD)
        assert pin is not None
        assert (pin.digest, pin.files) == (record.digest, record.files)
        assert pin.manifest_sha256 == record.manifest_sha256
        assert (pin.hub, pin.source) == (hub.name, "manifest")


def test_pinned_asks_no_hub(hub: LocalHub, store: Store, lock: PinFile, tmp_path: Path) -> None:
    trust = Trust(lock=lock)
    pull(NAME, hub, store, trust=trust)
    dead = troubled(tmp_path / "dead", errors.Forbidden.for_hub("the dead hub"))
    result = pull("oscar-zoo/TINY-qwen3-hard", dead, store, trust=trust)
    assert (result.already_present, result.level, dead.asked) == (True, "numeric", 0)
    assert isinstance(plan(NAME, dead, store, trust=trust), PullResult)
    with pytest.raises(errors.Forbidden):  # without the lock: the name may mean something else now
        pull(NAME, dead, store)


def test_a_digest_that_is_here_asks_no_hub(hub: LocalHub, store: Store, tmp_path: Path) -> None:
    digest = pull(NAME, hub, store).artifact.record.digest
    dead = troubled(tmp_path / "dead")
    assert pull(f"{NAME}@{digest[:25]}", dead, store).already_present
    assert dead.asked == 0


def test_locks_bind_every_hub(hub: LocalHub, store: Store, lock: PinFile, tmp_path: Path) -> None:
    old = pull(NAME, hub, store, trust=Trust(lock=lock)).artifact.record
    other = hub_with(tmp_path / "other", artifact_files(seed=1))
    elsewhere = Store(tmp_path / "elsewhere")
    trust = Trust(known=PinFile(tmp_path / "someone" / "known.json"), lock=lock)
    before = lock.path.read_bytes()
    with pytest.raises(errors.DigestMismatchError, match=LOCK_NAME) as caught:
        pull(NAME, other, elsewhere, trust=trust)
    assert (caught.value.want, elsewhere.installed()) == (old.digest, ())
    assert caught.value.got in caught.value.message
    assert lock.path.read_bytes() == before
    new = pull(
        NAME, other, elsewhere, trust=Trust(known=trust.known, lock=lock, accept_new=True)
    ).artifact.record
    assert new.digest == caught.value.got
    assert lock.read().pin(HARD).digest == new.digest  # type: ignore[union-attr]


def test_a_lock_delivers_its_version_always(store: Store, lock: PinFile, tmp_path: Path) -> None:
    hub = hub_with(tmp_path / "hub", artifact_files())
    trust = Trust(lock=lock)
    digest = pull(NAME, hub, store, trust=trust).artifact.record.digest
    put_version(hub, f"{NAME}/newer", artifact_files(artifact=f"{NAME}/newer", seed=2))
    write_index(hub, entry(artifact_files(), state="yanked"))
    fresh = Store(tmp_path / "fresh")
    result = pull(NAME, hub, fresh, trust=trust)
    assert result.artifact.record.digest == digest
    assert any("yanked" in warning for warning in result.warnings)
    assert pull(NAME, hub, Store(tmp_path / "other")).artifact.record.id.tag == "newer"


def test_locked_mode_takes_and_writes_nothing(hub: LocalHub, store: Store, lock: PinFile) -> None:
    with pytest.raises(errors.NotLocked, match=LOCK_NAME):
        pull(NAME, hub, store, trust=Trust(lock=lock, locked=True))
    assert not lock.path.exists()
    pull(NAME, hub, store, trust=Trust(lock=lock))
    before = lock.path.read_bytes()
    assert pull(NAME, hub, store, trust=Trust(lock=lock, locked=True)).already_present
    store.remove(store.installed()[0])
    assert not pull(NAME, hub, store, trust=Trust(lock=lock, locked=True)).already_present
    assert lock.path.read_bytes() == before


def test_a_lock_is_read_without_being_written(hub: LocalHub, store: Store, lock: PinFile) -> None:
    pull(NAME, hub, store, trust=Trust(lock=lock, write_lock=False))
    assert not lock.path.exists()
    pull(NAME, hub, store, trust=Trust(lock=lock))
    with pytest.raises(
        errors.ArtifactNotFound
    ):  # another organisation's model does not fit the pin
        pull(f"someone/{NAME}", hub, store, trust=Trust(lock=lock))


def test_another_manifest_under_a_pin_is_seen(
    hub: LocalHub, store: Store, lock: PinFile, tmp_path: Path
) -> None:
    trust = Trust(lock=lock)
    pull(NAME, hub, store, trust=trust)
    manifest = hub.root / str(HARD) / FILE_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"recent": 256', b'"recent": 255'))
    with pytest.raises(errors.DigestMismatchError, match=r"oscar\.json"):
        pull(NAME, hub, Store(tmp_path / "fresh"), trust=trust)


def test_what_was_seen_outlasts_the_store(hub: LocalHub, store: Store, tmp_path: Path) -> None:
    old = pull(NAME, hub, store).artifact.record
    store.remove(old)
    with pytest.raises(errors.DigestMismatchError, match="known artifacts") as caught:
        pull(NAME, hub_with(tmp_path / "other", artifact_files(seed=1)), store)
    assert old.digest in caught.value.message
    assert store.installed() == ()
    assert not pull(NAME, hub, store).already_present


def test_an_index_that_contradicts_its_files_is_refused(hub: LocalHub, store: Store) -> None:
    write_index(hub, entry(artifact_files(seed=1)))
    for trust in (Trust(), Trust(accept_new=True)):
        with pytest.raises(errors.DigestMismatchError, match="index"):
            pull(NAME, hub, store, trust=trust)
    write_index(hub, entry(artifact_files()), serial=2)
    assert pull(NAME, hub, store).artifact.record.digest == entry(artifact_files()).digest
    assert PinFile.known().read().pin(HARD).source == "index"  # type: ignore[union-attr]


def test_an_older_index_is_refused_unless_it_is_allowed(hub: LocalHub, store: Store) -> None:
    write_index(hub, entry(artifact_files(), state="yanked"), serial=5)
    pull(f"{NAME}@{entry(artifact_files()).digest}", hub, store)
    write_index(hub, entry(artifact_files()), serial=4)  # the yank would be gone
    with pytest.raises(errors.RollbackError) as caught:
        pull(NAME, hub, store)
    assert "5" in caught.value.message and "4" in caught.value.message
    assert pull(NAME, hub, store, trust=Trust(allow_downgrade=True)).already_present
    assert pull(NAME, hub, store).already_present  # accepted once is accepted
    write_index(hub, entry(artifact_files()), serial=3)
    with pytest.raises(errors.RollbackError):
        pull(NAME, hub, store)


def test_yanked_versions_need_a_digest_and_bring_the_reason(hub: LocalHub, store: Store) -> None:
    write_index(hub, entry(artifact_files(), state="yanked", aliases=("hardy",)))
    for name in (NAME, "hardy", str(HARD), HARD.reference):
        with pytest.raises(errors.ArtifactNotFound, match="a bad fit"):
            pull(name, hub, store)
    result = pull(f"{NAME}@{entry(artifact_files()).digest}", hub, store)
    assert any("a bad fit" in warning for warning in result.warnings)


def test_an_alias_of_the_index_is_a_name(hub: LocalHub, store: Store) -> None:
    write_index(hub, entry(artifact_files(), aliases=("hardy",)))
    assert pull("HARDY", hub, store).artifact.record.id == HARD


@pytest.mark.parametrize(
    "trouble", [errors.HubUnreachable.for_hub("it", "reset"), errors.HubTimeout("silent.")]
)
def test_the_next_hub_is_asked_after_network_trouble(
    hub: LocalHub, store: Store, tmp_path: Path, trouble: errors.NetworkError
) -> None:
    result = pull(NAME, [troubled(tmp_path / "dead", trouble), hub], store)
    assert (result.hub, result.notes) == (hub.name, (trouble.message,))


@pytest.mark.parametrize(
    "trouble", [errors.Forbidden.for_hub("it"), errors.DigestMismatchError("wrong bytes")]
)
def test_no_other_hub_hides_a_refusal_or_wrong_bytes(
    hub: LocalHub, store: Store, tmp_path: Path, trouble: errors.OscarZooError
) -> None:
    with pytest.raises(type(trouble)):
        pull(NAME, [troubled(tmp_path / "first", trouble), hub], store)
    assert store.installed() == ()


def test_a_name_is_sought_hub_after_hub(hub: LocalHub, store: Store, tmp_path: Path) -> None:
    empty = LocalHub(tmp_path / "empty", must_exist=False)
    assert pull(NAME, [empty, hub], store).hub == hub.name
    with pytest.raises(errors.NotFoundError) as caught:
        pull("tiny-qwen3-hart", [empty, hub], store)
    assert NAME in (caught.value.hint or "")
    with pytest.raises(errors.ArtifactNotFound) as missing:
        pull("Qwen3-32B", [empty, hub], store)
    assert str(empty.root) in missing.value.message and str(hub.root) in missing.value.message
    with pytest.raises(errors.NetworkError) as silent:
        pull("Qwen3-32B", [troubled(tmp_path / "dead"), empty], store)
    assert "the first hub" in silent.value.message
    assert f"{empty.title} has no Qwen3-32B" in silent.value.message


def test_an_error_offline_says_what_is_here(hub: LocalHub, store: Store, tmp_path: Path) -> None:
    dead, own = troubled(tmp_path / "dead"), LocalHub(paths.default_zoo_dir(), must_exist=False)
    named = LocalHub(hub.root)
    installed = f"installed: {HARD.reference}"

    def failure(name: str, *hubs: LocalHub, offline: bool = False) -> errors.OscarZooError:
        with pytest.raises(errors.OscarZooError) as caught:
            pull(name, list(hubs), store, offline=offline)
        return caught.value

    empty = failure("Qwen3-32B", own, dead)
    assert isinstance(empty, errors.NetworkError) and "no rotation is here yet" in str(empty.hint)
    assert empty.message.startswith("Qwen3-32B is not") and str(own.root) not in empty.message
    assert "computed" in str(failure("Qwen3-14B", dead).hint) and "computed" not in str(empty.hint)
    pull(NAME, hub, store)
    known = failure("Qwen3-32B", own, dead)
    assert isinstance(known, errors.NetworkError) and str(known.hint).endswith(installed)
    unknown = failure("qwen3-31b", own, dead)
    assert isinstance(unknown, errors.NetworkError) and str(unknown.hint).endswith(installed)
    assert str(unknown.hint).startswith("did you mean Qwen3-32B")
    offline = failure("Qwen3-32B", own, offline=True)
    assert isinstance(offline, errors.OfflineError) and str(offline.hint).endswith(installed)
    nobody = failure("qwen3-31b", own, offline=True)
    assert isinstance(nobody, errors.ArtifactNotFound) and "Qwen3-32B" in str(nobody.hint)
    assert isinstance(failure("Qwen3-32B", named, offline=True), errors.ArtifactNotFound)


def test_a_lock_names_the_hub_to_ask_first(store: Store, lock: PinFile, tmp_path: Path) -> None:
    one, two = hub_with(tmp_path / "one", payload()), hub_with(tmp_path / "two", payload())
    trust = Trust(lock=lock)
    pull(NAME, two, store, trust=trust)
    result = pull(NAME, [one, two], Store(tmp_path / "fresh"), trust=trust)
    assert result.hub == two.name
    moved = pull(NAME, [one], Store(tmp_path / "fresher"), trust=trust)
    assert moved.hub == one.name


def test_a_missing_pinned_version_is_named(store: Store, lock: PinFile, tmp_path: Path) -> None:
    home = hub_with(tmp_path / "home", payload())
    pull(NAME, home, store, trust=Trust(lock=lock))
    trust = Trust(lock=lock, write_lock=False)
    other = LocalHub(tmp_path / "other", must_exist=False)
    newer = ArtifactId(HARD.model, "newer")
    put_version(other, newer, payload())
    for hubs, failure in (
        (other, errors.NotFoundError),
        (troubled(tmp_path / "dead"), errors.NetworkError),
        ((), errors.OfflineError),
    ):
        fresh = Store(tmp_path / f"without-{failure.__name__}")
        pull(newer.reference, other, fresh)
        with pytest.raises(failure) as caught:
            pull(NAME, hubs, fresh, trust=trust, offline=not hubs)
        assert f"{lock.path} pins {NAME} to {HARD.reference}" in caught.value.message
        assert f"oscar-zoo pull {HARD.reference} --hub {home.name}" in str(caught.value.hint)
        assert newer.reference in str(caught.value.hint)
        assert "--offline" not in str(caught.value.hint)
        assert pull(newer.reference, (), fresh, trust=trust, offline=True).already_present
        assert not pull(HARD.reference, home, fresh, trust=trust).already_present


def test_offline_pins_what_is_here_as_well(hub: LocalHub, store: Store, lock: PinFile) -> None:
    with pytest.raises(errors.OfflineError, match=NAME):
        pull(NAME, (), store, offline=True)
    record = pull(NAME, hub, store).artifact.record
    assert pull(NAME, (), store, trust=Trust(lock=lock), offline=True).already_present
    pin = lock.read().pin(HARD)
    assert pin is not None and pin == PinFile.known().read().pin(HARD)
    assert (pin.digest, pin.hub) == (record.digest, hub.name)


def test_a_silent_hub_says_to_use_the_copy(hub: LocalHub, store: Store, tmp_path: Path) -> None:
    pull(NAME, hub, store)
    with pytest.raises(errors.NetworkError) as caught:
        pull(NAME, troubled(tmp_path / "dead"), store)
    assert "--offline" in (caught.value.hint or "")
    assert pull(NAME, troubled(tmp_path / "dead"), store, prefer_installed=True).already_present
