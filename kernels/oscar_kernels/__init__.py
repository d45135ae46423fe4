"""INT2 KV-cache quantizer and kernels: a leaf that knows nothing of oscar_zoo. Importing it loads no torch."""
