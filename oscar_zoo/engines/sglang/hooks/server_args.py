"""Hooks on what users ask of a server: its arguments and its model. They add defaults or refuse."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines import setting_flags, settings
from oscar_zoo.engines.sglang import compile_ahead, refusals, sizing, worker
from oscar_zoo.engines.sglang.compat import memory, server_arguments
from oscar_zoo.engines.sglang.sizing import ITEMSIZES
from oscar_zoo.engines.sglang.worker import FIRED
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.models import config_file
from oscar_zoo.runtime.disk_files import make_private

logger = logging.getLogger(__name__)

LISTED = frozenset(
    "Exaone4ForCausalLM ExaoneMoEForCausalLM Gemma4ForConditionalGeneration"
    " Gemma4UnifiedForConditionalGeneration GptOssForCausalLM".split()
)
"""Classes of models for which SGLang asks for one of a few attention backends."""
STAND_IN = "triton"
"""One of them, which runs the layers of these models that have a sliding window."""
DRAFT_BACKEND = "flashinfer"
"""Of draft models. It is there wherever an INT2 cache is served on a GPU, for chains and trees."""
USUAL_DRAFTS = 12
"""Most drafts of a request that SGLang chooses by itself."""
MOST_COMMON_KV_HEADS = 8
INTERFACE = "lo"
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Which interface the processes of a group talk over."""
HOST_PAGE = 64
"""Tokens of a page, where pages are kept in the host's memory: they are copied whole."""
UNIFIED_TREE = "SGLANG_ENABLE_UNIFIED_RADIX_TREE"
"""Names the one prefix cache of SGLang 0.5.17 whose pool on the host can be ours. Later releases
have no other."""
INTERPRET = "TRITON_INTERPRET"
"""SGLang's allocator runs Triton kernels with a backend that is not its own. Without a GPU they
need this variable. Triton reads it when a worker imports the kernels, and workers inherit it."""


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    server_arguments.add_dtype_choice(parser, setting_flags.DTYPE)
    group = parser.add_argument_group("INT2 KV cache (oscar-zoo)")
    for option in setting_flags.OPTIONS.values():
        group.add_argument(
            *option.names,
            action=setting_flags.EnvironmentAction,
            const=option,
            default=argparse.SUPPRESS,
            help=option.help,
        )


def set_defaults(args: Any, *_: Any, **__: Any) -> None:
    """Choose our backend, and a number of requests whose windows fit. SGLang's own default is 2048
    requests or more."""
    if args.kv_cache_dtype != setting_flags.DTYPE or not server_arguments.may_set_defaults(args):
        return
    worker.served.cache_clear()  # an earlier engine of this process may have had other settings
    os.environ[setting_flags.MODEL] = str(args.model_path)
    _take_backend(args)
    # A draft model, whose cache is SGLang's own, has a backend of SGLang.
    algorithm = str(args.speculative_algorithm or "NGRAM").upper()
    if algorithm != "NGRAM" and args.speculative_draft_attention_backend is None:
        args.speculative_draft_attention_backend = DRAFT_BACKEND
    if args.max_running_requests is None:
        args.max_running_requests = _requests(args)
    if args.enable_hierarchical_cache:
        _host_cache(args)
    if args.cuda_graph_backend_prefill is None and args.cuda_graph_config is None:
        args.cuda_graph_backend_prefill = "disabled"  # see `flags.GPU_FLAGS`


def model_arguments(original: Any, args: Any, *rest: Any, **named: Any) -> Any:
    """Let SGLang take our backend for models whose backends it compares with a list of its own."""
    asked = (args.kv_cache_dtype, args.attention_backend)
    ours = asked == (setting_flags.DTYPE, setting_flags.BACKEND)
    if ours and LISTED.intersection(server_arguments.architectures(args)):
        with server_arguments.shown_backend(args, STAND_IN):
            return original(args, *rest, **named)
    return original(args, *rest, **named)


def _take_backend(args: Any) -> None:
    for name in refusals.BACKENDS:
        chosen = getattr(args, name)
        if chosen in refusals.FORK_BACKENDS:
            said = "INT2 KV cache: --%s %s: %s is used instead."
            logger.warning(said, name.replace("_", "-"), chosen, setting_flags.BACKEND)
            setattr(args, name, None)
    if args.attention_backend is None:
        args.attention_backend = setting_flags.BACKEND


def _host_cache(args: Any) -> None:
    """Have pages copied by the numbers that our pool on the host takes, which are on the host
    themselves. Its layout is its own, whatever the user says of SGLang's."""
    args.hicache_io_backend, args.hicache_mem_layout = "direct", "page_first_direct"
    args.page_size = args.page_size or HOST_PAGE
    if refusals.DISK in os.environ:
        args.hicache_storage_backend = refusals.STORAGE_BACKEND
        with suppress(OscarZooError):  # `check_server_args` says it
            # What a hit leaves to prefill is never looked up.
            least = worker.served()[0].recent + args.page_size
            args.hicache_storage_backend_extra_config = json.dumps({"prefetch_threshold": least})
    os.environ[UNIFIED_TREE] = "1"


