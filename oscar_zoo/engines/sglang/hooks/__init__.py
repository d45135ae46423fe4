"""Every change to SGLang, one function per hook; `installation` registers them all.

Every hook returns at once unless the KV dtype is int2: merely having the package installed must not
change a server that does not use it.
"""
