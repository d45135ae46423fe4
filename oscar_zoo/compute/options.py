"""A computation of which everything is decided: its checks, its model and its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.names import check_part
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe, Widths, Windows, check_groups
from oscar_zoo.compute.data.calibration import CalibrationData, check_source, load_calibration
from oscar_zoo.compute.data.overlap import check_overlap
from oscar_zoo.compute.folder import check_target
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.methods.table import METHODS, find_method, methods_for
from oscar_zoo.compute.moments import LOSS_WINDOWS
from oscar_zoo.compute.params import ComputeParams
from oscar_zoo.errors import UsageError
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.models.memory import Workload, check_device
from oscar_zoo.serving.sizes import check_bits

AUTO = "auto"
"""The method that fits all others and keeps the best."""
HELDOUT_TOKENS = 8192
LONGEST_DEFAULT = 4096
"""Tokens of a calibration sequence when neither the caller nor the model says less."""


@dataclass(frozen=True, kw_only=True)
class Job(ComputeParams):
    """The parameters, with nothing left open, and what follows from the model's name.
    `model_name` is the first part of the artifact id, without organisation; `heldout_tokens` are
    kept apart for measuring, with `auto` and where bits are chosen; `geometry` decides, if given,
    which methods there are; `created` is a time in the form of manifests, `None` for now."""

    model: str = field(kw_only=True)
    calib_tokens: int
    output: Path | None = None
    device: str = "cpu"
    model_name: str
    recipe: ServingRecipe
    geometry: Geometry | None = None
    heldout_tokens: int = HELDOUT_TOKENS
    created: str | None = None

    @property
    def auto(self) -> bool:
        """Whether the method is chosen."""
        return self.method == AUTO

    @cached_property
    def wish(self) -> WidthWish | None:
        """Bits of codes to choose per layer and side; `None` for 2 bits everywhere."""
        return width_wish(self.bits)

    @property
    def raises(self) -> bool:
        """Whether layers get more where 2 bits fail their gates, because nobody asked for them.
        Latents do not: servers read codes of 2 bits alone."""
        return self.bits is None and not self.latent

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods to fit."""
        if not self.auto:
            return (find_method(self.method, self.geometry),)
        return tuple((methods_for(self.geometry) if self.geometry else METHODS).values())

    @property
    def latent(self) -> bool:
        return self.geometry is not None and self.geometry.rotary_key is not None

    @property
    def needs_data(self) -> bool:
        """Whether a method to fit reads sums over text."""
        return any(method.needs for method in self.methods)

    def check(self) -> None:
        """Find all that can be wrong before the model is read."""
        assert self.methods
        for name, number in (("calib_tokens", self.calib_tokens), ("seq_len", self.seq_len)):
            if number is not None and number <= 0:
                raise UsageError(f"{name} must be above 0, not {number}.", hint="2048 is usual")
        check_part(self.model_name, "model name")
        check_source(self.calib_data)
        if self.output is not None:
            check_target(self.output, force=self.force)
        check_device(self.device, several=True)

    def sequence_length(self, block: ModelBlock) -> int:
        """Tokens of a calibration sequence, once quantization groups and context are checked."""
        assert self.methods
        self.recipe.check_model(block, block.id)
        longest = block.rope.max_position if block.rope else None
        if self.seq_len is None:
            return min(LONGEST_DEFAULT, longest or LONGEST_DEFAULT)
        least = shortest_measured(LOSS_WINDOWS)
        if block.rotary_key and self.needs_data and self.seq_len < least:
            raise UsageError(
                f"sequences of {self.seq_len} tokens show no row behind the windows of latents.",
                hint=f"use a sequence length of {least} or more",
            )
        if longest is not None and self.seq_len > longest:
            raise UsageError(
                f"sequences of {self.seq_len} tokens are longer than the {longest} of {block.id}.",
                hint=f"use a sequence length of at most {longest}",
            )
        return self.seq_len


def shortest_measured(windows: Windows) -> int:
    """Tokens of the shortest held-out sequence with a token to predict beyond both windows."""
    return windows.sink + windows.recent + 2


ENOUGH_TOKENS = 5000
"""Published fits stop changing near this number of tokens; fewer give a remark."""


