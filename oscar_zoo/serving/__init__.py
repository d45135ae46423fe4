"""Serving: verbs that start, watch, and end servers."""
