"""The store computes plain attention over all tokens, wherever keys and values are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import sampled
from torch import Tensor

from fastattention.errors import ArgumentError, CacheFullError
from fastattention.offload.eviction_order import eviction_order
from fastattention.offload.kv_store import MOST_QUERIES_ON_CPU, CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions
from fastattention.offload.staging import StagedChunk
from offload.fake_device import FakeDevice
from offload.reference_cache import HEADDIM, HEADDIM_V, NHEADS_K, CachePair, page_shape

pytestmark = pytest.mark.usefixtures("small_buffers")

every_share = pytest.mark.parametrize("share", [0.0, 0.4, 1.0])


def make_pair(share: float = 0.4, **changed: Any) -> CachePair:
    """A store with room on the device for about a layer of 40 tokens, and for a page of each other layer."""
    batch_size = changed.get("batch_size", 1)
    changed.setdefault("gpu_pages", 25 * batch_size)
    return CachePair(share=lambda layers, tokens: share, **changed)


@every_share
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_after_a_prompt(share: float, dtype: torch.dtype) -> None:
    pair = make_pair(share, shape=page_shape(dtype))
    pair.attend(13)
    pair.steps(30)
    assert 0 < sum(pair.store.layers_on_cpu) < pair.num_layers


@every_share
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@sampled
def test_quantized_pages_in_cpu_memory(share: float, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Exactly whole pages are quantized, each value once."""
    pair = make_pair(share, shape=page_shape(dtype, cache_dtype))
    pair.attend(13)
    pair.steps(30)
    pair.append(9)
    pair.attend(MOST_QUERIES_ON_CPU + 1)
    pair.truncate(37)
    pair.steps(6)
    assert any(pair.store.layers_on_cpu)
    assert pair.store.usage.cpu_bytes % pair.shape.nbytes == 0


@every_share
def test_every_option_at_once(share: float) -> None:
    """Softcap, sinks, three sequences of uneven padding, six heads on two, and a smaller head dimension of values."""
    options = {"softcap": 3.0, "sinks": torch.randn(6)}
    pair = make_pair(share, batch_size=3, nheads=6, options=options, padding=[0, 7, 3])
    pair.attend(11)
    pair.steps(12)
    pair.steps(3, tokens=4)
    pair.append(6)
    pair.steps(4)
    assert any(pair.store.layers_on_cpu)


@every_share
@pytest.mark.parametrize("padding", [[22, 0, 9], [40, 2, 0]], ids=["over two chunks", "of all tokens"])
def test_padding_that_ends_in_a_later_chunk_than_it_begins(share: float, padding: list[int]) -> None:
    pair = make_pair(share, batch_size=3, padding=padding, gpu_pages=80)
    for tokens in (10, 10, 4, 1):
        pair.attend(tokens)
    pair.steps(12)
    assert any(pair.store.layers_on_cpu)


@every_share
@pytest.mark.parametrize("chunk", [3, 4, MOST_QUERIES_ON_CPU, MOST_QUERIES_ON_CPU + 1])
def test_a_prompt_in_chunks(share: float, chunk: int) -> None:
    pair = make_pair(share, gpu_pages=35)
    while pair.length < 66:
        pair.attend(chunk)
    assert any(pair.store.layers_on_cpu)
    pair.steps(5)


@every_share
def test_a_prompt_that_nothing_attends_to(share: float) -> None:
    """A prompt may exceed the device: a layer in CPU memory takes it in pieces."""
    pair = make_pair(share)
    pair.append(300)
    assert pair.store.layers_on_cpu == [True] * 4
    pair.append(3)
    pair.steps(5)


@every_share
def test_several_tokens_a_step(share: float) -> None:
    """As in assisted decoding, candidates are appended, and those that are not accepted are dropped."""
    pair = make_pair(share)
    pair.attend(10)
    for accepted in (1, 5, 3, 2, 4, 1, 5, 5, 2, 5):
        length = pair.length
        pair.attend(5)
        pair.truncate(length + accepted)
    assert any(pair.store.layers_on_cpu)


@sampled
@every_share
@pytest.mark.parametrize("length", range(40))
def test_truncating_to_every_length_and_going_on(share: float, length: int) -> None:
    pair = make_pair(share, padding=[3])
    pair.append(36)
    pair.attend(3)
    assert any(pair.store.layers_on_cpu)
    pair.truncate(length)
    pair.steps(3, tokens=2)


@every_share
def test_layers_move_in_the_middle_of_decoding(share: float) -> None:
    pair = make_pair(share)
    pair.attend(16)
    seen = set()
    for _ in range(60):
        pair.attend(1)
        seen.add(tuple(pair.store.layers_on_cpu))
    assert len(seen) == 5
    assert pair.store.layers_on_cpu == [True] * 4


