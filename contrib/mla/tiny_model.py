"""Make a small trained model with multi-head latent attention, for `simulate.py`.

    python contrib/mla/tiny_model.py FOLDER [--minutes 24] [--text CALIBRATION]

All but the attention comes from examples/models/tiny-qwen3-hard. The latent attention is new, and
learns to do what that model's attention does: first every layer by itself, from the teacher's
hidden states, then the whole model the teacher's predictions. On one core 20 minutes are enough.
With `--minutes 0` the attention is random.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.evaluate.caches import encoder
from oscar_zoo.evaluate.questions import Encode, Recall
from oscar_zoo.models.loading import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "examples/models/tiny-qwen3-hard"
CALIBRATION = ROOT / "examples/text/calibration.txt"
RANK, ROPE = 128, 32
LENGTH = 1536
QUERIES = 192
"""Queries of a sequence whose attention is compared."""
BY_LAYER = 0.6
"""The share of the time in which layers learn by themselves."""
RATE = 3e-3


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small model with latent attention.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=24, help="of training [default: 24]")
    parser.add_argument("--seed", type=int, default=0, help="of the weights [default: 0]")
    parser.add_argument("--text", type=Path, default=CALIBRATION)
    options = parser.parse_args()
    teacher, tokenizer = load_teacher(), load_tokenizer(str(TEACHER))
    model = new_model(teacher, options.seed)
    if options.minutes:
        text = options.text.read_text("utf-8")
        train(model, teacher, text, encoder(tokenizer), options.minutes)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


def load_teacher() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        TEACHER, dtype=torch.float32, attn_implementation="eager"
    )


def new_model(teacher: Any, seed: int = 0, **changes: Any) -> Any:
    """Random latent attention, and all else from the teacher; `changes` of its configuration."""
    old = teacher.config
    config = DeepseekV3Config(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size,
        num_hidden_layers=old.num_hidden_layers,
        first_k_dense_replace=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_attention_heads,
        q_lora_rank=None,
        kv_lora_rank=RANK,
        qk_nope_head_dim=ROPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=old.head_dim,
        rms_norm_eps=old.rms_norm_eps,
        max_position_embeddings=old.max_position_embeddings,
        tie_word_embeddings=True,
    )
    config.update(changes)
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config)
    kept = {name: one for name, one in teacher.state_dict().items() if "self_attn" not in name}
    model.load_state_dict(kept, strict=False)
    for mine, theirs in zip(model.model.layers, teacher.model.layers, strict=True):
        mine.self_attn.o_proj.load_state_dict(theirs.self_attn.o_proj.state_dict())
    return model


def train(model: Any, teacher: Any, text: str, encode: Encode, minutes: float) -> None:
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for i, layer in enumerate(teacher.model.layers):
        layer.self_attn.register_forward_hook(
            lambda _, __, given, out, i=i: seen.update({i: (given["hidden_states"], *out)}),
            with_kwargs=True,
        )
    learning = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    begin, told, sums = time.monotonic(), 0.0, []
    for step, prompt in enumerate(prompts(text, encode)):
        done = (time.monotonic() - begin) / (60 * minutes)
        if done >= 1:
            return
        for group in learning.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 50) * (1 - done)
        ids, share = prompt if done < BY_LAYER else (prompt[0][:, -640:], prompt[1][-640:])
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(ids, use_cache=False).logits
            if done < BY_LAYER:
                loss = unlike(model, seen)
            else:
                model.set_attn_implementation("sdpa")
                mine = model(ids, use_cache=False).logits.float().log_softmax(-1)
                target = wanted.float().log_softmax(-1)
                each = functional.kl_div(mine, target, log_target=True, reduction="none").sum(-1)
                loss = (each[0] * share).sum()
        learning.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learning.step()
        sums.append(loss.item())
        if time.monotonic() - told > 30:
            print(f"{done:4.0%} step {step}: loss {sum(sums) / len(sums):.3f}", flush=True)
            told, sums = time.monotonic(), []


def prompts(text: str, encode: Encode) -> Iterator[tuple[Tensor, Tensor]]:
    """Text and questions about facts by turns, `[1, LENGTH]`, and how much each position counts."""
    draw, ids = random.Random(0), torch.tensor(encode(text))
    near = Windows(sink=1, recent=16)
    for step in range(1_000_000):
        start = draw.randrange(len(ids) - LENGTH)
        share = torch.full((LENGTH,), 1 / LENGTH)
        yield ids[None, start : start + LENGTH], share
        asked = Recall.from_tokens(ids, encode, windows=near, answers=16, length=LENGTH, seed=step)
        for one in asked.prompts:
            counts = share.clone()
            counts[one.scored] += 1 / len(one.scored)
            yield one.ids[None], counts


def unlike(model: Any, seen: Mapping[int, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """How far the attention of some queries is from that of the teacher, in weights and outputs."""
    some = seen[0][0]
    tokens = some.shape[1]
    pick = torch.randperm(tokens)[:QUERIES]
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[pick]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, scaling: float, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        p = (scaling * query[:, :, pick] @ key.mT + mask).float().softmax(-1)
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=value.dtype)
        return out.index_copy(2, pick, (p.to(value.dtype) @ value)).transpose(1, 2), p

    ALL_ATTENTION_FUNCTIONS["some_queries"] = attention
    model.config._attn_implementation = "some_queries"
    turns = model.model.rotary_emb(some, torch.arange(tokens)[None])
    total = torch.zeros(())
    for i, layer in enumerate(model.model.layers):
        hidden, out, p = seen[i]
        mine, q = layer.self_attn(hidden, turns, None)
        out, p = out[:, pick].float(), p[:, :, pick].float()
        total = total + (mine[:, pick].float() - out).square().mean() / out.var()
        total = total + (p * (p.clamp_min(1e-6).log() - q.clamp_min(1e-6).log())).sum(-1).mean()
    return total


if __name__ == "__main__":
    main()
