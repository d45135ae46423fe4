"""Which request has which sinks.

The scheduler must know it before it takes a prefix hit, and the workers act on it, each in a
process of its own perhaps. So each of them keeps an account. All accounts agree, because all follow
the messages of the scheduler to its workers, which come to everyone in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oscar_zoo.runtime.sink_blocks import NOBODY, PromptKey, SinkBlocks


class Account:
    def __init__(self, sinks: SinkBlocks, begin: Callable[[dict[int, int]], Any]) -> None:
        """`begin` gets the cached tokens of every row with a new owner, in front of the step that
        brings its first new ones."""
        self.sinks, self._begin = sinks, begin
        self._rows: dict[str, int] = {}
        self._number = 0

    def follow(self, message: Any, row_of: Callable[[str], int] | None = None) -> None:
        """Read a `SchedulerOutput`. `row_of` tells the row of a request; by default rows are just
        numbers."""
        ended = message.finished_req_ids | (message.preempted_req_ids or set())
        new = message.scheduled_new_reqs
        # Also one that comes again with more tokens. In the order in which workers free rows.
        for name in (*sorted(ended), *(one.req_id for one in new)):
            if name in self._rows:
                self.sinks.release(self._rows.pop(name), NOBODY)
        for one in new:
            self._number += 1
            self._rows[one.req_id] = self._number if row_of is None else row_of(one.req_id)
        rows = [self._rows[one.req_id] for one in new]
        self.sinks.admit(rows, [_prompt_of(one, self.sinks.width) for one in new])
        computed = {one.req_id: one.num_computed_tokens for one in new}
        self._begin(dict(zip(rows, computed.values(), strict=True)))
        step, old = message.num_scheduled_tokens, message.scheduled_cached_reqs
        told = zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True)
        computed |= {name: count for name, count, said in told if said == 0 or step[name] > 1}
        chunks = [name for name in computed if name in step]
        ends = [computed[name] + step[name] for name in chunks]
        self.sinks.launched([self._rows[name] for name in chunks], ends)


def prompt_key(ids: Sequence[int], lora: Any, pictures: Any, width: int) -> PromptKey:
    """What the first tokens of a request depend on: those of an image are not known by ids."""
    scope = None if pictures else (None if lora is None else lora.lora_name,)
    return PromptKey(scope, tuple(ids[:width]), len(ids))


def _prompt_of(new: Any, width: int) -> PromptKey:
    return prompt_key(new.prefill_token_ids, new.lora_request, new.mm_features, width)
