"""A model and its tokenizer at a pinned revision, and the one place that taps its attention.

The only module of this package that knows `transformers`. Weights come from safetensors only, and
code that ships with a checkpoint is never run. `attention_scope` replaces what every full-attention
layer computes and touches nothing else, so whatever is simulated inside it needs no copy of any
architecture.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.errors import (
    InvalidModel,
    MissingDependency,
    NetworkError,
    PathNotFound,
    UnsupportedModel,
)
from oscar_zoo.models import (
    config_file,
    model_hub,
    torchvision_ops,  # noqa: F401  (transformers imports torchvision)
)
from oscar_zoo.models.geometry import float8_block, model_block
from oscar_zoo.models.model_folder import check_model_folder

try:
    import torch
    from torch import Tensor
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import cached_file
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise MissingDependency.for_extra(error.name or "transformers", "compute") from error

# isort: split

from oscar_zoo.models import checkpoint
from oscar_zoo.models.memory import FreeMemory, Workload, free_memory
from oscar_zoo.models.placement import PlacementRequest, place_model

Dtype = Literal["auto", "float32", "bfloat16"]
AttentionFn = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""`(layer_id, query [B, n_q, T, d], key [B, n_kv, T, d], value [B, n_kv, T, dv], scaling) -> output
[B, n_q, T, dv]`"""

SCOPE = "oscar_zoo_scope"
BLOCKED = {
    "s_aux": "attention sinks",
    "softcap": "logit soft-capping",
    "position_bias": "a position bias",
}
"""Arguments of an attention call that change the softmax, and what they are; `attention_scope`
refuses them."""


@dataclass(frozen=True)
class ModelSize:
    """How large a model is.

    Attributes:
        parameters: all of them.
        active: those that one token meets: of a mixture of experts only the experts that it is sent
            to.
    """

    parameters: int
    active: int


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in memory.

    Attributes:
        model: the `transformers` model, in evaluation mode.
        tokenizer: its tokenizer.
        block: what a manifest says about it.
        dtype: of its weights as loaded, such as `bfloat16`.
        streamed: every decoder layer is read from its file when it runs: run many sequences through
            one at a time.
        notes: what the user should know about how it was loaded.
    """

    model: Any
    tokenizer: Any
    block: ModelBlock
    dtype: str
    streamed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where token ids go, also when accelerate keeps the weights elsewhere."""
        embedding = self.model.get_input_embeddings()
        device: torch.device = embedding.weight.device
        return (
            torch.device(embedding._hf_hook.execution_device) if device.type == "meta" else device
        )

    @property
    def spread(self) -> bool:
        """Whether its layers are on several devices."""
        return len(set(getattr(self.model, "hf_device_map", {}).values())) > 1


def inspect_model(
    path_or_id: str, *, revision: str | None = None, model_id: str | None = None
) -> ModelBlock:
    """Describe a model from its `config.json` alone.

    Args:
        path_or_id: a local folder or a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id.
        model_id: recorded as `id`; by default the Hugging Face id, or the name of the folder.

    Raises:
        PathNotFound: there is no such folder.
        InvalidModel: the folder or repository has no readable configuration.
        UnsupportedModel: see `geometry.model_block`.
    """
    return _read_config(path_or_id, revision, model_id)[1]


def config_folder(path_or_id: str, *, revision: str | None = None) -> Path:
    """The folder with the `config.json` of a model, fetched when it is not here; raises as
    `inspect_model`."""
    folder = _local_folder(path_or_id)
    if folder is not None:
        return folder
    try:
        return Path(
            cached_file(
                path_or_id,
                config_file.NAME,
                revision=revision or "main",
                **model_hub.search_limits(),
            )
        ).parent
    except Exception as error:  # as for the configuration
        raise _unusable(path_or_id, "its config.json", error) from None


