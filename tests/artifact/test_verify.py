"""Outcomes of whole artifacts: five of them, first failure stops, one check per stage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_artifacts as artifacts
import tiny_rotations as tiny

from oscar_zoo.artifact import artifact_folder
from oscar_zoo.artifact.artifact_folder import find_artifacts, verify_path
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, sha256_hex
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import FileEntry, Manifest, StatisticsBlock
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
SHAPE = Geometry(
    num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, attention_layers=(0, 1)
)
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
    assert found.k is not None
    assert found.v is not None
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


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (tiny.hadamard_set(), tiny.hadamard_set()),
        (tiny.per_head_set(), tiny.per_head_set("vtv_r_h_pbr")),
        (tiny.partnered_set("k"), tiny.partnered_set("v")),
    ],
)
def test_the_other_formats(k: RotationSet, v: RotationSet) -> None:
    found = assert_verified(
        verify_files(pair(k, v, names=("k_rotation.pt", "v_rotation.pt")), geometry=SHAPE)
    )
    assert found.k is not None
    assert found.k.objective == k.objective


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


def test_file_list_and_files_agree() -> None:
    files = described(pair())
    assert_rejected(
        verify_files({n: d for n, d in files.items() if n != V}), "bytes", "missing_file"
    )
    assert_rejected(verify_files({**files, "extra.pt": files[K]}), "bytes", "unlisted_file")
    assert_verified(verify_files({**files, "README.md": b"hello"}))
    absent = [FileDigest("other.pt", "0" * 64, 1)]
    assert_rejected(verify_files(pair(), expected=absent), "bytes", "missing_file")


def test_a_broken_manifest_is_refused_by_its_own_rules() -> None:
    files = described(pair())
    for data, code in (
        (b"{}", "manifest.version"),
        (b'{"schema": "oscar-zoo.manifest/9"}', "manifest.version"),
        (b'{"schema": "oscar-zoo.manifest/1"}', "manifest.schema"),
        (b'{"a":1,"a":2}', "json.duplicate_key"),
        (b"id: yaml", "json.syntax"),
        (
            files["oscar.json"].replace(b'"group_size": 8', b'"group_size": 8, "x": 1'),
            "manifest.schema",
        ),
    ):
        assert_rejected(verify_files({**files, "oscar.json": data}), "bytes", code)


def test_problems_of_one_file_name_the_file() -> None:
    broken = V_SET.layers[1].forward.copy()
    broken[0, 0] = np.nan
    outcome = assert_rejected(
        verify_files(pair(v=tiny.change(V_SET, forward=broken))), "numeric", "not_finite"
    )
    assert (outcome.path, outcome.layer) == (V, 1)
    assert_rejected(verify_files({**pair(), V: b"<html>"}), "container", "file.html")


def test_layers_come_from_the_model() -> None:
    hybrid = SHAPE.model_copy(update={"num_layers": 8, "attention_layers": (3, 7)})
    k, v = (
        tiny.rotation_set("qqt_r_h_pbr", layers=(3, 7)),
        tiny.rotation_set("sst_r_h_pbr", layers=(3, 7)),
    )
    assert "layers.not_checked" in assert_verified(verify_files(pair(k, v))).warnings
    outcome = assert_rejected(verify_files(pair(k, v), strict=True), "schema", "layers.gaps")
    assert "name the model" in outcome.message
    assert_verified(verify_files(pair(k, v), geometry=hybrid))
    assert_rejected(verify_files(pair(k, v), geometry=SHAPE), "schema", "layers.missing")
    more = hybrid.model_copy(update={"attention_layers": (3,)})
    assert_rejected(verify_files(pair(k, v), geometry=more), "schema", "layers.extra")


def test_the_manifest_describes_the_files() -> None:
    files = pair()
    for field, value in (("format_version", 2), ("grouping", "kv_head")):
        assert_rejected(
            verify_files(described(files, **{field: value})), "schema", f"manifest.{field}"
        )
    k, v = tiny.partnered_set("k"), tiny.partnered_set("v")
    three = pair(k, v, names=("k_rotation_wush.pt", "v_rotation_wush.pt"))
    plain = described(three, format_version=3, grouping="kv_head")
    assert_rejected(verify_files(plain), "schema", "manifest.orthogonal")


def test_a_precision_of_float32_is_a_warning_and_bf16_a_rejection() -> None:
    def noisy(size: float) -> RotationSet:
        noise = np.random.default_rng(0).standard_normal((8, 8)) * size
        return tiny.change(K_SET, forward=(K_SET.layers[-1].forward + noise).astype(np.float32))

    found = assert_verified(verify_files(pair(noisy(3e-7))))
    assert (found.grade, "numeric.fp32_grade" in found.warnings) == ("fp32", True)
    outcome = assert_rejected(verify_files(pair(noisy(1e-4))), "numeric", "not_orthogonal")
    assert outcome.measured is not None
    assert outcome.limit == 5e-6
    assert outcome.measured > outcome.limit


def test_a_transform_that_scales_up_is_no_permutation() -> None:
    good = tiny.partnered_set()
    louder = [
        replace(
            layer, forward=layer.forward * np.float32(16), partner=layer.partner / np.float32(16)
        )
        for layer in good.layers
    ]
    assert_verified(verify_files({"k.pt": rotation_bytes(replace(good, layers=tuple(louder)))}))


def test_missing_and_tied_eigenvalues_are_warnings() -> None:
    bare = replace(K_SET, layers=tuple(replace(layer, eigenvalues=None) for layer in K_SET.layers))
    assert "eigenvalues.missing" in assert_verified(verify_files(pair(bare))).warnings
    values = np.sort(np.repeat([1.0, 2.0], 4)).astype(np.float32)
    assert (
        "eigenvalues.tied"
        in assert_verified(verify_files(pair(tiny.change(K_SET, eigenvalues=values)))).warnings
    )


def test_swapped_files_are_refused() -> None:
    assert_rejected(verify_files(pair(V_SET, K_SET, names=("k_x.pt", "v_x.pt"))), "roles", "k-is-v")
    assert_rejected(verify_files(described(pair(V_SET, K_SET))), "roles", "k-is-v")
    again = replace(K_SET, layers=tuple(tiny.rotated(m, i) for i, m in enumerate(MATRICES["sst"])))
    assert_rejected(verify_files(pair(v=again)), "roles", "same_role")
    both = pair(tiny.hadamard_set(), tiny.hadamard_set(), names=("k_a.pt", "k_b.pt"))
    assert_rejected(verify_files(both), "roles", "same_role")
    neither = pair(tiny.hadamard_set(), tiny.hadamard_set(), names=("a.pt", "b.pt"))
    assert_rejected(verify_files(neither), "roles", "same_role")


def test_content_decides_roles_before_names() -> None:
    found = assert_verified(verify_files(pair(names=("b.pt", "a.pt"))))
    assert found.k is not None
    assert found.k.objective == "qqt_r_h_pbr"
    one = assert_verified(verify_files({"k_rotation.pt": rotation_bytes(V_SET)}))
    assert (one.k, "role.label" in one.warnings) == (None, True)


def test_a_misleading_name_is_a_warning_and_for_publishing_a_rejection() -> None:
    files = pair(names=("k_rotation_qqt_r_h_pbr.pt", "v_rotation_qqt_r_h_pbr.pt"))
    assert "role.file_name" in assert_verified(verify_files(files)).warnings
    assert_rejected(verify_files(files, strict=True), "roles", "role.file_name")
    assert_verified(verify_files(pair(), strict=True))
    nameless = {"x.pt": rotation_bytes(tiny.hadamard_set())}
    assert "role.unknown" in assert_verified(verify_files(nameless)).warnings
    assert assert_verified(verify_files(nameless, name_hint="v_rotation_hadamard.pt")).v is not None


@pytest.mark.parametrize(
    ("k", "v", "code"),
    [
        ({"generation_id": "aa"}, {"generation_id": "bb"}, "pair.fit_id"),
        ({"prompt_sha256": "x"}, {"prompt_sha256": "y"}, "pair.prompts"),
    ],
)
def test_files_of_two_fits_are_no_pair(k: dict[str, Any], v: dict[str, Any], code: str) -> None:
    files = pair(replace(K_SET, calibration=k), replace(V_SET, calibration=v))
    assert_rejected(verify_files(files), "roles", code)


def test_files_of_different_shape_are_no_pair() -> None:
    longer = tiny.rotation_set("sst_r_h_pbr", layers=(0, 1, 2))
    assert_rejected(verify_files(pair(v=longer)), "roles", "pair.layers")
    heads = tiny.per_head_set("vtv_r_h_pbr")
    assert_rejected(verify_files(pair(v=heads)), "roles", "pair.version")


def test_one_fit_id_proves_the_pair() -> None:
    label = {"generation_id": "ab" * 16}
    files = pair(replace(K_SET, calibration=label), replace(V_SET, calibration=label))
    assert assert_verified(verify_files(files)).warnings == ()
    fit = artifacts.manifest(dict(files), geometry=SHAPE).fit
    other = described(files, fit=fit.model_copy(update={"fit_id": "cd" * 16}))
    assert_rejected(verify_files(other), "roles", "pair.fit_id")
    half = pair(replace(K_SET, calibration=label))
    assert assert_verified(verify_files(half)).warnings == ("pair.unproven",)
    tokens = pair(
        replace(K_SET, calibration={"tokens": 1}), replace(V_SET, calibration={"tokens": 2})
    )
    assert assert_verified(verify_files(tokens)).warnings == ("pair.tokens",)


def test_the_model_has_these_heads() -> None:
    def other(**changes: int) -> Geometry:
        return SHAPE.model_copy(update=changes)

    assert_rejected(verify_files(pair(), geometry=other(head_dim=16)), "model", "model.head_dim")
    assert_rejected(verify_files(pair(), geometry=other(v_head_dim=16)), "model", "model.head_dim")
    heads = pair(tiny.per_head_set(), tiny.per_head_set("vtv_r_h_pbr"))
    assert_rejected(
        verify_files(heads, geometry=other(num_kv_heads=4)), "model", "model.num_kv_heads"
    )
    assert_rejected(
        verify_files(described(pair()), geometry=other(num_q_heads=8)), "model", "model.geometry"
    )


def test_statistics_see_a_swap_under_false_labels() -> None:
    k = replace(V_SET, objective=K_SET.objective)
    v = replace(K_SET, objective=V_SET.objective)
    outcome = assert_rejected(
        verify_files(described(pair(k, v), statistics=fingerprint())),
        "statistics",
        "statistics.mismatch",
    )
    assert outcome.measured is not None
    assert outcome.measured > 0.01
    assert_verified(verify_files(described(pair(k, v))))  # blind without


def test_broken_statistics_are_refused() -> None:
    files = described(pair(), statistics=b"\0" * 40)
    assert_rejected(verify_files(files), "statistics", "safetensors.header")


def test_localisation_is_only_a_warning() -> None:
    rng = np.random.default_rng(0)
    mixed = np.linalg.qr(rng.standard_normal((2, 64, 64)))[0]
    stack = mixed * np.exp(np.linspace(0, 3, 64)) @ np.swapaxes(mixed, -2, -1)
    files = pair(
        tiny.rotation_set(matrices=stack), tiny.rotation_set("sst_r_h_pbr", matrices=stack[::-1])
    )
    found = assert_verified(verify_files(files))
    assert {"localisation.k", "localisation.v"} <= {*found.warnings}
    assert_verified(verify_files(files, strict=True))


def test_other_kinds_are_named() -> None:
    outcome = verify_files(described(pair(), kind="gguf"))
    assert isinstance(outcome, Unsupported)
    assert outcome.kind == "gguf"


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


def test_no_file_escapes_the_digests_that_are_known() -> None:
    lock = [file_digest(name, data) for name, data in pair().items()]
    assert_verified(verify_files(pair(), expected=lock))
    assert_rejected(verify_files(pair(), expected=lock[:1]), "bytes", "unlisted_file")
    more = {**pair(), "statistics.safetensors": fingerprint()}
    assert_rejected(verify_files(more, expected=lock), "bytes", "unlisted_file")


def test_a_folder_is_judged_by_its_names_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = write(tmp_path / "real", pair())
    (tmp_path / "link").symlink_to(folder)
    assert isinstance(verify_path(tmp_path / "link"), Unreadable)
    linked = write(tmp_path / "linked", {K: pair()[K]})
    (linked / V).symlink_to(folder / V)
    outcome = verify_path(linked)
    assert isinstance(outcome, Unreadable)
    assert "symbolic link" in outcome.cause
    (tmp_path / "pipes").mkdir()
    assert isinstance(verify_path(folder / K, max_bytes=100), Unreadable)


def test_artifacts_in_a_tree(tmp_path: Path) -> None:
    one = write(tmp_path / "Model" / "tag", pair())
    two = write(tmp_path / "Model" / "other", {"oscar.json": b"{}"})
    write(tmp_path / ".hidden" / "x", pair())
    write(tmp_path / "notes", {"a.txt": b"x"})
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_artifacts(tmp_path) == [two, one]
    assert find_artifacts(one) == [one]
    assert find_artifacts(tmp_path / "absent") == find_artifacts(one / K) == []


def test_a_folder_that_vanishes_during_the_walk_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    list_folder = Path.iterdir

    def listed(folder: Path) -> list[Path]:
        if folder != tmp_path:
            folder.rmdir()
        return list(list_folder(folder))

    monkeypatch.setattr(Path, "iterdir", listed)
    assert find_artifacts(tmp_path) == []
