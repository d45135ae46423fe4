"""`OscarCache`: an INT2 cache for `model.generate(past_key_values=...)` of transformers.

    from oscar_zoo.transformers import OscarCache

    cache = OscarCache.from_pretrained("Qwen3-8B", model=model)
    model.generate(**inputs, past_key_values=cache)

Not for training, `torch.compile`, CPU offloading, or several processes that share the heads of a
layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

# isort: split
from oscar_zoo.errors import GeometryMismatch, MissingDependency, UnsupportedModel, UsageError
from oscar_zoo.models import model_source  # noqa: F401  (first: it prepares the imports)

# isort: split
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

try:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin
except ImportError as error:
    raise MissingDependency("OscarCache needs transformers 5.12 or newer.") from error

from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import row_bytes
from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.names import safe_part
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.transformers.graph import StepGraph, install
from oscar_zoo.engines.transformers.layer import NAME, OscarLayer, with_state
from oscar_zoo.engines.transformers.rows import EXACT, GROWTH, LayerSpec, Rows
from oscar_zoo.engines.transformers.steps import SPARE, Steps
from oscar_zoo.models.geometry import model_block, refuse_latents
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import Artifact, open_artifact
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.recipe import serving_recipe
from oscar_zoo.runtime.transforms import TransformTable

Attention = Literal["auto", "keep"]
MB = 1e6


class OscarCache(Cache):  # type: ignore[misc]
    """The cache of one batch, as `DynamicCache` is: full-attention layers are stored in 2 bits (4
    where the artifact says so) but for their first and last tokens; other layers stay as they are.

    Greedy search, sampling, beams, prompt lookup, `prefill_chunk_size`, `crop`, another turn and
    `copy.deepcopy` of a common beginning work as with `DynamicCache`.
    """

    def __init__(
        self,
        model: Any,
        k: RotationSet,
        v: RotationSet,
        recipe: ServingRecipe,
        *,
        attention: Attention = "auto",
        attention_mask: Tensor | None = None,
        cuda_graph: bool = True,
    ) -> None:
        """Args:
            model: of transformers, loaded.
            k, v, recipe: rotations, and how their rows are stored.
            attention: `auto` lets the model attend with `oscar_int2`, which reads codes; `keep`
                leaves its attention alone, which then gets rows in the model's own basis: a matrix
                product for every cached token in every step.
            attention_mask: `[B, T]` of a batch with padding on the left. Only needed with `keep`
                and where `generate` takes the prompt in pieces.
            cuda_graph: replay decode steps on a GPU; see `graph`.

        Raises:
            GeometryMismatch: the rotations are of another model.
            UnsupportedModel: a layer keeps something else than keys and values of each token.
        """
        if not hasattr(model, "set_attn_implementation"):
            given = type(model).__name__
            raise UsageError(f"model= is a loaded model of transformers, and not a {given}.")
        if attention not in get_args(Attention):
            raise UsageError(f"attention={attention!r} is neither 'auto' nor 'keep'.")
        block = block_of(model.config)
        k.require_geometry("k", block, block.id)
        v.require_geometry("v", block, block.id)
        specs = layer_specs(block, recipe)
        self._config = model.config.get_text_config(decoder=True)
        self.block, self.recipe = block, recipe
        self.steps = Steps(None if attention_mask is None else attention_mask.long().argmax(1))
        self.waiting: OscarLayer | None = None
        """The layer whose tokens came and whose attention has not run."""
        self._workspaces: dict[tuple[torch.device, int, int], Workspace] = {}
        table = TransformTable.build(
            k, v, block.attention_layers, kv_heads=range(block.num_kv_heads), device="cpu"
        )
        layers = DynamicCache(config=model.config).layers or [
            DynamicLayer() for _ in range(block.num_layers)
        ]  # 5.12 makes none yet where a configuration says that no layers share a cache
        for place, index in enumerate(block.attention_layers):
            spec = LayerSpec(table.layers[place], *specs[place], recipe.windows)
            layers[index] = _replaced(layers, index, OscarLayer(index, spec, self))
        super().__init__(layers=layers)
        self.graph = StepGraph(self) if cuda_graph else None
        if cuda_graph:
            install(model)
        if attention == "auto":
            with suppress(ValueError):  # without the interface its own function gets all rows
                model.set_attn_implementation(NAME)

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        model: Any,
        hubs: str | Sequence[str] | None = None,
        observer: Observer = SILENT,
        **options: Any,
    ) -> OscarCache:
        """The cache of a rotation by its name, which is pulled where it is not here, or in a
        folder; both are verified. `hubs` and `observer` are as of `oscar_zoo.pull`, and `options`
        as of the class."""
        artifact = open_artifact(targets.parse(name_or_folder), Sources(hubs), observer)
        return cls.from_artifact(artifact, model=model, **options)

    @classmethod
    def from_artifact(cls, artifact: Artifact, *, model: Any, **options: Any) -> OscarCache:
        """The same of a rotation that `oscar_zoo.pull` gave."""
        k, v = artifact.rotations()
        if hasattr(model, "config"):
            check_made_for(artifact, k, v, block_of(model.config))
        recipe = artifact.recipe or serving_recipe(None, block_of(model.config).geometry)
        return cls(model, k, v, recipe, **options)

    @staticmethod
    def bytes_for(
        config: Any, tokens: int, *, batch: int = 1, recipe: ServingRecipe | None = None
    ) -> int:
        """The most bytes that the full-attention layers of a model take on a GPU for `tokens` of
        each sequence, by its configuration; on a CPU the newest 32 take some more, as they came.
        `recipe` is 2 bits everywhere by default."""
        block = block_of(config)
        recipe = recipe or serving_recipe(None, block.geometry)
        specs, windows = layer_specs(block, recipe), recipe.windows
        token = block.num_kv_heads * sum(row_bytes(side) for both in specs for side in both)
        kept = windows.sink + windows.recent + SPARE
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        row = sum(block.head_dims) * int(EXACT.get(dtype, dtype).itemsize)
        exact = len(specs) * block.num_kv_heads * row * kept
        return batch * (token * (tokens + GROWTH) + exact)

    # What layers ask

    @property
    def attends(self) -> bool:
        """Whether the model attends with `oscar_int2` now."""
        return bool(self._config._attn_implementation == NAME)

    def check_update(self, layer: OscarLayer, key: Tensor, value: Tensor) -> None:
        """Refuse tokens that this cache cannot take."""
        if self.waiting is not None:
            index, self.waiting = self.waiting.index, None
            message = f"the attention of layer {index} of {self.block.id} never read this cache."
            hint = "after an interruption make a new cache; else attention='keep'"
            raise UnsupportedModel(message, hint=hint)
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and key.requires_grad):
            raise UsageError(
                "an INT2 cache takes no gradients and no compiled forward pass.",
                hint="model.generate, or torch.no_grad() around the call",
            )
        block, batch = self.block, len(key) if layer.rows is None else layer.rows.batch
        want = [(batch, block.num_kv_heads, width) for width in block.head_dims]
        if (found := [(*x.shape[:2], x.shape[3]) for x in (key, value)]) != want:
            raise UsageError(
                f"keys and values of layer {layer.index} are {found}, sequences, heads and"
                f" channels, and this cache holds {want}.",
                hint="make a cache for each batch and each model",
            )

    def workspace(self, rows: Rows, num_q_heads: int, new: int) -> Workspace:
        """For `new` tokens of every sequence; layers of a device share it."""
        kind = rows.device, rows.batch, new
        if kind not in self._workspaces:
            need, _ = rows.ops.workspace_numel(rows.store, num_q_heads, rows.batch, new, 1)
            self._workspaces[kind] = Workspace.allocate(need, rows.device)
        return self._workspaces[kind]

    # What transformers and users ask

    def reset(self) -> None:
        super().reset()
        self.waiting = None
        self.graph = StepGraph(self) if self.graph else None

    def __deepcopy__(self, memo: dict[int, Any]) -> OscarCache:
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._config)] = self._config  # it says how the model attends now
        made.__dict__ = copy.deepcopy(self.__dict__ | {"_workspaces": {}, "graph": None}, memo)
        made.graph = StepGraph(made) if self.graph else None
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of the full-attention layers: codes, windows and what waits to be coded."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, OscarLayer))

    def describe(self) -> str:
        """One line: tokens, bytes, and how many BF16 would take."""
        block, tokens = self.block, self.get_seq_length(self.block.attention_layers[0])
        batch = max(1, len(self.steps.pads))
        row = 2 * block.num_kv_heads * sum(block.head_dims) * len(block.attention_layers)
        plain, own = row * tokens * batch, self.nbytes
        times = f", {plain / own:.1f} times as much" if plain > own else ""
        return (
            f"{tokens:,} tokens x {batch} in {own / MB:,.1f} MB; BF16 takes {plain / MB:,.1f} MB"
            f"{times} ({self.recipe.bits_per_element:.2f} bits per element but for the first and"
            f" last tokens, {block.id})"
        )

    def __repr__(self) -> str:
        return f"OscarCache({self.describe()})"


def block_of(config: Any) -> ModelBlock:
    """The shape of a model by its configuration, as it is in memory."""
    given = str(getattr(config, "name_or_path", None) or "")
    name = type(config).__name__ if given in ("", "None") else Path(given).name
    refuse_latents(config.get_text_config(decoder=True), safe_part(name))
    return model_block(config, model_id=safe_part(name), revision=None, config_sha256="0" * 64)


def check_made_for(artifact: Artifact, k: RotationSet, v: RotationSet, block: ModelBlock) -> None:
    """Refuse rotations of another model, by its name."""
    try:
        k.require_geometry("k", block, block.id)
        v.require_geometry("v", block, block.id)
    except GeometryMismatch as error:
        made = artifact.base_model or "another model"
        what = f"the rotation {artifact.label} was made for {made}"
        error.advise(f"{what}; make one: oscar-zoo compute MODEL")
        raise


def layer_specs(block: ModelBlock, recipe: ServingRecipe) -> list[tuple[Any, Any]]:
    """How keys and values of each full-attention layer are quantized; scales have 16 bits."""
    if recipe.scale_dtype == "float32":
        recipe = recipe.model_copy(update={"scale_dtype": "float16"})
    recipe.check_model(block, block.id)
    return [
        (recipe.quant_spec("k", block.head_dim, i), recipe.quant_spec("v", block.v_head_dim, i))
        for i in range(len(block.attention_layers))
    ]


def _replaced(layers: list[Any], index: int, ours: OscarLayer) -> Any:
    stock = layers[index] if index < len(layers) else None
    if type(stock) in (DynamicLayer, DynamicSlidingWindowLayer):  # a window that hides nothing
        return ours
    if isinstance(stock, DynamicLayer) and isinstance(stock, LinearAttentionCacheLayerMixin):
        return with_state(stock, ours)
    raise UnsupportedModel(
        f"layer {index} of {ours.owner.block.id} keeps a {type(stock).__name__}, which is no cache"
        " of full attention.",
        hint="use DynamicCache with this model",
    )
