"""From a verified artifact to a command line: what `serve` will run, as data, with the environment
and the ports of a server. Needs neither torch nor sglang.

The server is closed by default: loopback address, an argument list without a shell, `--flag=value`
form so that no value can become a flag, flags of the user without those of a deny-list, an
environment from an allow-list, and an API key that travels in a private file and never in the
argument list, which every local user may read.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oscar_zoo import children
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.setting_flags import OPTIONS, CodeBits, layers_text
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.sglang.front.access import ON
from oscar_zoo.engines.sglang.launch.user_flags import (
    DRAFT_MODEL,
    SERVED_NAME,
    TENSOR_PARALLEL,
    UserFlags,
)
from oscar_zoo.engines.sglang.sizing import device_flags, device_switches
from oscar_zoo.errors import PortInUse, UsageError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 30000


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: str  # local folder or Hugging Face id, at `revision`
    recipe: ServingRecipe
    device: str
    gpu: int = 0  # number of the first one
    tensor_parallel: int = 1  # number of GPUs, unless `flags` say one
    host: str = LOOPBACK
    port: int = DEFAULT_PORT  # 0 is any free one
    revision: str | None = None
    name: str | None = None  # how the server calls the artifact to those who ask
    served_name: str | None = None  # what requests call the model, unless `flags` say it
    flags: UserFlags = field(default_factory=UserFlags)


@dataclass(frozen=True)
class LaunchPlan:
    """A child process to start, with its whole environment `env`, the part of it that we set, and
    the secrets that its log must not hold. It will answer at `url`, without `/v1`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    url: str
    sets: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    engine: str = "SGLang"


DRAFT_FORMAT = "--speculative-draft-load-format"


