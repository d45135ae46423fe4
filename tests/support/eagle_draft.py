"""A small draft model of EAGLE3 for the example model, trained for seconds on its text, so that the
tokens it guesses depend on hidden states, and on its own cache of them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

AUX, LENGTH, ROWS, STEPS = [1, 2, 3], 128, 64, 120
SIZE, HEADS, HEAD, EPS = 256, 4, 64, 1e-6
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": SIZE,
    "intermediate_size": SIZE, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": HEAD, "vocab_size": 2048, "draft_vocab_size": 2048,
    "eagle_aux_hidden_state_layer_ids": AUX, "max_position_embeddings": 2048, "rms_norm_eps": EPS,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip


def write_draft(model: Any, ids: list[int], folder: Path) -> Path:
    """`model`: a `LoadedModel` of float32. `ids`: text, of which 8,192 tokens are used."""
    target = model.model
    with torch.device(model.device), torch.random.fork_rng():
        rows = torch.tensor(ids[: ROWS * LENGTH]).view(-1, LENGTH)
        with torch.no_grad():
            outputs = [target(part, output_hidden_states=True) for part in rows.split(16)]
        hidden = torch.cat([torch.cat([o.hidden_states[i] for i in AUX], -1) for o in outputs])
        wanted = torch.cat([one.logits.argmax(-1) for one in outputs])
        table = target.get_input_embeddings().weight.detach()
        torch.manual_seed(0)
        draft = Draft()
        adam = torch.optim.AdamW(draft.parameters(), lr=3e-3)
        for _ in range(STEPS):
            some = torch.randint(ROWS, (4,))
            logits = draft(hidden[some, :-1], table[rows[some, 1:]]) @ table.T
            loss = functional.cross_entropy(logits.flatten(0, 1), wanted[some, 1:].flatten())
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    folder.mkdir()
    save_file(draft.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def linear(inner: int, outer: int) -> nn.Module:
    return nn.Linear(inner, outer, bias=False)


class Draft(nn.Module):
    """Names of weights are those of published drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = linear(len(AUX) * SIZE, SIZE), nn.RMSNorm(SIZE, EPS)
        widths = {"q_proj": HEADS * HEAD, "k_proj": HEAD, "v_proj": HEAD}
        own = {name: linear(2 * SIZE, width) for name, width in widths.items()}
        own["o_proj"] = linear(HEADS * HEAD, SIZE)
        mlp = {name: linear(SIZE, SIZE) for name in ("gate_proj", "up_proj", "down_proj")}
        norms = "hidden_norm", "input_layernorm", "post_attention_layernorm"
        parts = {"self_attn": nn.ModuleDict(own), "mlp": nn.ModuleDict(mlp)}
        self.midlayer = nn.ModuleDict(parts | {name: nn.RMSNorm(SIZE, EPS) for name in norms})

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """States behind the final norm, `[B, T, SIZE]`, of hidden states of tokens and the
        embeddings of those that follow them."""
        layer: Any = self.midlayer
        state, own, mlp = self.fc(hidden), layer["self_attn"], layer["mlp"]
        both = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](state)], -1)
        q, k, v = (own[f"{x}_proj"](both).unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in "qkv")
        out = functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        state = state + own["o_proj"](out.transpose(1, 2).flatten(2))
        x = layer["post_attention_layernorm"](state)
        state = state + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        normed: Tensor = self.norm(state)
        return normed


def turned(x: Tensor) -> Tensor:
    """Rotary positions, from 0 on, of `[B, heads, T, HEAD]`."""
    steps = 10000.0 ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    angles = torch.arange(x.shape[2])[:, None] * steps
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
