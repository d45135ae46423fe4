"""What works for a kind of model, and how that was tested: one row for model types that behave
alike.

A model type is what `config.json` calls itself. The row of a recipe says nothing about its weights:
a checkpoint has the shapes of its architecture, and what was tried with one is expected of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Answer:
    """Whether something works: what it was tried with, or why it does not work where that is known.
    Without both, nobody has tried it."""

    tested: str | None = None
    reason: str | None = None

    @property
    def state(self) -> Literal["works", "does not work", "not tried"]:
        return "works" if self.tested else "does not work" if self.reason else "not tried"


@dataclass(frozen=True)
class Architecture:
    """One row, for the names of model types in `config.json`. Serving on an NVIDIA GPU does not
    work exactly where `config.json` alone makes the server refuse the model."""

    model_types: tuple[str, ...]
    compute: Answer
    evaluate: Answer
    serve_cpu: Answer
    serve_gpu: Answer


EXAMPLE = Answer(tested="a trained example of this architecture")
EXAMPLE_GPU = Answer(tested="a trained example of this architecture on an H100 and an H200")
TINY = Answer(tested="a tiny random model on the CPU")
TINY_GPU = Answer(tested="a tiny random model on an H100 and an H200")
TINY_H200 = Answer(tested="a tiny random model on an H200")
PERPLEXITY_H200 = Answer(tested="a small random model on an H200, by its perplexity alone")
DUMMY_H200 = Answer(tested="dummy weights on an H200")
UNTRIED = Answer()
GPU_ALONE = Answer(reason="latents (MLA) are served on a GPU only")
NEEDS_CUDA = Answer(reason="SGLang itself needs CUDA for this model")
LANGUAGE_ALONE = Answer(
    reason="SGLang reads the two head sizes of its layers from the configuration of a whole Gemma 4"
    " only"
)
NEWER = Answer(tested="a tiny random model on the CPU with transformers 5.19")
OWN_CODE = Answer(reason="code that ships with the model, which oscar-zoo serve never runs")
CHUNKS = Answer(reason="SGLang masks chunks in its FlashAttention backend alone")


def _row(names: str, *answers: Answer) -> Architecture:
    return Architecture(tuple(names.split()), *answers)


ARCHITECTURES = (
    _row("qwen3", EXAMPLE, EXAMPLE, EXAMPLE, EXAMPLE_GPU),
    _row("qwen3_moe", TINY, TINY, TINY, TINY_GPU),
    _row(
        "apertus cohere2 ernie4_5 exaone4 exaone_moe gemma3 gemma3_text gemma4 gemma4_unified glm4 "
        "glm4_moe granite lfm2 lfm2_moe llama mellum mistral mistral3 mixtral olmo2 phi3 qwen2 "
        "qwen2_5_vl qwen3_vl qwen3_vl_moe seed_oss smollm3",
        TINY,
        TINY,
        TINY,
        TINY_H200,
    ),
    _row(
        "ernie4_5_moe falcon_h1 granitemoehybrid nemotron_h qwen3_5 qwen3_5_text qwen3_next",
        TINY,
        TINY,
        NEEDS_CUDA,
        TINY_H200,
    ),
    _row("minimax_m2 qwen3_5_moe qwen3_5_moe_text", TINY, TINY, NEEDS_CUDA, DUMMY_H200),
    _row("gpt_oss", TINY, TINY, TINY, DUMMY_H200),
    _row("deepseek_v2 glm4_moe_lite", TINY, TINY, GPU_ALONE, UNTRIED),
    _row("deepseek_v3", TINY, TINY, GPU_ALONE, PERPLEXITY_H200),
    _row("olmo3", TINY, TINY, TINY, UNTRIED),
    _row("gemma2", TINY, TINY, NEEDS_CUDA, UNTRIED),
    _row("gemma4_text", TINY, TINY, LANGUAGE_ALONE, LANGUAGE_ALONE),
    _row("llama4", TINY, TINY, CHUNKS, CHUNKS),
    _row("mimo_v2_flash", NEWER, NEWER, OWN_CODE, OWN_CODE),
)
"""Every row. Whoever makes something work changes the row with the code."""


def architecture(model_type: str) -> Architecture | None:
    return next((row for row in ARCHITECTURES if model_type in row.model_types), None)
