import json
from functools import partial
from pathlib import Path

import pytest
from hub_uses import put_version
from tiny_artifacts import artifact_files

from oscar_zoo import errors
from oscar_zoo.artifact.manifest import Manifest, Registry, Status
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.registry.asking import first_answer
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.base import INDEX_NAME, Hub
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index, IndexEntry
from oscar_zoo.registry.view import HubView, ResolvedArtifact, find

HARD = "tiny-qwen3-hard/seq512_prompt2_group64"
PAIR = {"k.pt": b"keys", "v.pt": b"values"}


def resolve(
    reference: Reference | str, hub: Hub, catalog: Catalog | None = None
) -> ResolvedArtifact:
    return find(Reference.parse(str(reference)), HubView.open(hub, catalog))


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    put_version(hub, HARD, artifact_files(artifact=HARD))
    put_version(hub, "Qwen3-8B/seq20000_prompt83_group128", {"k.pt": b"default", "v.pt": b"1"})
    put_version(hub, "Qwen3-8B/other", {**PAIR, "README.md": b"text"})
    put_version(hub, "Custom/one", {"k.pt": b"1", "v.pt": b"1", "statistics.safetensors": b"2"})
    put_version(hub, "Custom/two", PAIR)
    return hub


@pytest.mark.parametrize(
    "reference",
    [
        "tiny-qwen3-hard",
        "TINY-QWEN3-HARD",
        "oscar-zoo/tiny-qwen3-hard",
        HARD,
        HARD.upper(),
        "tiny-qwen3-hard:seq512_prompt2_group64",
        "oscar-zoo/tiny-qwen3-hard:SEQ512_prompt2_group64",
    ],
)
def test_every_way_to_name_an_artifact(hub: LocalHub, reference: str) -> None:
    found = resolve(reference, hub)
    assert str(found.id) == HARD
    assert found.manifest is not None
    assert found.manifest.digest == found.digest
    assert found.geometry == found.manifest.model.geometry
    assert [f.path for f in found.files] == [
        "k_rotation_qqt_r_h_pbr.pt",
        "v_rotation_sst_r_h_pbr.pt",
    ]


def test_a_bare_name_means_the_default_tag(hub: LocalHub) -> None:
    for name in ("qwen3-8b", "Qwen/Qwen3-8B"):
        assert resolve(name, hub).id.tag == "seq20000_prompt83_group128"
    found = resolve("Qwen3-8B:other", hub)
    assert found.manifest is None
    assert found.packaged is None
    assert [f.path for f in found.files] == ["k.pt", "v.pt"]


def test_several_versions_without_a_default_are_listed(hub: LocalHub) -> None:
    with pytest.raises(errors.AmbiguousName) as caught:
        resolve("custom", hub)
    assert "Custom:one" in caught.value.message
    assert "Custom:two" in caught.value.message


def test_a_digest_prefix_selects_and_must_match(hub: LocalHub) -> None:
    digest = resolve("Custom:two", hub).digest
    assert digest is not None
    assert resolve(f"custom@{digest[:19]}", hub).id.tag == "two"
    assert resolve(f"Custom/two@{digest}", hub).id.tag == "two"
    with pytest.raises(errors.ArtifactNotFound) as caught:
        resolve("custom@sha256:000000000000", hub)
    assert digest in (caught.value.hint or "")
    put_version(hub, "Custom/three", PAIR)
    with pytest.raises(errors.AmbiguousName):
        resolve(f"custom@{digest}", hub)


def test_an_unknown_name_brings_close_matches(hub: LocalHub) -> None:
    for name, meant in (("qwen3-7b", "Qwen3-8B"), ("custm", "Custom"), ("hunyuan", "--compute")):
        with pytest.raises(errors.ArtifactNotFound) as caught:
            resolve(name, hub)
        assert name in caught.value.message and meant in (caught.value.hint or "")


def test_close_matches_survive_hubs_that_cannot_be_reached(hub: LocalHub, tmp_path: Path) -> None:
    gone = LocalHub(tmp_path / "gone", must_exist=False)

    def ask(one: Hub, name: str) -> object:
        if one is gone:
            raise errors.HubUnreachable.for_hub(one.title, "connection refused")
        return resolve(name, one)

    for name, hubs, word in (
        ("qwen3-7b", (gone,), "Qwen3-8B"),
        ("qwen3-7b:tag", (gone, gone), "Qwen3-8B"),
        ("custm", (hub, gone), "Custom"),
        ("Qwen3-32B", (hub, gone), ""),
    ):
        with pytest.raises(errors.HubUnreachable) as caught:
            first_answer(hubs, partial(ask, name=name), name=name)
        hint = caught.value.hint or ""
        assert word in hint and ("did you mean" in hint) == bool(word)


