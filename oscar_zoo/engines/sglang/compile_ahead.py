"""Kernels of a server are compiled in a process of their own, from the moment that the shape of the
model is known, while workers start and load weights.

As a program, `python -m ...`, this is that process. It has the pid of the server, and a `Request`
on its standard input, reads the artifact as the server does, from the same variables, and makes no
context on the GPU, so it takes none of its memory.

Whatever goes wrong here is no error of the server: its workers compile what they do not find, and
say what is wrong in their own words.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from oscar_kernels import ahead, nvrtc
from oscar_kernels.chips import Target
from oscar_kernels.spec import QuantSpec
from oscar_zoo import children
from oscar_zoo.artifact.specs import Spec
from oscar_zoo.engines import served_artifact
from oscar_zoo.engines.sglang import compiling, worker
from oscar_zoo.engines.sglang.compat import geometry, server_arguments
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.rehearsal import Worker
from oscar_zoo.runtime.transforms import TransformTable

logger = logging.getLogger(__name__)

LEARNED_SINKS = frozenset(("gpt_oss",))
"""Types of models whose attention has learned sinks."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables of the process, which forks."""


class Request(Spec):
    gpu: int  # number among the visible GPUs
    layers: tuple[int, ...]  # global id of a layer for each of `worker.specs`
    worker: rehearsal.Worker  # shapes of a worker


def start(args: Any) -> None:
    os.environ.pop(compiling.VARIABLE, None)  # an earlier engine of this process may have had it
    resolved = server_arguments.resolved(args)
    if not str(resolved.device).startswith("cuda"):
        return
    try:
        nvrtc.version()
        wanted = request(args, resolved)
        k_spec, v_spec = wanted.worker.specs[0]
        dims, dtype = (k_spec.head_dim, v_spec.head_dim), wanted.worker.dtype
        capped = wanted.worker.cap > 0
        compiling.spawn(
            compiling.Wanted(gpu=wanted.gpu, head_dims=dims, dtype=dtype, capped=capped)
        )
        spawn(wanted)
    except Exception as error:  # see above
        told = f"{type(error).__name__}: {error}"
        logger.info("INT2 KV cache: nothing is compiled ahead (%s)", " ".join(told.split()))


def request(args: Any, resolved: Any) -> Request:
    model = server_arguments.model_config(args)
    layout = Layout.of_arguments(resolved)
    ranks = layout.attention_ranks
    chosen, first = worker.served()[0], dict[tuple[QuantSpec, QuantSpec], int]()
    for layer, specs in worker.layer_specs(model).items():
        first.setdefault(specs, layer)
    text = model.hf_text_config
    drafts = resolved.speculative_num_draft_tokens if resolved.speculative_algorithm else None
    chain = resolved.speculative_eagle_topk == 1 and resolved.speculative_algorithm != "NGRAM"
    return Request(
        gpu=resolved.base_gpu_id or 0,
        layers=tuple(first.values()),
        worker=Worker(
            specs=tuple(first),
            num_q_heads=int(model.num_attention_heads) // ranks,
            num_kv_heads=1 if geometry.is_latent(model) else int(model.get_num_kv_heads(ranks)),
            sink=chosen.sink,
            recent=chosen.recent,
            dtype=str(model.dtype).removeprefix("torch."),
            cap=float(getattr(text, "attn_logit_softcapping", None) or 0),
            learned_sinks=text.model_type in LEARNED_SINKS,
            drafts=int(drafts or 1),
            tree=not chain,
            requests=max(1, int(resolved.max_running_requests or 1) // layout.workers),
            max_tokens=int(model.context_len),
        ),
    )


def spawn(wanted: Request) -> None:
    command = children.python("-m", __name__, str(os.getpid()))
    with compiling.held() as (descriptor, path):
        process = children.start(
            command,
            stdin=subprocess.PIPE,
            stderr=compiling.errors(),
            pass_fds=(descriptor,),
            env={**os.environ, **ONE_THREAD},
            text=True,
        )
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(wanted.model_dump_json())
    os.environ[compiling.VARIABLE] = str(path)

    def end() -> None:
        process.wait()
        path.unlink(missing_ok=True)

    threading.Thread(target=end, daemon=True).start()


def jobs(
    request: Request, artifact: served_artifact.ServedArtifact, target: Target
) -> list[ahead.Job]:
    heads = range(request.worker.num_kv_heads)
    transforms = TransformTable.build(
        artifact.k, artifact.v, request.layers, kv_heads=heads, device="cpu"
    )
    return rehearsal.jobs(request.worker, transforms, target)


def main() -> None:
    compiling.end_with_parent(signal.SIGKILL, parent=int(sys.argv[1]))
    request = Request.model_validate_json(sys.stdin.read())
    signal.alarm(int(compiling.PATIENCE))
    began = time.monotonic()
    try:
        wanted = jobs(request, worker.served()[1], nvrtc.target(request.gpu))
        failed = ahead.compile_all(wanted)
    except Exception as error:  # workers compile for themselves, and say what is wrong
        compiling.say(f"nothing is compiled ahead ({compiling.cause(error)})")
        raise
    compiling.say(f"{len(wanted)} kernels were compiled ahead in {time.monotonic() - began:.1f} s")
    for line in failed:
        compiling.say(f"one of them was not ({line})")


if __name__ == "__main__":
    main()
