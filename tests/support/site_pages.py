"""Pages of the site as data, and the hub that tests build it from."""

import base64
import hashlib
import math
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from hub_uses import HARD
from measured_artifacts import SELECTION, measured_files
from tiny_artifacts import FILE_NAME, manifest, payload, write_folder

from oscar_zoo.artifact.manifest import License
from oscar_zoo.artifact.width_selection import VerifiedWidths, WidthSelection, WidthStep
from oscar_zoo.compute.report.data import (
    Candidate,
    ClipChart,
    ClipCurves,
    Comparison,
    Fact,
    Headroom,
    MethodErrors,
    ReportData,
    Spectra,
    Spectrum,
)

HOSTILE = "<script>alert(1)</script>\"'&lt;\u202e<img src=x onerror=alert(2)>"
EVIL = "tiny-qwen3-hard/seq512_prompt3_group64"
BARE = "Some-Model/seq512_prompt2_group64"
"""An artifact without a manifest, of a model that the zoo does not know."""
CLIP = {"ratios": [0.9, 0.95, 0.0], "errors": [0.3, 0.2, 0.25], "best": 0.95}
QUALITY = {"clip": {"k": CLIP, "v": CLIP}, "errors": {"output": [0.1, 0.2, 0.3, 0.2]}}
_VOID = {"meta", "link", "input", "br", "img", "hr"}


def write_hub(root: Path) -> Path:
    """A hub in a folder: one artifact with figures and a report, one of hostile texts with charts
    in its manifest, one without a manifest."""
    folder = write_folder(root / str(HARD), measured_files())
    folder.with_name(f"{folder.name}.report.json").write_bytes(sample_report().to_bytes())
    files = payload(seed=1)
    evil = manifest(files, artifact=EVIL)
    selection = SELECTION | {"reason": HOSTILE, "chosen": SELECTION["chosen"] | {"method": HOSTILE}}
    changes = {
        "fit": evil.fit.model_copy(update={"method": HOSTILE, "selection": selection}),
        "license": License(artifact=HOSTILE, model=None, calibration_data=None, note=HOSTILE),
        "quality": QUALITY,
        "provenance": evil.provenance.model_copy(update={"hub": "hf", "repo": HOSTILE}),
    }
    data = evil.model_copy(update=changes).to_bytes()
    write_folder(root / EVIL, {**files, FILE_NAME: data})
    write_folder(root / BARE, payload(seed=2))
    return root


@dataclass
class Page(HTMLParser):
    """What a page has; `tags` are all start tags with their attributes."""

    text: str
    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    words: str = ""
    open: list[str] = field(default_factory=list)
    inside: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.inside[self.open[-1]][-1] += data
            return
        self.words += data
        for tag in set(self.open):
            self.inside[tag][-1] += data

    def all(self, *names: str) -> list[dict[str, str]]:
        """Attributes of all elements of these names."""
        return [attributes for tag, attributes in self.tags if tag in names]

    def codes(self) -> list[str]:
        """The hashes of style and scripts, as a policy writes them."""
        return [
            f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
            for code in (*self.inside["style"], *self.inside.get("script", ()))
        ]


METHODS = {
    "identity": 4754.0,
    "hadamard": 14.1,
    "oscar": 11.45,
    "oscar-per-head": 12.43,
    "wush": 9.675,
}
BF16 = 9.654


def sample_report(layers: int = 4, *, fast: bool = False) -> ReportData:
    """Every block, with `wush` kept; `fast` leaves out what needs the model: perplexity, recall and
    the gate."""
    ids = tuple(range(layers))
    candidates = tuple(
        Candidate(
            method=method,
            clip_k=0.0 if method == "identity" else 0.96,
            clip_v=0.0 if method == "identity" else 0.92,
            output_error=0.1 + value / 1e4,
            perplexity=None if fast else value,
            change_percent=None if fast else 100 * (value / BF16 - 1),
            standard_error=None if fast else 0.05,
            recall=None if fast else 0.5,
            chosen=method == "wush",
            gate=None if fast else "pass" if method == "wush" else "fail",
        )
        for method, value in METHODS.items()
    )
    return ReportData(
        title="tiny-qwen3-hard/seq512_prompt2_group64-wush",
        layers=ids,
        facts=(
            Fact(label="Model", value="org/tiny"),
            Fact(label="Time", value="load 1.0 s, capture 2.0 s"),
        ),
        comparison=Comparison(
            candidates=candidates,
            bf16_perplexity=None if fast else BF16,
            bf16_recall=None if fast else 1.0,
            reason="lowest perplexity.",
        ),
        errors=tuple(
            MethodErrors(method=method, layers=tuple(0.1 * (1 + n) + value / 1e4 for n in ids))
            for method, value in METHODS.items()
        ),
        clip=ClipCurves(method="wush", k=_curve(layers, 0.95), v=_curve(layers, 0.94)),
        headroom=Headroom(k=tuple(1.5 + n for n in ids), v=tuple(1.1 for _ in ids)),
        spectra=Spectra(k=_spectrum("qqt/1", layers, 64), v=_spectrum("sst/1", layers, 128)),
        widths=None if fast else sample_widths(layers),
        notes=("512 tokens are few.",),
    )


def sample_widths(layers: int = 4) -> WidthSelection:
    """A curve with the keys of the last layer raised."""
    order = [(layer, side) for side in ("k", "v") for layer in reversed(range(layers))]
    steps = [WidthStep(bits=2.5, predicted=8e-3, predicted_error=1e-3, verified=_verified(8e-3))]
    for at, (layer, side) in enumerate(order, 1):
        told = 8e-3 / (1 + at) ** 1.5
        found = _verified(told) if at in (1, len(order)) else None
        steps.append(
            WidthStep(
                layer=layer,
                side="k" if side == "k" else "v",
                bits=2.5 + 2 * at / len(order),
                predicted=told,
                predicted_error=told / 8,
                verified=found,
            )
        )
    return WidthSelection(
        rule="widths/1",
        wish="--bits 2.75",
        reason="the raises that gain most within 2.75 bits",
        prompts=4,
        positions=2812,
        layers=tuple(range(layers)),
        gains_k=tuple(1e-3 * (1 + layer) for layer in range(layers)),
        gains_v=tuple(1e-4 * (layer - 1) for layer in range(layers)),
        steps=tuple(steps),
        chosen=1,
        bits_at={"8192": 3.375, "32768": 2.906, "131072": 2.789},
    )


def _verified(divergence: float) -> VerifiedWidths:
    return VerifiedWidths(
        divergence=divergence,
        divergence_error=divergence / 10,
        change_percent=0.12,
        change_error=0.05,
        recall=0.998,
    )


def _curve(layers: int, best: float) -> ClipChart:
    ratios = (0.88, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0)
    errors = tuple(tuple(0.2 + n / 10 + (one - best) ** 2 for one in ratios) for n in range(layers))
    mean = tuple(sum(column) / layers for column in zip(*errors, strict=True))
    return ClipChart(error="output", ratios=ratios, layers=errors, mean=mean, chosen=0.94)


def _spectrum(target: str, layers: int, dim: int) -> Spectrum:
    return Spectrum.of(
        target, [[math.exp(-rank * (n + 1) / dim) for rank in range(dim)] for n in range(layers)]
    )
