"""How good a cache is: perplexity and recall in process, against BF16 and the data-free
baselines."""
