"""The plugin's only import of sglang, and every difference between the versions it supports.

One module per part of SGLang that we touch. Nothing is imported before a function runs, so the rest
of the plugin can be imported without sglang. Names that moved between releases are rows of
`releases.py`, and appear nowhere outside this folder.
"""
