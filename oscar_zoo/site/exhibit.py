"""What the page shows of one artifact: the entry of the registry, and numbers that need more than a
manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oscar_zoo.compute.report.data import ReportData, Spectra
from oscar_zoo.engines.sglang.capacity import Cache
from oscar_zoo.registry.entries import Entry

INDEX = "index.html"


@dataclass(frozen=True)
class Exhibit:
    """One artifact and what was found about it.

    Attributes:
        entry: what the registry knows.
        caches: the kinds of KV cache of its model by number of GPUs, each on one of them; empty
            where the shapes are not known or no INT2 cache takes them.
        weights: bytes of the model in BF16, or `None` where nobody knows.
        gpus: how many GPUs the model starts from.
        divided: whether a server divides the memory between tokens and what other layers keep.
        unknown: what nobody knows of those layers, in words; `None` where all is known.
        report: the report of its fit, where it lies beside the artifact.
        spectra: of its rotation files, where they have eigenvalues.
    """

    entry: Entry
    caches: Mapping[int, tuple[Cache, ...]] = field(default_factory=dict)
    weights: int | None = None
    gpus: int = 1
    divided: bool = False
    unknown: str | None = None
    report: ReportData | None = None
    spectra: Spectra | None = None

    @property
    def path(self) -> str:
        """Of its page, from the root of the site; names of artifacts are safe in paths."""
        return f"artifacts/{self.entry.id.model}/{self.entry.id.tag}.html"
