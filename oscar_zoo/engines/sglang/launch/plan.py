"""From a verified artifact to a command line: what `serve` will run, as data. Pure; needs neither
torch nor sglang.

The server is closed by default: loopback address, an argument list without a shell, `--flag=value`
form so that no value can become a flag, flags of the user without those of a deny-list, an
environment from an allow-list, and an API key that travels in a private file and never in the
argument list, which every local user may read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oscar_zoo import children
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang.flags import device_flags, device_switches
from oscar_zoo.engines.sglang.front.settings import ON
from oscar_zoo.engines.sglang.launch.environment import child_environment, set_variables
from oscar_zoo.engines.sglang.launch.user_flags import SERVED_NAME, TENSOR_PARALLEL, UserFlags
from oscar_zoo.engines.sglang.layer_values import CodeBits, layers_text
from oscar_zoo.engines.sglang.setting_flags import OPTIONS
from oscar_zoo.engines.sglang.settings import ArtifactSource

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 30000


@dataclass(frozen=True)
class ServeOptions:
    """What the caller decided.

    Attributes:
        model: local folder or Hugging Face id.
        rotations: where the plugin finds the rotations.
        rotations_sha256: artifact digest; the plugin compares it with the bytes that it read.
        recipe: serving recipe in force.
        device: `cpu` or `cuda`.
        gpu: number of the first GPU.
        tensor_parallel: number of GPUs, unless `flags` say one.
        host, port: where to listen.
        kernels: private folder of compiled kernels, kept from one start to the next.
        revision: commit of the model on its hub.
        config_file: file with keys in the engine's own configuration format, or `None`.
        front: file with the settings of the front, or `on`; see `front.settings`.
        copy_of: digest of the artifact, where the rotations are a copy of it with other bytes.
        name: how the server calls the artifact to those who ask.
        served_name: what requests call the model, unless `flags` say it.
        flags: engine flags of the user.
    """

    model: str
    rotations: ArtifactSource
    rotations_sha256: str
    recipe: ServingRecipe
    kernels: Path
    device: str
    gpu: int = 0
    tensor_parallel: int = 1
    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    revision: str | None = None
    config_file: Path | None = None
    front: str = ON
    copy_of: str | None = None
    name: str | None = None
    served_name: str | None = None
    flags: UserFlags = field(default_factory=UserFlags)


@dataclass(frozen=True)
class LaunchPlan:
    """A child process to start.

    Attributes:
        argv: its argument list.
        env: its whole environment.
        url: where it will answer, without `/v1`.
        sets: the part of `env` that we set.
        secrets: what its log must not hold.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    url: str
    sets: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = field(default=(), repr=False)


DRAFT_MODEL = ("--speculative-draft-model-path", "--speculative-draft-model")
"""The names of one flag."""
DRAFT_FORMAT = "--speculative-draft-load-format"


def cache_flags(
    rotations: ArtifactSource,
    rotations_sha256: str,
    recipe: ServingRecipe,
    *,
    copy_of: str | None,
) -> dict[str, str]:
    """The engine's flags for an INT2 cache with `rotations`, a folder or a name, and the settings
    of `recipe`; `copy_of` as for `ServeOptions`."""
    where = "--oscar-rotation-path" if rotations.artifact is None else "--oscar-artifact"
    return {
        "--kv-cache-dtype": "int2",
        where: str(rotations),
        "--oscar-rotation-sha256": rotations_sha256,
        **({} if copy_of is None else {"--oscar-copy-of": copy_of}),
        "--oscar-sink-size": str(recipe.windows.sink),
        "--oscar-recent-size": str(recipe.windows.recent),
        **_code_flags(recipe),
        "--oscar-group-size": str(recipe.group_size),
    }


def _code_flags(recipe: ServingRecipe) -> dict[str, str]:
    """Bits and clips; bits only where they are not 2 everywhere."""
    widths = recipe.widths
    if widths is None:
        return {"--oscar-k-clip": repr(recipe.clip.k), "--oscar-v-clip": repr(recipe.clip.v)}
    return {
        "--oscar-bits": str(CodeBits(widths.k.bits, widths.v.bits)),
        "--oscar-k-clip": layers_text(widths.k.clip),
        "--oscar-v-clip": layers_text(widths.v.clip),
    }


def url(host: str, port: int) -> str:
    """Where a server that listens on `host` and `port` answers, without `/v1`."""
    address = f"[{host}]" if ":" in host else host
    return f"http://{address}:{port}"


def plan(options: ServeOptions, environ: Mapping[str, str]) -> LaunchPlan:
    """The child process for `options`."""
    flags = {
        "--model-path": options.model,
        "--host": options.host,
        "--port": str(options.port),
        **cache_flags(
            options.rotations, options.rotations_sha256, options.recipe, copy_of=options.copy_of
        ),
        **device_flags(options.device),
        OPTIONS["front"].flag: options.front,
    }
    ours, theirs = OPTIONS["group_size"].names
    if options.flags.text(theirs) is not None:
        del flags[ours]  # two names of one flag; what the user says wins
    if options.name is not None:
        flags["--oscar-name"] = options.name
    if options.served_name is not None and options.flags.text(SERVED_NAME) is None:
        flags[SERVED_NAME] = options.served_name
    if options.flags.text(*DRAFT_MODEL) is not None and options.flags.text(DRAFT_FORMAT) is None:
        flags[DRAFT_FORMAT] = "safetensors"  # never a pickle
    if options.tensor_parallel > 1 and options.flags.text(*TENSOR_PARALLEL) is None:
        flags["--tp-size"] = str(options.tensor_parallel)
    if options.gpu:
        flags["--base-gpu-id"] = str(options.gpu)
    if options.revision is not None:
        flags["--revision"] = options.revision
    argv = children.python("-m", "sglang.launch_server")
    if options.config_file is not None:
        argv += [
            "--config",
            str(options.config_file),
        ]  # SGLang does not know the `=` form of this one flag
    argv += [f"{name}={value}" for name, value in flags.items()]
    argv += device_switches(options.device)
    argv += options.flags.words  # last, so that they win
    env = child_environment(environ, device=options.device, kernels=options.kernels)
    sets = set_variables(device=options.device, kernels=options.kernels)
    return LaunchPlan(tuple(argv), env, url(options.host, options.port), sets)
