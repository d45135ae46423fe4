"""What one worker process of vLLM serves: settings and artifact, and the stores and the cache that
follow from them and the model.

Windows, transforms and scratch are allocated when weights are loaded, so vLLM counts them before it
sizes its pages. Codes and scales lie in these pages: a layer is one contiguous region of them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oscar_kernels.spec import QuantSpec, code_bytes, group_channels, row_bytes
from oscar_zoo.artifact.specs import check_groups
from oscar_zoo.engines import served_artifact, setting_flags, settings
from oscar_zoo.engines.vllm import compat, refusals
from oscar_zoo.engines.vllm.account import Account
from oscar_zoo.engines.vllm.decoding import Decoding, Rows
from oscar_zoo.engines.vllm.prefill import LARGEST_HEAD, FlashPrefill
from oscar_zoo.engines.vllm.register import DTYPE
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.batch import Batch, moved
from oscar_zoo.runtime.dispatch import choose_ops
from oscar_zoo.runtime.engine import CacheConfig, Softmax
from oscar_zoo.runtime.int2_cache import SHORT, Int2Cache, piece_tokens
from oscar_zoo.runtime.sink_blocks import SinkBlocks
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

logger = logging.getLogger(__name__)
model = ""
"""The name or folder of the last one with our dtype."""
running: Worker | None = None
"""Of the last model with our dtype in this process."""


def served() -> tuple[settings.PluginSettings, served_artifact.ServedArtifact]:
    """Settings and artifact by environment variables, as a SGLang server reads them."""
    mine = {name: text for name, text in os.environ.items() if name.startswith(settings.PREFIXES)}
    return _served(tuple(sorted(mine.items())), model)


@functools.cache
def _served(
    variables: tuple[tuple[str, str], ...], model: str
) -> tuple[settings.PluginSettings, served_artifact.ServedArtifact]:
    environ = dict(variables)
    sources = [setting_flags.OPTIONS[name].variable for name in ("artifact", "rotation_path")]
    if not {*sources, settings.K_FILE} & {*environ}:
        environ[sources[0]] = name_of(model)
    given = settings.read_settings(environ)
    artifact = served_artifact.load(
        given.source, given.expected_digest, model=environ.get(setting_flags.MODEL)
    )
    return settings.read_settings(environ, artifact.recipe), artifact


def name_of(model: str) -> str:
    """What the zoo calls a model: a folder by its name, and what the hub's client keeps as the hub
    does."""
    kept = [part for part in Path(model).parts if part.startswith("models--")]
    return kept[0].split("--")[-1] if kept else Path(model).name


def specs_of(head_dim: int, index: int) -> tuple[QuantSpec, QuantSpec]:
    """How keys and values of one layer are quantized."""
    chosen = served()[0]
    size = chosen.group_size or head_dim
    check_groups((head_dim, head_dim), size, "this model", option="OSCAR_INT2_GROUP_SIZE={}")
    codes = chosen.code("k", index), chosen.code("v", index)
    k, v = (QuantSpec(head_dim, group_channels(head_dim, size), clip, bits=b) for b, clip in codes)
    return k, v


def sinks_of(rows: int) -> SinkBlocks:
    """For so many rows of requests, the padding row included."""
    chosen = served()[0]
    idle = 0 if chosen.sink == 0 else chosen.idle_sinks or rows - 1
    return SinkBlocks(chosen.sink, rows + idle, chosen.refilled or None)


def layers_of(vllm_config: Any) -> dict[str, Any]:
    """Those with our dtype, by name: not the layers of a draft model, nor those with a window."""
    found = compat.attention_layers(vllm_config).items()
    return {name: layer for name, layer in found if layer.kv_cache_dtype == DTYPE}


def start(vllm_config: Any) -> Worker:
    """The worker of a model, made once that is built. A process can have one after the other."""
    global running
    found = of(vllm_config)
    if found is None:
        found = running = Worker(vllm_config)
    return found


def of(vllm_config: Any) -> Worker | None:
    """The worker of a model, if its cache is ours."""
    same = running is not None and running.context is compat.context(vllm_config)
    return running if same else None


class Worker:
    def __init__(self, vllm_config: Any) -> None:
        layers, self.context = layers_of(vllm_config), compat.context(vllm_config)
        chosen, artifact = served()
        states = compat.state_layers(vllm_config)
        refusals.check(vllm_config, layers, states, chosen)
        numbers = tuple(map(compat.layer_number, layers))
        first = next(iter(layers.values())).impl
        heads, dim = first.num_kv_heads, first.head_size
        model, rows = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs + 1
        whole, ranks = model.get_total_num_kv_heads(), vllm_config.parallel_config.world_size
        artifact.check_geometry(layer_ids=numbers, num_kv_heads=whole, head_dim=dim, v_head_dim=dim)
        own = compat.tensor_rank() * whole // ranks  # the first head; ranks may share one
        device, sinks = torch.device(vllm_config.device_config.device), sinks_of(rows)
        shape = WindowShape(
            num_layers=len(layers),
            num_rows=rows,
            num_kv_heads=heads,
            k_head_dim=dim,
            v_head_dim=dim,
            sink=chosen.sink,
            recent=chosen.recent,
            dtype=model.dtype,
            idle=sinks.num_blocks - rows,
            drafts=1 + vllm_config.num_speculative_tokens,
        )
        refusals.check_windows(shape, device)
        self.windows = WindowStore(shape, device, sinks)
        self.account = Account(sinks, self.windows.begin)
        table = TransformTable.build(
            artifact.k, artifact.v, numbers, kv_heads=range(own, own + heads), device=device
        )
        softmax = Softmax(first.scale, first.logits_soft_cap or 0.0)
        if softmax.cap and table.centred:
            raise UnsupportedModel("this model caps its logits, and centred keys shift them.")
        flash = device.type == "cuda" and dim <= LARGEST_HEAD and model.dtype.itemsize == 2
        config = CacheConfig(
            numbers,
            first.num_heads,
            softmax,
            shape.max_batch,
            model.max_model_len,
            piece_tokens(device) if flash else 0,
            device,
        )
        self._layers, self._ops = layers, choose_ops(device)
        others = compat.attention_layers(vllm_config).values()
        windowed = any(one.sliding_window is not None for one in others)
        self._shared = windowed or bool(states)
        self.unused = 0
        """The slot that padding writes."""
        most = max(shape.max_batch, SHORT)
        self._order = torch.arange(most, dtype=torch.int64, device=device)
        self._compiled = False
        self._specs = tuple(specs_of(dim, index) for index in range(len(layers)))
        self._pages: tuple[Tensor, int] | None = None
        self._scales: list[Tensor] = []  # of every layer, by page
        self.requests: Rows = np.zeros(0, np.int64)
        """Those of a step, where its metadata does not name them."""
        self.built: tuple[Any, Any] | None = None
        """What vLLM asks for in front of a step, and what it was given."""
        self._nothing = SlotStore(SlotShape(self._specs, 1, heads), device)
        self.cache = Int2Cache(
            config,
            self._nothing,
            self.windows,
            table,
            self._pack,
            ops=self._ops,
            prefill=FlashPrefill(compat.flash_attention()) if flash else None,
        )
        self._decoding = Decoding(self._ops, self.windows, self.cache.tables, self.cache.verify)
        for warning in (*chosen.warnings, *artifact.warnings):
            logger.warning("%s", warning)
        logger.info("INT2 KV cache: artifact %s; %s", artifact.told, chosen.describe())

    def forget_pages(self) -> None:
        """vLLM allocates few of them to try its CUDA graphs, and all of them later."""
        self._pages = self.built = None
        self.cache.use(self._nothing)

    def decoding(self, rows: Rows, longest: int | None) -> Decoding:
        """Of these requests, or of all that decode in this step if they are not named."""
        if longest is None:
            return self._decoding
        return Decoding.apart(self._ops, self.windows, rows, longest)

    def step(self, pages: Tensor, size: int) -> Int2Cache:
        """The cache, for requests whose pages of `size` tokens are `[B, most pages]`."""
        if self._pages is None:  # vLLM has allocated them since
            self.cache.use(self._slots(size))
            if not self._compiled:
                self._pages = pages.new_zeros(SHORT, 1), size
                self.cache.compile_kernels(lambda: None)
                self._compiled = True
                for one in self.cache.caches:
                    one.codes[0].zero_()  # written while compiling
        self._pages = pages, size
        return self.cache

    def copy(self, pages: Sequence[Any]) -> None:
        """What lies behind the pages, of which vLLM copies some: a hit ended within them."""
        if pages:
            origin, copied = moved(torch.tensor(pages), self._scales[0].device).T
            for one in self._scales:
                one[copied] = one[origin]

    def _slots(self, size: int) -> SlotStore:
        """Of the pages that vLLM allocated; `placement` says where what lies."""
        heads, specs = self.windows.shape.num_kv_heads, self._specs
        places = [layer.kv_cache for layer in self._layers.values()]
        memory = torch.empty(0, dtype=torch.uint8, device=places[0].device)
        memory.set_(places[0].untyped_storage())
        widths = [heads * sum(map(code_bytes, one)) for one in specs]
        affine = heads * sum(map(row_bytes, specs[0])) - widths[0]  # in all layers
        number = places[0].nbytes // widths[0]
        if self._shared:  # a page behind all others, because others read the first one
            self.unused, number = number, number + size
        rest = memory[-len(specs) * number * affine :].chunk(len(specs))
        starts = [one.storage_offset() * one.itemsize for one in places]
        codes = [memory[i:][: number * width] for i, width in zip(starts, widths, strict=True)]
        self._scales = [one.view(-1, size * affine) for one in rest]
        shape = SlotShape(specs, number, heads)
        return SlotStore(shape, memory.device, [*zip(codes, rest, strict=True)])

    @property
    def batch(self) -> Batch:
        assert self.cache.batch is not None
        return self.cache.batch

    def _pack(self, rows: Tensor, lengths: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
        assert self._pages is not None
        pages, size = self._pages  # in the order of the step
        self._ops.pack(pages, self._order[: len(rows)], lengths, kv_indptr, out, page=size)
