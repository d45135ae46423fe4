"""A model on disk and in memory: its configuration, geometry per layer, weights and their place."""
