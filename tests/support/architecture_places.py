"""Where the small models of `architectures` are served: on this CPU, or on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engines import environment


@dataclass(frozen=True)
class Place:
    """A device, and what an attempt there looks like.

    Attributes:
        device: what computes and serves.
        dtype: of the weights that are served.
        flags: of SGLang, beside those that `oscar-zoo serve` sets.
        stock_flags: more of them for SGLang without an INT2 cache; the first that it starts with.
        tie: two tokens whose logits differ by less may change places.
        tie_of_spread: the same, as a share of the standard deviation of the logits.
        start_seconds: how long a server may take to be ready.
    """

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    flags: tuple[str, ...]
    stock_flags: tuple[tuple[str, ...], ...] = ((),)
    tie: float = 0.0
    tie_of_spread: float = 0.0
    start_seconds: int = 400

    def given(self, flags: tuple[str, ...], start_seconds: int) -> Place:
        """With more flags of SGLang, which win over those here."""
        return replace(self, flags=(*self.flags, *flags), start_seconds=start_seconds)

    def state(self, work: Path) -> dict[str, str]:
        """Variables of a command line that keeps what it knows in `work`.

        On a GPU the cache is the user's, because compiled kernels are in it.
        """
        own = ("STATE", "DATA") if self.device == "cuda" else ("STATE", "DATA", "CACHE")
        folders = {f"OSCAR_ZOO_{kind}": str(work / kind.lower()) for kind in own}
        return {**os.environ, **folders, "HF_HUB_OFFLINE": "1"}

    def stock(self) -> dict[str, str]:
        """Variables of SGLang without an INT2 cache."""
        alone = {"SGLANG_PLUGINS": "none"}
        return {**os.environ, **alone} if self.device == "cuda" else environment(**alone)


CPU = Place(
    "cpu",
    "float32",
    ("--dtype=float32", "--disable-cuda-graph", "--max-total-tokens=4096"),
    tie=0.03,
)
GPU = Place(
    "cuda",
    "bfloat16",
    (
        # Servers start side by side. SGLang compares the free memory before and after it loads a
        # model, and a small share would be less than what the others take meanwhile. So the share
        # is large, and what is made of it is bounded by the other flags.
        "--mem-fraction-static=0.5",
        "--max-total-tokens=16384",
        "--max-running-requests=8",
        "--max-mamba-cache-size=64",
        "--cuda-graph-max-bs-decode=8",
    ),
    # Triton's backend knows windows, sinks and caps, and nothing is compiled for it beforehand, but
    # SGLang refuses it where the first layer has no attention.
    stock_flags=(("--attention-backend=triton",), ("--attention-backend=flashinfer",)),
    # In bfloat16 a logit of these models moves by a few hundredths of the spread between two ways
    # to compute it. The best of 2048 random tokens leads the second by 0.3 of the spread on the
    # average, and any other token lies 3.5 behind: a wrong cache shows within a few tokens.
    tie_of_spread=0.15,
    start_seconds=200,
)
