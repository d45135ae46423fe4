"""An INT2 cache in a running server, whatever the engine: stores, batches, attention and the
memory plan."""
