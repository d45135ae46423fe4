"""`OscarCache` gives the tokens of the chunked reference server, whatever the length of a prompt
and of the windows, for every kind of transform, and whichever way its rows are read."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cache_oracle import general_set
from tiny_models import write_model
from torch import Tensor
from transformers import DynamicCache

from oscar_zoo.artifact.formats import LayerTransform, hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, SideWidths, Widths, Windows
from oscar_zoo.engines.transformers import graph
from oscar_zoo.engines.transformers import rows as rows_module
from oscar_zoo.engines.transformers.layer import CROPS_TO_LENGTH
from oscar_zoo.errors import GeometryMismatch, UnsupportedModel, UsageError
from oscar_zoo.evaluate.generate import GenerationRequest
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.transformers import OscarCache

TEXT = torch.randint(3, 2000, (2, 400), generator=torch.Generator().manual_seed(1))
NEW = 24
WAYS = ("auto", "keep")


@pytest.fixture(params=WAYS)
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@pytest.fixture(scope="module")
def model(device: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_model(tmp_path_factory.mktemp("model"))
    return load_model(str(folder), dtype="float32", device=device)


@pytest.fixture(scope="module")
def reference(model: LoadedModel, replayed: Any) -> Callable[..., list[int]]:
    """What the server takes behind a prompt, which it reads in chunks; see `replayed`."""

    def taken(ids: Tensor, spec: CacheSpec, new: Tensor, chunk: int = 4096) -> list[int]:
        request = GenerationRequest(model, spec)
        logits = [request.extend(piece)[-1] for piece in ids.split(chunk)]
        return replayed(request, logits[-1], new)  # type: ignore[no-any-return]

    return taken


def recipe(sink: int = 4, recent: int = 9, widths: Widths | None = None) -> ServingRecipe:
    windows, clip = Windows(sink=sink, recent=recent), Clip(k=0.96, v=0.92)
    return ServingRecipe(group_size=16, clip=clip, windows=windows).with_widths(widths)


def spec_of(model: LoadedModel, **settings: Any) -> CacheSpec:
    sets = (hadamard_set(model.block, side) for side in ("k", "v"))
    return CacheSpec(*sets, recipe(**settings))


def cache_of(model: LoadedModel, spec: CacheSpec, **options: Any) -> OscarCache:
    model.model.set_attn_implementation("sdpa")
    assert spec.k is not None and spec.v is not None
    return OscarCache(model.model, spec.k, spec.v, spec.recipe, **options)


def generated(model: LoadedModel, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """New tokens, `[B, NEW]`."""
    usual: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    usual["eos_token_id"] = None
    ids = (ids if ids.dim() == 2 else ids[None]).to(model.device)
    found = model.model.generate(ids, past_key_values=cache, **usual | options)
    new: Tensor = found[:, ids.shape[1] :].cpu()
    return new


def fed(model: LoadedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits of tokens that come at once."""
    with torch.no_grad():
        return model.model(ids.to(model.device), past_key_values=cache).logits  # type: ignore[no-any-return]


LENGTHS = [(tokens, 4, 9) for tokens in (1, 3, 4, 5, 9, 10, 13, 14, 70, 200)]
WINDOWS = [(90, 0, 1), (90, 0, 40), (90, 2, 33), (90, 7, 3), (90, 64, 100)]


@pytest.mark.parametrize(("tokens", "sink", "recent"), LENGTHS + WINDOWS)
def test_lengths_of_a_prompt_and_windows(
    model: LoadedModel, reference: Any, tokens: int, sink: int, recent: int, attention: str
) -> None:
    spec, ids = spec_of(model, sink=sink, recent=recent), TEXT[0, :tokens]
    got = generated(model, ids, cache_of(model, spec, attention=attention))
    assert got[0].tolist() == reference(ids, spec, got[0])


