"""Measuring an engine with BF16, FP8 and INT2 caches, one after the other, on one machine.

`measuring.py` has the verbs. `sides.py` has the command line of each engine, follows its news, and
makes a model and an artifact of random numbers; `report.py` has what comes out, and the ratios.
`load.py` puts clients on an INT2 server. What an engine is told, and the program that holds it, are
in `engines/sglang/offline_process.py`.
"""
