"""What one worker process serves: settings and artifact, read once, and the shapes, stores and
cache that follow from them and the model; and which hooks ran in it.

The memory budget and the allocation both ask here, so they cannot disagree. SGLang swallows
exceptions that are raised while a hook is installed. So each hook notes in `FIRED` that it ran, and
the attention backend refuses to start if one is missing.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from oscar_kernels.spec import (
    CLIP_ALGORITHM,
    MIXED_QUANTIZER,
    PLAIN,
    QUANTIZER,
    QuantSpec,
    group_channels,
)
from oscar_zoo.artifact.specs import check_groups
from oscar_zoo.engines import served_artifact, setting_flags, settings
from oscar_zoo.engines.sglang import compiling, refusals
from oscar_zoo.engines.sglang.compat import forward_batch, geometry, server_arguments
from oscar_zoo.engines.sglang.compat.backends import TritonPrefill
from oscar_zoo.engines.sglang.sizing import SINKS_SHARE
from oscar_zoo.errors import UsageError
from oscar_zoo.models import model_hub, weight_files
from oscar_zoo.runtime import host_pages, memory_plan
from oscar_zoo.runtime.disk_files import DiskFiles
from oscar_zoo.runtime.disk_sinks import DiskSinks
from oscar_zoo.runtime.dispatch import choose_ops
from oscar_zoo.runtime.engine import CacheConfig
from oscar_zoo.runtime.int2_cache import Int2Cache, cache_bytes, make_prefill, piece_tokens
from oscar_zoo.runtime.kept_rings import KeptRings
from oscar_zoo.runtime.sink_blocks import SinkBlocks
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable, transform_bytes

logger = logging.getLogger(__name__)

FIRED: set[str] = set()
"""Hooks that ran in this process with int2."""
BEFORE_BACKEND = frozenset({"rendezvous", "kv_dtype", "slot_bytes", "budget", "rows", "pool"})
"""Hooks that must have run when the attention backend is built."""
HOST_BYTES = 1 << 30
"""Of the host, for first tokens whose place on a GPU was given away, of all ranks together."""
FACTS: dict[str, Any] = {}
"""Numbers for reports that the hooks gave to SGLang."""


@functools.cache
def served() -> tuple[settings.PluginSettings, served_artifact.ServedArtifact]:
    given = settings.read_settings(os.environ)
    artifact = served_artifact.load(
        given.source, given.expected_digest, model=os.environ.get(setting_flags.MODEL)
    )
    final = settings.read_settings(os.environ, artifact.recipe)
    if final.copy_of is not None:
        artifact = artifact.copy_of(final.copy_of)
    return replace(final, warnings=final.warnings + artifact.warnings), artifact


def kept_by_hits() -> int:
    return served()[0].refilled


def eager_only(server_args: Any) -> bool:
    return not str(server_arguments.resolved(server_args).device).startswith("cuda")


def scratch_bytes(owner: Any, device: str, slots: SlotShape, windows: WindowShape) -> int:
    """Bytes that the INT2 cache allocates beside pool and transforms."""
    whole = cache_bytes(
        slots,
        windows,
        choose_ops(device),
        num_q_heads=geometry.local_q_heads(owner.model_config),
        max_tokens=geometry.longest_request(owner),
        piece_tokens=piece_tokens(device),
        device=device,
    )
    if server_arguments.published().enable_hierarchical_cache:
        page = int(server_arguments.published().page_size)
        whole += host_pages.stage_bytes(slots.token_bytes() * page)
    if device.startswith("cuda"):
        # The write kernel keeps a copy of the transforms; see `oscar_kernels.kv_write.dispatch`.
        artifact = served()[1]
        whole += transform_bytes(artifact.k, artifact.v, slots.num_layers, slots.num_kv_heads)
    return whole


def fixed_memory(configurator: Any, *, num_rows: int) -> memory_plan.MemoryPlan:
    artifact, slots = served()[1], slot_shape(configurator, num_slots=0)
    windows = window_shape(configurator, num_rows=num_rows)
    transforms = transform_bytes(artifact.k, artifact.v, slots.num_layers, slots.num_kv_heads)
    scratch = scratch_bytes(configurator, str(configurator.device), slots, windows)
    return memory_plan.plan(slots, windows, transforms, scratch=scratch)


def make_stores(
    slots: SlotShape, windows: WindowShape, device: str
) -> tuple[SlotStore, WindowStore]:
    owners = sink_blocks(windows), KeptRings(kept_by_hits(), windows.drafts)
    return SlotStore(slots, device), WindowStore(windows, device, *owners)


def make_cache(
    config: CacheConfig,
    slots: SlotStore,
    windows: WindowStore,
    transforms: TransformTable,
    slot_table: Tensor,
) -> Int2Cache:
    ops = choose_ops(config.device)
    cache = Int2Cache(
        config,
        slots,
        windows,
        transforms,
        functools.partial(ops.pack, slot_table),
        ops=ops,
        prefill=make_prefill(config, windows.shape, of_engine=TritonPrefill),
    )
    cache.compile_kernels(compiling.wait)
    return cache


def check_model(model_config: Any, args: Any = None) -> None:
    refusals.check_model(model_config)
    if args is not None:
        others = geometry.other_layers(model_config)
        refusals.check_layers(args, others)
        if geometry.is_latent(model_config):
            resolved, bits = server_arguments.resolved(args), served()[0].bits.k
            refusals.check_latents(resolved, others, bits)
        if others == "windows" and refusals.has_draft_model(args):
            forward_batch.draft_model(args, args)
    latent, dims = geometry.is_latent(model_config), geometry.row_dims(model_config)
    served()[1].check_geometry(
        layer_ids=geometry.full_layers(model_config),
        num_kv_heads=geometry.kv_heads(model_config),
        head_dim=dims[0],
        v_head_dim=dims[0] if latent else dims[1],
        latent=latent,
    )


def sink_blocks(shape: WindowShape) -> SinkBlocks:
    return SinkBlocks(shape.sink, shape.num_blocks, served()[0].refilled or None, shape.host)


def disk_files(pool: Any, page_size: int) -> DiskFiles:
    """The files of pages and first tokens, which the windows of the pool use from now on."""
    chosen, given = served()[0], server_arguments.published()
    size = None if chosen.disk_size is None else chosen.disk_size * 10**9
    tag = disk_tag(pool.slots.shape, pool.windows.shape, page_size, given)
    files = DiskFiles(Path(chosen.disk_cache or ""), tag, size)
    told = "INT2 KV cache: prompts in up to %.1f GB of %s, tag %s"
    logger.info(told, files.limit / 1e9, chosen.disk_cache, tag)
    DiskSinks(files, pool.windows)
    pool.disk_counts, FACTS["disk_bytes"] = files.counts, files.limit
    return files


def disk_tag(slots: SlotShape, windows: WindowShape, page_size: int, args: Any) -> str:
    """Names all that decides the bytes of a record beside tokens, and how they are to be read."""
    folder = Path(args.model_path)
    found = folder if folder.is_dir() else model_hub.kept_config(args.model_path, args.revision)
    if found is None:
        raise UsageError(
            f"the files of {args.model_path} are in no folder and no cache of a hub.",
            hint="a disk cache works with a model in a folder",
        )
    parts = (
        served()[1].digest,
        (slots.specs, slots.num_kv_heads, QUANTIZER, MIXED_QUANTIZER, CLIP_ALGORITHM),
        (windows.sink, windows.k_head_dim, windows.v_head_dim, windows.dtype),
        (page_size, host_pages.LAYERS),
        (geometry.attention_ranks(), args.tp_size),
        (args.dtype, args.quantization, args.json_model_override_args),
        weight_files.fingerprint(found),
    )
    return "oz1-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def slot_shape(configurator: Any, *, num_slots: int) -> SlotShape:
    model = configurator.model_config
    by_layer = layer_specs(model)
    specs = tuple(by_layer[layer] for layer in geometry.worker_layers(configurator))
    return SlotShape(specs, num_slots, len(geometry.local_kv_heads(model)))


def layer_specs(model_config: Any) -> dict[int, tuple[QuantSpec, QuantSpec]]:
    chosen = served()[0]
    dims, latent = geometry.row_dims(model_config), geometry.is_latent(model_config)
    size = chosen.group_size or max(dims)
    layers = geometry.full_layers(model_config)
    chosen.check_layers(len(layers))

    def spec(role: Literal["k", "v"], dim: int, index: int) -> QuantSpec:
        bits, clip = chosen.code(role, index)
        return QuantSpec(dim, group_channels(dim, size), clip, bits=bits)

    sides = [[chosen.code(role, i) for i in range(len(layers))] for role in ("k", "v")]
    if latent and sides[0] != sides[1]:
        raise UsageError(
            "latents are keys and values at once, with the same codes for both.",
            hint="give both sides the same bits and the same clip ratio",
        )
    coded = (dims[0], dims[0]) if latent else dims
    check_groups(coded, size, "this model", option="--oscar-group-size={}")
    rotary = QuantSpec(dims[1], dims[1], bits=PLAIN)
    return {
        layer: (spec("k", dims[0], index), rotary if latent else spec("v", dims[1], index))
        for index, layer in enumerate(layers)
    }


def window_shape(configurator: Any, *, num_rows: int) -> WindowShape:
    chosen, model = served()[0], configurator.model_config
    idle, drafts = chosen.idle_sinks, forward_batch.most_drafts()
    if drafts > chosen.recent:
        raise UsageError(
            f"{drafts} draft tokens do not fit into a window of {chosen.recent} tokens.",
            hint=f"--oscar-recent-size {drafts}, or fewer --speculative-num-draft-tokens",
        )
    k_head_dim, v_head_dim = geometry.row_dims(model)
    shape = WindowShape(
        num_layers=len(geometry.worker_layers(configurator)),
        num_rows=num_rows,
        num_kv_heads=len(geometry.local_kv_heads(model)),
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
        sink=chosen.sink,
        recent=chosen.recent,
        dtype=configurator.model_dtype,
        idle=0 if chosen.sink == 0 else num_rows - 1 if idle is None else idle,
        drafts=drafts,
        ranks=geometry.attention_ranks(),
    )
    host = chosen.host_sinks
    if host is None:  # by what is alike on all ranks, which must decide alike
        usual = HOST_BYTES if str(configurator.device).startswith("cuda") else 0
        usual = max(usual, int(SINKS_SHARE * server_arguments.host_cache_bytes() * shape.ranks))
        whole = replace(shape, num_layers=len(geometry.full_layers(model)))
        host = usual // max(1, shape.sink * whole.token_bytes * shape.ranks)
    return replace(shape, host=host)
