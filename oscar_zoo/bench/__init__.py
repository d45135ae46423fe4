"""Measuring SGLang with a BF16 cache and with an INT2 cache, one after the other, on one machine.

`run.py` starts one engine after the other (`engines/sglang/offline_job.py` is what it is told, and
`engines/sglang/offline_process.py` the program), `sides.py` makes the command lines, `timing.py` is
the arithmetic over arrival times, `report.py` and `chart.py` are what comes out, and `dummy.py`
makes a model and an artifact of random numbers. The `load_` files put requests on a server that
runs. Nothing here touches a cache: what is measured is what `serve` starts.
"""
