"""An INT2 cache in a running server, whatever the engine: stores, batches, the executor and the
memory plan."""
