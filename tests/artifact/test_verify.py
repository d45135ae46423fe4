"""Outcomes of whole artifacts: five of them, first failure stops, one check per stage."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_artifacts as artifacts
import tiny_artifacts as tiny

from oscar_zoo.artifact import artifact_folder
from oscar_zoo.artifact.artifact_folder import find_artifacts, verify_path
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, sha256_hex
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import STATISTICS_NAME, FileEntry, Manifest, StatisticsBlock
from oscar_zoo.artifact.outcome import (
    DigestMismatch,
    Outcome,
    Rejected,
    Unreadable,
    Unsupported,
    Verified,
)
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.statistics import fingerprint_bytes
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.errors import PathNotFound

STAGES = "bytes container schema numeric eigenvalues content roles model statistics localisation probe".split()  # noqa: E501
SHAPE = artifacts.cache_shape(2, heads=4, kv_heads=2, dim=8)
K, V = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"
MATRICES = {"qq": tiny.covariances(2, seed=1), "sst": tiny.covariances(2, seed=2)}
K_SET = tiny.rotation_set("qqt_r_h_pbr", matrices=MATRICES["qq"])
V_SET = tiny.rotation_set("sst_r_h_pbr", matrices=MATRICES["sst"])


def pair(
    k: RotationSet = K_SET, v: RotationSet = V_SET, *, names: tuple[str, str] = (K, V)
) -> dict[str, bytes]:
    return {names[0]: rotation_bytes(k), names[1]: rotation_bytes(v)}


def described(
    files: Mapping[str, bytes], *, statistics: bytes | None = None, **changes: Any
) -> dict[str, bytes]:
    """`files` with a manifest, and with statistics when given; `changes` to manifest fields."""
    manifest = artifacts.manifest(dict(files), geometry=SHAPE)
    complete = dict(files)
    if statistics is not None:
        complete["statistics.safetensors"] = statistics
        found = file_digest("statistics.safetensors", statistics)
        entry = FileEntry(
            path=found.path, role="statistics", size=found.size, sha256=found.sha256, format=None
        )
        block = StatisticsBlock(
            file=found.path, version="oscar-zoo.stats/1", matrices=("qq", "sst"), n_tokens=32
        )
        digest = artifact_digest(file_digest(name, data) for name, data in complete.items())
        changes = {
            "files": (*manifest.files, entry),
            "statistics": block,
            "digest": digest,
        } | changes
    return complete | {"oscar.json": manifest.model_copy(update=changes).to_bytes()}


def fingerprint() -> bytes:
    manifest = artifacts.manifest(pair(), geometry=SHAPE)
    return fingerprint_bytes(MATRICES, (0, 1), manifest.model.id, manifest.model.revision)


def states(outcome: Outcome) -> dict[str, str]:
    return {check.name: check.state for check in outcome.checks}


def assert_rejected(outcome: Outcome, stage: str, code: str) -> Rejected:
    assert isinstance(outcome, Rejected), outcome
    assert (outcome.stage, outcome.code) == (stage, code), outcome.message
    if outcome.checks:
        assert [check.name for check in outcome.checks] == STAGES
        assert states(outcome)[stage] == "failed"
        after = outcome.checks[STAGES.index(stage) + 1 :]
        assert all(check.state == "not checked" for check in after)
    return outcome


def assert_verified(outcome: Outcome) -> Verified:
    assert isinstance(outcome, Verified), outcome
    assert [check.name for check in outcome.checks] == STAGES
    return outcome


def test_a_pair_with_manifest_and_statistics() -> None:
    files = described(pair(), statistics=fingerprint())
    found = assert_verified(verify_files(files))
    assert (found.level, found.grade) == ("statistics", "fp64")
    assert states(found)["statistics"] == "ok"
    assert found.digest == Manifest.from_bytes(files["oscar.json"]).digest
    assert {entry.path for entry in found.files} == files.keys() - {"oscar.json"}
    assert found.k is not None and found.v is not None
    tiny.assert_same(found.k, K_SET)
    tiny.assert_same(found.v, V_SET)


def test_a_pair_without_manifest() -> None:
    found = assert_verified(verify_files(pair()))
    assert (found.level, found.warnings) == ("numeric", ("pair.unproven",))
    assert states(found)["bytes"] == "not checked"
    assert "no statistics" in found.checks[STAGES.index("statistics")].detail
    assert found.digest == artifact_digest(file_digest(name, data) for name, data in pair().items())


@pytest.mark.parametrize("role", ["k", "v"])
def test_one_file_is_one_side(role: str) -> None:
    rotations = K_SET if role == "k" else V_SET
    found = assert_verified(verify_files({f"{role}_x.pt": rotation_bytes(rotations)}))
    assert [found.k is not None, found.v is not None] == [role == "k", role == "v"]
    assert found.warnings == ()


def test_one_flipped_byte_anywhere_is_a_digest_mismatch() -> None:
    files = described(pair(), statistics=fingerprint())
    lock = [file_digest(name, data) for name, data in files.items()]
    for name in files:
        for position in range(0, len(files[name]), 97):
            data = bytearray(files[name])
            data[position] ^= 1 << position % 8
            outcome = verify_files({**files, name: bytes(data)}, expected=lock)
            if name != "oscar.json":
                assert isinstance(outcome, DigestMismatch)
                assert (outcome.path, outcome.got) == (name, "sha256:" + sha256_hex(bytes(data)))
            else:
                assert not isinstance(outcome, Verified)


def test_bytes_are_compared_before_they_are_parsed() -> None:
    good = pair()
    lock = [file_digest(name, data) for name, data in good.items()]
    outcome = verify_files({**good, K: b"<html>"}, expected=lock)
    assert isinstance(outcome, DigestMismatch)
    assert (outcome.want, outcome.got) == (f"{len(good[K])} bytes", "6 bytes")
    assert states(outcome)["container"] == "not checked"


def noisy(size: float) -> RotationSet:
    noise = np.random.default_rng(0).standard_normal((8, 8)) * size
    return tiny.change(K_SET, forward=(K_SET.layers[-1].forward + noise).astype(np.float32))


def fitted(k: dict[str, Any], v: dict[str, Any]) -> dict[str, bytes]:
    """A pair that says of its calibration `k` and `v`."""
    return pair(replace(K_SET, calibration=k), replace(V_SET, calibration=v))


def shape(**changes: Any) -> dict[str, Geometry]:
    return {"geometry": SHAPE.model_copy(update=changes)}


def at_layers(*layers: int) -> dict[str, bytes]:
    return pair(
        *(tiny.rotation_set(name, layers=layers) for name in ("qqt_r_h_pbr", "sst_r_h_pbr"))
    )


PAIR, DESCRIBED = pair(), described(pair())
LOCK = [file_digest(name, data) for name, data in PAIR.items()]
PLAIN = tiny.hadamard_set()
TWICE = replace(K_SET, layers=tuple(tiny.rotated(m, i) for i, m in enumerate(MATRICES["sst"])))
HEADS = pair(tiny.per_head_set(), tiny.per_head_set("vtv_r_h_pbr"))
PARTNERED = pair(tiny.partnered_set("k"), tiny.partnered_set("v"), names=("k_a.pt", "v_a.pt"))
ONE_FIT = fitted({"generation_id": "ab" * 16}, {"generation_id": "ab" * 16})
OTHER_FIT = artifacts.manifest(ONE_FIT, geometry=SHAPE).fit.model_copy(update={"fit_id": "cd" * 16})
MISLEADING = pair(names=("k_rotation_qqt_r_h_pbr.pt", "v_rotation_qqt_r_h_pbr.pt"))
UNKNOWN_KEY = DESCRIBED["oscar.json"].replace(b'"group_size": 8', b'"group_size": 8, "x": 1')
PER_HEAD = {"format_version": 3, "grouping": "kv_head"}
REJECTED: list[tuple[str, str, dict[str, bytes], dict[str, Any]]] = [
    ("bytes", "missing_file", {n: d for n, d in DESCRIBED.items() if n != V}, {}),
    ("bytes", "unlisted_file", {**DESCRIBED, "extra.pt": b"x"}, {}),
    ("bytes", "missing_file", PAIR, {"expected": [FileDigest("other.pt", "0" * 64, 1)]}),
    ("bytes", "unlisted_file", PAIR, {"expected": LOCK[:1]}),
    ("bytes", "unlisted_file", {**PAIR, STATISTICS_NAME: fingerprint()}, {"expected": LOCK}),
    ("bytes", "manifest.version", {**DESCRIBED, "oscar.json": b"{}"}, {}),
    ("bytes", "json.duplicate_key", {**DESCRIBED, "oscar.json": b'{"a":1,"a":2}'}, {}),
    ("bytes", "json.syntax", {**DESCRIBED, "oscar.json": b"id: yaml"}, {}),
    ("bytes", "manifest.schema", {**DESCRIBED, "oscar.json": UNKNOWN_KEY}, {}),
    ("container", "file.html", {**PAIR, V: b"<html>"}, {}),
    ("schema", "layers.gaps", at_layers(3, 7), {"strict": True}),
    ("schema", "layers.missing", at_layers(3, 7), shape()),
    ("schema", "layers.extra", at_layers(3, 7), shape(num_layers=8, attention_layers=(3,))),
    ("schema", "manifest.format_version", described(PAIR, format_version=2), {}),
    ("schema", "manifest.grouping", described(PAIR, grouping="kv_head"), {}),
    ("schema", "manifest.orthogonal", described(PARTNERED, **PER_HEAD), {}),
    ("numeric", "not_orthogonal", pair(noisy(1e-4)), {}),
    ("roles", "k-is-v", pair(V_SET, K_SET, names=("k_x.pt", "v_x.pt")), {}),
    ("roles", "k-is-v", described(pair(V_SET, K_SET)), {}),
    ("roles", "same_role", pair(v=TWICE), {}),
    ("roles", "same_role", pair(PLAIN, PLAIN, names=("k_a.pt", "k_b.pt")), {}),
    ("roles", "same_role", pair(PLAIN, PLAIN, names=("a.pt", "b.pt")), {}),
    ("roles", "role.file_name", MISLEADING, {"strict": True}),
    ("roles", "pair.fit_id", fitted({"generation_id": "aa"}, {"generation_id": "bb"}), {}),
    ("roles", "pair.fit_id", described(ONE_FIT, fit=OTHER_FIT), {}),
    ("roles", "pair.prompts", fitted({"prompt_sha256": "x"}, {"prompt_sha256": "y"}), {}),
    ("roles", "pair.layers", pair(v=tiny.rotation_set("sst_r_h_pbr", layers=(0, 1, 2))), {}),
    ("roles", "pair.version", pair(v=tiny.per_head_set("vtv_r_h_pbr")), {}),
    ("model", "model.head_dim", PAIR, shape(head_dim=16)),
    ("model", "model.head_dim", PAIR, shape(v_head_dim=16)),
    ("model", "model.num_kv_heads", HEADS, shape(num_kv_heads=4)),
    ("model", "model.geometry", DESCRIBED, shape(num_q_heads=8)),
    ("statistics", "safetensors.header", described(PAIR, statistics=b"\0" * 40), {}),
]


@pytest.mark.parametrize(("stage", "code", "files", "given"), REJECTED)
def test_an_artifact_that_must_not_be_used(
    stage: str, code: str, files: dict[str, bytes], given: dict[str, Any]
) -> None:
    outcome = assert_rejected(verify_files(files, **given), stage, code)
    assert outcome.measured is None or outcome.measured > (outcome.limit or 0) == 5e-6


BARE = replace(K_SET, layers=tuple(replace(layer, eigenvalues=None) for layer in K_SET.layers))
TIED = tiny.change(K_SET, eigenvalues=np.repeat([1.0, 2.0], 4).astype(np.float32))
MIXED = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 64, 64)))[0]
STACK = MIXED * np.exp(np.linspace(0, 3, 64)) @ np.swapaxes(MIXED, -2, -1)
FLAT = pair(
    tiny.rotation_set(matrices=STACK), tiny.rotation_set("sst_r_h_pbr", matrices=STACK[::-1])
)
WARNED: list[tuple[set[str], dict[str, bytes], dict[str, Any]]] = [
    (set(), ONE_FIT, {}),
    (set(), {**DESCRIBED, "README.md": b"hello"}, {"strict": True}),
    (set(), at_layers(3, 7), shape(num_layers=8, attention_layers=(3, 7))),
    ({"layers.not_checked"}, at_layers(3, 7), {}),
    ({"numeric.fp32_grade"}, pair(noisy(3e-7)), {}),
    ({"eigenvalues.missing"}, pair(BARE), {}),
    ({"eigenvalues.tied"}, pair(TIED), {}),
    ({"role.file_name"}, MISLEADING, {}),
    ({"role.unknown"}, {"x.pt": rotation_bytes(PLAIN)}, {}),
    ({"role.label"}, {"k_rotation.pt": rotation_bytes(V_SET)}, {}),
    ({"pair.tokens"}, fitted({"tokens": 1}, {"tokens": 2}), {}),
    ({"pair.unproven"}, PAIR, {"expected": LOCK}),
    ({"localisation.k", "localisation.v", "localisation.order"}, FLAT, {"strict": True}),
]


@pytest.mark.parametrize(("codes", "files", "given"), WARNED)
def test_what_only_warns(codes: set[str], files: dict[str, bytes], given: dict[str, Any]) -> None:
    found = assert_verified(verify_files(files, **given))
    assert codes <= {*found.warnings} <= codes | {"pair.unproven"}
    assert found.grade == ("fp32" if "numeric.fp32_grade" in codes else "fp64")


def test_other_kinds_and_names_of_one_file() -> None:
    outcome = verify_files(described(pair(), kind="gguf"))
    assert isinstance(outcome, Unsupported) and outcome.kind == "gguf"
    alone = {"x.pt": rotation_bytes(PLAIN)}
    assert assert_verified(verify_files(alone, name_hint="v_rotation_hadamard.pt")).v is not None


def test_problems_of_one_file_name_the_file() -> None:
    broken = V_SET.layers[1].forward.copy()
    broken[0, 0] = np.nan
    files = pair(v=tiny.change(V_SET, forward=broken))
    outcome = assert_rejected(verify_files(files), "numeric", "not_finite")
    assert (outcome.path, outcome.layer) == (V, 1)


def test_a_transform_that_scales_up_is_no_permutation() -> None:
    good, factor = tiny.partnered_set(), np.float32(16)
    louder = tuple(
        replace(layer, forward=layer.forward * factor, partner=layer.partner / factor)
        for layer in good.layers
    )
    assert_verified(verify_files({"k.pt": rotation_bytes(replace(good, layers=louder))}))


def test_content_decides_roles_before_names() -> None:
    found = assert_verified(verify_files(pair(names=("b.pt", "a.pt"))))
    assert found.k is not None and found.k.objective == "qqt_r_h_pbr"
    assert assert_verified(verify_files({"k_rotation.pt": rotation_bytes(V_SET)})).k is None


def test_statistics_see_a_swap_under_false_labels() -> None:
    k = replace(V_SET, objective=K_SET.objective)
    v = replace(K_SET, objective=V_SET.objective)
    found = verify_files(described(pair(k, v), statistics=fingerprint()))
    outcome = assert_rejected(found, "statistics", "statistics.mismatch")
    assert outcome.measured is not None and outcome.measured > 0.01
    assert_verified(verify_files(described(pair(k, v))))  # blind without


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", described(pair(), statistics=fingerprint()))
    assert assert_verified(verify_path(folder)).level == "statistics"
    alone = assert_verified(verify_path(folder / K))
    assert alone.v is None
    with pytest.raises(PathNotFound):
        verify_path(tmp_path / "absent")


def test_expected_digests(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair())
    digest = artifact_digest(file_digest(name, data) for name, data in pair().items())
    found = assert_verified(verify_path(folder, expected_digest=digest))
    assert states(found)["bytes"] == "ok"
    for want in ("sha256:" + sha256_hex(pair()[K]), sha256_hex(pair()[K])):
        assert_verified(verify_path(folder / K, expected_digest=want))
    for path, want in ((folder, "sha256:" + "0" * 64), (folder / K, digest)):
        outcome = verify_path(path, expected_digest=want)
        assert isinstance(outcome, DigestMismatch)
        assert outcome.want == want


def test_a_folder_is_first_judged_by_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("a", "b", "c"):
        os.mkfifo(folder / f"{name}.pt")  # reading one would be another outcome
    assert_rejected(verify_path(folder), "schema", "ambiguous_pair")
    whole = write(tmp_path / "pair", pair())
    monkeypatch.setattr(artifact_folder, "MAX_ARTIFACT_BYTES", sum(map(len, pair().values())))
    assert_verified(verify_path(whole))
    monkeypatch.setattr(artifact_folder, "MAX_ARTIFACT_BYTES", sum(map(len, pair().values())) - 1)
    assert isinstance(verify_path(whole), Unreadable)


def test_folders_that_are_no_pair(tmp_path: Path) -> None:
    several = write(tmp_path / "several", pair() | pair(names=("k_perhead.pt", "v_perhead.pt")))
    outcome = assert_rejected(verify_path(several), "schema", "ambiguous_pair")
    assert all(name in outcome.message for name in (K, V, "k_perhead.pt", "v_perhead.pt"))
    half = write(tmp_path / "half", {K: pair()[K]})
    assert assert_rejected(verify_path(half), "schema", "incomplete_pair").path == K
    latent = write(tmp_path / "latent", {f"layer_{i}.pt": b"x" for i in range(3)})
    assert isinstance(verify_path(latent), Unsupported)
    empty = write(tmp_path / "empty", {"notes.txt": b"x"})
    assert isinstance(verify_path(empty), Unreadable)


def test_links_and_large_files_stay_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "real", pair())
    (tmp_path / "link").symlink_to(folder)
    assert isinstance(verify_path(tmp_path / "link"), Unreadable)
    linked = write(tmp_path / "linked", {K: pair()[K]})
    (linked / V).symlink_to(folder / V)
    outcome = verify_path(linked)
    assert isinstance(outcome, Unreadable)
    assert "symbolic link" in outcome.cause
    monkeypatch.setattr(artifact_folder, "MAX_PAYLOAD_BYTES", 100)
    assert isinstance(verify_path(folder / K), Unreadable)


def test_artifacts_in_a_tree(tmp_path: Path) -> None:
    one = write(tmp_path / "Model" / "tag", pair())
    two = write(tmp_path / "Model" / "other", {"oscar.json": b"{}"})
    write(tmp_path / ".hidden" / "x", pair())
    write(tmp_path / "notes", {"a.txt": b"x"})
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_artifacts(tmp_path) == [two, one]
    assert find_artifacts(one) == [one]
    assert find_artifacts(tmp_path / "absent") == find_artifacts(one / K) == []


def test_a_folder_that_vanishes_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    list_folder = Path.iterdir

    def listed(folder: Path) -> list[Path]:
        if folder != tmp_path:
            folder.rmdir()
        return list(list_folder(folder))

    monkeypatch.setattr(Path, "iterdir", listed)
    assert find_artifacts(tmp_path) == []
