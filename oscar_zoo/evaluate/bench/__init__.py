"""Measuring SGLang with BF16, FP8 and INT2 caches, one after the other, on one machine.

`sides.py` has the command line of each engine, and a model and an artifact of random numbers;
`run.py` starts an engine, follows its news, ends it, and makes figures of arrival times;
`report.py` has the ratios, and what comes out. `load.py` puts clients on an INT2 server. What an
engine is told, and the program that holds it, are in `engines/sglang/offline_job.py` and
`offline_process.py`.
"""
