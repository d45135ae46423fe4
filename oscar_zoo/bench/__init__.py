"""Measuring SGLang with a BF16 cache and with an INT2 cache, one after the other, on one machine.

`job.py` is what both sides are told, `engine_process.py` the program that holds an engine and
streams requests through it, `sides.py` its command line, `run.py` the parent that starts it,
follows its news and ends it, `timing.py` the arithmetic over arrival times, `report.py` and
`chart.py` what comes out, `dummy.py` a model and an artifact of random numbers. Nothing here
touches a cache: what is measured is what `serve` starts.
"""
