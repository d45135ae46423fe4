"""How good a cache is: perplexity and recall against BF16 and the data-free baselines."""
