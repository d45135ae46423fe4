"""The manifest: one file form, a closed schema, and rules across fields."""

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny_artifacts as artifacts
from tiny_artifacts import manifest, payload

from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest
from oscar_zoo.artifact.manifest import Manifest, Registry, Status
from oscar_zoo.artifact.reader import GROUPINGS
from oscar_zoo.errors import MalformedFile

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def value() -> dict[str, Any]:
    return artifacts.manifest(artifacts.payload()).to_json()


def read(value: dict[str, Any]) -> Manifest:
    return Manifest.from_bytes(json.dumps(value).encode())


def test_round_trip(value: dict[str, Any]) -> None:
    manifest = read(value)
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.to_bytes() == manifest.to_bytes()
    assert manifest.to_bytes().endswith(b"}\n")


def test_the_mutable_block_is_apart(value: dict[str, Any]) -> None:
    manifest = read(value).model_copy(update={"registry": Registry(status=Status(state="yanked"))})
    with pytest.raises(MalformedFile, match="registry"):
        Manifest.from_bytes(manifest.to_bytes())
    packaged = Manifest.from_bytes(manifest.to_bytes(), registry=True)
    assert packaged.registry is not None
    assert packaged.model_copy(update={"registry": None}) == read(value)


def model(**changes: Any) -> Change:
    return lambda value: value["model"].update(changes)


BAD: dict[str, Change] = {
    "unknown key": lambda v: v.update(extra=1),
    "unknown key inside": lambda v: v["model"].update(extra=1),
    "id without tag": lambda v: v.update(id="Model"),
    "id with dots": lambda v: v.update(id="../evil"),
    "digits of another script": lambda v: v.update(created="٢٠٢٦-01-02T03:04:05Z"),
    "path too deep": lambda v: v["files"][0].update(path="a/b/c/d/k.pt"),
    "local time": lambda v: v.update(created="2026-01-02T03:04:05"),
    "digest": lambda v: v.update(digest="sha256:" + "0" * 64),
    "digest short": lambda v: v.update(digest="sha256:00"),
    "no digest": lambda v: v.update(digest=None),
    "kind": lambda v: v.update(kind="other"),
    "version as text": lambda v: v.update(format_version="1"),
    "version as bool": lambda v: v.update(format_version=True),
    "version as float": lambda v: v.update(format_version=1.0),
    "bits as float": lambda v: v["recipe"].update(bits=2.0),
    "version of no format": lambda v: v.update(format_version=max(GROUPINGS) + 1),
    "no files": lambda v: v.update(files=[]),
    "two k files": lambda v: v["files"][1].update(role="k_rotation"),
    "path upwards": lambda v: v["files"][0].update(path="../k.pt"),
    "absolute path": lambda v: v["files"][0].update(path="/k.pt"),
    "path to the manifest": lambda v: v["files"][0].update(path="oscar.json"),
    "same path": lambda v: v["files"][0].update(path=v["files"][1]["path"].upper()),
    "size 0": lambda v: v["files"][0].update(size=0),
    "half known": lambda v: v["files"][0].update(sha256=None),
    "capital hex": lambda v: v["files"][0].update(sha256="A" * 64),
    "layers unordered": model(attention_layers=[1, 0, 2, 3]),
    "layers twice": model(attention_layers=[0, 0, 1, 2]),
    "layer too high": model(attention_layers=[0, 4]),
    "no layers": model(attention_layers=[]),
    "heads": model(num_q_heads=3),
    "huge number": model(head_dim=1 << 40),
    "float for int": model(head_dim=64.5),
    "revision": model(revision="main"),
    "group 0": lambda v: v["recipe"].update(group_size=0),
    "bits 4": lambda v: v["recipe"].update(bits=4),
    "clip": lambda v: v["recipe"]["clip"].update(k=1.5),
    "tiny clip": lambda v: v["recipe"]["clip"].update(v=1e-10),
    "Cyrillic letter in the model": lambda v: v["model"].update(id="\u0410cme/tiny"),
    "wide letter in the model": lambda v: v["model"].update(id="acme/\uff41"),
    "space in the model": lambda v: v["model"].update(id="acme/a b"),
    "three parts of a model": lambda v: v["model"].update(id="acme/a/b"),
    "path for a model": lambda v: v["model"].update(id="../a"),
    "line end behind the model": lambda v: v["model"].update(id="acme/a\n"),
    "long model": lambda v: v["model"].update(id="a" * 300),
    "capability": lambda v: v["recipe"].update(requires=["magic"]),
    "empty text": lambda v: v["model"].update(id=""),
    "fit id": lambda v: v["fit"].update(fit_id="short"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, value: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(value))
    BAD[name](changed)
    if changed["files"] != value["files"] and all(entry["sha256"] for entry in changed["files"]):
        # the right digest of the wrong list, so that only the rule in question is broken
        rows = (FileDigest(row["path"], row["sha256"], row["size"]) for row in changed["files"])
        changed["digest"] = artifact_digest(rows)
    with pytest.raises(MalformedFile) as caught:
        read(changed)
    assert caught.value.reason == "manifest.schema"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("schema", [None, "oscar-zoo.manifest/4", 1, "oscar-zoo.manifest/1 "])
def test_other_versions_are_refused(schema: object, value: dict[str, Any]) -> None:
    with pytest.raises(MalformedFile) as caught:
        read({**value, "schema": schema})
    assert caught.value.reason == "manifest.version"


def test_every_required_field_is_required(value: dict[str, Any]) -> None:
    for key in value:
        with pytest.raises(MalformedFile):
            read({k: v for k, v in value.items() if k != key})


def test_formats_that_are_read_and_files_that_were_never_pulled(value: dict[str, Any]) -> None:
    for version in GROUPINGS:
        assert read({**value, "format_version": version}).format_version == version
    files = [{**entry, "sha256": None, "size": None} for entry in value["files"]]
    assert read({**value, "files": files, "digest": None}).file_digests is None


def test_the_json_schema_is_closed() -> None:
    schema = Manifest.model_json_schema(by_alias=True)
    blocks = [schema, *schema["$defs"].values()]
    assert all(
        one["additionalProperties"] is False for one in blocks if one.get("type") == "object"
    )


def test_an_unknown_key_is_named_with_its_place() -> None:
    value = json.loads(manifest(payload()).to_bytes()) | {"more": 1}
    with pytest.raises(MalformedFile) as caught:
        Manifest.from_bytes(json.dumps(value).encode())
    assert caught.value.reason == "manifest.schema" and "more: " in caught.value.message


FILES = [
    FileDigest("k_rotation_qqt_r_h_pbr.pt", "a" * 64, 2399261),
    FileDigest("v_rotation_sst_r_h_pbr.pt", "b" * 64, 2399261),
]


def test_the_published_vector() -> None:
    published = "ed1ca2c0eea4e915afd0c79d01e20584373fa46ddd5acf4eb8b5204958e72bd3"
    assert artifact_digest(FILES) == f"sha256:{published}"
    assert file_digest("a", b"") == FileDigest("a", hashlib.sha256().hexdigest(), 0)


def test_order_does_not_matter_and_everything_else_does() -> None:
    digests = {artifact_digest(order) for order in itertools.permutations(FILES)}
    k, v = FILES
    for other in (
        FileDigest("x.pt", v.sha256, v.size),
        FileDigest(v.path, k.sha256, v.size),
        FileDigest(v.path, v.sha256, 1),
    ):
        digests.add(artifact_digest([k, other]))
    digests.add(artifact_digest([k]))
    assert len(digests) == 5
