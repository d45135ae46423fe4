"""Small artifacts whose manifest says what was measured when they were made."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_uses import HARD
from tiny_artifacts import FILE_NAME, manifest, payload

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Harness, Paired, Score, TokenCounts
from oscar_zoo.registry.score_file import ScoreFile

SELECTION: dict[str, Any] = {
    "rule": "auto/3",
    "heldout": {"prompts_sha256": "a" * 64, "tokens": 4096},
    "bf16_perplexity": 9.468,
    "bf16_recall": 0.992,
    "candidates": [],
    "chosen": {
        "method": "wush",
        "perplexity": 9.553,
        "change_percent": 0.9,
        "standard_error": 0.11,
        "recall": 0.984,
    },
    "reason": "lowest",
    "refused": {},
}
"""What `compute` writes into `fit.selection`."""


def measured_manifest(
    selection: Any = SELECTION, *, artifact: str = str(HARD), seed: int = 0
) -> Manifest:
    """The manifest of `payload()` with a selection."""
    made = manifest(payload(seed=seed), artifact=artifact)
    return made.model_copy(update={"fit": made.fit.model_copy(update={"selection": selection})})


def measured_files(
    selection: Any = SELECTION, *, artifact: str = str(HARD), seed: int = 0
) -> dict[str, bytes]:
    """Every file of such an artifact, which may be published."""
    made = measured_manifest(selection, artifact=artifact, seed=seed)
    return {**payload(seed=seed), FILE_NAME: made.to_bytes()}


DIGEST = "sha256:" + "a" * 64
FORCED: dict[str, Any] = dict.fromkeys(
    ("sampling", "thinking", "generation_cap", "exhausted_rate", "stderr", "values")
)
"""What a measurement without generated answers does not say."""


def gpqa(digest: str = DIGEST, **more: Any) -> Score:
    """A measured score of INT2 that says all that it must; `more` replaces fields."""
    facts: dict[str, Any] = {
        "task": "gpqa_diamond",
        "value": 55.0,
        "kv_dtype": "int2",
        "reporter": "measured",
        "date": "2026-11-20",
        "dataset_revision": "sha256:" + "d" * 64,
        "stderr": 2.5,
        "n": 198,
        "repeats": 2,
        "seeds": (0, 1),
        "values": (54.0, 56.0),
        "harness": Harness(name="lm-evaluation-harness", version="0.4.9"),
        "engine": Harness(name="sglang", version="0.5.21"),
        "hardware": "NVIDIA H200",
        "sampling": {"temperature": 0.6},
        "thinking": True,
        "generation_cap": 32768,
        "exhausted_rate": 0.11,
        "tokens": TokenCounts(prompt=1, completion=2),
        "artifact_digest": digest,
    }
    return Score(**(facts | more))


def measured(digest: str = DIGEST) -> Score:
    """The same with its baseline, compared question by question."""
    before = gpqa(digest, kv_dtype="bf16", value=56.5, artifact_digest=None, values=(56.0, 57.0))
    compared = Paired(n=198, difference=-1.5, lower95=-4, upper95=1, p_value=0.3, no_worse_than=3.6)
    return gpqa(digest, baseline=before, paired=compared)


def figure(task: str, before: float, after: float, *, digest: str = DIGEST, **more: Any) -> Score:
    """Perplexity or recall as `eval` records it."""
    unit = "perplexity" if task == "perplexity" else "percent"
    metric = "perplexity" if task == "perplexity" else "digit_accuracy"
    facts = FORCED | {"task": task, "metric": metric, "unit": unit, "n": 1, "repeats": 1}
    facts |= {"seeds": (0,), "tokens": TokenCounts(prompt=12288, completion=0)} | more
    base = gpqa(**facts, kv_dtype="bf16", value=before, artifact_digest=None)
    return gpqa(digest, **facts, value=after, baseline=base)


def write_scores(
    path: Path, *scores: Score, digest: str = DIGEST, artifact: ArtifactId = HARD
) -> Path:
    path.write_bytes(ScoreFile.of(artifact, digest, scores).to_bytes())
    return path


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
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
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
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(CHECKER)},
        capture_output=True,
        text=True,
    )
