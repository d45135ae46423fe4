import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.artifact.manifest import HubLocation, Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import MalformedFile, UsageError
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.base import MAX_ROOT_BYTES
from oscar_zoo.registry.index import SCHEMA, Index


def entry(name: str = "Qwen3-8B/tag", *, model: str | None = "Qwen/Qwen3-8B", **more: Any) -> Any:
    made = Version.of(ArtifactId.parse(name), {"k.pt": b"keys", "v.pt": b"values"}).entry()
    return made.model_copy(update={"manifest_sha256": "c" * 64, "model": model, **more})


def test_an_index_comes_back_from_its_bytes() -> None:
    index = Index.empty().with_entry(
        entry(
            aliases=("q8",),
            status=Status(state="yanked", reason="wrong data", date="2026-01-02"),
            scores=(Score(task="gpqa_diamond", value=55.56, kv_dtype="int2", reporter="upstream"),),
            hubs={"ms": HubLocation(repo="org/zoo", revision="d" * 40)},
        )
    )
    data = index.to_bytes()
    assert Index.from_bytes(data) == index
    assert Index.from_bytes(data).to_bytes() == data
    assert data.endswith(b"\n") and json.loads(data)["schema"] == SCHEMA


def test_an_entry_is_added_or_replaced_and_the_serial_grows() -> None:
    first = (
        Index.empty().with_entry(entry("b/tag", model=None)).with_entry(entry("A/tag", model=None))
    )
    assert (first.serial, [e.id for e in first.artifacts]) == (2, ["A/tag", "b/tag"])
    yanked = entry("b/tag", model=None, status=Status(state="yanked", reason="x"))
    second = first.with_entry(yanked)
    assert (second.serial, len(second.artifacts)) == (3, 2)
    assert second.entry(ArtifactId("B", "TAG")) == yanked
    assert second.entry(ArtifactId("b", "other")) is None
    assert first.entry(ArtifactId("b", "tag")) == entry("b/tag", model=None)


def test_aliases_name_one_artifact_in_any_case() -> None:
    index = (
        Index.empty()
        .with_entry(entry(aliases=("Q8", "small-one")))
        .with_entry(entry("other/tag", model=None))
    )
    assert [e.id for e in index.aliased("q8")] == ["Qwen3-8B/tag"]
    assert index.aliased("Qwen3-8B") == ()
    with pytest.raises(UsageError, match="names both"):
        index.with_entry(entry("other/tag", model=None, aliases=("SMALL-ONE",)))
    for taken in ("qwen3-8b", "qwen/qwen3-8b"):
        with pytest.raises(UsageError, match="another model"):
            index.with_entry(entry("other/tag", model=None, aliases=(taken,)))
    assert index.with_entry(entry(aliases=("Qwen3-8B",))).aliased("QWEN3-8b")


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(
        Index.empty().with_entry(entry("a/tag")).with_entry(entry("b/tag", model=None)).to_bytes()
    )
    change(value)
    return json.dumps(value).encode()


def first(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["artifacts"][0]
    return found


BAD: dict[str, Callable[[dict[str, Any]], object]] = {
    "an unknown key": lambda v: v.update(more=1),
    "an unknown key of an entry": lambda v: first(v).update(more=1),
    "no serial": lambda v: v.pop("serial"),
    "a negative serial": lambda v: v.update(serial=-1),
    "a serial as text": lambda v: v.update(serial="1"),
    "a serial that is a bool": lambda v: v.update(serial=True),
    "not sorted": lambda v: v["artifacts"].reverse(),
    "an id twice": lambda v: v["artifacts"].append(v["artifacts"][1]),
    "an id twice in another case": lambda v: v["artifacts"].insert(1, first(v) | {"id": "A/TAG"}),
    "an id that climbs": lambda v: first(v).update(id="../tag"),
    "an id without tag": lambda v: first(v).update(id="model"),
    "another digest": lambda v: first(v).update(digest="sha256:" + "0" * 64),
    "a digest in capitals": lambda v: first(v).update(digest=first(v)["digest"].upper()),
    "no files": lambda v: first(v).update(files=[]),
    "a file that climbs": lambda v: first(v)["files"][0].update(path="../k.pt"),
    "an absolute file": lambda v: first(v)["files"][0].update(path="/k.pt"),
    "the manifest among the files": lambda v: first(v)["files"][0].update(path="OSCAR.json"),
    "an empty file": lambda v: first(v)["files"][0].update(size=0),
    "an unknown state": lambda v: first(v)["status"].update(state="gone"),
    "an unknown hub": lambda v: first(v).update(hubs={"ftp": {"repo": "x"}}),
    "an alias with a tag": lambda v: first(v).update(aliases=["a:b"]),
    "an alias with a line break": lambda v: first(v).update(aliases=["a\nb"]),
    "an alias for two": lambda v: [e.update(aliases=["x"]) for e in v["artifacts"]],
    "a digest of other files": lambda v: first(v)["files"].pop(),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_what_breaks_a_rule_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(MalformedFile) as caught:
        Index.from_bytes(changed(change))
    assert caught.value.reason == "index.schema"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("schema", ["oscar-zoo.index/2", "oscar-zoo.manifest/1", None, 1])
def test_an_index_of_another_version_says_to_upgrade(schema: object) -> None:
    data = changed(lambda value: value.update(schema=schema))
    with pytest.raises(MalformedFile, match="file:/zoo") as caught:
        Index.from_bytes(data, what="index.json of file:/zoo")
    assert caught.value.reason == "index.version" and "-U" in (caught.value.hint or "")


HEAD = '{"schema": "oscar-zoo.index/1", "artifacts": [], "serial": '


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "json.syntax"),
        (b"[]", "index.schema"),
        (b"\xef\xbb\xbf{}", "json.encoding"),
        (f'{HEAD} 1, "serial": 2}}'.encode(), "json.duplicate_key"),
        (f"{HEAD} 9007199254740992}}".encode(), "json.number"),
        (b"<!doctype html>", "json.syntax"),
        (b" " * (MAX_ROOT_BYTES + 1), "json.size"),
    ],
)
def test_what_is_no_index_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedFile) as caught:
        Index.from_bytes(data)
    assert caught.value.reason == reason


@given(st.data())
def test_an_index_is_the_same_in_whatever_order_it_grew(data: st.DataObject) -> None:
    names = data.draw(
        st.lists(st.sampled_from("abcdefgABCDEFG"), min_size=1, max_size=7, unique_by=str.casefold)
    )
    entries = [entry(f"{name}/tag", model=None) for name in names]
    one, two = Index.empty(), Index.empty()
    for item in entries:
        one = one.with_entry(item)
    for item in data.draw(st.permutations(entries)):
        two = two.with_entry(item)
    assert one.to_bytes() == two.to_bytes()
    assert one.serial == len(names)