@every_share
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_beams(share: float, page_size: int) -> None:
    """Any sequence may be continued from any other, several times or not at all."""
    pair = make_pair(
        share, batch_size=3, padding=[0, 5, 2], shape=page_shape(page_size=page_size), gpu_pages=280 // page_size
    )
    pair.attend(9)
    for _ in range(25):
        pair.select(torch.randint(3, (3,)).tolist())
        pair.attend(1)
    pair.truncate(7)
    pair.select([1, 1, 1])
    pair.steps(3)


@every_share
def test_sequences_are_repeated_and_dropped(share: float) -> None:
    pair = make_pair(share, batch_size=2, gpu_pages=100, padding=[4, 0])
    pair.attend(17)
    pair.select([0, 0, 0, 1, 1, 1])
    pair.steps(7)
    pair.select([4, 0, 3])
    pair.steps(7)
    pair.select([1])
    pair.steps(60)
    assert any(pair.store.layers_on_cpu)


def test_reading_ahead_uploads_nothing_twice() -> None:
    """In the steady state a step uploads its share once, because prefetched chunks are used."""
    pair = make_pair(1.0)
    pair.append(100)
    pair.steps(2)
    pair.device.finish()
    before, tokens = pair.device.uploaded_bytes, 0
    for _ in range(20):
        tokens += pair.num_layers * (pair.length // 4 * 4)
        pair.attend(1)
    uploaded = pair.device.uploaded_bytes - before
    assert uploaded <= 1.05 * tokens * pair.shape.token_bytes


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_buffer_is_filled_again_only_when_it_has_been_read(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """The computation is slower than the link here, and the device notices an upload that overtakes it."""
    pair = make_pair(0.6, batch_size=batch_size)
    attend_to_chunk = pair.store._attend_to_chunk

    def slow(q: Tensor, chunk: StagedChunk, options: AttendOptions) -> tuple[Tensor, Tensor]:
        result = attend_to_chunk(q, chunk, options)
        pair.device.compute(1.0, chunk.buffer.pages.tensors())
        return result

    monkeypatch.setattr(pair.store, "_attend_to_chunk", slow)
    pair.append(60)
    pair.steps(4)
    pair.select([0] * batch_size)
    pair.attend(1)
    pair.truncate(30)
    pair.append(40)
    pair.steps(2)
    assert pair.device.now > 100.0


def test_the_cpu_reads_only_what_is_not_uploaded() -> None:
    pair = make_pair(0.5)
    pair.append(160)
    pair.steps(2)  # none of them has corrected the share yet
    before = pair.device.cpu_bytes
    pair.attend(1)
    assert pair.device.cpu_bytes - before == pair.num_layers * 80 * pair.shape.token_bytes


@every_share
def test_a_prompt_is_attended_to_by_the_device_alone(share: float) -> None:
    pair = make_pair(share)
    pair.append(60)
    pair.steps(2)
    before = pair.device.cpu_bytes
    pair.attend(MOST_QUERIES_ON_CPU + 1)
    assert pair.device.cpu_bytes == before


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
def test_layers_leave_spread_over_the_depth_the_last_first(count: int) -> None:
    order = eviction_order(count)
    assert sorted(order) == list(range(count))
    assert order[0] == count - 1
    if count == 32:
        assert sorted(order[:8]) == [3, 7, 11, 15, 19, 23, 27, 31]


def test_wrong_arguments_are_named() -> None:
    pair = make_pair()
    pair.attend(9)
    for length in (10, -1):
        with pytest.raises(ArgumentError, match=f"length={length} must be 0 to 9"):
            pair.store.truncate(length)
    for rows in ([], [1], [-1]):
        with pytest.raises(ArgumentError, match="rows="):
            pair.store.select(rows)
    q, k, v = (torch.zeros(1, 1, *heads) for heads in ((4, HEADDIM), (NHEADS_K, HEADDIM), (NHEADS_K, HEADDIM_V)))
    with pytest.raises(ArgumentError, match="layer 2 must follow layer 1"):
        pair.store.attend(2, q, k, v, AttendOptions())
    pair.check()
    pair.steps(2)


def test_a_budget_that_holds_no_token_is_refused_with_what_it_takes() -> None:
    with pytest.raises(CacheFullError, match=r"gpu_memory") as refusal:
        CachePair(gpu_pages=7)
    least = int(str(refusal.value).split("at least ")[1].split(" ")[0])
    budget = MemoryCaps(least, 1 << 16)
    store = CooperativeKVStore(4, 1, page_shape(), FakeDevice(), budget, lambda layers, tokens: 0.0)
    store.append(0, torch.zeros(1, 1, NHEADS_K, HEADDIM), torch.zeros(1, 1, NHEADS_K, HEADDIM_V))
