"""From a verified artifact to a command line: what `serve` will run, as data. Pure; needs neither
torch nor sglang.

The server is closed by default: loopback address, an argument list without a shell, `--flag=value`
form so that no value can become a flag, extra flags against a deny-list, an environment from an
allow-list, and an API key that travels in a private file and never in the argument list, which
every local user may read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.sglang.flags import (
    SERVED_NAME,
    TENSOR_PARALLEL,
    device_flags,
    flag_value,
)
from oscar_zoo.engines.sglang.settings import OPTIONS, ArtifactSource
from oscar_zoo.errors import UsageError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 30000

DENIED_FLAGS = {
    "--trust-remote-code": "it runs code from the model repository",
    "--host": "use --expose with an API key",
    "--port": "use oscar-zoo serve --port",
    "--api-key": "arguments are visible to every local user; use --api-key-file",
    "--admin-api-key": "arguments are visible to every local user",
    "--model-path": "use oscar-zoo serve --model",
    "--model": "use oscar-zoo serve --model",
    "--kv-cache-dtype": "serve always runs the INT2 cache",
    "--config": "a configuration file could set any of the refused flags",
    "--enable-custom-logit-processor": "it unpickles code from requests",
    "--custom-weight-loader": "it imports code by name",
    "--custom-sigquit-handler": "it imports code by name",
    "--forward-hooks": "it imports code by name",
    "--oscar-rotation-path": "serve gives the server its own verified copy",
    "--oscar-artifact": "serve gives the server its own verified copy",
    "--oscar-name": "serve says what it verified",
    "--oscar-rotation-sha256": "serve sets it from the copy it wrote",
    "--device": "use --device in front of --",
    "--base-gpu-id": "use --device cuda:N in front of --",
    "--ssl-keyfile-password": "arguments are visible to every local user",
    "--watermark-key": "arguments are visible to every local user",
    "--watermark-key-b": "arguments are visible to every local user",
    "--sidecar": "it runs a module by name",
    "--sidecar-args": "it runs a module by name",
    "--tool-server": "it lets answers of the model run tools",
    "--trust-request-chat-template": "it runs templates from requests",
    "--modelopt-checkpoint-restore-path": "it unpickles a checkpoint",
    "--grpc-mode": "it opens a server without the API key",
    "--smg-grpc-mode": "it opens a server without the API key",
    "--grpc-port": "it opens a server without the API key",
    "--grpc-http-sidecar-port": "it opens a server without the API key",
    "--smg-http-sidecar-port": "it opens a server without the API key",
    "--gated-launch-port": "it opens a server without the API key",
    "--kv-events-config": "it publishes what is cached to the network",
    "--load-publish-endpoint": "it publishes the load to the network",
    "--dist-init-addr": "processes of several machines exchange pickles over the network",
    "--nccl-init-addr": "processes of several machines exchange pickles over the network",
    "--nnodes": "processes of several machines exchange pickles over the network",
    "--node-rank": "processes of several machines exchange pickles over the network",
    "--use-ray": "processes of several machines exchange pickles over the network",
    "--language-only": "encoders on other machines are reached without a key",
    "--modelexpress-config": "weights would come over the network, unchecked",
    "--decrypted-config-file": "the model would not be the one that was checked",
}
"""Engine flags that `serve` refuses after `--`, with the reason shown to the user (SECURITY section
9)."""

DENIED_FAMILIES = {
    "--disaggregation-": "disaggregation with an INT2 cache is not supported",
    "--encoder-": "encoders on other machines are reached without a key",
    "--decoupled-spec-": "speculative decoding with an INT2 cache is not supported",
    "--hicache-storage-": "it imports code by name, and an INT2 cache has no copy on the host",
    "--unified-cache-external-linker-": (
        "it imports code by name, and an INT2 cache has no copy elsewhere"
    ),
    "--remote-instance-weight-loader-": "weights would come from another server, unchecked",
    "--weight-cache-": "weights would come from another process, unchecked",
    "--elastic-ep-": "processes of several machines exchange pickles over the network",
}
"""The same for every flag whose name begins so; also those of SGLang versions to come."""

WHOLE_FLAGS = frozenset(["--ssl-keyfile"])
"""Allowed flags that are the beginning of a refused one; the engine takes a whole name for
itself."""

KEPT_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP SHELL TERM VIRTUAL_ENV LD_LIBRARY_PATH CC"
    " CXX HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE XDG_CACHE_HOME"
    " XDG_DATA_HOME HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy SSL_CERT_FILE"
    " SSL_CERT_DIR OSCAR_KERNELS_CACHE OSCAR_KERNELS_CUDA_WRITE".split()
)
KEPT_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "SGLANG_",
    "TORCHINDUCTOR_",
)
DROPPED_VARIABLES = frozenset(
    ["SGLANG_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_EXTERNAL_MM_MODEL_ARCH"]
)

HARMFUL_VARIABLES = (
    "LD_PRELOAD",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    *sorted(DROPPED_VARIABLES - {"SGLANG_PLUGINS"}),
)
"""Of the variables that a server does not get: those that run code or lower a guard, for a command
that people run."""


@dataclass(frozen=True)
class ServeOptions:
    """What the caller decided.

    Attributes:
        model: local folder or Hugging Face id.
        rotations: where the plugin finds them.
        rotations_sha256: artifact digest; the plugin compares it with what it read.
        recipe: serving recipe in force.
        device: `cpu` or `cuda`.
        gpu: number of the first GPU.
        tensor_parallel: number of GPUs, unless `extra` says one.
        host, port: where to listen.
        kernels: private folder of compiled kernels, kept from one start to the next.
        revision: commit of the model on its hub.
        config_file: file with the API key in the engine's own configuration format, or `None`.
        name: how the server calls the artifact to those who ask.
        served_name: what requests call the model, unless `extra` says it.
        extra: engine flags of the user, already split.
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
    name: str | None = None
    served_name: str | None = None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """A child process to be: argument list, whole environment, where it will answer, and what we
    set of the former."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    url: str
    sets: Mapping[str, str] = field(default_factory=dict)


def cpu_site_dir() -> Path:
    """Folder of the import shims that only a machine without a GPU needs."""
    return Path(__file__).resolve().parent / "cpu_site"


def check_extra_flags(extra: Sequence[str]) -> None:
    """Refuse engine flags that would open the server or replace what `serve` guarantees.

    Abbreviations that the engine's argument parser would complete to a denied flag are refused too.

    Raises:
        UsageError: naming the flag and what to use in its place.
    """
    for token in extra:
        if not token.startswith("-") or token.lstrip("-").split("=")[0].replace(".", "").isdigit():
            continue
        if any(ord(c) < 32 for c in token):
            raise UsageError("an engine flag holds a control character.")
        name = token.split("=", 1)[0].replace("_", "-")
        reason = _reason_against(name)
        if reason is not None:
            raise UsageError(
                f"{name} is not allowed after --: {reason}.", hint="oscar-zoo serve --help"
            )


def _reason_against(name: str) -> str | None:
    """Why the flag `name`, or a flag that the engine would complete it to, is refused; `None` when
    it is not."""
    if name in WHOLE_FLAGS:
        return None
    for denied, reason in DENIED_FLAGS.items():
        if name == denied or (len(name) > 2 and denied.startswith(name)):
            return reason
    for family, reason in DENIED_FAMILIES.items():
        if name.startswith(family) or (len(name) > 2 and family.startswith(name)):
            return reason
    return None


def child_environment(
    parent: Mapping[str, str], *, device: str | None, kernels: Path
) -> dict[str, str]:
    """The server's whole environment.

    Kept: an allow-list without tokens, preloads or Python paths. Set: weights-only loading, the
    plugin filter, a private folder for compiled kernels, and on a CPU the import shims and Triton's
    interpreter (SGLang's slot allocator uses Triton for every attention backend it does not know).

    Args:
        parent: usually `os.environ`.
        device: `cpu` adds what a machine without a GPU needs.
        kernels: folder only this user may enter, for compiled kernels.
    """
    kept = {
        name: value
        for name, value in parent.items()
        if (name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES))
        and name not in DROPPED_VARIABLES
    }
    return kept | set_variables(device=device, kernels=kernels)


def set_variables(*, device: str | None, kernels: Path) -> dict[str, str]:
    """The variables that a server gets beside those of its parent; arguments as for
    `child_environment`."""
    env = {
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "SGLANG_PLUGINS": "oscar",
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
        env["PYTHONPATH"] = str(cpu_site_dir())
    return env


def cache_flags(
    rotations: ArtifactSource, rotations_sha256: str, recipe: ServingRecipe
) -> dict[str, str]:
    """The engine's flags for an INT2 cache with `rotations`, a folder or a name, and the settings
    of `recipe`."""
    where = "--oscar-rotation-path" if rotations.artifact is None else "--oscar-artifact"
    return {
        "--kv-cache-dtype": "int2",
        where: str(rotations),
        "--oscar-rotation-sha256": rotations_sha256,
        "--oscar-sink-size": str(recipe.windows.sink),
        "--oscar-recent-size": str(recipe.windows.recent),
        "--oscar-k-clip": repr(recipe.clip.k),
        "--oscar-v-clip": repr(recipe.clip.v),
        "--oscar-group-size": str(recipe.group_size),
    }


def url(host: str, port: int) -> str:
    """Where a server that listens on `host` and `port` answers, without `/v1`."""
    address = f"[{host}]" if ":" in host else host
    return f"http://{address}:{port}"


def plan(options: ServeOptions, environ: Mapping[str, str]) -> LaunchPlan:
    """The child process for `options`.

    Raises:
        UsageError: a denied extra flag.
    """
    check_extra_flags(options.extra)
    flags = {
        "--model-path": options.model,
        "--host": options.host,
        "--port": str(options.port),
        **cache_flags(options.rotations, options.rotations_sha256, options.recipe),
        **device_flags(options.device),
    }
    ours, theirs = OPTIONS["group_size"].names
    if flag_value(options.extra, theirs) is not None:
        del flags[ours]  # two names of one flag; what the user says wins
    if options.name is not None:
        flags["--oscar-name"] = options.name
    if options.served_name is not None and flag_value(options.extra, SERVED_NAME) is None:
        flags[SERVED_NAME] = options.served_name
    if options.tensor_parallel > 1 and flag_value(options.extra, *TENSOR_PARALLEL) is None:
        flags["--tp-size"] = str(options.tensor_parallel)
    if options.gpu:
        flags["--base-gpu-id"] = str(options.gpu)
    if options.revision is not None:
        flags["--revision"] = options.revision
    argv = [sys.executable, "-m", "sglang.launch_server"]
    if options.config_file is not None:
        argv += [
            "--config",
            str(options.config_file),
        ]  # SGLang does not know the `=` form of this one flag
    argv += [f"{name}={value}" for name, value in flags.items()]
    argv += options.extra  # last, so that they win
    env = child_environment(environ, device=options.device, kernels=options.kernels)
    sets = set_variables(device=options.device, kernels=options.kernels)
    return LaunchPlan(tuple(argv), env, url(options.host, options.port), sets)