def _requests(args: Any) -> int:
    layout = sizing.Layout.of_arguments(args)
    memory = None if args.device == "cpu" else sizing.gpu_memory(args.base_gpu_id or 0, layout.gpus)
    try:
        chosen, artifact = worker.served()
    except OscarZooError:  # `check_server_args` says it, when the arguments themselves are right
        memory = None
    if memory is None:
        return sizing.UNKNOWN * layout.workers
    more = (args.speculative_num_draft_tokens or USUAL_DRAFTS) if args.speculative_algorithm else 0
    windows = Windows(sink=chosen.sink, recent=chosen.recent + more)
    token = layout.token_bytes(
        layers=len(artifact.k.layers),
        num_kv_heads=artifact.num_kv_heads or _kv_heads(str(args.model_path)),
        dims=artifact.k.head_dim + artifact.v.head_dim,
        itemsize=ITEMSIZES.get(str(args.dtype), 2),
    )
    return sizing.usual_requests(memory, token, windows, layout)


def _kv_heads(model: str) -> int:
    """Of a model in a folder; of others what most models have."""
    with suppress(OscarZooError):
        config = config_file.ConfigFile.of_folder(Path(model))
        return config_file.describe(config, "model").num_kv_heads
    return MOST_COMMON_KV_HEADS


def check_server_args(_result: None, args: Any, *_: Any, **__: Any) -> None:
    if args.kv_cache_dtype != setting_flags.DTYPE:
        if flags := setting_flags.flags_given(os.environ):
            hint = "add it, or leave the flag out"
            raise UsageError(f"{flags[0]} needs --kv-cache-dtype int2.", hint=hint)
        if idle := settings.present(os.environ):
            logger.warning("%s have no effect without --kv-cache-dtype int2.", ", ".join(idle))
        return
    resolved = server_arguments.resolved(args)
    refusals.check_server(resolved, os.environ, eager_only=worker.eager_only(args))
    if resolved.nnodes == 1:
        use_loopback()
    if resolved.device == "cpu":
        os.environ.setdefault(INTERPRET, "1")
    chosen, artifact = worker.served()
    if chosen.disk_cache is not None:
        make_private(Path(chosen.disk_cache))
        if not chosen.refilled:
            raise UsageError(
                "a disk cache does not work with --oscar-window-on-hit int2: a hit without"
                " its first tokens would read them as INT2.",
                hint="leave out one of the two",
            )
    for warning in chosen.warnings:
        logger.warning("INT2 KV cache: %s", warning)
    folder = chosen.source.folder
    if folder is not None and Path(folder) != Path(artifact.where):
        found = (chosen.source, args.model_path, artifact.where)
        logger.info("INT2 KV cache: %s has the artifact of %s in %s", *found)
    logger.info("INT2 KV cache: artifact %s; %s", artifact.told, chosen.describe())
    compile_ahead.start(args)


def model(
    result: Any,
    args: Any,
    model_path: str | None = None,
    *_: Any,
    is_draft_model: bool = False,
    **__: Any,
) -> None:
    """Refuse a model that cannot be served, or not with this artifact, before its
    weights are loaded. Leave out images where only text is served or calibrated with."""
    other = model_path not in (None, args.model_path) or is_draft_model
    if other or args.kv_cache_dtype != setting_flags.DTYPE:
        return
    if args.enable_multimodal is None and result.hf_config.model_type in refusals.TEXT_ONLY:
        server_arguments.leave_out_images(result)
    worker.check_model(result, args)
    memory.use_two_pools(result)


# The store by which the workers of one machine find each other is on loopback alone: torch listens
# on every interface, whatever address it is given, and its store obeys everybody who connects.


def rendezvous(*given: Any, **named: Any) -> None:
    if server_arguments.published_dtype() == setting_flags.DTYPE:
        FIRED.add("rendezvous")
        if any(means_loopback(str(one)) for one in (*given, *named.values())):
            bind_stores()


def use_loopback() -> None:
    """Let worker processes that are started later talk over loopback, unless the user chose an
    interface."""
    if Path("/sys/class/net", INTERFACE).exists():
        for variable in VARIABLES:
            os.environ.setdefault(variable, INTERFACE)


def means_loopback(method: str) -> bool:
    try:
        return ipaddress.ip_address(urlsplit(method).hostname or "").is_loopback
    except ValueError:
        return urlsplit(method).hostname == "localhost"


def bind_stores() -> None:
    """From now on, stores of this process that are on loopback listen there and nowhere else."""
    import torch.distributed

    stock: Any = torch.distributed.TCPStore
    if getattr(stock, "oscar_loopback", False):
        return

    class LoopbackStore(stock):  # type: ignore[misc]
        oscar_loopback = True

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *given: Any,
            **named: Any,
        ) -> None:
            if is_master and means_loopback(f"tcp://{host_name}"):
                listening = _listening(host_name, port, any_port=world_size == 1)
                named["master_listen_fd"], port = listening
            super().__init__(host_name, port, world_size, is_master, *given, **named)

    for name in ("torch.distributed", "torch.distributed.rendezvous"):
        module: Any = sys.modules[name]
        if getattr(module, "TCPStore", None) is stock:
            module.TCPStore = LoopbackStore


def _listening(host: str, port: int, *, any_port: bool) -> tuple[int, int]:
    """The number of a socket that listens on loopback, which torch closes, and its port.
    `any_port`: take another port where this one is taken. It was chosen before it is bound, so
    another process can be faster; nobody else must know it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen(128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not any_port:
                raise
        else:
            port = found.getsockname()[1]
            return found.detach(), port
    return _listening(host, 0, any_port=False)
