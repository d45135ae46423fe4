"""INT2 KV cache in stock SGLang, as a plugin. Importable without sglang."""
