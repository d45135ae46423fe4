"""Ways of speculative decoding that the INT2 cache does not support, refused by name. Needs neither
torch nor sglang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oscar_zoo.engines.sglang.refusal import Refusal, Uses, above, is_set
from oscar_zoo.engines.sglang.setting_flags import BACKEND
from oscar_zoo.errors import UnsupportedModel

SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Algorithms whose drafts are a chain or a tree that the target verifies in one step."""
MOST_DRAFTS = 32
"""`oscar_kernels.cache.MOST_DRAFTS`, which needs torch."""
OTHERS = f"--speculative-algorithm {' or '.join(SERVED)}"


def _algorithm(config: Any) -> str:
    return str(getattr(config, "speculative_algorithm", None) or "").upper()


def _is(name: str) -> Uses:
    return lambda config: _algorithm(config) == name


def _speculative(also: Uses) -> Uses:
    return lambda config: bool(_algorithm(config)) and also(config)


def _value(name: str) -> Callable[[Any], Any]:
    return lambda config: getattr(config, name, None)


def has_draft_model(config: Any) -> bool:
    """Whether another model, or a layer of the model, makes the drafts."""
    return _algorithm(config) not in ("", "NGRAM")


def check_layers(config: Any, others: str | None) -> None:
    """Refuse trees of drafts for a model whose other layers verify chains alone.

    Args:
        others: what layers without full attention keep; see `geometry.other_layers`.
    """
    if not _algorithm(config) or others is None:
        return
    flag = BREADTH if _algorithm(config) == "NGRAM" else BRANCHES
    if getattr(config, flag.removeprefix("--").replace("-", "_"), None) != 1:
        raise UnsupportedModel(
            "a tree of drafts does not work with an INT2 KV cache of this model, because"
            f" {NO_TREES[others]}.",
            hint=f"use a chain: {flag}=1",
        )


BREADTH, BRANCHES = "--speculative-ngram-max-bfs-breadth", "--speculative-eagle-topk"
"""The flags by which drafts are a chain or a tree."""

NO_TREES = {
    "states": "its other layers keep states",
    "windows": "SGLang moves a sliding window by the place of a draft in the step, and not by its"
    " depth in a tree",
}
"""Why other layers verify chains alone, by what they keep."""

ROWS = (
    Refusal(
        "--speculative-algorithm FROZEN_KV_MTP",
        _is("FROZEN_KV_MTP"),
        "its draft model reads the slots of the target",
        OTHERS,
    ),
    Refusal(
        "--speculative-algorithm DFLASH",
        _is("DFLASH"),
        "its draft model writes blocks into a cache that is sized like the target's",
        OTHERS,
    ),
    Refusal(
        "--speculative-algorithm DSPARK",
        _is("DSPARK"),
        "it verifies another number of drafts of each request",
        OTHERS,
    ),
    Refusal(
        "--speculative-algorithm",
        lambda config: _algorithm(config) not in ("", *SERVED),
        "nobody has tested it",
        OTHERS,
    ),
    Refusal(
        "--speculative-adaptive",
        is_set("speculative_adaptive"),
        "it changes the number of drafts, which the rings are sized for",
        "--speculative-num-draft-tokens",
    ),
    Refusal(
        "--speculative-num-draft-tokens",
        above("speculative_num_draft_tokens", MOST_DRAFTS),
        f"a step verifies {MOST_DRAFTS} drafts of a request at most",
        f"--speculative-num-draft-tokens {MOST_DRAFTS}",
    ),
    Refusal(
        "--speculative-draft-attention-backend",
        lambda config: _value("speculative_draft_attention_backend")(config) == BACKEND,
        "the cache of the draft model is SGLang's own",
        "--speculative-draft-attention-backend flashinfer",
    ),
    Refusal(
        "--enable-multi-layer-eagle",
        lambda config: (
            bool(_value("enable_multi_layer_eagle")(config))
            and (_value("speculative_eagle_topk")(config) or 1) > 1
        ),
        "trees of several draft layers were never tested",
        "--speculative-eagle-topk 1",
    ),
    Refusal(
        "--enable-linear-replayssm-spec",
        _speculative(is_set("enable_linear_replayssm_spec")),
        "nobody has tested it",
        "leave it out",
    ),
    Refusal(
        "--pp-size",
        _speculative(above("pp_size", 1)),
        "with drafts the stages of a pipeline would commit at different times",
        "--tp-size, or no drafts",
    ),
    Refusal(
        "--enable-mixed-chunk",
        _speculative(is_set("enable_mixed_chunk")),
        "a step has either prompts or drafts",
        "leave it out with drafts",
    ),
)
"""Rows over the resolved server arguments."""

PLAN_STREAM = (
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    "it prepares drafts on another stream than the one that writes rings",
)
"""A row of `refusals.ENVIRONMENT`."""
