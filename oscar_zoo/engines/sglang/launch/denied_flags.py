"""Engine flags that would open a server, run foreign code, or replace what `serve` guarantees.

Pure; the list is checked against the flags of every supported release by a test.
"""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.errors import UsageError

DENIED_FLAGS = {
    "--trust-remote-code": "it runs code from the model repository",
    "--host": "use --expose with an API key",
    "--port": "use oscar-zoo serve --port",
    "--api-key": "arguments are visible to every local user; use --api-key-file",
    "--admin-api-key": "arguments are visible to every local user",
    "--model-path": "use oscar-zoo serve --model",
    "--model": "use oscar-zoo serve --model",
    "--kv-cache-dtype": "serve always runs the INT2 cache",
    "--config": "a configuration file could set any of the refused flags",
    "--enable-custom-logit-processor": "it unpickles code from requests",
    "--custom-weight-loader": "it imports code by name",
    "--custom-sigquit-handler": "it imports code by name",
    "--forward-hooks": "it imports code by name",
    "--oscar-rotation-path": "serve gives the server its own verified copy",
    "--oscar-artifact": "serve gives the server its own verified copy",
    "--oscar-name": "serve says what it verified",
    "--oscar-copy-of": "serve says what it verified",
    "--oscar-rotation-sha256": "serve sets it from the copy it wrote",
    "--oscar-front": "serve always has its front",
    "--device": "use --device in front of --",
    "--base-gpu-id": "use --device cuda:N in front of --",
    "--ssl-keyfile-password": "arguments are visible to every local user",
    "--watermark-key": "arguments are visible to every local user",
    "--watermark-key-b": "arguments are visible to every local user",
    "--sidecar": "it runs a module by name",
    "--sidecar-args": "it runs a module by name",
    "--tool-server": "it lets answers of the model run tools",
    "--trust-request-chat-template": "it runs templates from requests",
    "--modelopt-checkpoint-restore-path": "it unpickles a checkpoint",
    "--grpc-mode": "it opens a server without the API key",
    "--smg-grpc-mode": "it opens a server without the API key",
    "--grpc-port": "it opens a server without the API key",
    "--grpc-http-sidecar-port": "it opens a server without the API key",
    "--smg-http-sidecar-port": "it opens a server without the API key",
    "--gated-launch-port": "it opens a server without the API key",
    "--kv-events-config": "it publishes what is cached to the network",
    "--load-publish-endpoint": "it publishes the load to the network",
    "--dist-init-addr": "processes of several machines exchange pickles over the network",
    "--nccl-init-addr": "processes of several machines exchange pickles over the network",
    "--nnodes": "processes of several machines exchange pickles over the network",
    "--node-rank": "processes of several machines exchange pickles over the network",
    "--use-ray": "processes of several machines exchange pickles over the network",
    "--language-only": "encoders on other machines are reached without a key",
    "--modelexpress-config": "weights would come over the network, unchecked",
    "--decrypted-config-file": "the model would not be the one that was checked",
}
"""Engine flags that `serve` refuses after `--`, with the reason that the user reads."""

DENIED_FAMILIES = {
    "--disaggregation-": "disaggregation with an INT2 cache is not supported",
    "--encoder-": "encoders on other machines are reached without a key",
    "--decoupled-spec-": "speculative decoding with an INT2 cache is not supported",
    "--hicache-storage-": "it imports code by name, and an INT2 cache has no copy on the host",
    "--unified-cache-external-linker-": (
        "it imports code by name, and an INT2 cache has no copy elsewhere"
    ),
    "--remote-instance-weight-loader-": "weights would come from another server, unchecked",
    "--weight-cache-": "weights would come from another process, unchecked",
    "--elastic-ep-": "processes of several machines exchange pickles over the network",
}
"""The same for every flag whose name begins so, those of later SGLang releases included."""

WHOLE_FLAGS = frozenset(["--ssl-keyfile"])
"""Allowed flags whose name is the beginning of a refused one: the engine prefers a whole name."""


def check_extra_flags(extra: Sequence[str]) -> None:
    """Refuse engine flags that would open the server or replace what `serve` guarantees.

    Abbreviations are refused too when the engine's argument parser would complete them to a denied
    flag.
    """
    for token in extra:
        if not token.startswith("-") or token.lstrip("-").split("=")[0].replace(".", "").isdigit():
            continue
        if any(ord(c) < 32 for c in token):
            raise UsageError("an engine flag holds a control character.")
        name = token.split("=", 1)[0].replace("_", "-")
        reason = _reason_against(name)
        if reason is not None:
            raise UsageError(
                f"{name} is not allowed after --: {reason}.", hint="try: oscar-zoo serve --help"
            )


def is_denied(flag: str) -> bool:
    """Whether `serve` refuses `flag`, which is written with hyphens."""
    return _reason_against(flag) is not None


def _reason_against(name: str) -> str | None:
    """Why the flag `name`, or a flag that the engine would complete it to, is refused; else
    `None`."""
    if name in WHOLE_FLAGS:
        return None
    for denied, reason in DENIED_FLAGS.items():
        if name == denied or (len(name) > 2 and denied.startswith(name)):
            return reason
    for family, reason in DENIED_FAMILIES.items():
        if name.startswith(family) or (len(name) > 2 and family.startswith(name)):
            return reason
    return None
