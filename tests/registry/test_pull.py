import contextlib
from pathlib import Path

import pytest
from hub_uses import HARD, hub_with, pull, put_version
from scripted_hub import Injection, killed_at, raise_error
from tiny_artifacts import K_NAME, TINY, V_NAME, ZOO, artifact_files, payload, rotation

from oscar_zoo import errors
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import DigestMismatch, Rejected
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.base import HubFile, Progress
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import Trust

NAME = HARD.model


def test_pull_stores_the_hubs_bytes_and_fetches_them_once(tmp_path: Path, store: Store) -> None:
    files, seen = artifact_files(), list[str]()
    hub = hub_with(tmp_path / "hub", files)
    result = pull("TINY-qwen3-hard", hub, store, progress=lambda path, *_: seen.append(path))
    assert not (result.already_present or result.first_use)
    assert result.artifact.files == files
    assert result.verified is not None and result.verified.k is not None
    assert result.verified.digest == result.artifact.record.digest
    assert result.verified.k.layer_ids == (0, 1, 2, 3)
    assert sorted(seen) == [K_NAME, V_NAME]
    assert result.artifact.record.source == f"file:{tmp_path / 'hub'}"
    again = pull(NAME, hub, store, progress=lambda path, *_: seen.append(path))
    assert again.already_present and again.artifact.record == result.artifact.record
    assert len(seen) == 2
    digest = result.artifact.record.digest
    assert pull(f"{NAME}@{digest[:30]}", hub, store).already_present
    for other in (hub_with(tmp_path / "new", files), hub):  # what the last one said stands
        found = pull(NAME, other, store)
        assert found.already_present and store.installed() == (found.artifact.record,)
        assert (found.artifact.record.source, found.artifact.files) == (other.name, files)


def test_a_folder_without_manifest_is_trusted_on_first_use(tmp_path: Path, store: Store) -> None:
    hub = hub_with(tmp_path / "hub", payload())
    result = pull(NAME, hub, store)
    assert result.first_use and result.artifact.manifest is None
    assert not pull(NAME, hub, store).first_use


@pytest.mark.parametrize("locked", [False, True])
def test_a_rotten_entry_names_the_hub_it_came_from_where_others_were_asked(
    tmp_path: Path, store: Store, locked: bool
) -> None:
    home = hub_with(tmp_path / "the hub", artifact_files())
    lock = PinFile(tmp_path / "oscar-zoo.lock")
    trust = Trust(lock=lock if locked else None)
    path = pull(NAME, home, store, trust=trust).artifact.record.path / K_NAME
    path.chmod(0o600)
    path.write_bytes(b"?")
    (tmp_path / "other").mkdir()
    other = LocalHub(tmp_path / "other")
    again = f"oscar-zoo pull {HARD.reference} --hub 'file:{tmp_path}/the hub'"
    trust = Trust(lock=lock if locked else None)
    with pytest.raises(errors.DigestMismatchError, match=K_NAME) as info:
        pull(NAME, other, store, trust=trust)
    assert again in str(info.value.hint)
    with pytest.raises(errors.DigestMismatchError) as info:
        pull(NAME, (), store, trust=trust, offline=True)
    assert again in str(info.value.hint)


def test_other_bytes_under_one_id_are_an_error_of_2_digests(tmp_path: Path, store: Store) -> None:
    old = pull(NAME, hub_with(tmp_path / "one", artifact_files()), store).artifact.record
    hub = hub_with(tmp_path / "two", artifact_files(seed=1))
    with pytest.raises(errors.DigestMismatchError) as caught:
        pull(NAME, hub, store)
    new = pull(NAME, hub, store, trust=Trust(accept_new=True)).artifact
    assert old.digest in caught.value.message and new.record.digest in caught.value.message
    assert store.installed() == (new.record,)
    assert pull(NAME, hub, store).already_present


