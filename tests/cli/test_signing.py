"""Signatures of artifacts from `publish` to `verify`: by whom, over what, and everything that makes
one worthless."""

import base64
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from hub_uses import HARD
from measured_artifacts import key_file, measured_files, model_signing, needs_checker, public_file
from tiny_artifacts import write_folder

from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, Manifest
from oscar_zoo.artifact.signature_file import MAX_BYTES, SignatureFile, bundle_bytes
from oscar_zoo.registry import signatures
from oscar_zoo.registry.catalog import TrustedKey, TrustedKeys, packaged_keys
from oscar_zoo.registry.signatures import VARIABLE, SigningKey

pytest.importorskip("cryptography")
NAME = HARD.reference
REQUIRED = "--require-signature"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = key_file(tmp_path / "zoo.pem")
    monkeypatch.setenv(VARIABLE, str(path))
    return path


@pytest.fixture
def hub(tmp_path: Path, key: Path, cli: Cli) -> str:
    folder = write_folder(tmp_path / "out", measured_files())
    hub = f"file:{tmp_path}/hub"
    cli(0, "publish", folder, "--hub", hub, "--create", "--sign")
    return hub


@pytest.fixture
def unsigned_index(hub: str) -> str:
    """The same without the timestamp of the index, so that no key is pinned."""
    (Path(hub[5:]) / "timestamp.json").unlink()
    return hub


@pytest.fixture
def copy(unsigned_index: str, cli: Cli, tmp_path: Path) -> Path:
    cli(0, "pull", NAME, "--hub", unsigned_index, "--output", tmp_path / "copy")
    return tmp_path / "copy" / str(HARD)


def mark(private: Path) -> str:
    return signatures.fingerprint(SigningKey.of_file(private).public)


def signature_on(hub: str) -> Path:
    return Path(hub[5:]) / str(HARD) / SIGNATURE_NAME


def test_the_key_of_the_hub_is_known_after_the_first_pull(cli: Cli, hub: str, key: Path) -> None:
    value = cli.json(0, "pull", NAME, "--hub", hub, REQUIRED)
    assert value["artifacts"][0]["signature"] == {
        "state": "valid",
        "fingerprint": mark(key),
        "known_by": f"the key of {hub}",
        "code": None,
        "message": None,
    }
    assert f"signed by {mark(key)} (the key of {hub})" in cli(0, "verify", NAME, REQUIRED)
    assert f"signed by {mark(key)}" in cli(0, "info", NAME, "--hub", hub)
    facts = cli.json(0, "info", NAME, "--hub", hub)
    assert facts["installed"][0]["signature"]["state"] == "valid"
    assert facts["offered"][0]["signed"] is True
    row = cli.json(0, "verify", NAME)["results"][0]
    assert row["checks"][-1]["name"] == "signature" and row["signature"]["state"] == "valid"


def test_a_named_key_is_known_and_no_other(cli: Cli, copy: Path, key: Path, tmp_path: Path) -> None:
    public, other = public_file(key), public_file(key_file(tmp_path / "other.pem"))
    shown = cli(0, "verify", copy, REQUIRED, "--key", public)
    assert f"signed by {mark(key)} (--key {public})" in shown
    assert "a key that is not known here" in cli(0, "verify", copy)
    for words in ([], ["--key", other]):
        row = cli.json(4, "verify", copy, REQUIRED, *words)["results"][0]
        assert row["code"] == "signature.unknown_key" and mark(key)[:16] in row["message"]
    assert "--key PUBLIC.pem" in (cli(4, "verify", copy, REQUIRED), cli.err)[1]
    cli(0, "verify", copy, REQUIRED, "--key", other, "--key", public)
    cli(2, "verify", copy, REQUIRED, "--key", copy / FILE_NAME)
    assert "no public key of the curve P-256" in cli.err
    cli(2, "verify", copy / "k_rotation_qqt_r_h_pbr.pt", REQUIRED, "--key", public)
    assert "one file" in cli.err


