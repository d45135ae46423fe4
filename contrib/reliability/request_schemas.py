"""In a fork: the JSON schemas of every type of request that SGLang's open routes take."""

from __future__ import annotations

import importlib
import json
import typing
from pathlib import Path

TYPES = {
    "/generate": "sglang.srt.managers.io_struct:GenerateReqInput",
    "/v1/completions": "sglang.srt.entrypoints.openai.protocol:CompletionRequest",
    "/v1/chat/completions": "sglang.srt.entrypoints.openai.protocol:ChatCompletionRequest",
    "/tokenize": "sglang.srt.entrypoints.openai.protocol:TokenizeRequest",
    "/detokenize": "sglang.srt.entrypoints.openai.protocol:DetokenizeRequest",
    "/v1/messages": "sglang.srt.entrypoints.anthropic.protocol:AnthropicMessagesRequest",
}


def write(out: str) -> None:
    """Write the schema of each route, and under `sampling` that of the sampling parameters."""
    from pydantic import TypeAdapter, create_model
    from pydantic.json_schema import GenerateJsonSchema
    from sglang.srt.sampling.sampling_params import SamplingParams

    class Lenient(GenerateJsonSchema):
        def handle_invalid_for_json_schema(self, schema: typing.Any, error_info: str) -> typing.Any:
            return {}  # a type of Python only: any value is sent

    def schema(kind: typing.Any) -> typing.Any:
        return TypeAdapter(kind).json_schema(schema_generator=Lenient)

    found = {}
    for path, place in TYPES.items():
        module, name = place.split(":")
        found[path] = schema(getattr(importlib.import_module(module), name))
    hints = typing.get_type_hints(SamplingParams)
    fields = {name: (hints[name], None) for name in SamplingParams.__struct_fields__}
    fields.pop("watermark", None)
    found["sampling"] = schema(create_model("SamplingParams", **fields))
    Path(out).write_text(json.dumps(found))
