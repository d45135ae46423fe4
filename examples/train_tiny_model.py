"""Train a Qwen3-type language model of a few million parameters whose answers depend on a precise
KV cache.

Half of the rows are plain text, half are the tasks of `recall_tasks.py`. The learning rate follows
a cosine over the time given, so a run ends when its time is over. The result is a checkpoint folder
for `transformers` and SGLang.

    python examples/train_tiny_model.py --text train.txt --validation validation.txt --size tiny
    --out MODEL

Text files hold documents separated by `<|endoftext|>`. Size `tiny` takes about three minutes on one
H200; size `unit` with `--max-steps 3` takes seconds on a CPU and only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from recall_tasks import ANSWER_WEIGHT, LETTER_WEIGHT, RecallTasks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEPARATOR = "<|endoftext|>"
SPECIAL_TOKENS = [SEPARATOR, "<|im_start|>", "<|im_end|>"]
USUAL_CONTEXT = 2048
"""Batches have as many rows of this length as their size says, and fewer of a longer one."""
WARMUP_STEPS = 100
LOWEST_RATE = 0.02
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

Tokens = NDArray[np.uint16]
Batch = tuple[NDArray[np.int32], NDArray[np.float32]]


@dataclass(frozen=True)
class Size:
    """Shape of a model and how it is trained."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    batch: int
    rate: float
    context: int = USUAL_CONTEXT

    @property
    def rows(self) -> int:
        """Rows of a batch: as many tokens for every context."""
        return max(1, self.batch * USUAL_CONTEXT // self.context)

    def config(self) -> Qwen3Config:
        """As `transformers` wants it."""
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0 if self.context <= USUAL_CONTEXT else 100000.0,
            },
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


SIZES = {
    "unit": Size(64, 2, 2, 1, 32, 128, 2048, batch=4, rate=3e-3),
    "tiny": Size(256, 4, 4, 2, 64, 704, 2048, batch=128, rate=3e-3),
    "mid": Size(512, 8, 8, 2, 128, 1280, 4096, batch=96, rate=2e-3),
}


@dataclass(frozen=True)
class Corpus:
    """Tokenized text; `path` holds the bytes of `train` for the processes that build batches."""

    tokenizer_path: Path
    path: Path
    train: Tokens
    validation: Tokens


def read_documents(path: Path) -> list[str]:
    """Documents of a text file; characters outside ASCII are dropped, which keeps the vocabulary
    small."""
    text = path.read_text(encoding="ascii", errors="ignore")
    return [document for document in text.split(SEPARATOR) if document.strip()]


