"""Small random models of many architectures, and the rows their attention sees, found without the
tap.

Rows come from hooks on the models' own projections and norms; rotary embedding and softmax
attention are computed here.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.models.attention import EXACT, Softmax
from oscar_zoo.models.geometry import model_block
from oscar_zoo.models.loading import LoadedModel

VOCABULARY = 96
HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": HYBRID,
}
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip
SLIDING = {"layer_types": WINDOWED, "sliding_window": 8}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {"num_hidden_layers": 2, "attention_bias": True},
    "Qwen2": {"num_hidden_layers": 2},
    "Qwen3": {"num_hidden_layers": 2},
    "Olmo2": {"num_hidden_layers": 2},
    "Qwen3Moe": {"num_hidden_layers": 2, **MOE},
    "Qwen3Next": {**LINEAR, **MOE, "shared_expert_intermediate_size": 16},
    "Qwen3_5Text": LINEAR,
    "Gemma3Text": {**SLIDING, "query_pre_attn_scalar": 16},
    "Gemma2": {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "GptOss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {
        "head_dim": None, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "Bamba": {
        "head_dim": None, "attn_layer_indices": [1, 3], "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_n_groups": 1, "mamba_d_state": 8,
    },
}  # fmt: skip
"""By prefix of the class: what differs from the common shape."""


def build(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> LoadedModel:
    """A random model of `family`, with larger weights than usual, so that attention is not flat.
    `None` leaves an entry of its configuration out."""
    import transformers

    shape = {**COMMON, **FAMILIES.get(family, {}), **changes}
    given = {name: value for name, value in shape.items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**given)
    kind = family.removesuffix("Text")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
            elif name.endswith("sinks"):
                parameter.normal_()
    model.set_attn_implementation(EXACT)
    model.set_experts_implementation("eager")  # the others know no float64
    block = model_block(config, model_id=f"tests/{family}", revision=None, config_sha256="0" * 64)
    return LoadedModel(model, None, block, str(dtype).removeprefix("torch."))


def llama_in_gguf(path: Path) -> dict[str, Tensor]:
    """Write a Llama model as llama.cpp does, with a vocabulary for `ab12`; its weights in bfloat16
    by their names in Hugging Face."""
    import gguf

    shape = {"num_hidden_layers": 2, "vocab_size": 8, "tie_word_embeddings": True, "head_dim": 8}
    model = build("Llama", torch.bfloat16, **shape, attention_bias=False).model
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    file = gguf.GGUFWriter(path, "llama")
    for name, weight in model.base_model.named_parameters(prefix="model"):
        values = weight.detach().float().numpy()
        if "q_proj" in name or "k_proj" in name:  # numbers that turn together lie side by side
            values = values.reshape(-1, 2, 4, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        file.add_tensor(names.get_name(name, (".weight",)), values.copy())
    file.add_block_count(2)
    file.add_context_length(256)
    file.add_embedding_length(32)
    file.add_feed_forward_length(48)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(10_000.0)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    file.add_token_list([*control, "a", "b", "1", "2", "ab"])
    file.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    file.add_token_merges(["a b"])
    for add, token in (
        (file.add_unk_token_id, 0), (file.add_bos_token_id, 1), (file.add_eos_token_id, 2),
        (file.add_pad_token_id, 2),
    ):  # fmt: skip
        add(token)
    file.add_chat_template("chat")
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return dict(model.state_dict())


def sequences(*lengths: int, seed: int = 0, vocabulary: int = VOCABULARY) -> CalibrationData:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths)
    return CalibrationData(tuple(tuple(x.tolist()) for x in drawn), sum(lengths), "random")


@dataclasses.dataclass
class Rows:
    """Rows of one layer over all sequences, `[heads, T, d]`; `output` from softmax attention in
    float64 here."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def attention_rows(loaded: LoadedModel, data: Sequence[Sequence[int]]) -> dict[int, Rows]:
    parts: dict[int, list[Rows]] = {layer: [] for layer in loaded.block.attention_layers}
    for ids in data:
        with _hooked(loaded, parts), torch.inference_mode():
            loaded.model.base_model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    names = [field.name for field in dataclasses.fields(Rows)]
    return {
        layer: Rows(**{name: torch.cat([getattr(one, name) for one in rows], 1) for name in names})
        for layer, rows in parts.items()
    }


