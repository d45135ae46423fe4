"""The plugin's only import of sglang, and every difference between the versions it supports.

One module per part of SGLang that we touch. Nothing is imported before a function runs, so the rest
of the plugin can be imported without sglang. Names of things that moved between 0.5.17 and 0.5.23
appear here and nowhere else.
"""
