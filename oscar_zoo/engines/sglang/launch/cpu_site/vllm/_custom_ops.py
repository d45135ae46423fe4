"""The one name SGLang imports from vllm when the device is the CPU; the torch path that runs never
calls it."""


def rotary_embedding(*args: object, **kwargs: object) -> None:
    """Not implemented on purpose: reaching it means SGLang took a path that needs the real vllm."""
    raise NotImplementedError(
        "vllm is not installed; this CPU setup only supports SGLang's native torch path"
    )