@contextmanager
def _hooked(loaded: LoadedModel, parts: dict[int, list[Rows]]) -> Iterator[None]:
    handles = []
    for attention in loaded.model.modules():
        if getattr(attention, "layer_idx", None) in parts and hasattr(attention, "q_proj"):
            handles += _watch(attention, parts[attention.layer_idx])
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(attention: Any, rows: list[Rows]) -> list[Any]:
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, output)

    def positions(module: Any, args: Any, kwargs: Any) -> None:
        seen["positions"] = kwargs.get("position_embeddings") or args[1]

    def finish(module: Any, args: Any, output: Any) -> None:
        width = attention.head_dim
        q, k, v = (by_head(seen[name][0], seen["v"].shape[1], width) for name in "qkv")
        angles = [part[0] for part in seen["positions"]]
        if hasattr(attention, "sinks"):  # gpt-oss gives the angle of a pair once
            angles = [torch.cat([part, part], -1) for part in angles]
        q, k = (rotated(x, *angles) for x in (q, k))
        more = (getattr(attention, name, None) for name in ("attn_logit_softcapping", "sinks"))
        out = softmax_attention(q, k, v, Softmax(attention.scaling, *more))
        rows.append(Rows(q, k, v, out))

    handles = [attention.register_forward_pre_hook(positions, with_kwargs=True)]
    for name in "qkv":
        module = first(attention, f"{name}_norm", f"{name}_layernorm", f"{name}_proj")
        handles.append(module.register_forward_hook(keep(name)))
    return [*handles, attention.register_forward_hook(finish)]


def first(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if getattr(module, name, None) is not None)


def by_head(x: Tensor, tokens: int, width: int) -> Tensor:
    """`[heads, T, d]` from that, from `[T, heads, d]` or from `[T, heads * d]`."""
    there = x.ndim == 3 and x.shape[0] != tokens
    return x if there else x.reshape(tokens, -1, width).transpose(0, 1)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of `[heads, T, d]`, halves paired, over the first channels where the
    embedding is narrower."""
    width = cosine.shape[-1]
    turn, rest = x[..., :width], x[..., width:]
    first, second = turn.chunk(2, -1)
    return torch.cat([turn * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
    """Causal, in float64, query head j reading KV head j // g."""
    group = query.shape[0] // key.shape[0]
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 0) for x in (key, value))
    logits = q @ k.mT * softmax.scaling
    if softmax.cap is not None:
        logits = softmax.cap * (logits / softmax.cap).tanh()
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    logits = logits.masked_fill(later, float("-inf"))
    if softmax.sinks is not None:
        sink = softmax.sinks.double()[:, None, None].expand(*logits.shape[:2], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1) @ v


def same_sum(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit; of a stack of matrices, the lower triangles are the sums."""
    return torch.equal(one.tril(), other.tril()) if one.ndim == 3 else torch.equal(one, other)


INDEX = "model.safetensors.index.json"


def save_model(
    folder: Path,
    family: str = "Qwen3",
    *,
    shard: str = "5GB",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Write weights and the example's tokenizer; files of at most about `shard`."""
    build(family, dtype, **changes).model.save_pretrained(folder, max_shard_size=shard)
    for name in TOKENIZER:
        shutil.copyfile(EXAMPLE / name, folder / name)
    return folder


def quantize_blocks(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """float8 weight, its scales `[blocks, blocks]`, and the bfloat16 weights they stand for; block
    after block."""
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    exact = torch.empty_like(weight, dtype=torch.bfloat16)
    rows, columns = (range(0, size, step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.empty(len(rows), len(columns))
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            at = slice(top, top + block[0]), slice(left, left + block[1])
            scales[i, j] = weight[at].float().abs().max() / 448
            stored[at] = (weight[at].float() / scales[i, j]).to(stored.dtype)
            exact[at] = (stored[at].float() * scales[i, j]).to(exact.dtype)
    return stored, scales, exact


def float8_pair(
    source: Path, folder: Path, block: tuple[int, int] = (128, 128)
) -> tuple[Path, Path]:
    """A checkpoint with float8 projections, and one with the bfloat16 weights that it stands
    for."""
    quantized, plain = (shutil.copytree(source, folder / name) for name in ("float8", "plain"))
    small: dict[str, Tensor] = {}
    exact = load_file(source / "model.safetensors")
    for name, weight in exact.items():
        small[name] = weight
        if name.endswith("_proj.weight"):
            small[name], small[f"{name}_scale_inv"], exact[name] = quantize_blocks(weight, block)
    save_file(small, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    format_of = {"quant_method": "fp8", "weight_block_size": list(block)}
    change_config(quantized, quantization_config=format_of)
    return quantized, plain


def change_config(folder: Path, *, part: str | None = None, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (config[part] if part else config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))


EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def write_model(
    folder: Path, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, head_dim: int = 16
) -> Path:
    """Write float32 weights of a model with context 256 and the example's tokenizer; returns
    `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copyfile(EXAMPLE / name, folder / name)
    return folder
