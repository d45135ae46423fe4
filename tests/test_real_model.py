"""Four layers of a trained model, from `compute` with its defaults to an artifact that is verified.

Small random models have no outliers. `make install` makes the folder of SmolLM2-135M-Instruct.
Its first six layers alone predict nothing (perplexity 4.6e8), so the slice gets an output head that
is fitted to what the whole model says. With such a head the first six hardly need their cache: a
clipped Hadamard cache of 2 bits moves them by 0.002 nats. So the slice has the first two layers and
the last two, and runs in float32, as divergences are small.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import EXAMPLE
from transformers import AutoModelForCausalLM, AutoTokenizer

import oscar_zoo
from oscar_zoo.compute.methods import tuned
from oscar_zoo.compute.moments_file import load_moments

SMOLLM2 = Path(sys.prefix) / "smollm2"
LAYERS, VOCABULARY = (0, 1, 28, 29), 8192
TOKENS, LENGTH, CHARACTERS = 1280, 640, 15_000
RIDGE = 0.3
TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
OTHER_TEXT = TEXT.with_name("validation.txt")
SILENT_LAYER, SILENT_HEAD, SILENT_CHANNEL, HEAD_DIM = 1, 1, 5, 64
"""Of keys; with the channel half a head behind it, with which it turns."""
PAIR = [SILENT_CHANNEL, SILENT_CHANNEL + HEAD_DIM // 2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no smollm2 folder in sys.prefix"),
]


def write_slice(folder: Path) -> None:
    """`LAYERS`, the most frequent tokens, a silent pair of channels of a key, and an own head."""
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2)
    tokenizer = write_tokenizer(folder)
    ids = torch.tensor(tokenizer(TEXT.read_text("utf-8")[: 8 * TOKENS]).input_ids[:TOKENS])
    parts = model.model
    with torch.no_grad():
        whole = parts(ids.reshape(4, -1), use_cache=False).last_hidden_state.flatten(0, 1).double()
        parts.layers = torch.nn.ModuleList(parts.layers[at] for at in LAYERS)
        keys = parts.layers[SILENT_LAYER].self_attn.k_proj.weight
        keys.unflatten(0, (-1, HEAD_DIM))[SILENT_HEAD, PAIR] = 0
        own = parts(ids.reshape(4, -1), use_cache=False).last_hidden_state.flatten(0, 1).double()
        gram = own.T @ own
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        lens = torch.linalg.solve(gram, own.T @ whole)
        embedding = parts.embed_tokens.weight[:VOCABULARY]
        head = (embedding.double() @ lens.T).to(embedding.dtype)
    parts.embed_tokens = torch.nn.Embedding.from_pretrained(embedding.clone())
    model.lm_head.weight = torch.nn.Parameter(head)
    small = {"num_hidden_layers": len(LAYERS), "vocab_size": VOCABULARY}
    model.config.update({**small, "tie_word_embeddings": False})
    model.save_pretrained(folder)


def write_tokenizer(folder: Path) -> Any:
    """That of the model, with the tokens that came of its first merges."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    parts = json.loads(file.read_text("utf-8"))
    found = parts["model"]
    found["vocab"] = {token: at for token, at in found["vocab"].items() if at < VOCABULARY}
    found["merges"] = [pair for pair in found["merges"] if "".join(pair) in found["vocab"]]
    file.write_text(json.dumps(parts), "utf-8")
    return AutoTokenizer.from_pretrained(folder)


class Made(NamedTuple):
    """What became of the slice in the folder `work`."""

    work: Path
    bits: float

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.work / "kept/oscar.json").read_text("utf-8"))
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    work = tmp_path_factory.mktemp("real")
    write_slice(work / "slice")
    (work / "text.txt").write_text(TEXT.read_text("utf-8")[:CHARACTERS], "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "STEPS", 20)
        computed = oscar_zoo.compute_artifact(
            str(work / "slice"), calib_data=str(work / "text.txt"), calib_tokens=TOKENS,
            seq_len=LENGTH, output=work / "kept", dtype="float32",
        )  # fmt: skip
    return Made(work, computed.bits_per_element)


def test_compute_with_its_defaults_passes_its_gates(made: Made) -> None:
    assert oscar_zoo.verify(made.work / "kept").ok
    gates = {one["name"]: one["result"] for one in made.manifest["quality"]["gates"]}
    assert gates["perplexity_change_percent"] == "pass"
    assert 2.5 <= made.bits <= 4.5


def test_keys_have_feedback_also_where_channels_carry_nothing(made: Made) -> None:
    moments, _ = load_moments(made.work / "kept.moments.safetensors")
    keys = moments.layers[SILENT_LAYER].kk[SILENT_HEAD].diagonal()
    assert (keys == 0).nonzero().flatten().tolist() == PAIR
    assert "k_feedback" in made.manifest["recipe"]["requires"]


def test_other_text_moves_less_than_with_a_clipped_hadamard_at_the_same_bits(made: Made) -> None:
    report = oscar_zoo.evaluate_against(
        made.work / "kept",
        ["hadamard-clip", "artifact:2"],
        model=made.work / "slice",
        data=str(OTHER_TEXT),
        dtype="float32",
        windows=2,
        length=768,
        answers=1,
    )
    rows = {row.cache: row for row in report.rows}
    two, hadamard = rows["artifact:2"], rows["hadamard-clip"]
    assert two.bits_per_element == hadamard.bits_per_element == 2.5
    assert rows["artifact"].divergence <= two.divergence < 0.5 * hadamard.divergence