def cache_flags(
    rotations: ArtifactSource, rotations_sha256: str, recipe: ServingRecipe, *, copy_of: str | None
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


def plan(
    options: ServeOptions,
    environ: Mapping[str, str],
    *,
    rotations: ArtifactSource,
    sha256: str,
    kernels: Path,
    copy_of: str | None = None,
    config_file: Path | None = None,
    front: str = ON,
) -> LaunchPlan:
    """The child process for `options`. `rotations` says where the plugin finds them, which compares
    their digest with `sha256`; `copy_of` is that of the artifact where they are a copy with other
    bytes. `kernels` is a private folder of compiled kernels, `config_file` has keys in the engine's
    own format, and `front` is a file with the settings of the front, or `on`."""
    flags = {
        "--model-path": options.model,
        "--host": options.host,
        "--port": str(options.port),
        **cache_flags(rotations, sha256, options.recipe, copy_of=copy_of),
        **device_flags(options.device),
        OPTIONS["front"].flag: front,
    }
    given = options.flags
    ours, theirs = OPTIONS["group_size"].names
    if given.text(theirs) is not None:
        del flags[ours]  # two names of one flag; what the user says wins
    if options.name is not None:
        flags["--oscar-name"] = options.name
    if options.served_name is not None and given.text(SERVED_NAME) is None:
        flags[SERVED_NAME] = options.served_name
    if given.text(*DRAFT_MODEL) is not None and given.text(DRAFT_FORMAT) is None:
        flags[DRAFT_FORMAT] = "safetensors"  # never a pickle
    if options.tensor_parallel > 1 and given.text(*TENSOR_PARALLEL) is None:
        flags["--tp-size"] = str(options.tensor_parallel)
    # SGLang does not know the `=` form of this one flag
    config = [] if config_file is None else ["--config", str(config_file)]
    argv = server_words(options.device, options.gpu, options.revision, flags, config=config)
    env = child_environment(environ, device=options.device, kernels=kernels)
    sets = set_variables(device=options.device, kernels=kernels)
    return LaunchPlan((*argv, *given.words), env, url(options.host, options.port), sets)


def server_words(
    device: str,
    gpu: int,
    revision: str | None,
    flags: Mapping[str, str],
    *,
    config: Sequence[str] = (),
) -> list[str]:
    """The command of a server on `device`; flags of the user go behind it, so that they win."""
    if gpu:
        flags = {**flags, "--base-gpu-id": str(gpu)}
    if revision is not None:
        flags = {**flags, "--revision": revision}
    words = [f"{name}={value}" for name, value in flags.items()]
    program = children.python("-m", "sglang.launch_server")
    return [*program, *config, *words, *device_switches(device)]


KEPT_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP SHELL TERM VIRTUAL_ENV LD_LIBRARY_PATH CC"
    " CXX HF_HOME HF_HUB_CACHE HF_ENDPOINT HF_HUB_OFFLINE TRANSFORMERS_OFFLINE XDG_CACHE_HOME"
    " XDG_DATA_HOME HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy SSL_CERT_FILE"
    " SSL_CERT_DIR OSCAR_KERNELS_CACHE OSCAR_KERNELS_CUDA_WRITE VLLM_LOGGING_LEVEL"
    " VLLM_USE_FLASHINFER_SAMPLER".split()
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
"""Variables that run code or lower a guard. A server never gets them; a printed command removes
them."""

NO_MODULES = "/dev/null/oscar-zoo-runs-no-code-of-a-model"
"""Where transformers would copy the code of a model before it imports it. Nothing can be written
there, because SGLang imports such code for unknown architectures and for processors without asking
`--trust-remote-code`."""

ENDS_AT_ONCE = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""SGLang holds every request for 65 seconds after a crash, in which it writes what its developers
read. A server ends at once instead, unless the user sets these."""


def cpu_site_dir() -> Path:
    return Path(__file__).resolve().parent / "cpu_site"


def child_environment(
    parent: Mapping[str, str], *, device: str | None, kernels: Path
) -> dict[str, str]:
    """The server's whole environment: an allow-list of its parent's variables, without tokens,
    preloads or Python paths, and `set_variables`. A model that needs a token must be here before.
    `device="cpu"` adds what a machine without a GPU needs; only this user may enter the folder
    `kernels`."""
    kept = {
        name: value
        for name, value in parent.items()
        if (name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES))
        and name not in DROPPED_VARIABLES
    }
    wanted = {name: value for name, value in kept.items() if name in ENDS_AT_ONCE}
    return kept | set_variables(device=device, kernels=kernels) | wanted


def set_variables(*, device: str | None, kernels: Path) -> dict[str, str]:
    """The variables that a server gets beside those of its parent: weights-only loading, the plugin
    filter, no imports from the current folder, an end without delay after a crash, private folders
    for what Triton and torch compile. On a CPU also the import shims, and Triton's interpreter,
    which SGLang's slot allocator uses for every attention backend it does not know; torch then
    compiles none of SGLang's small functions, which took longer than they run."""
    env = {
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "SGLANG_PLUGINS": "oscar",
        "HF_MODULES_CACHE": NO_MODULES,
        "TRITON_CACHE_DIR": str(kernels / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"),
        **children.SAFE,
        "PYTHONUNBUFFERED": "1",
        **ENDS_AT_ONCE,
    }
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
        env["TORCHDYNAMO_DISABLE"] = "1"
        env["PYTHONPATH"] = str(cpu_site_dir())
    return env


WILDCARDS = {"0.0.0.0": LOOPBACK, "[::]": "[::1]"}
"""Addresses that mean every address of a machine, and one that a client on it can ask."""

NEVER_GIVEN = range(20_000, 29_000)
"""Ports below those that Linux, macOS and Windows give to connections, and below SGLang's usual."""


def check_port_free(host: str, port: int, *, again: Callable[[], str] | None = None) -> None:
    refusal = _bind_error(host, port)
    if refusal is None:
        return
    if refusal.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
        raise UsageError(
            f"{host} is not an address of this machine.",
            hint="see them: ip address; all: --expose 0.0.0.0",
        )
    other = again() if again else f"--port {next_free_port(host, port) or 'PORT'}"
    taken, said = refusal.errno == errno.EADDRINUSE, f"you may not listen on port {port}."
    if taken:
        said = f"port {port} on {host} is taken by another process."
    raise (PortInUse if taken else UsageError)(said, hint=f"choose another: {other}")


def next_free_port(host: str, port: int, *, avoid: Collection[int] = ()) -> int | None:
    """The first port above `port` that nobody listens on and any user may open, `avoid` left out;
    `None` where a hundred are taken."""
    first = port + 1 if port > 1023 else DEFAULT_PORT
    near = (other for other in range(first, min(first + 99, 65536)) if other not in avoid)
    return next((other for other in near if _bind_error(host, other) is None), None)


def free_port() -> int:
    """A port of loopback that nobody listens on now, and that the system gives to no connection, so
    that none takes it before a server listens there."""
    for port in random.sample(NEVER_GIVEN, 100):
        if _bind_error(LOOPBACK, port) is None:
            return port
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def client_url(url: str) -> str:
    """Where a client on this machine reaches a server that listens at `url`."""
    for wildcard, address in WILDCARDS.items():
        url = url.replace(f"://{wildcard}:", f"://{address}:")
    return url


def _bind_error(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:  # gaierror of an unknown name included
            return error
    return None


RANK_PORT = "--nccl-port"


def rank_port(
    flags: UserFlags, tensor_parallel: int = 1, *, listens: int | None = None
) -> list[str]:
    """The engine's words for a port over which its ranks find each other, and which is given to no
    connection. SGLang before 0.5.23 chooses one of those that are, and listens there seconds later.

    Empty for one rank, whose store takes any port; where the user names the port; and with data
    parallelism, where SGLang needs a port for each group. `tensor_parallel` are the ranks of a
    group, unless `flags` say it.
    """
    sizes = flags.sizes()
    ranks = (sizes.tensor_parallel or tensor_parallel) * sizes.pipeline_parallel
    groups = sizes.data_parallel * sizes.attention_data_parallel
    if ranks == 1 or groups > 1 or flags.text(RANK_PORT) is not None:
        return []
    port = free_port()
    while port == listens:
        port = free_port()
    return [f"{RANK_PORT}={port}"]