def model_size(path_or_id: str, *, revision: str | None = None) -> ModelSize | None:
    """Count parameters from `config.json` alone: the model is built without memory for its weights.

    Returns:
        The size, or `None` when this model class cannot be built that way.
    """
    where, source = _place(path_or_id, revision)
    try:
        config = AutoConfig.from_pretrained(where, **source)
        with torch.device("meta"), _silent_transformers():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # a size is only told; what is wrong with a model is said by whoever loads it
        return None
    text = config.get_text_config(decoder=True)
    counts = (
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    share = getattr(text, "num_experts_per_tok", None) or 1
    number = next((count for count in counts if count), share)
    sizes = [
        (parameter.numel(), ".experts." in name) for name, parameter in model.named_parameters()
    ]
    idle = sum(size for size, of_expert in sizes if of_expert) * (number - share) // number
    total = sum(size for size, _ in sizes)
    return ModelSize(total, total - idle)


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
    """Load weights and tokenizer; arguments as for `inspect_model`.

    Args:
        dtype: of the weights in memory; `auto` keeps the type they are stored in, bfloat16 for
            float8.
        device: a torch device that holds the whole model, or `auto` for all GPUs and then main
            memory.
        stream: read decoder layers when they run, one at a time; `None` does so when the model does
            not fit otherwise.
        workload: what will run, for the memory it takes.
        free: how much memory a device has.

    Raises:
        PathNotFound, UnsupportedModel: as `inspect_model`; also a quantization that is not read
            here.
        InvalidModel: configuration, weights or tokenizer are missing, damaged, or not in
            safetensors.
        NotEnoughMemory: it does not fit; known before weights are read.
        MissingDependency: `auto` needs accelerate.
    """
    config, block = _read_config(path_or_id, revision, model_id)
    blocks = float8_block(config, block.id)
    folder = _local_folder(path_or_id)
    if folder is not None:
        check_model_folder(folder)
    where, source = _place(path_or_id, block.revision or revision)
    stored = checkpoint.open_weights(folder or _fetch_weights(where, source), block=blocks)
    tokenizer = load_tokenizer(path_or_id, revision=block.revision or revision)
    model = _build(where, config, stored, dtype)
    wish = PlacementRequest(device, stream, workload or Workload(), free)
    placed = place_model(model, block.id, block.num_layers, wish)
    kind = str(model.dtype).removeprefix("torch.")
    return LoadedModel(model.eval(), tokenizer, block, kind, placed.streamed, placed.notes)


def load_tokenizer(path_or_id: str, *, revision: str | None = None) -> Any:
    """Load the tokenizer alone; arguments as for `inspect_model`.

    Raises:
        InvalidModel: it is missing or damaged.
    """
    where, source = _place(path_or_id, revision)
    try:
        return AutoTokenizer.from_pretrained(where, **source)
    except (
        Exception
    ) as error:  # as for the configuration: a tokenizer's own error types are not public
        raise _unusable(path_or_id, "its tokenizer", error) from None


def _place(path_or_id: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a model, and how it may look."""
    folder = _local_folder(path_or_id)
    if folder is not None:
        return str(folder), {"trust_remote_code": False, "local_files_only": True}
    return path_or_id, {
        "trust_remote_code": False,
        "revision": revision or "main",
        **model_hub.search_limits(),
    }


@contextmanager
def attention_scope(model: LoadedModel, fn: AttentionFn) -> Iterator[None]:
    """Send every full-attention call of `model` to `fn` while the scope is open.

    Queries and keys arrive after qk-norm and RoPE, keys and values before head repetition, and no
    mask arrives: `fn` decides which keys each query reads. Layers of other kinds compute as always.
    Batches must not be padded.

    Args:
        model: left as it was found.
        fn: see `AttentionFn`.

    Raises:
        UnsupportedModel: a full-attention layer did not call `fn`, or has a softmax this package
            does not simulate.
    """
    wanted, seen = set(model.block.attention_layers), set[int]()
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def routed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        layer_id = getattr(module, "layer_idx", None)
        if layer_id not in wanted:
            result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **rest)
            return result
        for name, what in BLOCKED.items():
            if rest.get(name) is not None:
                raise UnsupportedModel(
                    f"layer {layer_id} of {model.block.id} uses {what}, which is not simulated."
                )
        seen.add(layer_id)
        scaling = rest.get("scaling")
        output = fn(
            layer_id,
            query,
            key,
            value,
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        )
        return output.transpose(1, 2).contiguous(), None

    before = model.model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[SCOPE] = routed
    # masks are made for registered names only: without them, sliding-window layers would see
    # everything
    ALL_MASK_ATTENTION_FUNCTIONS.register(SCOPE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.model.set_attn_implementation(SCOPE)
        yield
    finally:
        model.model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[SCOPE]
    if missing := sorted(wanted - seen):
        raise UnsupportedModel(
            f"attention of layers {missing} of {model.block.id} was never reached.",
            hint="its attention code does not use transformers' attention interface",
        )


def _local_folder(path_or_id: str) -> Path | None:
    """The folder that is meant, or `None` for a Hugging Face id: `org/name`, and no such folder
    here."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InvalidModel(
            f"{path_or_id} is a file, not a model folder.", hint="name the folder that holds it"
        )
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path_or_id):
        return None
    raise PathNotFound.for_path(path_or_id, "model folder")