@pytest.mark.parametrize("pinned", [False, True])
def test_a_named_key_replaces_the_hub_s(cli: Cli, hub: str, tmp_path: Path, pinned: bool) -> None:
    """A hub that is signed by somebody else is refused, at its first pull as well."""
    other = public_file(key_file(tmp_path / "other.pem"))
    if pinned:
        cli(0, "pull", NAME, "--hub", hub, REQUIRED)
    error = cli.json(4, "pull", NAME, "--hub", hub, REQUIRED, "--key", other)["error"]
    assert error["code"] == "signature.unknown_key"
    row = cli.json(4 if pinned else 3, "verify", NAME, REQUIRED, "--key", other)
    assert not pinned or row["results"][0]["code"] == "signature.unknown_key"


def shipped(monkeypatch: pytest.MonkeyPatch, key: Path, expires: str | None) -> None:
    encoded = base64.b64encode(SigningKey.of_file(key).public).decode()
    row = TrustedKey(owner="A zoo", key=encoded, expires=expires)
    table = TrustedKeys(schema="oscar-zoo.trusted-keys/1", keys=(row,))
    monkeypatch.setattr(signatures, "packaged_keys", lambda: table)


def test_a_shipped_key_is_known_until_it_expires(
    cli: Cli, copy: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packaged_keys().keys == ()
    shipped(monkeypatch, key, "2999-01-01T00:00:00Z")
    assert "shipped with oscar-zoo: A zoo" in cli(0, "verify", copy, REQUIRED)
    shipped(monkeypatch, key, "2020-01-01T00:00:00Z")
    row = cli.json(4, "verify", copy, REQUIRED)["results"][0]
    assert row["code"] == "signature.expired" and "2020-01-01" in row["message"]


def rewrite_manifest(folder: Path) -> None:
    """A manifest of another tool, which is as good as the first."""
    made = Manifest.from_bytes((folder / FILE_NAME).read_bytes())
    tool = made.tool.model_copy(update={"version": "9.9"})
    (folder / FILE_NAME).write_bytes(made.model_copy(update={"tool": tool}).to_bytes())


def flip(folder: Path) -> None:
    path = next(folder.glob("k_*.pt"))
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)


def change_signature(folder: Path, change: Callable[[SignatureFile], bytes]) -> None:
    path = folder / SIGNATURE_NAME
    path.write_bytes(change(SignatureFile.from_bytes(path.read_bytes())))


def with_other_statement(found: SignatureFile) -> bytes:
    """The statement of another artifact under the signature of this one."""
    payload = found.payload.replace(str(HARD).encode(), b"Other/tag")
    return bundle_bytes(payload, found.signature, str(found.hint))


def move_key(found: SignatureFile) -> bytes:
    return bundle_bytes(found.payload, found.signature, "0" * 64)


