"""What a request may ask of a server: one row per field, checked before the scheduler sees it.

SGLang hands most values to its scheduler as they are, and one bad value ends the whole server
there. Needs neither torch nor sglang.
"""
