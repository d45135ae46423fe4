"""Digests that the package ships: where they came from, and that `pull` holds hubs to them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hub_uses import HARD, hub_with, pull
from tiny_artifacts import ZOO, payload

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.cli.main import exit_code
from oscar_zoo.errors import DigestMismatchError, MalformedFile
from oscar_zoo.registry.catalog import Catalog, KnownDigest, KnownDigests, Seen, packaged_digests
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import Trust

KNOWN = packaged_digests().artifacts


def seen(files: dict[str, bytes]) -> KnownDigest:
    """`files` as somebody saw them."""
    entry = Version.of(HARD, files).entry()
    place = Seen(repository="org/name", branch="main", commit="a" * 40, path="rotations")
    return KnownDigest(id=entry.id, digest=entry.digest, files=entry.files, seen=place)


def catalog(files: dict[str, bytes]) -> Catalog:
    return Catalog(Catalog.packaged().recipes(), (), [seen(files)])


def test_the_shipped_list_is_canonical_and_names_its_sources() -> None:
    again = KnownDigests.from_bytes(packaged_digests().to_bytes())
    assert again == packaged_digests() and again.to_bytes() == packaged_digests().to_bytes()
    ids = [ArtifactId.parse(known.id) for known in KNOWN]
    assert {"Qwen3-8B", "Qwen3-4B-Thinking-2507", "Qwen3.5-4B"} <= {one.model for one in ids}
    for known, artifact in zip(KNOWN, ids, strict=True):
        assert Catalog.packaged().recipe(artifact.model) is not None
        assert Catalog.packaged().manifest(artifact) is None, "its own manifest would pin it"
        assert len(known.seen.commit) == 40 and known.seen.repository == "FutureMLS-Lab/OSCAR"


def test_a_file_that_nobody_has_seen_stays_null() -> None:
    for manifest in Catalog.packaged().manifests():
        known = manifest.digest is not None
        assert all((file.sha256 is not None) == known for file in manifest.files)
        assert known or manifest.file_digests is None


@pytest.mark.real
@pytest.mark.skipif(not ZOO.is_dir(), reason="the real rotation files are not here")
def test_the_list_is_that_of_the_real_files() -> None:
    compared = 0
    for known in KNOWN:
        folder = ZOO / known.id
        if folder.is_dir():
            files = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
            found = Version.of(ArtifactId.parse(known.id), files)
            assert (found.digest, found.payload) == (known.digest, known.files)
            compared += 1
    assert compared == 4


def test_bytes_that_were_seen_are_no_first_use(tmp_path: Path) -> None:
    files = payload()
    hub = hub_with(tmp_path / "hub", files)
    result = pull(HARD.reference, hub, Store(tmp_path / "one"), catalog=catalog(files))
    assert not result.first_use
    nobody, new = Catalog(Catalog.packaged().recipes()), Trust(known=PinFile(tmp_path / "new.json"))
    assert pull(HARD.reference, hub, Store(tmp_path / "two"), catalog=nobody, trust=new).first_use


def test_other_bytes_are_exit_code_4_with_digests_and_source_until_accepted(tmp_path: Path) -> None:
    files, other = payload(), payload(seed=1)
    hub, store = hub_with(tmp_path / "hub", other), Store(tmp_path / "cache")
    with pytest.raises(DigestMismatchError, match=r"seen in org/name") as caught:
        pull(HARD.reference, hub, store, catalog=catalog(files))
    assert exit_code(caught.value) == 4 and not store.installed()
    assert seen(files).digest in caught.value.message
    assert Version.of(HARD, other).digest in caught.value.message
    assert "--accept-new-digest" in (caught.value.hint or "")
    trust = Trust(accept_new=True)
    taken = pull(HARD.reference, hub, store, catalog=catalog(files), trust=trust)
    assert taken.artifact.record.digest == Version.of(HARD, other).digest


BAD: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown key": lambda v: v.update(extra=1),
    "another digest": lambda v: v["artifacts"][0].update(digest="sha256:" + "0" * 64),
    "no source": lambda v: v["artifacts"][0].pop("seen"),
    "a branch for a commit": lambda v: v["artifacts"][0]["seen"].update(commit="main"),
    "twice": lambda v: v["artifacts"].append(v["artifacts"][0]),
    "path upwards": lambda v: v["artifacts"][0]["files"][0].update(path="../k.pt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_list_is_refused(name: str) -> None:
    value = json.loads(packaged_digests().to_bytes())
    BAD[name](value)
    with pytest.raises(MalformedFile):
        KnownDigests.from_bytes(json.dumps(value).encode())
