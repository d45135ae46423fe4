"""Keys that sign in tests, and the checker of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKER = Path(sys.prefix) / "model-signing"
"""The package `model-signing` with what only it needs; see `make install`."""
needs_checker = pytest.mark.skipif(
    not (CHECKER / "model_signing").is_dir(), reason="needs `make install`: model-signing"
)


def key_file(path: Path, curve: str = "SECP256R1") -> Path:
    """A new private key in a file that only its owner may read."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(getattr(ec, curve)())
    data = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path


def public_file(private: Path) -> Path:
    """The public key of the file `private`, beside it."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(private.read_bytes(), None)
    data = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    path = private.with_suffix(".public.pem")
    path.write_bytes(data)
    return path


def model_signing(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command of the package `model-signing`."""
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(CHECKER)},
        capture_output=True,
        text=True,
    )
