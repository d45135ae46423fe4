"""A second plugin for SGLang, beside ours, that only the test suite has.

It lies on the path of the engine's processes and replaces the functions of `worker` that make
stores and cache. `reads` are counted in every INT2 server of the suite. The environment asks for
more:

* `INT2_TEST_MODE`: `lossless` keeps float32 rows beside the codes and reads those, so greedy tokens
  must equal those of a stock backend; every difference is a plumbing bug. `poison` stores the codes
  of a wrong constant: with a window longer than every request nothing may read a slot, so tokens
  must still be equal.
* `INT2_TEST_MUTANT`: a deliberate bug of `mutants` that the suite must notice.
* `INT2_TEST_OPS`: `kernels` runs what a GPU runs, on a CPU, with Triton's interpreter.
* `INT2_TEST_SLIDING`: `triton` runs layers with a sliding window as a GPU does, in SGLang's own
  backend, with the same interpreter; `graphs` does so from the buffers that CUDA graphs read.
* `INT2_TEST_LATE`: pages come back from the host only when somebody waits for them.
"""

import os

MODES, OPS = ("", "lossless", "poison"), ("", "kernels")
SLIDING = ("", "triton", "graphs")


def register() -> None:
    """Entry point of group `sglang.srt.plugins`."""
    from int2_test_plugin import mutants, workers

    mode, mutant, ops = (
        os.environ.get(f"INT2_TEST_{name}", "") for name in ("MODE", "MUTANT", "OPS")
    )
    assert mode in MODES and mutant in ("", *mutants.NAMES) and ops in OPS, (mode, mutant, ops)
    workers.install(mode, mutant, ops)
    if os.environ.get("INT2_TEST_LATE"):
        mutants.late_pages(mutant)
    sliding = os.environ.get("INT2_TEST_SLIDING", "")
    assert sliding in SLIDING, sliding
    if sliding:
        workers.slide_as_on_a_gpu(graphs=sliding == "graphs")