def _read_config(
    path_or_id: str, revision: str | None, model_id: str | None
) -> tuple[Any, ModelBlock]:
    folder = _local_folder(path_or_id)
    source: dict[str, Any] = {"local_files_only": True}
    if folder is None:
        source = {"revision": revision or "main", **model_hub.search_limits()}
    if folder and not (folder / "config.json").is_file():
        raise InvalidModel(
            f"{path_or_id} has no config.json.", hint="name the folder of a Hugging Face checkpoint"
        )
    where = str(folder or path_or_id)
    try:
        config_file = Path(cached_file(where, "config.json", **source))
        config = AutoConfig.from_pretrained(where, trust_remote_code=False, **source)
    except Exception as error:  # a file anybody wrote, read by code that raises whatever it meets
        raise _unusable(path_or_id, "its config.json", error) from None
    return config, model_block(
        config,
        model_id=model_id or (folder.name if folder else path_or_id),
        revision=None if folder else getattr(config, "_commit_hash", None),
        config_sha256=hashlib.sha256(config_file.read_bytes()).hexdigest(),
    )


def _fetch_weights(where: str, source: dict[str, Any]) -> Path:
    """The folder with the weight files of a Hugging Face id, downloaded when they are not here."""
    try:
        with _silent_transformers():
            single = cached_file(
                where, checkpoint.SINGLE, _raise_exceptions_for_missing_entries=False, **source
            )
            if single is not None:
                return Path(single).parent
            index = Path(cached_file(where, checkpoint.INDEX, **source))
            named = checkpoint.index_files(index.read_bytes(), f"{checkpoint.INDEX} of {where}")
            for name in sorted(set(named.values())):
                cached_file(where, name, **source)
    except (OSError, ValueError) as error:
        raise _unusable(where, "its weights", error) from None
    return index.parent


def _build(
    where: str, config: Any, stored: dict[str, checkpoint.CheckpointFile], dtype: Dtype
) -> Any:
    """The model with weights that are not read: transformers renames, joins and ties what it gets
    for tensors."""
    for part in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # `stored` stands for the weights as they were before
    try:
        with _silent_transformers():
            with torch.device("meta"):
                outline = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            model, report = type(outline).from_pretrained(
                None,
                config=outline.config,
                state_dict=stored,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the name of a tensor
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unusable(where, "its weights", error) from None
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise InvalidModel(
            f"the weights of {where} do not fit its config.json: "
            f"{name} has shape {list(stored)}, the configuration wants {list(wanted)}.",
            hint="the two files belong to different models; download both again",
        )
    if missing := sorted(report["missing_keys"]):
        raise InvalidModel(
            f"the weights of {where} lack {len(missing)} tensors, the first is {missing[0]}.",
            hint="the checkpoint is incomplete; download it again",
        )
    return model


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """No progress bar and no report of its own from transformers: what it would say becomes one
    error of ours."""
    bars, level = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _unusable(where: str, what: str, error: Exception) -> InvalidModel | NetworkError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    cause = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    trouble = None if Path(where).is_dir() else model_hub.unreachable()
    if trouble is not None:
        return NetworkError(
            f"{where} is not complete on this machine, and Hugging Face cannot be reached:"
            f" {trouble}.",
            hint="check the network, or give a local folder",
        )
    if not Path(where).is_dir() and ("connect" in cause or "offline" in cause):
        return NetworkError(
            f"cannot load {where}: {cause[:300]}", hint="check the network, or give a local folder"
        )
    return InvalidModel(
        f"cannot load {where}: {what}: {cause[:300]}",
        hint=(
            "it needs config.json, *.safetensors and a tokenizer"
            if Path(where).is_dir()
            else "check its name, the revision and the network, or give a local folder"
        ),
    )
