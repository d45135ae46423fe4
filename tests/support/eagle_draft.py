"""A small draft model of EAGLE3 for the example model, trained for seconds on its text, so that the
tokens it guesses depend on hidden states, and on its own cache of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

AUX, LENGTH, ROWS, STEPS = [1, 2, 3], 128, 64, 60


def write_draft(model: Any, ids: list[int], folder: Path) -> Path:
    """`model`: a `LoadedModel` of float32. `ids`: text, of which 8,192 tokens are used."""
    with torch.device(model.device):
        return _write_draft(model, ids, folder)


def _write_draft(model: Any, ids: list[int], folder: Path) -> Path:
    config, torch_model = model.model.config, model.model
    rows = torch.tensor(ids[: ROWS * LENGTH]).view(-1, LENGTH)
    with torch.no_grad():
        outputs = [torch_model(part, output_hidden_states=True) for part in rows.split(16)]
        hidden = torch.cat([torch.cat([o.hidden_states[i] for i in AUX], -1) for o in outputs])
        wanted = torch.cat([one.logits.argmax(-1) for one in outputs])
    table = torch_model.get_input_embeddings().weight.detach()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draft = Draft(config.hidden_size, config.head_dim)
        adam = torch.optim.AdamW(draft.parameters(), lr=3e-3)
        for _ in range(STEPS):
            some = torch.randint(ROWS, (4,))
            states = draft(hidden[some, :-1], table[rows[some, 1:]])
            loss = functional.cross_entropy(
                (states @ table.T).flatten(0, 1), wanted[some, 1:].flatten()
            )
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    folder.mkdir()
    save_file(draft.state_dict(), folder / "model.safetensors")
    told = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX},
        "eagle_aux_hidden_state_layer_ids": AUX,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(told))
    return folder


class Draft(nn.Module):
    """Names of weights are those of published drafts."""

    def __init__(self, size: int, head_dim: int) -> None:
        super().__init__()

        def linear(inner: int, outer: int) -> nn.Module:
            return nn.Linear(inner, outer, bias=False)

        self.size, self.head_dim = size, head_dim
        self.fc, self.norm = linear(len(AUX) * size, size), nn.RMSNorm(size, 1e-6)
        attention = {"q_proj": 4 * head_dim, "k_proj": head_dim, "v_proj": head_dim}
        own = {name: linear(2 * size, width) for name, width in attention.items()}
        own["o_proj"] = linear(4 * head_dim, size)
        mlp = {name: linear(size, size) for name in ("gate_proj", "up_proj", "down_proj")}
        norms = "hidden_norm", "input_layernorm", "post_attention_layernorm"
        layer = {name: nn.RMSNorm(size, 1e-6) for name in norms}
        self.midlayer = nn.ModuleDict(
            {"self_attn": nn.ModuleDict(own), "mlp": nn.ModuleDict(mlp), **layer}
        )

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """States behind the final norm, `[B, T, size]`, of hidden states of tokens and the
        embeddings of those that follow them."""
        layer: Any = self.midlayer
        state = self.fc(hidden)
        both = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](state)], -1)
        attention, mlp = layer["self_attn"], layer["mlp"]
        q, k, v = (
            attention[f"{name}_proj"](both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        out = functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        state = state + attention["o_proj"](out.transpose(1, 2).flatten(2))
        x = layer["post_attention_layernorm"](state)
        state = state + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        normed: Tensor = self.norm(state)
        return normed


def turned(x: Tensor) -> Tensor:
    """Rotary positions, from 0 on, of `[B, heads, T, head_dim]`."""
    half = x.shape[-1] // 2
    steps = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[2])[:, None] * steps
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