@pytest.mark.parametrize("listed", [True, False])
def test_a_rotten_entry_says_what_a_hub_must_do(tmp_path: Path, store: Store, listed: bool) -> None:
    old = pull(NAME, hub_with(tmp_path / "one", payload()), store).artifact.record
    (old.path / K_NAME).chmod(0o600)
    (old.path / K_NAME).write_bytes(b"rot")
    hub = hub_with(tmp_path / "two", payload(seed=1))
    hub = hub if listed else SilentHub(hub.root)
    for _ in range(2):
        with pytest.raises(errors.DigestMismatchError) as caught:
            pull(NAME, hub, store)
        assert old.digest in caught.value.message
    assert pull(NAME, hub, store, trust=Trust(accept_new=True)).artifact.record.digest != old.digest


class SilentHub(LocalHub):
    """A hub that lists no digests."""

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        return tuple(HubFile(file.path, file.size, None) for file in super().files(artifact))


class ChangingHub(SilentHub):
    """Delivers each file with bytes more than it has; `listed` is the size that it lists."""

    more, listed = b"?", 0

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        files = super().files(artifact)
        return tuple(HubFile(file.path, self.listed or file.size, None) for file in files)

    def fetch(
        self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None
    ) -> bytes:
        assert limit < 1 << 40, "far more is fetched than an artifact has"
        return super().fetch(artifact, path, limit=limit, progress=progress) + self.more


def test_a_length_other_than_listed_or_possible_is_refused(tmp_path: Path, store: Store) -> None:
    hub = ChangingHub(hub_with(tmp_path / "hub", payload()).root)
    with pytest.raises(errors.DigestMismatchError, match="bytes"):
        pull(NAME, hub, store)
    hub.listed = 1 << 40
    with pytest.raises(errors.MalformedFile) as caught:
        pull(NAME, hub, store)
    assert caught.value.reason == "file.size"


@pytest.mark.parametrize("more", [{}, {"statistics.safetensors": b"unknown"}])
def test_bytes_are_as_promised(tmp_path: Path, store: Store, more: dict[str, bytes]) -> None:
    promised = Manifest.from_bytes(artifact_files()[FILE_NAME])
    catalog = Catalog(Catalog.packaged().recipes(), [promised])
    other = hub_with(tmp_path / "one", {**payload(seed=0 if more else 1), **more})
    for trust in (
        Trust(),
        Trust(accept_new=True),
    ):  # not a promise of the past: it cannot be given up
        with pytest.raises(errors.DigestMismatchError, match="shipped with oscar-zoo") as listed:
            pull(NAME, other, store, catalog=catalog, trust=trust)
    assert str(promised.digest) in listed.value.message
    with pytest.raises(
        errors.VerificationFailed
    ) as caught:  # a listing without digests: the bytes are looked at
        pull(NAME, SilentHub(other.root), store, catalog=catalog)
    assert isinstance(caught.value.outcome, Rejected if more else DigestMismatch)
    result = pull(NAME, hub_with(tmp_path / "two", payload()), store, catalog=catalog)
    assert result.artifact.record.digest == promised.digest
    assert not result.first_use


@pytest.mark.parametrize("change", ["swapped", "removed"])
def test_other_manifests_of_a_payload_are_errors(tmp_path: Path, store: Store, change: str) -> None:
    files = artifact_files()
    pull(NAME, hub_with(tmp_path / "one", files), store)
    other = dict(files)
    if change == "removed":
        del other[FILE_NAME]
    else:
        other[FILE_NAME] = files[FILE_NAME].replace(b'"recent": 256', b'"recent": 255')
    hub = hub_with(tmp_path / "two", other)
    with pytest.raises(errors.DigestMismatchError, match=r"oscar\.json"):
        pull(NAME, hub, store)
    assert pull(NAME, hub, store, trust=Trust(accept_new=True)).artifact.files == other
    assert len(store.installed()) == 1


