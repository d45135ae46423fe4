"""oscar-zoo: registry, hub tooling and SGLang plugin for 2-bit KV caches.

Importing this package loads no heavy library.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
