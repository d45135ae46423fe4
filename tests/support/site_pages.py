"""Pages of the site as data, and the hub that tests build it from."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from hub_folders import HARD
from measured_artifacts import SELECTION, measured_files
from sample_reports import sample_report
from tiny_artifacts import FILE_NAME, manifest, payload, write_folder

from oscar_zoo.artifact.manifest import License

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
