"""Make the KV cache of a Qwen3-type checkpoint hard to quantize without changing what the model
computes.

Some channels of the cached keys and values are scaled up and the scale is taken back where they are
read: keys in `k_norm` against `q_norm` (both halves of a rotary pair alike), values in the rows of
`v_proj` against the columns of `o_proj`. All scales are powers of two, so bfloat16 weights stay
exact and the logits in float32 are equal bit for bit, while the cache gets the outlier channels
that large models have.

    python examples/make_hard_variant.py SOURCE TARGET
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Outliers:
    """Spread of the channel scales.

    Attributes:
        sigma: standard deviation of their natural logarithm, before rounding to powers of two.
        massive: channels of each head (for keys: of each half head) that are scaled up further.
        factor: by which; a power of two.
    """

    sigma: float = 0.5
    massive: int = 2
    factor: float = 8.0

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """`[count]` powers of two."""
        exponents = torch.round(self.sigma / math.log(2) * torch.randn(count, generator=generator))
        scales = torch.exp2(exponents)
        scales[torch.randperm(count, generator=generator)[: self.massive]] *= self.factor
        return scales


@dataclass(frozen=True)
class Heads:
    """Attention geometry of the checkpoint."""

    query: int
    kv: int
    dim: int

    @classmethod
    def of(cls, folder: Path) -> Heads:
        """Read `config.json` in `folder`."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])


def harden_keys(weights: dict[str, Tensor], prefix: str, scales: Tensor) -> None:
    """Scale the key channels of one attention layer in place; `scales` is `[head_dim // 2]`, one
    per rotary pair."""
    pairs = scales.repeat(2)
    _rescale(weights, f"{prefix}k_norm.weight", pairs)
    _rescale(weights, f"{prefix}q_norm.weight", 1 / pairs)


def harden_values(weights: dict[str, Tensor], prefix: str, scales: Tensor, heads: Heads) -> None:
    """Scale the value channels of one attention layer in place; `scales` is
    `[num_kv_heads, head_dim]`."""
    per_query_head = scales.repeat_interleave(heads.query // heads.kv, 0)
    _rescale(weights, f"{prefix}v_proj.weight", scales.flatten()[:, None])
    _rescale(weights, f"{prefix}o_proj.weight", 1 / per_query_head.flatten())


def harden(
    weights: dict[str, Tensor], heads: Heads, outliers: Outliers, generator: torch.Generator
) -> None:
    """Scale keys and values of every layer of a checkpoint in place."""
    layers = sum(name.endswith(".self_attn.k_norm.weight") for name in weights)
    for layer in range(layers):
        prefix = f"model.layers.{layer}.self_attn."
        harden_keys(weights, prefix, outliers.draw(heads.dim // 2, generator))
        values = torch.stack([outliers.draw(heads.dim, generator) for _ in range(heads.kv)])
        harden_values(weights, prefix, values, heads)


def harden_checkpoint(source: Path, target: Path, outliers: Outliers, seed: int) -> None:
    """Write the hard variant of the checkpoint in `source` to the folder `target`."""
    weights = load_file(source / "model.safetensors")
    harden(weights, Heads.of(source), outliers, torch.Generator().manual_seed(seed))
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    for name in COPIED:
        shutil.copyfile(source / name, target / name)


def _rescale(weights: dict[str, Tensor], name: str, scales: Tensor) -> None:
    weight = weights[name]
    weights[name] = (weight.float() * scales).to(weight.dtype).contiguous()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of the checkpoint")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument(
        "--sigma", type=float, default=Outliers.sigma, help="spread of the scales (%(default)s)"
    )
    parser.add_argument(
        "--massive", type=int, default=Outliers.massive, help="outliers per head (%(default)s)"
    )
    parser.add_argument(
        "--factor", type=float, default=Outliers.factor, help="their further scale (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=5, help="of the random scales (%(default)s)")
    options = parser.parse_args()
    outliers = Outliers(options.sigma, options.massive, options.factor)
    harden_checkpoint(options.source, options.target, outliers, options.seed)


if __name__ == "__main__":
    main()
