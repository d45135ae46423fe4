"""The port over which the ranks of one engine find each other.

SGLang before 0.5.23 chooses one of those that the system gives to connections, and its ranks listen
there many seconds later. Any process can take it in between, and then the start fails.
"""

from __future__ import annotations

from oscar_zoo.engines.sglang.launch.ports import free_port
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags

RANK_PORT = "--nccl-port"


def rank_port(
    flags: UserFlags, tensor_parallel: int = 1, *, listens: int | None = None
) -> list[str]:
    """The engine's words for a port that is given to no connection.

    Empty for one rank, whose store takes any port; where the user names the port; and with data
    parallelism, where SGLang needs a port for each group.

    Args:
        tensor_parallel: ranks of a group, unless `flags` say it.
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
