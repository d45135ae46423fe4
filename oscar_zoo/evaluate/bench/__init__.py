"""Measuring SGLang with BF16, FP8 and INT2 caches, one after the other, on one machine.

`sides.py` has the command line of each engine, `run.py` the parent that starts it, follows its news
and ends it, `timing.py` the arithmetic over arrival times, `report.py` the ratios, `records.py` and
`chart.py` what comes out, `dummy.py` a model and an artifact of random numbers. What an engine is
told, and the program that holds it, are in `engines/sglang/offline_job.py` and
`offline_process.py`. Nothing here touches a cache: what is measured is what `serve` starts.
"""