def train_tokenizer(documents: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tokens:
    """All documents as one stream of token ids, each ended by the end-of-text token."""
    end = tokenizer.token_to_id(SEPARATOR)
    parts = []
    for start in range(0, len(documents), 512):
        batch = tokenizer.encode_batch(documents[start : start + 512], add_special_tokens=False)
        parts += [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in batch]
    return np.concatenate(parts)


def build_corpus(text: Path, validation: Path, *, vocabulary: int, work: Path) -> Corpus:
    """Train a tokenizer on a quarter of the documents and encode both texts."""
    documents = read_documents(text)
    tokenizer = train_tokenizer(documents[::4], vocabulary)
    tokenizer_path = work / "tokenizer.json"
    tokenizer.save(str(tokenizer_path))
    train = encode(tokenizer, documents)
    train.tofile(work / "train.bin")
    return Corpus(
        tokenizer_path, work / "train.bin", train, encode(tokenizer, read_documents(validation))
    )


def make_batches(
    tokenizer_path: Path, data: Path, seed: int, rows: int, context: int, queue: Queue[Batch]
) -> None:
    """Fill `queue` for ever; the body of one process."""
    tokens: Tokens = np.fromfile(data, dtype=np.uint16)
    tasks = RecallTasks(Tokenizer.from_file(str(tokenizer_path)), tokens, seed)
    draw = np.random.default_rng(seed + 999)
    while True:
        ids = np.empty((rows, context + 1), np.int32)
        weights = np.ones((rows, context + 1), np.float32)
        for row in range(rows):
            if draw.random() < 0.5:
                start = int(draw.integers(0, len(tokens) - context - 2))
                ids[row] = tokens[start : start + context + 1]
            else:
                ids[row], weights[row] = tasks.row(context + 1)
        queue.put((ids, weights))


@contextmanager
def batches(corpus: Corpus, size: Size, workers: int) -> Iterator[Queue[Batch]]:
    """A queue of batches for `size`, filled by `workers` processes, which end with the scope."""
    context = multiprocessing.get_context("spawn")
    queue: Queue[Batch] = context.Queue(maxsize=24)
    processes = [
        context.Process(
            target=make_batches,
            args=(corpus.tokenizer_path, corpus.path, 100 + i, size.rows, size.context, queue),
            daemon=True,
        )
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        yield queue
    finally:
        for process in processes:
            process.terminate()
            process.join()


def new_model(size: Size, device: str) -> nn.Module:
    """Random weights from a fixed seed: embeddings scaled for a unit-norm residual stream, matrices
    at 0.02."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(size.config())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=size.hidden**-0.5 if "embed_tokens" in name else 0.02)
    moved: nn.Module = model.to(device)
    return moved


def new_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=torch.cuda.is_available())


def training_loss(model: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """Next-token cross-entropy in float32, averaged with one weight per token; `ids` and `weights`
    `[B, T + 1]`."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def rate_factor(step: int, elapsed: float) -> float:
    """Learning rate relative to its peak: linear warm-up, cosine over the share of time `elapsed`
    in 0..1."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (
        LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed)))
    )


def train(
    model: nn.Module, queue: Queue[Batch], size: Size, *, seconds: float, max_steps: int
) -> int:
    """Train in place until the time or the steps are used up; returns the number of steps."""
    device = next(model.parameters()).device
    compute_loss = torch.compile(training_loss) if device.type == "cuda" else training_loss
    optimizer = new_optimizer(model, size.rate)
    start: float | None = None
    for step in range(max_steps):
        ids, weights = (torch.from_numpy(array).to(device) for array in queue.get())
        if step == 3:  # compilation is over: the clock starts
            start = time.monotonic()
        elapsed = 0.0 if start is None else (time.monotonic() - start) / seconds
        if elapsed >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = size.rate * rate_factor(step, elapsed)
        with torch.autocast(device.type, torch.bfloat16):
            loss = compute_loss(model, ids.long(), weights)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return max_steps


@torch.no_grad()
def measure(
    model: nn.Module, corpus: Corpus, context: int, *, windows: int = 24, seed: int = 777
) -> dict[str, float]:
    """Perplexity on validation text, and accuracy on recalled digits and on letters of choices."""
    device = next(model.parameters()).device

    def predict(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits: Tensor = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        return logits.float()

    loss, text = 0.0, corpus.validation.astype(np.int64)
    for i in range(windows):
        start = (len(text) - context - 1) * i // windows
        ids = torch.from_numpy(text[start : start + context + 1]).to(device)
        loss += functional.cross_entropy(predict(ids), ids[1:]).item() / windows
    tasks = RecallTasks(Tokenizer.from_file(str(corpus.tokenizer_path)), corpus.validation, seed)
    right = {ANSWER_WEIGHT: 0, LETTER_WEIGHT: 0}
    asked = dict.fromkeys(right, 0)
    for _ in range(2 * windows):
        tokens, row_weights = tasks.row(context + 1)
        ids, weights = (
            torch.tensor(tokens, device=device),
            torch.tensor(row_weights, device=device)[1:],
        )
        hit = predict(ids).argmax(-1) == ids[1:]
        for weight in right:
            right[weight] += int(hit[weights == weight].sum())
            asked[weight] += int((weights == weight).sum())
    return {
        "perplexity": math.exp(loss),
        "answers": right[ANSWER_WEIGHT] / max(asked[ANSWER_WEIGHT], 1),
        "letters": right[LETTER_WEIGHT] / max(asked[LETTER_WEIGHT], 1),
    }


def save(model: nn.Module, corpus: Corpus, context: int, out: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer."""
    model.to(device="cpu", dtype=torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(corpus.tokenizer_path)),
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        model_max_length=context,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="training text")
    parser.add_argument("--validation", type=Path, required=True, help="other text")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument(
        "--context", type=int, default=USUAL_CONTEXT, help="tokens of a row (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=170, help="training time (%(default)s)")
    parser.add_argument(
        "--max-steps", type=int, default=10**9, help="end after so many steps at the latest"
    )
    parser.add_argument(
        "--workers", type=int, default=10, help="processes that build batches (%(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    options = parser.parse_args()
    size = replace(SIZES[options.size], context=options.context)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as work:
        corpus = build_corpus(
            options.text, options.validation, vocabulary=size.vocabulary, work=Path(work)
        )
        print(
            f"{len(corpus.train):,} training and {len(corpus.validation):,} validation tokens",
            flush=True,
        )
        model = new_model(size, device)
        with batches(corpus, size, options.workers) as queue:
            steps = train(model, queue, size, seconds=options.seconds, max_steps=options.max_steps)
        report = {"steps": steps, "size": asdict(size), **measure(model, corpus, size.context)}
        save(model, corpus, size.context, options.out)
    (options.out / "training.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    print(report)


if __name__ == "__main__":
    main()
