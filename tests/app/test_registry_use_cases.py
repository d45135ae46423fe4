"""The use cases around the registry: typed requests in, typed results out, nothing printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_uses import HARD, hub_with
from measured_artifacts import measured_files
from tiny_artifacts import artifact_files, write_folder

import oscar_zoo
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.errors import ArtifactNotFound, OutputExists, UsageError
from oscar_zoo.observer import SILENT
from oscar_zoo.registry import publish, pull, verify
from oscar_zoo.registry.artifacts import open_artifact
from oscar_zoo.registry.fetch import PullResult
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.params import PublishParams, PullParams, VerifyParams
from oscar_zoo.registry.pull import Offered
from oscar_zoo.registry.targets import parse, parse_name
from oscar_zoo.site.cache import stored
from oscar_zoo.site.info import describe
from oscar_zoo.site.params import CacheListParams


@pytest.fixture(autouse=True)
def prints_nothing(capfd: pytest.CaptureFixture[str]) -> object:
    yield
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    hub = hub_with(tmp_path / "hub", artifact_files())
    return Sources(f"file:{hub.root}")


def test_pull_gives_one_result_per_target_in_order(sources: Sources, tmp_path: Path) -> None:
    names, out = ("nowhere", HARD.model, "nowhere"), tmp_path / "out"
    (offered,) = pull.run(PullParams(names, hubs=sources.named, dry_run=True)).artifacts
    assert isinstance(offered, Offered) and len(offered.files) == 2
    assert not offered.already_present and stored(CacheListParams()).artifacts == ()
    report = pull.run(PullParams(names, hubs=sources.named, output=out))
    (missing,), (pulled,) = report.errors, report.artifacts  # named twice, pulled once
    assert isinstance(missing, ArtifactNotFound) and isinstance(pulled, PullResult)
    assert pulled.output == out / HARD.model / HARD.tag and report.new_lock is None
    (again,) = pull.run(PullParams(hubs=sources.named, everything=True)).artifacts
    assert isinstance(again, PullResult) and again.already_present


def test_a_pull_that_contradicts_itself_is_refused(sources: Sources) -> None:
    with pytest.raises(UsageError, match="name artifacts"):
        pull.run(PullParams(hubs=sources.named))
    with pytest.raises(UsageError, match="--locked needs the lock"):
        pull.run(PullParams((HARD.model,), hubs=sources.named, lock=False, locked=True))


def test_python_pulls_into_a_folder_and_hears_of_bytes(sources: Sources, tmp_path: Path) -> None:
    heard: dict[str, int] = {}

    def progress(file: str, done: int, total: int) -> None:
        heard[file] = done

    artifact = oscar_zoo.pull(
        HARD.model, hubs=list(sources.named), output=tmp_path / "out", progress=progress
    )
    assert artifact.id == str(HARD) and artifact.path == tmp_path / "out" / HARD.model / HARD.tag
    assert set(artifact.files) - {"oscar.json"} == set(heard)
    (artifact.path / "oscar.json").write_text("{}")
    with pytest.raises(OutputExists):
        oscar_zoo.pull(HARD.model, hubs=list(sources.named), output=tmp_path / "out")


def test_an_artifact_is_one_type_wherever_it_comes_from(sources: Sources, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", artifact_files())
    from_folder = open_artifact(parse(folder), Sources(), SILENT)
    from_hub = open_artifact(parse(HARD.reference), sources, SILENT)
    assert (from_folder.label, from_folder.digest) == (from_hub.label, from_hub.digest)
    assert (from_folder.installed, from_hub.installed) == (False, True)
    assert from_folder.hub is None and from_hub.hub == sources.named[0]
    assert isinstance(from_folder.verified, Verified) and from_hub.verified.k is not None
    (listed,) = oscar_zoo.installed(HARD.model)
    assert listed.outcome is None and listed.verified.digest == from_hub.digest
    assert len(listed.rotations()) == 2


def test_verify_gives_values(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tree" / "one", artifact_files())
    write_folder(tmp_path / "tree" / "two", artifact_files(seed=1))
    results = verify.run(VerifyParams(tmp_path / "tree")).results
    assert [isinstance(found, Verified) for found in results] == [True, True]
    with pytest.raises(UsageError, match="--digest goes with exactly one"):
        verify.run(VerifyParams((folder, folder), digest="0" * 64))


def test_a_later_hub_that_fails_leaves_what_was_done(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", measured_files())
    (tmp_path / "first").mkdir()
    hubs = (f"file:{tmp_path}/first", f"file:{tmp_path}/missing")
    report = publish.run(PublishParams(folder, hubs=hubs))
    assert [result.hub for result in report.hubs] == [hubs[0]] and report.error is not None
    with pytest.raises(type(report.error)):
        publish.run(PublishParams(folder, hubs=hubs[1:]))


def test_what_is_known_is_typed(sources: Sources) -> None:
    hubs = list(sources.named)
    found = oscar_zoo.list_artifacts(hubs=hubs)
    assert [row["id"] for row in found.rows] == [str(HARD)] and found.unreachable == ()
    assert oscar_zoo.list_artifacts(hubs=hubs, installed=True).rows == ()
    assert oscar_zoo.list_artifacts(hubs=hubs, model="qwen3-9b").close
    about = describe(parse_name(HARD.model), sources, gpu_memory=24 * 10**9)
    assert [offer.id for offer in about.offered] == [HARD] and about.installed == ()
    assert [manifest.artifact_id for manifest in about.artifacts] == [HARD]
    with pytest.raises(ArtifactNotFound) as caught:
        describe(parse_name("tiny-qwen3-hart"), sources)
    assert HARD.model in caught.value.suggestions
