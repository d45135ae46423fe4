"""Pages in the host's memory: what goes out comes back to the same bytes, in any order, over any
number of buffers, and nothing beside it changes."""

import pytest
import torch

from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import host_pages
from oscar_zoo.runtime.host_pages import HostPages, stage_bytes
from oscar_zoo.runtime.stores import SlotShape, SlotStore

PAGE, PAGES, RECORDS, HEADS = 16, 12, 20, 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TWO, FOUR = QuantSpec(64, 32, 0.96), QuantSpec(64, 64, 0.0, bits=4)


@pytest.fixture(params=DEVICES)
def slots(request: pytest.FixtureRequest) -> SlotStore:
    """Layers of other bits than their neighbours, full of random bytes."""
    shape = SlotShape(((TWO, TWO), (FOUR, TWO), (TWO, FOUR)), PAGE * PAGES, HEADS)
    store, order = SlotStore(shape, request.param), torch.Generator().manual_seed(0)
    for buffer in store.buffers():
        noise = torch.randint(256, (buffer.nbytes,), dtype=torch.uint8, generator=order)
        buffer.view(torch.uint8).copy_(noise.view(buffer.view(torch.uint8).shape))
    return store


def width(layer: torch.Tensor) -> int:
    return layer.shape[-1]


def pages_of(store: SlotStore, layers: int = 3) -> list[torch.Tensor]:
    """The bytes of every page: of so many layers at a time, codes, then parameters, in each those
    of narrow layers first."""
    found = []
    for first in range(0, 3, layers):
        for side in (store.codes, store.affine):
            found += sorted(side[first : first + layers], key=width)
    parts = [one.view(torch.uint8).reshape(PAGES, -1).cpu().clone() for one in found]
    return list(torch.cat(parts, 1))


@pytest.mark.parametrize("layers", [1, 2, 6])
@pytest.mark.parametrize("staged", [1, 3, 100])
def test_pages_come_back_to_the_same_bytes(
    slots: SlotStore, staged: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = slots.shape.token_bytes() * PAGE
    monkeypatch.setattr(host_pages, "STAGE_BYTES", staged * record)
    monkeypatch.setattr(host_pages, "LAYERS", layers)
    host, before = HostPages(slots, PAGE, RECORDS), pages_of(slots, layers)
    assert host.record_bytes == record and stage_bytes(record) == 2 * staged * record
    out, records, back = [5, 6, 7, 1, 11], [3, 4, 9, 10, 0], [2, 8, 9, 4, 10]
    host.save(torch.tensor(out), torch.tensor(records))
    if host.memory.is_pinned():
        torch.cuda.synchronize()
    for page, place in zip(out, records, strict=True):
        assert torch.equal(host.record(place), before[page])
    host.fill(15, host.record(records[0]))
    order = [4, 0, 2, 1, 3]
    found = [torch.tensor([of[one] for one in order]) for of in ([15, *records[1:]], back)]
    for layer, _ in enumerate(host.load(*found)):
        for buffer in (slots.codes[layer], slots.affine[layer]):
            pages = buffer.view(torch.uint8).reshape(PAGES, -1)
            assert torch.equal(pages[back[4]], pages[out[4]]), layer
    assert layer == 2
    expected = dict(enumerate(before)) | {
        page: before[was] for page, was in zip(back, out, strict=True)
    }
    after = pages_of(slots, layers)
    for page in range(PAGES):
        assert torch.equal(after[page], expected[page]), page
    host.close()
    host.close()


def test_a_page_is_whole_words(slots: SlotStore) -> None:
    with pytest.raises(ValueError, match="8"):
        HostPages(slots, 8, RECORDS)
