"""Print the versions that installing this package into SGLang's image must not change."""

from importlib.metadata import version

for name in ("torch", "sglang", "transformers", "triton"):
    print(name, version(name))
