"""Artifacts of one fit that differ in bits per layer and side differ everywhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_uses import publish, pull
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.files import artifact_digest, file_digest
from oscar_zoo.artifact.manifest import FILE_NAME, WIDTHS_NAME, Manifest
from oscar_zoo.artifact.outcome import Rejected, Verified
from oscar_zoo.artifact.specs import Clip, Widths
from oscar_zoo.engines.served_artifact import load
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.errors import IntegrityError, MalformedFile, VersionExists
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.mirror import copy_all
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.store import Store, export
from oscar_zoo.registry.trust import Trust
from oscar_zoo.site.status import set_status

CLIP = Clip(k=0.96, v=0.92)
FOUR_K = Widths.uniform(4, k=4, v=2, clip=CLIP)
FOUR = Widths.uniform(4, k=4, v=4, clip=CLIP)
TWO_BITS, MIXED = "tiny/seq512_prompt2_group64", "tiny/seq512_prompt2_group64_bits3.5"


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    """Both widths of one fit."""
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    for name, widths in ((TWO_BITS, None), (MIXED, FOUR_K)):
        folder = write_folder(tmp_path / name, artifact_files(artifact=name, widths=widths))
        publish(folder, hub)
    return hub


def name_of(artifact: str) -> str:
    return artifact.replace("/", ":")


def test_both_widths_of_a_fit_are_published_and_pulled(hub: LocalHub, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    plain, mixed = (pull(name_of(name), hub, store).artifact.record for name in (TWO_BITS, MIXED))
    digests = {TWO_BITS: plain.digest, MIXED: mixed.digest}
    assert plain.digest != mixed.digest
    assert {str(one.id): one.digest for one in store.installed()} == digests
    index = Index.from_bytes(hub.root_file("index.json") or b"")
    assert {str(entry.id): entry.digest for entry in index.artifacts} == digests
    assert pull(f"tiny@{mixed.digest}", hub, store).artifact.record.id == mixed.id
    assert {pin.digest for pin in PinFile.known().read().artifacts} == set(digests.values())


def test_a_server_reads_the_recipe_of_its_own_artifact(hub: LocalHub, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    plain, mixed = (
        load(ArtifactSource(folder=str(export(pull(name_of(name), hub, store).artifact, tmp_path))))
        for name in (TWO_BITS, MIXED)
    )
    assert (plain.recipe.bits.k, plain.recipe.bits.v) == ((2,), (2,))
    assert (mixed.recipe.bits.k, mixed.recipe.bits.v) == ((4,) * 4, (2,) * 4)
    assert (mixed.recipe.k_clip, mixed.recipe.v_clip) == ((0.0,) * 4, (0.92,) * 4)
    assert plain.digest != mixed.digest


def test_other_widths_under_a_published_name_are_refused(hub: LocalHub, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", artifact_files(artifact=MIXED, widths=FOUR))
    with pytest.raises(VersionExists, match=r"widths\.json"):
        publish(other, hub)
    same = write_folder(tmp_path / "same", artifact_files(artifact=MIXED, widths=FOUR_K))
    assert publish(same, hub).already_published


def test_a_mirror_and_a_yank_know_them_apart(hub: LocalHub, tmp_path: Path) -> None:
    copy = LocalHub(tmp_path / "copy", must_exist=False)
    assert {one.outcome for one in copy_all(hub, copy)} == {"copied"}
    set_status(copy, name_of(MIXED), "yanked", reason="too many bits")
    store = Store(tmp_path / "store")
    assert str(pull("tiny", copy, store).artifact.record.id) == TWO_BITS
    assert str(pull(name_of(TWO_BITS), copy, store).artifact.record.id) == TWO_BITS


def test_a_lock_pins_the_widths(hub: LocalHub, tmp_path: Path) -> None:
    lock = PinFile(tmp_path / "oscar-zoo.lock")
    pull(name_of(MIXED), hub, Store(tmp_path / "store"), trust=Trust(lock=lock))
    (pin,) = lock.read().artifacts
    assert WIDTHS_NAME in {file.path for file in pin.files}
    again = pull("tiny", hub, Store(tmp_path / "new"), trust=Trust(lock=lock, locked=True))
    assert again.artifact.manifest is not None
    assert again.artifact.manifest.recipe.widths == FOUR_K


def fewer_bits(value: dict[str, Any]) -> None:
    value["recipe"]["widths"]["k"] = {"bits": [2] * 4, "clip": [0.96] * 4}


def other_clip(value: dict[str, Any]) -> None:
    value["recipe"]["widths"]["v"]["clip"][0] = 0.9


def no_widths(value: dict[str, Any]) -> None:
    del value["recipe"]["widths"]
    value["recipe"]["quantizer"] = "asym-minmax-u2/1"
    value["schema"] = "oscar-zoo.manifest/1"


def no_file(value: dict[str, Any]) -> None:
    value["files"] = [one for one in value["files"] if one["role"] != "widths"]
    digests = [file_digest(name, data) for name, data in payload().items()]
    value["digest"] = artifact_digest(digests)


@pytest.mark.parametrize("change", [fewer_bits, other_clip, no_widths, no_file])
def test_an_edited_recipe_is_refused_everywhere(
    hub: LocalHub, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    published = hub.root / MIXED
    value = json.loads((published / FILE_NAME).read_bytes())
    change(value)
    data = json.dumps(value).encode()
    (published / FILE_NAME).chmod(0o600)
    (published / FILE_NAME).write_bytes(data)
    with pytest.raises(MalformedFile, match="widths"):
        Manifest.from_bytes(data)
    assert isinstance(verify_path(published), Rejected)
    with pytest.raises(IntegrityError):
        load(ArtifactSource(folder=str(published)))
    hub.refresh()
    with pytest.raises(IntegrityError):
        pull(name_of(MIXED), hub, Store(tmp_path / "store"))


def test_widths_without_their_manifest_are_refused(tmp_path: Path) -> None:
    """Rotations alone would be served with codes of 2 bits, which nobody measured."""
    files = artifact_files(artifact=MIXED, widths=FOUR_K)
    whole = write_folder(tmp_path / "whole", files)
    assert isinstance(verify_path(whole), Verified)
    bare = {name: data for name, data in files.items() if name != FILE_NAME}
    folder = write_folder(tmp_path / "bare", bare)
    outcome = verify_path(folder)
    assert isinstance(outcome, Rejected) and outcome.code == "widths.no_manifest"
    with pytest.raises(MalformedFile, match=r"oscar\.json"):
        load(ArtifactSource(folder=str(folder)))


def test_a_file_of_other_widths_is_refused(tmp_path: Path) -> None:
    files = artifact_files(artifact=MIXED, widths=FOUR_K) | {WIDTHS_NAME: FOUR.to_bytes()}
    outcome = verify_path(write_folder(tmp_path / "a", files))
    assert not isinstance(outcome, Verified)
    plain = artifact_files(artifact=TWO_BITS) | {WIDTHS_NAME: FOUR.to_bytes()}
    outcome = verify_path(write_folder(tmp_path / "b", plain))
    assert isinstance(outcome, Rejected) and outcome.code == "unlisted_file"
