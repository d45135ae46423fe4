"""The command line and the variables of the SGLang fork that was published with OSCAR, for people
who stay on it. Pure.

As its README and the cards of its rotations have them: windows, clip ratios and file names travel
in the environment, the group size is a flag. We print them and never start the fork: it is another
SGLang, in an environment of its own. Left out on purpose: `--trust-remote-code`, which runs code of
the model's repository, and the variable `SGLANG_OSCAR_ROTATION_MODE`, which the fork does not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang import fork_environment
from oscar_zoo.engines.sglang.setting_flags import FORK_NAMES
from oscar_zoo.errors import UsageError

ATTENTION = {"--prefill-attention-backend": "fa3", "--decode-attention-backend": "triton"}
"""What its README names; FlashAttention 3 needs an H100 or H200."""
SWITCHES = ("--disable-radix-cache", "--disable-custom-all-reduce")
"""In the launch command of its first README and of the cards, which its scores were measured
with."""
LARGEST_HADAMARD = 128
"""`HADAMARD_ORDER` of the cards, whose models have head_dim 128; without it the fork takes 16."""
LLOYD_MAX = "lloydmax-uniform-u2/1"


@dataclass(frozen=True)
class ForkOptions:
    """What is to be served.

    Attributes:
        model: local folder or Hugging Face id.
        k_file, v_file: the rotation files, which the fork reads itself.
        head_dim: of the model's keys.
        recipe: serving recipe in force.
        tensor_parallel: number of GPUs, or `None` where `extra` says it.
        host, port: where to listen.
        revision: commit of the model on its hub.
        extra: engine flags of the user.
    """

    model: str
    k_file: Path
    v_file: Path
    head_dim: int
    recipe: ServingRecipe
    tensor_parallel: int | None
    host: str
    port: int
    revision: str | None = None
    extra: tuple[str, ...] = ()


def check_format(k: RotationSet, v: RotationSet) -> None:
    """Refuse an artifact that the fork would misread.

    Raises:
        UsageError: a format other than 1.
    """
    newest = max(k.format_version, v.format_version)
    if newest != 1:
        what = "one matrix per KV head" if newest == 2 else "transform pairs that are no rotations"
        raise UsageError(
            f"the fork reads format_version 1; this artifact has format_version {newest} ({what}).",
            hint=(
                "serve it with stock SGLang, or make one that both read: oscar-zoo compute MODEL"
                " --compat"
            ),
        )


def variables(options: ForkOptions) -> dict[str, str]:
    """The environment that the fork needs, beside that of its user."""
    recipe = options.recipe
    if recipe.widths is not None:
        raise UsageError(
            "the fork has codes of 2 bits, and this artifact has codes of 4 bits too.",
            hint="serve it with stock SGLang, or make one that both read: oscar-zoo compute MODEL"
            " --compat",
        )
    clipped = recipe.clip.algorithm != "none"
    env = {
        "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
        fork_environment.K_FILE: str(options.k_file),
        fork_environment.V_FILE: str(options.v_file),
        FORK_NAMES["sink"]: str(recipe.windows.sink),
        FORK_NAMES["recent"]: str(recipe.windows.recent),
        "SGLANG_MIXED_KV_HP_MAX_SPLITS": "8",
        "SGLANG_MIXED_KV_HP_DTYPE": recipe.windows.dtype,
        fork_environment.SCALE_DTYPE: recipe.scale_dtype,
        "SGLANG_OSCAR_ABSORB_V_ROTATION": "0" if recipe.v_absorption == "forbidden" else "1",
        "SGLANG_LLOYD_MAX": "1" if recipe.quantizer == LLOYD_MAX else "0",
        "HADAMARD_ORDER": str(math.gcd(LARGEST_HADAMARD, options.head_dim)),
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    }
    if clipped and recipe.clip.k:
        env[FORK_NAMES["k_clip"]] = repr(recipe.clip.k)
    if clipped and recipe.clip.v:
        env[FORK_NAMES["v_clip"]] = repr(recipe.clip.v)
    return env


def argv(options: ForkOptions) -> tuple[str, ...]:
    """The command line; `python` is the one of the fork's own environment."""
    flags: Mapping[str, str | None] = {
        "--model-path": options.model,
        "--revision": options.revision,
        "--host": options.host,
        "--port": str(options.port),
        "--tensor-parallel-size": str(options.tensor_parallel) if options.tensor_parallel else None,
        "--kv-cache-dtype": "int2",
        "--kv-cache-quant-group-size": str(options.recipe.group_size),
        **ATTENTION,
    }
    given = (f"{name}={value}" for name, value in flags.items() if value is not None)
    return ("python", "-P", "-m", "sglang.launch_server", *given, *SWITCHES, *options.extra)