def test_bytes_that_break_a_promise_or_a_rule_are_not_stored(tmp_path: Path, store: Store) -> None:
    hub = hub_with(tmp_path / "hub", artifact_files())
    data = bytearray(artifact_files()[K_NAME])
    data[len(data) // 2] ^= 1
    (hub.root / str(HARD) / K_NAME).write_bytes(bytes(data))
    with pytest.raises(errors.IntegrityError, match=K_NAME):
        pull(NAME, hub, store)
    files = payload()
    swapped = {K_NAME: files[V_NAME], V_NAME: files[V_NAME]}
    with pytest.raises(errors.VerificationFailed) as caught:
        pull(NAME, hub_with(tmp_path / "swapped", swapped), store)
    assert isinstance(caught.value.outcome, Rejected)
    assert caught.value.outcome.code in caught.value.message
    assert "verify" in (caught.value.hint or "")
    assert store.installed() == ()


def test_the_recipes_geometry_decides_not_the_manifests(tmp_path: Path, store: Store) -> None:
    three = TINY.model_copy(update={"num_layers": 3, "attention_layers": (0, 1, 2)})
    short = {
        name: rotation_bytes(rotation(objective, geometry=three, spread=spread))
        for name, objective, spread in ((K_NAME, "qqt_r_h_pbr", 0.02), (V_NAME, "sst_r_h_pbr", 0.1))
    }
    with pytest.raises(errors.VerificationFailed):
        pull(NAME, hub_with(tmp_path / "one", short), store)
    unknown = hub_with(tmp_path / "two", short, ArtifactId("unknown-model", "tag"))
    assert pull("unknown-model", unknown, store).verified


class FlakyHub(LocalHub):
    """Delivers the first `bad` fetches of the K file with one byte changed."""

    bad = 0

    def fetch(
        self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None
    ) -> bytes:
        data = super().fetch(artifact, path, limit=limit, progress=progress)
        if path != K_NAME or self.bad == 0:
            return data
        self.bad -= 1
        return data[:-1] + bytes([data[-1] ^ 1])


def test_a_bad_delivery_is_refused(tmp_path: Path, store: Store) -> None:
    hub = FlakyHub(tmp_path / "hub", must_exist=False)
    put_version(hub, HARD, artifact_files())
    hub.bad = 1
    with pytest.raises(errors.DigestMismatchError, match=K_NAME):
        pull(NAME, hub, store)
    assert store.installed() == ()
    assert pull(NAME, hub, store).artifact.files == artifact_files()


@pytest.mark.parametrize("what", ["a full disk", "a kill"])
def test_whatever_stops_a_pull_is_repaired_by_the_next(tmp_path: Path, what: str) -> None:
    hub = hub_with(tmp_path / "hub", artifact_files())
    for number in range(1, 100, 7):
        store = Store(tmp_path / f"cache{number}")
        if what == "a kill":
            stopped = killed_at(number, lambda store=store: pull(NAME, hub, store))  # type: ignore[misc]
        else:
            injection = Injection(number, raise_error(), stays=True)
            with contextlib.suppress(errors.StorageError), injection.active():
                pull(NAME, hub, store)
            stopped = injection.fired
        for record in store.installed():
            assert store.open(record.digest).files == artifact_files()
        assert pull(NAME, hub, store).artifact.files == artifact_files()
        if not stopped:
            break


@pytest.mark.real
@pytest.mark.skipif(not ZOO.is_dir(), reason="the real rotation files are not beside this checkout")
@pytest.mark.parametrize(
    ("reference", "tag", "layers"),
    [
        ("qwen3-8b", "seq150000_prompt44_group128", tuple(range(36))),
        ("Qwen/Qwen3-4B-Thinking-2507", "gpqa_group128", tuple(range(36))),
        ("qwen3.5-4b:calibrated", "calibrated", tuple(range(3, 32, 4))),
        ("Qwen/Qwen3.5-4B:hadamard", "hadamard", tuple(range(3, 32, 4))),
    ],
)
def test_real_files_are_pulled_from_a_folder_without_manifests(
    store: Store, reference: str, tag: str, layers: tuple[int, ...]
) -> None:
    hub = LocalHub(ZOO)
    result = pull(reference, hub, store)
    assert result.artifact.record.id.tag == tag
    assert not result.first_use, "the package knows their digests"
    assert result.verified is not None
    assert result.verified.k is not None
    assert result.verified.k.layer_ids == layers
    assert pull(reference, hub, store).already_present