def test_another_organisations_model_is_not_taken_for_a_known_one(hub: LocalHub) -> None:
    for name in ("someone/Qwen3-8B", "someone/tiny-qwen3-hard"):
        with pytest.raises(errors.ArtifactNotFound):
            resolve(name, hub)
    value = json.loads(artifact_files(artifact="Qwen3-8B/claims")["oscar.json"])
    value["model"]["id"] = "someone/Qwen3-8B"
    claim = Manifest.from_bytes(json.dumps(value).encode()).to_bytes()
    put_version(hub, "Qwen3-8B/claims", artifact_files() | {"oscar.json": claim})
    with pytest.raises(errors.ArtifactNotFound):
        resolve("someone/Qwen3-8B", hub)


def test_an_organisation_the_zoo_does_not_know_must_be_the_manifests(tmp_path: Path) -> None:
    hub = LocalHub(tmp_path, must_exist=False)
    put_version(hub, "Mine/tag", artifact_files(artifact="Mine/tag"))
    assert str(resolve("oscar-zoo/mine", hub).id) == "Mine/tag"
    put_version(hub, "Bare/tag", PAIR)
    assert str(resolve("bare", hub).id) == "Bare/tag"
    for name in ("someone/mine", "someone/bare"):
        with pytest.raises(errors.ArtifactNotFound):
            resolve(name, hub)


def test_names_that_differ_in_case_only_are_ambiguous(hub: LocalHub) -> None:
    (hub.root / "custom" / "ONE").mkdir(parents=True)
    (hub.root / "custom" / "ONE" / "k.pt").write_bytes(b"other")
    for name in ("Custom/one", "Custom:one", "custom"):
        with pytest.raises(errors.AmbiguousName, match=r"Custom:one, .*custom:ONE"):
            resolve(name, hub)


def status(state: str, *, aliases: tuple[str, ...] = ()) -> Catalog:
    """The packaged recipes, and a manifest of the hub's artifact in that state."""
    manifest = Manifest.from_bytes(artifact_files(artifact=HARD)["oscar.json"])
    registry = Registry(status=Status(state=state, reason="a bad fit"), aliases=aliases)  # type: ignore[arg-type]
    return Catalog(
        Catalog.packaged().recipes(), [manifest.model_copy(update={"registry": registry})]
    )


def test_a_withdrawn_version_needs_its_digest(hub: LocalHub) -> None:
    catalog = status("yanked")
    reference = HARD.replace("/", ":")
    for name in ("tiny-qwen3-hard", HARD, reference):
        with pytest.raises(errors.ArtifactNotFound, match="is yanked: a bad fit") as caught:
            resolve(name, hub, catalog)
        assert "sha256:" in (caught.value.hint or "")
    digest = catalog.manifests()[0].digest
    found = resolve(f"tiny-qwen3-hard@{digest}", hub, catalog)
    assert found.warnings == (f"{reference} is yanked: a bad fit",)
    assert found.expected_digest == digest
    told = resolve("tiny-qwen3-hard", hub, status("deprecated")).warnings
    assert told == (f"{reference} is deprecated: a bad fit",)
    assert resolve("tiny-qwen3-hard", hub, status("active")).warnings == ()


def test_the_one_active_version_is_taken_before_deprecated_ones(tmp_path: Path) -> None:
    hub, default = LocalHub(tmp_path / "hub", must_exist=False), "seq20000_prompt83_group128"
    tags = {"old": "deprecated", default: "deprecated", "new": "active", "bad": "yanked"}
    for tag in tags:
        put_version(hub, f"Qwen3-8B/{tag}", PAIR)
    for meant in ("new", default, "old"):
        index = Index.empty()
        for tag, state in tags.items():
            index = index.with_entry(listed(f"Qwen3-8B/{tag}", state))
        (hub.root / INDEX_NAME).write_bytes(index.to_bytes())
        hub.refresh()
        assert resolve("Qwen3-8B", hub).id.tag == meant
        tags[meant] = "yanked"


def listed(artifact: str, state: str) -> IndexEntry:
    """The entry of an index for `PAIR` as `artifact`."""
    reason = None if state == "active" else "a bad fit"
    status = Status(state=state, reason=reason)  # type: ignore[arg-type]
    entry = Version.of(ArtifactId.parse(artifact), PAIR).entry()
    return entry.model_copy(update={"status": status, "model": "Qwen/Qwen3-8B"})


def test_a_manifest_of_another_artifact_is_refused(tmp_path: Path) -> None:
    hub = LocalHub(tmp_path, must_exist=False)
    put_version(hub, "tiny-qwen3/tag", artifact_files(artifact=HARD))
    with pytest.raises(errors.MalformedFile) as caught:
        resolve("tiny-qwen3", hub)
    assert caught.value.reason == "manifest.id"


def test_a_reference_outside_the_grammar_is_refused(hub: LocalHub) -> None:
    for text in ("../x", "a/b/c", "name@sha256:12", ""):
        with pytest.raises(errors.InvalidName):
            resolve(text, hub)
    assert resolve(Reference("tiny-qwen3-hard"), hub).id.model == "tiny-qwen3-hard"
