"""How good a cache is, and how fast: perplexity, recall, benchmarks, and servers under load."""
