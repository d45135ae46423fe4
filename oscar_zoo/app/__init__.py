"""One use case per verb: a typed request goes in, a typed result comes out.

Nothing here prints, reads a terminal or knows click. `oscar_zoo` exports these calls, and the
command line parses, calls one of them and renders its result, so the two cannot differ.
"""