def older_format(folder: Path) -> None:
    path = folder / SIGNATURE_NAME
    value = json.loads(path.read_bytes())
    payload = base64.b64decode(value["dsseEnvelope"]["payload"])
    payload = payload.replace(b"signature/v1.0", b"Digests/v0.1")
    value["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    path.write_text(json.dumps(value))


def link(folder: Path) -> None:
    path = folder / SIGNATURE_NAME
    path.rename(folder.parent / "elsewhere.sig")
    path.symlink_to(folder.parent / "elsewhere.sig")


ATTACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "removed": (lambda f: (f / SIGNATURE_NAME).unlink(), "missing"),
    "file": (flip, "changed_file"),
    "manifest": (rewrite_manifest, "changed_manifest"),
    "manifest removed": (lambda f: (f / FILE_NAME).unlink(), "changed_manifest"),
    "file removed": (lambda f: next(f.glob("v_*.pt")).unlink(), "missing_file"),
    "file added": (lambda f: (f / "notes.txt").write_text("x"), "added_file"),
    "file added below": (
        lambda f: [(f / "more").mkdir(), (f / "more" / "x.bin").write_text("x")],
        "added_file",
    ),
    "other statement": (lambda f: change_signature(f, with_other_statement), "invalid"),
    "other hint": (lambda f: change_signature(f, move_key), "invalid"),
    "older format": (older_format, "format"),
    "no signature": (lambda f: (f / SIGNATURE_NAME).write_text("hello"), "format"),
    "large": (lambda f: (f / SIGNATURE_NAME).write_bytes(b" " * (MAX_BYTES + 1)), "format"),
    "link": (link, "format"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_changes_of_a_signed_folder_have_a_code(cli: Cli, copy: Path, key: Path, name: str) -> None:
    attack, code = ATTACKS[name]
    attack(copy)
    words = ("verify", copy, REQUIRED, "--key", public_file(key))
    row = cli.json(4, *words)["results"][0]
    assert (row["stage"], row["code"]) == ("signature", f"signature.{code}")
    assert row["signature"]["code"] == row["code"]
    cli(4, *words)
    assert cli.err.startswith("Next: ") and cli.err.count("\n") == 1


@pytest.mark.parametrize("name", ["removed", "manifest", "older format", "no signature", "large"])
def test_a_hub_with_a_worthless_signature_is_refused_where_one_is_required(
    cli: Cli, unsigned_index: str, key: Path, name: str
) -> None:
    attack, code = ATTACKS[name]
    folder = signature_on(unsigned_index).parent
    attack(folder)
    if name == "manifest":  # a hub that makes its own index agree
        index = Path(unsigned_index[5:]) / "index.json"
        index.unlink()
    words = ("pull", NAME, "--hub", unsigned_index)
    value = cli.json(4, *words, REQUIRED, "--key", public_file(key))
    assert value["error"]["code"] == f"signature.{code}"
    artifact = cli.json(0, *words)["artifacts"][0]  # as before, with a remark where it is wrong
    remarks = [text for text in artifact["warnings"] if "signature" in text or "signed" in text]
    assert len(remarks) == (0 if code == "missing" else 1)


def test_a_refused_pull_keeps_nothing(cli: Cli, unsigned_index: str, own_state: Path) -> None:
    cli(4, "pull", NAME, "--hub", unsigned_index, REQUIRED)
    assert "a key that is not known here" in cli.err
    assert not list((own_state / "cache").glob("artifacts/*"))
    assert cli.json(0, "cache", "list")["artifacts"] == []


def test_a_copy_without_a_signature_is_fetched_again_where_one_is_required(
    cli: Cli, hub: str, tmp_path: Path, key: Path
) -> None:
    bare = f"file:{tmp_path}/bare"
    shutil.copytree(hub[5:], bare[5:])
    signature_on(bare).unlink()
    (Path(bare[5:]) / "timestamp.json").unlink()
    assert "signed" not in cli(0, "pull", NAME, "--hub", bare) + cli.err
    cli(4, "pull", NAME, "--hub", bare, REQUIRED, "--key", public_file(key))
    cli(4, "pull", NAME, "--offline", REQUIRED, "--key", public_file(key))
    assert "is not signed" in cli.err
    cli(0, "pull", NAME, "--hub", hub, REQUIRED)
    cli(0, "pull", NAME, "--hub", bare, REQUIRED, "--key", public_file(key))  # the copy has one
    assert cli.json(0, "verify", NAME)["results"][0]["signature"]["state"] != "missing"


def test_damage_of_the_stored_signature_is_seen(cli: Cli, hub: str, own_state: Path) -> None:
    path = Path(cli.json(0, "pull", NAME, "--hub", hub)["artifacts"][0]["path"]) / SIGNATURE_NAME
    path.chmod(0o600)
    path.write_text("rot")
    assert SIGNATURE_NAME in cli(4, "verify", NAME)
    cli(0, "pull", NAME, "--hub", hub, REQUIRED)
    cli(0, "verify", NAME, REQUIRED)


def test_an_unsigned_version_stays_unsigned(
    cli: Cli, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    folder, hub = write_folder(tmp_path / "out", measured_files()), f"file:{tmp_path}/hub"
    cli(0, "publish", folder, "--hub", hub, "--create")
    assert not signature_on(hub).exists()
    monkeypatch.setenv(VARIABLE, str(key))
    (warning,) = cli.json(0, "publish", folder, "--hub", hub, "--sign")["hubs"][0]["warnings"]
    assert "without a signature" in warning and "another tag" in warning
    assert not signature_on(hub).exists() and not (folder / SIGNATURE_NAME).exists()


def test_a_mirror_keeps_the_signature_and_a_copy_the_key_of_its_own_hub(
    cli: Cli, hub: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    there = f"file:{tmp_path}/mirror"
    cli(0, "mirror", hub, there, "--all", "--create")
    assert signature_on(there).read_bytes() == signature_on(hub).read_bytes()
    (Path(there[5:]) / "timestamp.json").unlink()
    cli(0, "pull", NAME, "--hub", hub)
    (pulled,) = cli.json(0, "pull", NAME, "--no-lock", "--hub", there)["artifacts"]
    (copy,) = cli.json(0, "info", NAME, "--hub", there)["installed"]
    assert pulled["signature"] == copy["signature"] and copy["signature"]["state"] == "valid"
    cli(0, "pull", NAME, "--no-lock", "--hub", there, REQUIRED, "--key", public_file(key))


def test_a_mirror_leaves_out_what_is_no_signature(cli: Cli, hub: str, tmp_path: Path) -> None:
    signature_on(hub).write_bytes(b" " * (MAX_BYTES + 1))
    there = f"file:{tmp_path}/mirror"
    (row,) = cli.json(0, "mirror", hub, there, "--all", "--create")["artifacts"]
    assert not signature_on(there).exists()
    assert any("was left out" in text for text in row["warnings"])


def test_a_pulled_folder_is_published_with_its_signature(
    cli: Cli, copy: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    there = f"file:{tmp_path}/other"
    before = (copy / SIGNATURE_NAME).read_bytes()
    cli(0, "publish", copy, "--hub", there, "--create")
    assert signature_on(there).read_bytes() == before
    rewrite_manifest(copy)
    cli(2, "publish", copy, "--hub", there)
    assert "not the signed one" in cli.err and f"rm {copy}/{SIGNATURE_NAME}" in cli.err


def test_without_the_library_a_signature_is_not_checked(
    cli: Cli, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    artifact = cli.json(0, "pull", NAME, "--hub", hub)["artifacts"][0]
    assert artifact["signature"]["state"] == "not_checked"
    assert cli.json(4, "verify", NAME, REQUIRED)["results"][0]["code"] == "signature.not_checked"


@needs_checker
def test_the_tool_of_others_checks_a_pulled_folder(copy: Path, key: Path, tmp_path: Path) -> None:
    def check(public: Path) -> tuple[int, str]:
        words = ("verify", "key", copy, "--signature", copy / SIGNATURE_NAME)
        done = model_signing(*words, "--public_key", public)
        return done.returncode, done.stdout + done.stderr

    assert check(public_file(key)) == (0, "Verification succeeded\n")
    assert check(public_file(key_file(tmp_path / "other.pem")))[0] != 0
    rewrite_manifest(copy)
    code, said = check(public_file(key))
    assert code != 0 and FILE_NAME in said


@needs_checker
def test_a_signature_of_the_tool_of_others_is_read(cli: Cli, copy: Path, tmp_path: Path) -> None:
    theirs = key_file(tmp_path / "theirs.pem")
    (copy / SIGNATURE_NAME).unlink()
    words = ("sign", "key", copy, "--private_key", theirs, "--signature", copy / SIGNATURE_NAME)
    done = model_signing(*words)
    assert done.returncode == 0, done.stderr
    shown = cli(0, "verify", copy, REQUIRED, "--key", public_file(theirs))
    assert f"signed by {mark(theirs)}" in shown
    assert "not known here (hint" in cli(0, "verify", copy)
    flip(copy)
    row = cli.json(4, "verify", copy, REQUIRED, "--key", public_file(theirs))["results"][0]
    assert row["code"] == "signature.changed_file"
