"""The process behind `sglang_forks`: it imports SGLang, vLLM, or what most commands import, then
forks for every client, and there for every call."""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import triton_interpreter

PRELOADED = {
    "sglang": "sglang sglang.srt.entrypoints.engine sglang.srt.entrypoints.http_server"
    " sglang.srt.layers.attention.torch_native_backend sglang.srt.managers.scheduler"
    " sglang.srt.models.registry oscar_zoo.engines.sglang.hooks.installation",
    "vllm": "vllm_child vllm.entrypoints.llm vllm.v1.worker.cpu_worker"
    " vllm.v1.worker.cpu.model_runner vllm.model_executor.models.qwen3"
    " oscar_zoo.engines.vllm.backend oscar_zoo.engines.vllm.hooks oscar_zoo.engines.vllm.placement",
    "commands": "filelock numpy yaml httpx rich.console rich.progress rich.table forked_commands"
    " oscar_zoo.registry.artifacts oscar_zoo.registry.mirror oscar_zoo.registry.publish"
    " oscar_zoo.registry.pull oscar_zoo.registry.hubs.huggingface oscar_zoo.registry.hubs.http"
    " oscar_zoo.serving.doctor oscar_zoo.cli.commands.pull oscar_zoo.cli.main",
}
"""Importing them has no effect on SGLang or vLLM."""
CLIENTS = {"huggingface_hub", "modelscope_hub"}
"""They read variables while they are imported, so every command imports them itself."""
POLL_SECONDS = 2.0
"""This long after its last client the process ends."""


def serve(listener: socket.socket, what: str) -> None:
    """Import what is `PRELOADED`, then serve everybody who connects; ends after the last client."""
    failure = ""
    try:
        for module in PRELOADED[what].split():
            importlib.import_module(module)
        if what == "sglang":
            _prepare_sglang()
        assert what != "commands" or not CLIENTS & sys.modules.keys()
        gc.collect()
        gc.freeze()  # or every collection of a call would walk all that was imported
    except Exception:
        failure = traceback.format_exc()
    sessions: set[int] = set()
    listener.settimeout(POLL_SECONDS)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            sessions -= {child for child in sessions if os.waitpid(child, os.WNOHANG)[0]}
            if not sessions:
                return
            continue
        child = os.fork()
        if child == 0:
            listener.close()
            _end_with_parent()
            _session(connection, failure)
            os._exit(0)
        connection.close()
        sessions.add(child)


def _prepare_sglang() -> None:
    triton_interpreter.patch_once()
    plain_convolutions = importlib.import_module("plain_convolutions")
    plain_convolutions.install(hook_targets()._replace_imported)
    _find_bindings_once()
    # It finds the place of our command line by our variables, which forks replace.
    importlib.import_module("setproctitle").getproctitle()


def _session(connection: socket.socket, failure: str) -> None:
    """The calls of one client, one after the other, until it is gone; before them, why there can be
    none."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", peer)[1] != os.getuid():
        return
    connection.setblocking(True)
    stream = connection.makefile("rw")

    def tell(what: object) -> None:
        stream.write(json.dumps(what) + "\n")
        stream.flush()

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        tell(failure)
        for line in stream:
            child = os.fork()
            if child == 0:
                stream.close()
                connection.close()
                os._exit(_run(**json.loads(line)))
            tell(child)
            tell(_status(child, connection))


def _status(child: int, connection: socket.socket) -> int:
    """Wait for the end of a call, or end it if nobody waits for it any more: its exit status."""
    handle = os.pidfd_open(child)
    if handle not in select.select([handle, connection], [], [])[0]:
        for kill in (os.killpg, os.kill):  # it may not have its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _find_bindings_once() -> None:
    """From now on, in this process and its forks, our hooks do not walk through all modules to find
    where else a function is bound: that took a quarter of the start of every engine.

    Bindings of today are found in a table. Modules that are imported later are walked through.
    """
    known = {*sys.modules}
    table: dict[int, list[tuple[ModuleType, str]]] = {}
    for module, name, value in _bindings(known):
        table.setdefault(id(value), []).append((module, name))

    def replace_imported(replaced: Mapping[int, object]) -> None:
        later = _bindings(sys.modules.keys() - known)
        places = [(module, name) for module, name, value in later if id(value) in replaced]
        for was in replaced:
            places += table.get(was, ())
        for module, name in places:
            found = id(vars(module).get(name))
            if found in replaced:
                setattr(module, name, replaced[found])

    assert hasattr(hook_targets(), "_replace_imported")
    hook_targets()._replace_imported = replace_imported


def hook_targets() -> Any:
    """Our module that attaches hooks, for its look through all modules."""
    return importlib.import_module("oscar_zoo.engines.sglang.compat.hook_targets")


def _bindings(modules: Iterable[str]) -> list[tuple[ModuleType, str, object]]:
    found = [sys.modules[name] for name in modules]
    return [
        (module, name, value)
        for module in found
        if isinstance(module, ModuleType)
        for name, value in [*vars(module).items()]
    ]


def _run(function: str, folder: str, log: str, env: dict[str, str], given: dict[str, Any]) -> int:
    _end_with_parent()
    os.setsid()
    os.chdir(folder)
    with Path(log).open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(env)
    module, name = function.split(":")
    try:
        getattr(importlib.import_module(module), name)(**given)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends; SGLang's workers do
    the same."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