def transforms(kind: str, model: LoadedModel) -> CacheSpec:
    block, plain = model.block, spec_of(model)
    if kind == "widths":
        sides = SideWidths(bits=(4, 2), clip=(0.0, 0.96)), SideWidths(bits=(2, 4), clip=(0.9, 0.0))
        return replace(plain, recipe=recipe(widths=Widths(k=sides[0], v=sides[1])))
    heads, d = block.num_kv_heads, block.head_dim
    k, v = (general_set(side, 2, heads, d, seed=3) for side in ("k", "v"))
    if kind == "feedback":
        draw = np.random.default_rng(6)
        own = [0.3 * draw.standard_normal((heads, d * (d - 1) // 2)) for _ in k.layers]
        pairs = zip(k.layers, own, strict=True)
        k = replace(k, layers=tuple(replace(x, feedback=np.float16(y)) for x, y in pairs))
    return replace(plain, k=k, v=v)


@pytest.mark.parametrize("kind", ["general", "widths", "feedback"])
def test_transforms(model: LoadedModel, reference: Any, kind: str, attention: str) -> None:
    spec = transforms(kind, model)
    got = generated(model, TEXT[0, :90], cache_of(model, spec, attention=attention))
    assert got[0].tolist() == reference(TEXT[0, :90], spec, got[0])


@pytest.mark.parametrize("size", [90, 60, 8])
def test_padding_on_the_left(model: LoadedModel, replayed: Any, attention: str, size: int) -> None:
    """With pieces of 60 a sequence begins in the second, with 8 in the middle of several."""
    spec, total = spec_of(model), 90
    ids, mask = torch.zeros(3, total, dtype=torch.int64), torch.zeros(3, total, dtype=torch.int64)
    texts = [TEXT[0, :90], TEXT[1, :37], TEXT[1, 100:121]]
    for row, text in enumerate(texts):
        ids[row, -len(text) :], mask[row, -len(text) :] = text, 1
    pieces = {} if size == total else {"prefill_chunk_size": size}
    given = mask if pieces or attention == "keep" else None
    cache = cache_of(model, spec, attention=attention, attention_mask=given)
    got = generated(model, ids, cache, attention_mask=mask.to(model.device), **pieces)
    for row, text in enumerate(texts):
        request, pad, logits = GenerationRequest(model, spec), total - len(text), TEXT
        for first in range(0, total, size):
            piece = text[max(first - pad, 0) : max(first + size - pad, 0)]
            if first >= 69 and size <= 9 and attention == "auto":  # few behind all padding
                for token in piece:
                    logits = request.decode(int(token))
            elif len(piece):
                logits = request.extend(piece)[-1]
        assert got[row].tolist() == replayed(request, logits, got[row])


def test_a_prompt_in_pieces_and_another_turn(
    model: LoadedModel, reference: Any, replayed: Any, attention: str
) -> None:
    spec = spec_of(model)
    cache = cache_of(model, spec, attention=attention)
    got = generated(model, TEXT[0, :120], cache, prefill_chunk_size=50)
    assert got[0].tolist() == reference(TEXT[0, :120], spec, got[0], chunk=50)
    said = torch.cat([TEXT[0, :120], got[0], TEXT[1, :40]])
    request = GenerationRequest(model, spec)
    for first in (0, 50, 100):
        request.extend(said[first : min(first + 50, 120)])
    for token in got[0, :-1]:
        request.decode(int(token))
    new = generated(model, said, cache)[0]
    assert new.tolist() == replayed(request, request.extend(said[143:])[-1], new)


@pytest.mark.parametrize("few", [1, 2, 9])
def test_a_few_tokens_read_what_they_would_read_one_by_one(model: LoadedModel, few: int) -> None:
    caches = [cache_of(model, spec_of(model)) for _ in range(2)]
    outs = []
    for cache, size in zip(caches, (1, few), strict=True):
        logits = [fed(model, TEXT[:, :60], cache)[:, -1:]]
        logits += [fed(model, piece, cache) for piece in TEXT[:, 60:96].split(size, 1)]
        outs.append(torch.cat(logits, 1))
    most = 1e-5 if model.device.type == "cpu" else 1e-2
    assert (outs[0] - outs[1]).norm() <= most * outs[0].norm()


@pytest.mark.parametrize("back", [0, 1, 5, 32, 33, 60, 130, 1000])
def test_tokens_taken_back(model: LoadedModel, replayed: Any, back: int, attention: str) -> None:
    """What was cut off does not matter, and of what is left the window may have lost rows."""
    spec, more = spec_of(model), TEXT[1, :40]
    cache = cache_of(model, spec, attention=attention)
    said = torch.cat([TEXT[0, :100], generated(model, TEXT[0, :100], cache)[0]])
    length = cache.get_seq_length()
    cache.crop(max(0, length - back) if CROPS_TO_LENGTH else -back)
    kept = cache.get_seq_length()
    assert kept == max(0, length - back)
    request, said = GenerationRequest(model, spec), said[:kept]
    if kept:
        request.extend(said[:100])
        for token in said[100:]:
            request.decode(int(token))
        request._own_from = min(kept, length - 9 - 32)  # what the ring held
    new = generated(model, torch.cat([said, more]), cache)[0]
    assert new.tolist() == replayed(request, request.extend(more)[-1], new)


def test_beams(model: LoadedModel) -> None:
    """Beams whose tokens differ have other odds."""

    def odds(cache: Any) -> Tensor:
        found = model.model.generate(
            TEXT[:1, :80].to(model.device), past_key_values=cache, max_new_tokens=NEW, num_beams=3,
            pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert len(set(found.beam_indices[0].tolist())) > 1
        return found.sequences_scores  # type: ignore[no-any-return]

    most = 1e-5 if model.device.type == "cpu" else 1e-2
    wide = cache_of(model, spec_of(model, sink=200, recent=200))
    exact = odds(DynamicCache(config=model.model.config))
    torch.testing.assert_close(odds(wide), exact, atol=most, rtol=0)
    ways = [odds(cache_of(model, spec_of(model), attention=way)) for way in WAYS]
    torch.testing.assert_close(*ways, atol=most, rtol=0)


def test_a_copied_beginning(model: LoadedModel, reference: Any) -> None:
    start = cache_of(model, spec_of(model))
    with torch.inference_mode():
        fed(model, TEXT[:1, :60], start)
    both = [torch.cat([TEXT[0, :60], TEXT[1, at : at + 40]]) for at in (0, 100)]
    copies = [generated(model, text, copy.deepcopy(start))[0] for text in both]
    assert start.get_seq_length() == 60
    for text, got in zip(both, copies, strict=True):
        assert got.tolist() == reference(text, spec_of(model), got, chunk=60)
    assert copy.deepcopy(start).layers[0].spec is start.layers[0].spec


def test_prompt_lookup(model: LoadedModel, reference: Any) -> None:
    spec, ids = spec_of(model), TEXT[0, :30].repeat(4)
    got = generated(model, ids, cache_of(model, spec), prompt_lookup_num_tokens=3, eos_token_id=0)
    assert got[0].tolist() == reference(ids, spec, got[0])


def test_an_assistant(model: LoadedModel, reference: Any) -> None:
    """It verifies its first guesses with the prompt, which is read exactly: so all of it is."""
    wide, ids = spec_of(model, sink=200, recent=200), TEXT[0, :60]
    options: dict[str, Any] = {"assistant_model": model.model, "eos_token_id": 0}
    got = generated(model, ids, cache_of(model, wide), **options)
    assert got[0].tolist() == reference(ids, wide, got[0])


def test_rows_in_windows_are_not_read_as_codes(model: LoadedModel) -> None:
    cache, ids = cache_of(model, spec_of(model, sink=50, recent=100)), TEXT[:1, :120]
    fed(model, ids, cache)
    spoilt = copy.deepcopy(cache)
    for layer in spoilt.layers:
        layer.rows.store.codes.fill_(0xA5)
    want = generated(model, TEXT[0, :121], cache, max_new_tokens=8)
    assert torch.equal(generated(model, TEXT[0, :121], spoilt, max_new_tokens=8), want)


def padded(total: int, pad: int) -> tuple[Tensor, Tensor]:
    """Two sequences, the second one with padding on the left, and their mask."""
    ids, mask = TEXT[:, :total].clone(), torch.ones(2, total, dtype=torch.int64)
    ids[1, :pad], mask[1, :pad] = 0, 0
    return ids, mask


def frozen(cache: OscarCache) -> Callable[..., tuple[Callable[[], None], Any]]:
    """Records as a CUDA graph does: what was on the host stays as it was then in every replay."""

    def record(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        host = [dict(vars(rows)) for rows in (layer.rows for layer in cache.layers)]

        def launch() -> Any:
            now = [dict(vars(layer.rows)) for layer in cache.layers]
            for layer, then in zip(cache.layers, host, strict=True):
                vars(layer.rows).update(then)
            found = call()
            for layer, then in zip(cache.layers, now, strict=True):
                vars(layer.rows).update(then)
            return found

        out = launch()

        def replay() -> None:
            out.logits.copy_(launch().logits)

        return replay, out

    return record


@on_cpu
@pytest.mark.parametrize(("kind", "new"), [("plain", 16), ("widths", 8), ("feedback", 8)])
def test_replayed_steps(
    model: LoadedModel, reference: Any, kind: str, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "ops_of", lambda _: KERNELS)
    monkeypatch.setattr(rows_module, "GROWTH", 5)
    spec = spec_of(model) if kind == "plain" else transforms(kind, model)
    ids, mask = padded(30, 12)
    cache = cache_of(model, spec)
    monkeypatch.setattr(graph, "record", frozen(cache))
    got = generated(model, ids, cache, attention_mask=mask, max_new_tokens=new)
    assert got[0].tolist() == reference(TEXT[0, :30], spec, got[0])
    assert got[1].tolist() == reference(TEXT[1, 12:30], spec, got[1])
    assert cache.graph is not None and cache.graph.usable
    # Of one step less than tokens; two come first, in front of and at each growth.
    assert cache.graph.replays == {16: 9, 8: 3}[new]


@on_cpu
@pytest.mark.parametrize("how", ["length on the host", "no recording", "not wanted"])
def test_steps_that_no_graph_can_hold(
    model: LoadedModel, reference: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "ops_of", lambda _: KERNELS)
    spec, ids = spec_of(model), TEXT[0, :20]
    cache = cache_of(model, spec, cuda_graph=how != "not wanted")

    def no_record(_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(graph, "record", no_record if how == "no recording" else frozen(cache))
    if how == "length on the host":
        turn, stock = model.model.model.rotary_emb, model.model.model.rotary_emb.forward

        def turned(x: Tensor, position_ids: Tensor) -> Any:
            length = cache.get_seq_length() if x.shape[1] == 1 else 0
            return stock(x, position_ids * 0 + length if length else position_ids)

        monkeypatch.setattr(turn, "forward", turned)
    got = generated(model, ids, cache, max_new_tokens=8)[0]
    monkeypatch.undo()
    assert got.tolist() == reference(ids, spec, got)
    assert cache.graph is None or not cache.graph.usable


def test_bytes_and_another_batch(model: LoadedModel, reference: Any) -> None:
    cache = cache_of(model, spec_of(model))
    fed(model, TEXT[:, :200], cache)
    most = OscarCache.bytes_for(model.model.config, 200, batch=2, recipe=cache.recipe)
    assert 0 < cache.nbytes <= most
    assert "200 tokens x 2" in cache.describe()
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    ids, mask = (x[[0, 1, 0]].to(model.device) for x in padded(30, 12))  # another batch
    got = generated(model, ids, cache, attention_mask=mask)
    assert got[1].tolist() == reference(TEXT[1, 12:30], spec_of(model), got[1])


@on_cpu
def test_what_cannot_work_is_refused(model: LoadedModel) -> None:
    spec = spec_of(model)
    assert spec.k is not None
    with pytest.raises(GeometryMismatch):
        cache_of(model, replace(spec, k=replace(spec.k, layers=spec.k.layers[:1])))
    *rest, last = spec.k.layers
    wrong = LayerTransform(last.layer_id, last.forward, 2 * last.partner)
    with pytest.raises(Exception, match="identity"):
        cache_of(model, replace(spec, k=replace(spec.k, layers=(*rest, wrong))))
    cache = cache_of(model, spec)
    generated(model, TEXT[:, :20], cache)
    with pytest.raises(UsageError):  # another batch
        generated(model, TEXT[0, :90], cache)
    rows = torch.zeros(1, 2, 3, 16, requires_grad=True)
    with pytest.raises(UsageError):
        cache_of(model, spec).update(rows, rows, 0)
    right = torch.ones(2, 20, dtype=torch.int64)
    right[1, -5:] = 0
    with pytest.raises(UsageError):
        generated(model, TEXT[:, :20], cache_of(model, spec), attention_mask=right)


@on_cpu
def test_attention_that_does_not_read_the_cache_is_found(model: LoadedModel) -> None:
    """Of a model whose code does not ask transformers for its attention function."""
    cache = cache_of(model, spec_of(model))
    rows = torch.zeros(1, 2, 3, 16)
    cache.update(rows, rows, 0)
    with pytest.raises(UnsupportedModel):
        cache.update(rows, rows, 1)
