"""The INT2 cache in stock vLLM, as a plugin: `vllm serve MODEL --kv-cache-dtype oscar_int2`."""
