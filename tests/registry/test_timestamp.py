"""Signed timestamps of hubs: a freeze, a swap, another key and a missing signature are noticed."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hub_uses import publish, pull
from measured_artifacts import key_file
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo import errors
from oscar_zoo.registry import signatures, view
from oscar_zoo.registry.hubs.base import INDEX_NAME, TIMESTAMP_NAME
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.signatures import VARIABLE, SigningKey
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import LIFETIME, Timestamp, Trust, checked_key
from oscar_zoo.site.status import set_status

pytest.importorskip("cryptography")
NAME = "tiny-qwen3-hard"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SigningKey:
    path = key_file(tmp_path / "zoo.pem")
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(view, "_BETWEEN_READS", 0)
    return SigningKey.of_file(path)


@pytest.fixture
def hub(tmp_path: Path, key: SigningKey) -> LocalHub:
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    publish(write_folder(tmp_path / "out", artifact_files()), hub)
    return hub


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return Trust(PinFile(tmp_path / "known.json"))


def open_view(hub: LocalHub, trust: Trust) -> view.HubView:
    hub.refresh()
    return view.HubView.open(hub, trust=trust)


def get(hub: LocalHub, tmp_path: Path, trust: Trust) -> None:
    """Pull, which pins the key."""
    hub.refresh()
    pull(NAME, [hub], store=Store(tmp_path / "store"), trust=trust)


def test_a_signed_index_is_taken_and_its_key_is_pinned(
    hub: LocalHub, key: SigningKey, trust: Trust, tmp_path: Path
) -> None:
    assert open_view(hub, trust).key == signatures.fingerprint(key.public)
    get(hub, tmp_path, trust)
    assert trust.known.read().keys == {hub.name: signatures.fingerprint(key.public)}


def test_an_index_that_is_served_for_ever_is_noticed(
    hub: LocalHub, trust: Trust, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    later = signatures.now() + LIFETIME + timedelta(minutes=1)
    monkeypatch.setattr("oscar_zoo.registry.signatures.now", lambda: later)
    with pytest.raises(errors.FrozenIndex, match="was valid until") as caught:
        open_view(hub, trust)
    assert "--allow-downgrade" in (caught.value.hint or "")
    assert open_view(hub, Trust(trust.known, allow_downgrade=True)).index.serial == 1
    publish(tmp_path / "out", hub)  # publishing again renews it
    assert open_view(hub, trust).index.serial == 1


def test_every_command_that_writes_signs_and_nobody_else_can(
    hub: LocalHub, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hub.root_file(TIMESTAMP_NAME)
    set_status(hub, f"{NAME}:seq512_prompt2_group64", "deprecated", reason="old")
    assert hub.root_file(TIMESTAMP_NAME) != before
    assert open_view(hub, trust).index.serial == 2
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(errors.SignatureError, match="no key is named") as caught:
        set_status(hub, f"{NAME}:seq512_prompt2_group64", "active")
    assert VARIABLE in (caught.value.hint or "")


def change_index(hub: LocalHub) -> None:
    path = hub.root / INDEX_NAME
    path.write_bytes(path.read_bytes().replace(b'"serial": 1', b'"serial": 9'))


def sign_with_another(hub: LocalHub) -> None:
    other = SigningKey.of_file(key_file(hub.root.parent / "other.pem"))
    index = (hub.root / INDEX_NAME).read_bytes()
    (hub.root / TIMESTAMP_NAME).write_bytes(Timestamp.of(index, 1, other).to_bytes())


def extend(hub: LocalHub) -> None:
    path = hub.root / TIMESTAMP_NAME
    value = json.loads(path.read_bytes())
    path.write_text(json.dumps(value | {"expires": "2999-01-01T00:00:00Z"}))


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (change_index, "another one than its owner signed"),
        (sign_with_another, "is signed by key"),
        (extend, "none of its key"),
        (lambda hub: (hub.root / TIMESTAMP_NAME).unlink(), "not signed any more"),
    ],
)
def test_what_the_owner_did_not_sign_is_refused(
    hub: LocalHub, trust: Trust, tmp_path: Path, attack: object, said: str
) -> None:
    get(hub, tmp_path, trust)
    attack(hub)  # type: ignore[operator]
    with pytest.raises(errors.SignatureError, match=said):
        open_view(hub, trust)


def test_a_new_key_is_taken_if_the_user_agrees(hub: LocalHub, trust: Trust, tmp_path: Path) -> None:
    get(hub, tmp_path, trust)
    sign_with_another(hub)
    assert open_view(hub, Trust(trust.known, accept_new=True)).key


@pytest.mark.parametrize(
    "change",
    [{"expires": "soon"}, {"key": "?"}, {"serial": -1}, {"more": 1}, {"schema": "other/1"}],
)
def test_a_document_that_is_none_is_refused(hub: LocalHub, change: dict[str, object]) -> None:
    value = json.loads(hub.root_file(TIMESTAMP_NAME) or b"") | change
    with pytest.raises(errors.MalformedFile):
        Timestamp.from_bytes(json.dumps(value).encode())


def test_a_hub_without_a_timestamp_is_as_before(
    tmp_path: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = LocalHub(tmp_path / "plain", must_exist=False)
    publish(write_folder(tmp_path / "out", artifact_files()), plain)
    assert plain.root_file(TIMESTAMP_NAME) is None
    assert open_view(plain, trust).key is None


def test_without_the_library_a_hub_that_was_checked_before_is_refused(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp, index = hub.root_file(TIMESTAMP_NAME), hub.root_file(INDEX_NAME)
    assert stamp is not None
    pinned = Timestamp.from_bytes(stamp).fingerprint
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(errors.MissingDependency):
        checked_key(stamp, index, hub="it", pinned=pinned, allow_old=False)
    assert checked_key(stamp, index, hub="it", pinned=None, allow_old=False) is None


@pytest.mark.parametrize("what", ["readable by all", "of another curve", "no key"])
def test_keys_that_are_no_good_are_refused(tmp_path: Path, what: str) -> None:
    curve = "SECP384R1" if what == "of another curve" else "SECP256R1"
    path = key_file(tmp_path / "one.pem", curve)
    if what == "readable by all":
        path.chmod(0o644)
    elif what == "no key":
        path.write_text("hello")
    with pytest.raises(errors.UsageError) as caught:
        SigningKey.of_file(path)
    assert caught.value.hint
