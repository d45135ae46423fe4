"""Load a model and its tokenizer at a pinned revision.

Weights come from safetensors files only, and code that ships with a checkpoint never runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.errors import InvalidModel, UnsupportedModel
from oscar_zoo.models.config_file import refuse_chosen_code
from oscar_zoo.models.geometry import float8_block
from oscar_zoo.models.model_source import (
    local_folder,
    read_model_config,
    silent_transformers,
    source_options,
    unusable,
)
from oscar_zoo.models.weight_files import check_model_folder

# isort: split

import torch
from transformers import AutoTokenizer
from transformers.utils import cached_file

from oscar_zoo.models import checkpoint, weight_files
from oscar_zoo.models.attention import EXACT
from oscar_zoo.models.memory import FreeMemory, Workload, free_memory
from oscar_zoo.models.model_source import outline
from oscar_zoo.models.placement import place_model

Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory, in evaluation mode. Where it is `streamed`, every decoder
    layer is read from its file when it runs, so run many sequences through one layer before the
    next. `notes` are remarks for the user."""

    model: Any
    tokenizer: Any
    block: ModelBlock
    dtype: str
    streamed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The device that token ids must be on, also when accelerate offloads the embedding."""
        embedding = self.model.get_input_embeddings()
        device: torch.device = embedding.weight.device
        return (
            torch.device(embedding._hf_hook.execution_device) if device.type == "meta" else device
        )

    @property
    def spread(self) -> bool:
        return len(set(getattr(self.model, "hf_device_map", {}).values())) > 1


def load_model(
    path_or_id: str,
    *,
    revision: str | None = None,
    dtype: Dtype = "auto",
    device: str = "cpu",
    model_id: str | None = None,
    stream: bool | None = None,
    workload: Workload | None = None,
    free: FreeMemory = free_memory,
) -> LoadedModel:
    """Load weights and tokenizer; arguments as for `inspect_model`. `dtype` `auto` keeps the stored
    type, and bfloat16 for float8; `device` `auto` fills all GPUs first and then main memory;
    without `stream`, layers are read one by one only where the model does not fit otherwise; the
    sequences of `workload` take memory beside the weights, of which `free` says how much a device
    has."""
    read = read_model_config(path_or_id, revision, model_id)
    config, block = read.parsed, read.block
    blocks = float8_block(config, block.id)
    folder = local_folder(path_or_id)
    if folder is not None:
        check_model_folder(folder)
    where, source = source_options(path_or_id, block.revision or revision)
    stored = checkpoint.open_weights(folder or _fetch_weights(where, source), block=blocks)
    tokenizer = load_tokenizer(path_or_id, revision=block.revision or revision)
    model = _build(where, block.id, config, stored, dtype)
    streamed, notes = place_model(
        model,
        block.id,
        block.num_layers,
        device=device,
        stream=stream,
        workload=workload or Workload(),
        free=free,
    )
    kind = str(model.dtype).removeprefix("torch.")
    return LoadedModel(model.eval(), tokenizer, block, kind, streamed, notes)


@contextmanager
def float32_arithmetic(model: LoadedModel, *, free: FreeMemory = free_memory) -> Iterator[None]:
    """Run a model in float32 for a while, with the same weights. A model that is read layer by
    layer, lies on several devices or has no room for them stays as it is."""
    inner = model.model
    tensors = list(chain(inner.parameters(), inner.buffers()))
    short = [one for one in tensors if one.dtype in (torch.bfloat16, torch.float16)]
    more = sum(one.numel() * (4 - one.itemsize) for one in short)
    if model.streamed or model.spread or 2 * more > free(model.device):
        yield
        return
    kept = [(one, one.dtype) for one in short]
    try:
        for one in short:
            one.data = one.data.float()
        yield
    finally:
        for one, dtype in kept:
            one.data = one.data.to(dtype)


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are not those of its `config.json`, from headers alone. What
    transformers does not run, or is quantized in a way that is not read here, passes: an engine may
    know more."""
    where, read = str(folder), read_model_config(str(folder), None, None)
    try:
        blocks = float8_block(read.parsed, read.block.id)
        stored = checkpoint.open_weights(folder, block=blocks)
        _build(where, read.block.id, read.parsed, stored, "auto")
    except UnsupportedModel:
        return


def load_tokenizer(path_or_id: str, *, revision: str | None = None) -> Any:
    where, source = source_options(path_or_id, revision)
    try:
        folder = local_folder(path_or_id)
        if folder is None:
            told = {"_raise_exceptions_for_missing_entries": False, **source}
            file = cached_file(where, "tokenizer_config.json", **told)
            folder = file and Path(file).parent
        if folder is not None:
            refuse_chosen_code(folder, path_or_id)
        return AutoTokenizer.from_pretrained(where, **source)
    except InvalidModel:
        raise
    except Exception as error:  # the error types of a tokenizer are not public
        raise unusable(path_or_id, "its tokenizer", error) from None


def _fetch_weights(where: str, source: dict[str, Any]) -> Path:
    """The folder with the weight files of a Hugging Face id, downloaded when they are not here."""
    try:
        with silent_transformers():
            single = cached_file(
                where, weight_files.SINGLE, _raise_exceptions_for_missing_entries=False, **source
            )
            if single is not None:
                return Path(single).parent
            index = Path(cached_file(where, weight_files.INDEX, **source))
            named = weight_files.index_files(index.read_bytes(), f"{weight_files.INDEX} of {where}")
            for name in sorted(set(named.values())):
                cached_file(where, name, **source)
    except (OSError, ValueError) as error:
        raise unusable(where, "its weights", error) from None
    return index.parent


def _build(
    where: str,
    model_id: str,
    config: Any,
    stored: dict[str, checkpoint.CheckpointFile],
    dtype: Dtype,
) -> Any:
    """Build the model around lazy weights. transformers renames, joins and ties the
    `CheckpointFile`s as if they were tensors; no number is read here."""
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # `stored` gives dequantized weights
    try:
        with silent_transformers():
            with torch.device("meta"):
                empty = outline(config, model_id)
            model, report = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=stored,
                dtype=dtype,
                attn_implementation=EXACT,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the name of a tensor
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise unusable(where, "its weights", error) from None
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        said = f"{name} has shape {list(stored)}, the configuration wants {list(wanted)}"
        message = f"the weights of {where} do not fit its config.json: {said}."
        raise InvalidModel(message, hint="they belong to different models; download both again")
    if missing := sorted(report["missing_keys"]):
        message = f"the weights of {where} lack {len(missing)} tensors, the first is {missing[0]}."
        raise InvalidModel(message, hint="the checkpoint is incomplete; download it again")
    return model