def load(job: Job) -> LoadedModel:
    """Read the model of a job."""
    length = min(job.seq_len or LONGEST_DEFAULT, job.calib_tokens)
    return load_model(
        job.model,
        revision=job.revision,
        dtype=job.dtype,
        device=job.device,
        model_id=job.model_id,
        stream=job.stream_weights,
        workload=Workload(length, job.calib_tokens),
    )


def read_data(job: Job, block: ModelBlock, tokenizer: Any) -> CalibrationData:
    """The sequences to calibrate with, and those held out for `auto` and for a choice of bits."""
    check_wish(job.wish, job.recipe, block)
    chooses, length = job.auto or job.wish is not None, job.sequence_length(block)
    data = load_calibration(
        job.calib_data,
        tokenizer,
        tokens=job.calib_tokens,
        seq_len=length,
        seed=job.seed,
        chat_template=job.chat_template,
        heldout_tokens=job.heldout_tokens if chooses else 0,
    )
    if job.needs_data and (found := data.tokens_used) < block.head_dim:
        more = "--calib-tokens" if found == job.calib_tokens else "text"
        raise UsageError(
            f"{job.calib_data} gives {found} tokens for {block.head_dim} channels per head.",
            hint=f"use more {more}: fits settle near {ENOUGH_TOKENS:,} tokens",
        )
    shortest = shortest_measured(job.recipe.windows)
    lengths = map(len, data.heldout.sequences) if data.heldout else ()
    if chooses and max(lengths, default=0) < shortest:
        what = "the method is" if job.auto else "bits are"
        raise UsageError(
            f"{what} chosen with held-out sequences of {shortest:,} tokens or more, and"
            f" {data.source} gives none: it has {data.tokens_used:,} tokens in sequences of at most"
            f" {length:,}.",
            hint="give more text or fewer --calib-tokens, longer sequences with --seq-len, or a"
            " --method and no bits to choose",
        )
    return check_overlap(data, allow_overlap=job.allow_overlap)


ALL_TWO, ALL_FOUR = 2.0, 4.0
"""These two are no budgets: they mean codes of 2 or of 4 bits everywhere, whatever scales add."""


@dataclass(frozen=True)
class WidthWish:
    """At most so many average bits of an element, scales and offsets included (`ALL_FOUR` gives all
    codes 4 bits), or the fewest that pass the gates of `rule`."""

    bits: float | None = None
    auto: bool = False

    @property
    def measures(self) -> bool:
        """Whether layers and sides have to be told apart."""
        return self.bits != ALL_FOUR

    @property
    def option(self) -> str:
        """As on the command line."""
        return "--bits auto" if self.auto else f"--bits {self.bits:g}"


INSTEAD = WidthWish(auto=True)
"""What is tried where codes of 2 bits do not pass their gates and nobody asked for them."""


def width_wish(bits: float | Literal["auto"] | None) -> WidthWish | None:
    """The wish of an option; `None` for codes of 2 bits everywhere."""
    if bits == "auto":
        return WidthWish(auto=True)
    return None if bits in (None, ALL_TWO) else WidthWish(bits=float(bits))


def possible_bits(recipe: ServingRecipe, geometry: Geometry) -> tuple[float, float]:
    """Bits of an element with codes of 2 and of 4 bits everywhere, scales and offsets included."""
    layers, no_clip = len(geometry.attention_layers), Clip(k=0.0, v=0.0, algorithm="none")
    four = Widths.uniform(layers, k=4, v=4, clip=no_clip)
    return bits_of(recipe.with_widths(None), geometry), bits_of(recipe.with_widths(four), geometry)


def bits_of(recipe: ServingRecipe, geometry: Geometry) -> float:
    """Bits of an element, scales and offsets included, on average over all layers."""
    from oscar_zoo.evaluate.simulated_cache import CacheSpec  # imports torch

    return CacheSpec(None, None, recipe).stored_bits(geometry)


def check_wish(wish: WidthWish | None, recipe: ServingRecipe, model: ModelBlock) -> None:
    """Raise `UsageError` for a number of bits that codes of 2 and 4 bits cannot have, or for groups
    that rows of the model cannot be cut into."""
    check_groups(model.head_dims, recipe.group_size, model.id)
    if wish is None or wish.bits is None or wish.bits == ALL_FOUR:
        return
    low, high = possible_bits(recipe, model)
    check_bits(wish.bits, low, high, recipe.group_size, latents=bool(model.rotary_key))
