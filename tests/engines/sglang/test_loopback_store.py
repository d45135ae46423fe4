"""The store of the workers of one machine, with torch's own rendezvous."""

import socket
import subprocess
import sys

import pytest

RANK = """
import sys
from oscar_zoo.engines.sglang.hooks.server_args import bind_stores
import torch.distributed as dist
bind_stores()
port, ranks = sys.argv[1:]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=int(ranks))
store = dist.distributed_c10d._get_default_store()
store.set("key", "value")
print(store.get("key").decode())
dist.barrier()
dist.destroy_process_group()
"""


def rank_zero(port: int, ranks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RANK, str(port), str(ranks)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_port_that_another_process_took(ranks: int) -> None:
    """SGLang chooses it before it is bound. A rank alone needs no port that others know; where
    there are others, they would wait for it in vain."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = rank_zero(other.getsockname()[1], ranks)
    if ranks == 1:
        assert done.stdout == "value\n", done.stderr
    else:
        assert done.returncode and "Address already in use" in done.stderr


def test_a_free_port_is_taken_as_it_is() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    done = rank_zero(port, 1)
    assert done.stdout == "value\n", done.stderr
