"""Stands in for vllm, which SGLang asks for on a CPU: see `_custom_ops`."""
