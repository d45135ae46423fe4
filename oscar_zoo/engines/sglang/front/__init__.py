"""What stands between clients and SGLang's HTTP server: which routes exist, who may ask, and from
where. Plain ASGI; needs neither torch nor sglang.
"""
