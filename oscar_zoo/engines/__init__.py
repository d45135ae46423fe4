"""Serving engines that an INT2 cache runs in, one folder each; nothing in `runtime` knows them."""
