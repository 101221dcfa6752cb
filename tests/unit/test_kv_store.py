"""KVStore: appended tokens can be read and truncated, and a wrong argument changes nothing."""

from __future__ import annotations

import errno
import mmap
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattention import (
    ArgumentError,
    DenseKVStore,
    KVStore,
    PackedKVStore,
    UnsupportedError,
    explain,
    fast_attn_with_kvcache,
)
from fastattention.attention.backend import AttentionBackend
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.backends.sdpa.backend import SdpaBackend
from unit.refusals import Refusal, assert_refused, refusals, refused
from unit.samples import int32

KINDS = [DenseKVStore, PackedKVStore]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)

# Sizes are odd on purpose: no vector, pair or panel ends where these do.
BATCH_SIZE, CAPACITY, NHEADS_K, HEADDIM, HEADDIM_V = 2, 77, 3, 13, 7


def make(kind: type[KVStore], dtype: torch.dtype = torch.float32) -> KVStore:
    return kind(BATCH_SIZE, CAPACITY, NHEADS_K, HEADDIM, HEADDIM_V, dtype=dtype)


def queries(seqlen: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH_SIZE, seqlen, 2 * NHEADS_K, HEADDIM).to(dtype)


def tokens(seqlen: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """k and v of new tokens."""
    shape = (BATCH_SIZE, seqlen, NHEADS_K)
    return torch.randn(*shape, HEADDIM).to(dtype), torch.randn(*shape, HEADDIM_V).to(dtype)


def held(store: KVStore) -> list[tuple[Tensor, Tensor]]:
    """(k, v) of every sequence, up to its length."""
    k, v = store.read()
    return [(k[b, :length].clone(), v[b, :length].clone()) for b, length in enumerate(store.seqlens.tolist())]


@every_kind
def test_a_new_store_is_empty_and_knows_its_sizes(kind: type[KVStore]) -> None:
    store = make(kind, torch.bfloat16)
    sizes = (store.batch_size, store.capacity, store.nheads_k, store.headdim, store.headdim_v)
    assert sizes == (BATCH_SIZE, CAPACITY, NHEADS_K, HEADDIM, HEADDIM_V)
    assert (store.dtype, store.device) == (torch.bfloat16, torch.device("cpu"))
    assert torch.equal(store.seqlens, int32(0, 0))
    assert store.nbytes >= BATCH_SIZE * CAPACITY * NHEADS_K * (HEADDIM + HEADDIM_V) * 2
    k, v = store.read()
    assert k.shape == (BATCH_SIZE, CAPACITY, NHEADS_K, HEADDIM)
    assert v.shape == (BATCH_SIZE, CAPACITY, NHEADS_K, HEADDIM_V)
    assert kind(1, 8, 1, 16, dtype=torch.float32).headdim_v == 16


@every_kind
@every_dtype
def test_what_is_appended_is_read_bit_for_bit(kind: type[KVStore], dtype: torch.dtype) -> None:
    store = make(kind, dtype)
    parts = [tokens(seqlen, dtype) for seqlen in (1, 33, 2, 0, 41)]
    for k, v in parts:
        store.append(k, v)
    k, v = store.read()
    assert torch.equal(store.seqlens, int32(77, 77))
    assert torch.equal(k, torch.cat([part[0] for part in parts], dim=1))
    assert torch.equal(v, torch.cat([part[1] for part in parts], dim=1))


@every_kind
@every_dtype
def test_truncated_tokens_are_forgotten_and_written_over(kind: type[KVStore], dtype: torch.dtype) -> None:
    store = make(kind, dtype)
    k, v = tokens(50, dtype)
    store.append(k, v)
    store.truncate(int32(3, 48))
    more_k, more_v = tokens(5, dtype)
    q = queries(dtype=dtype)
    out = store.attend(q, more_k, more_v)
    assert torch.equal(store.seqlens, int32(8, 53))
    for b, (length, (found_k, found_v)) in enumerate(zip((3, 48), held(store), strict=True)):
        assert torch.equal(found_k, torch.cat((k[b, :length], more_k[b])))
        assert torch.equal(found_v, torch.cat((v[b, :length], more_v[b])))
        alone = fast_attn_with_kvcache(q[b : b + 1], found_k[None], found_v[None])
        rounding = max(torch.finfo(dtype).eps, 1e-5)  # of values near 1, and of weights
        torch.testing.assert_close(out[b : b + 1], alone, rtol=0.0, atol=rounding)
    for length in (8, 0):
        store.truncate(length)
        assert torch.equal(store.seqlens, int32(length, length))
    assert not store.attend(queries(dtype=dtype)).any()


@every_kind
def test_lengths_are_one_tensor_for_life(kind: type[KVStore]) -> None:
    """A captured CUDA graph reads and writes the memory of the lengths it was captured with."""
    store = make(kind)
    seqlens = store.seqlens
    store.append(*tokens(3))
    store.attend(queries(), *tokens(2))
    store.truncate(int32(4, 1))
    assert store.seqlens is seqlens
    assert torch.equal(seqlens, int32(4, 1))


@every_kind
def test_rotary_embedding_is_that_of_a_call_with_a_cache(kind: type[KVStore]) -> None:
    angles = torch.rand(CAPACITY, 3)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    options = rotary | {"causal": True, "return_lse": True}
    store, q, first, second = make(kind), queries(4), tokens(30), tokens(4)
    store.append(*first, **rotary)
    found = store.attend(q, *second, **options)
    k_cache, v_cache = torch.zeros(2, CAPACITY, NHEADS_K, HEADDIM), torch.zeros(2, CAPACITY, NHEADS_K, HEADDIM_V)
    fast_attn_with_kvcache(q[:, :0], k_cache, v_cache, *first, cache_seqlens=0, **rotary)
    wanted = fast_attn_with_kvcache(q, k_cache, v_cache, *second, cache_seqlens=30, **options)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(store.read()[0][:, :34], k_cache[:, :34])


@every_kind
def test_explaining_a_call_appends_nothing(kind: type[KVStore]) -> None:
    store = make(kind)
    store.append(*tokens(5))
    before = held(store)
    explanation = explain(queries(), *tokens(2), function=store.attend)
    assert explanation.backend == "cpu"
    assert torch.equal(store.seqlens, int32(5, 5))
    torch.testing.assert_close(held(store), before, rtol=0.0, atol=0.0)


@every_kind
def test_an_unknown_backend_is_refused_and_an_unable_one_says_why(kind: type[KVStore]) -> None:
    store = make(kind)
    with pytest.raises(ArgumentError, match="'moon'"):
        store.append(*tokens(2), backend="moon")
    with pytest.raises(UnsupportedError, match="cuda"):
        store.append(*tokens(2), backend="cuda")
    assert torch.equal(store.seqlens, int32(0, 0))


@pytest.mark.parametrize("backend", [SdpaBackend, CudaBackend, AscendBackend], ids=["sdpa", "cuda", "ascend"])
def test_backends_that_cannot_read_panels_refuse_them(
    backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_why_not_device", lambda self, problem: None, raising=False)
    problem = explain(queries(), function=make(PackedKVStore).attend).problem
    assert problem.panel_size == 32
    assert "interleaved panels" in (backend().why_not(problem) or "")


def test_a_packed_store_is_for_the_cpu_and_for_eager_calls() -> None:
    with pytest.raises(ArgumentError, match=r"device=meta.*DenseKVStore"):
        PackedKVStore(1, 8, 1, 16, dtype=torch.float32, device="meta")
    store = make(PackedKVStore)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(UnsupportedError, match=r"traced.*DenseKVStore"):
        store.attend(torch.empty(BATCH_SIZE, 1, 2 * NHEADS_K, HEADDIM), *tokens(1))
    assert torch.equal(store.seqlens, int32(0, 0))


def test_a_panel_cache_has_the_documented_layout() -> None:
    """Other code may write it, so the place of each element is part of the interface."""
    for dtype, pair in ((torch.bfloat16, 2), (torch.float16, 1), (torch.float32, 1)):
        store = make(PackedKVStore, dtype)
        k, v = tokens(CAPACITY, dtype)
        store.append(k, v)
        panels_k, panels_v = store._k, store._v
        assert panels_k.shape == (BATCH_SIZE, NHEADS_K, 3, -(-HEADDIM // pair), 32, pair)
        assert panels_v.shape == (BATCH_SIZE, NHEADS_K, 96 // pair, HEADDIM_V, pair)
        for token, d in ((0, 0), (31, 12), (32, 3), (76, 7)):
            assert torch.equal(panels_k[:, :, token // 32, d // pair, token % 32, d % pair], k[:, token, :, d])
        for token, d in ((0, 0), (33, 6), (76, 3)):
            assert torch.equal(panels_v[:, :, token // pair, d, token % pair], v[:, token, :, d])
        if pair == 2:
            assert not panels_k[:, :, 0, -1, :, 1].any()


SIZES = (
    refused("batch_size=-1", "0 to 2147483647", batch_size=-1),
    refused("capacity=-1", "0 to 2147483647", capacity=-1),
    refused("capacity=2147483648", "0 to 2147483647", capacity=2**31),
    refused("device='rubbish' cannot be used", "rubbish", device="rubbish"),
    refused("capacity must be an integer", "1.5", capacity=1.5),
    refused("nheads_k=0", "1 to 2147483647", nheads_k=0),
    refused("headdim=577", "1 to 576", headdim=577),
    refused("headdim_v=0", "1 to 512", headdim_v=0),
    refused("headdim_v=513", "1 to 512", headdim=513),
    refused("dtype=torch.float64", "float16, bfloat16, float32", dtype=torch.float64),
)


@refusals(*SIZES)
@every_kind
def test_sizes_that_no_store_has_are_refused(kind: type[KVStore], refusal: Refusal) -> None:
    sizes: dict[str, Any] = {"batch_size": 1, "capacity": 8, "nheads_k": 1, "headdim": 16, "dtype": torch.float16}
    assert_refused(lambda: kind(**sizes | refusal.changes), refusal)


def test_more_memory_than_there_is_is_told() -> None:
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    with (
        mock.patch.object(mmap, "mmap", side_effect=no_memory),
        pytest.raises(MemoryError, match=r"there are no 8\.00 MiB of memory: .* Cannot allocate memory"),
    ):
        DenseKVStore(1, 4096, 4, 256, dtype=torch.float16)


ATTEND = (
    refused("q must be a torch.Tensor", "list", q=[]),
    refused("q is torch.float64 on cpu", "store torch.float32", q=queries().double()),
    refused("q is torch.float32 on meta", "store torch.float32 on cpu", q=queries().to("meta")),
    refused("q must be (batch_size, seqlen_q", "(2, 6, 13)", q=torch.ones(2, 6, 13)),
    refused("batch_size=2", "(3, 1, 6, 13)", q=torch.ones(3, 1, 6, 13)),
    refused("headdim=13", "(2, 1, 6, 14)", q=torch.ones(2, 1, 6, 14)),
    refused("multiple of nheads_k=3", "(2, 1, 4, 13)", q=torch.ones(2, 1, 4, 13)),
    refused("k and v must be given together", "only k", v=None),
    refused("k and v must be given together", "only v", k=None),
    refused("k must be a torch.Tensor", "list", k=[]),
    refused("k must be (batch_size, seqlen_new", "(2, 3, 13)", k=torch.ones(2, 3, 13)),
    refused("k must be", "(2, 2, 3, 13)", "(2, 2, 3, 12)", k=torch.ones(2, 2, 3, 12)),
    refused("v must be", "(2, 2, 3, 7)", "(2, 2, 3, 13)", v=torch.ones(2, 2, 3, 13)),
    refused("k has dtype torch.float16", "torch.float32", k=torch.ones(2, 2, 3, 13).half()),
    refused(
        "74 tokens for sequence 1",
        "holds 4 of capacity=77",
        "truncate",
        k=torch.ones(2, 74, 3, 13),
        v=torch.ones(2, 74, 3, 7),
    ),
    refused("rotary_cos and rotary_sin must be given together", rotary_cos=torch.ones(9, 2)),
    refused("rotary_cos has 5 positions", "needs 6", rotary_cos=torch.ones(5, 2), rotary_sin=torch.ones(5, 2)),
    refused("window_size must be two integers", "(1,)", window_size=(1,)),
    refused("attn_bias must broadcast", "(2, 6, 1, 77)", "(76,)", attn_bias=torch.ones(76)),
    refused("num_splits=-1", "at least 0", num_splits=-1),
)


@refusals(*ATTEND)
@every_kind
def test_a_refused_call_changes_nothing(kind: type[KVStore], refusal: Refusal) -> None:
    store = make(kind)
    store.append(*tokens(4))
    store.truncate(int32(2, 4))
    before = held(store)
    k, v = tokens(2)
    assert_refused(lambda: store.attend(**{"q": queries(), "k": k, "v": v} | refusal.changes), refusal)
    assert torch.equal(store.seqlens, int32(2, 4))
    torch.testing.assert_close(held(store), before, rtol=0.0, atol=0.0)


LENGTHS = (
    refused("seqlens[1]=5", "0 to 4", seqlens=int32(4, 5)),
    refused("seqlens[0]=-1", "0 to 4", seqlens=int32(-1, 0)),
    refused("seqlens[0]=5", "0 to 4", seqlens=5),
    refused("seqlens must be an int32 tensor", "1.5", seqlens=1.5),
    refused("seqlens must be int32 (batch_size,) = (2,)", "int64 (2,)", seqlens=int32(1, 1).long()),
    refused("(batch_size,) = (2,)", "int32 (1,)", seqlens=int32(1)),
    refused("on cpu", "on meta", seqlens=int32(1, 1).to("meta")),
)


@refusals(*LENGTHS)
@every_kind
def test_a_refused_truncation_changes_nothing(kind: type[KVStore], refusal: Refusal) -> None:
    store = make(kind)
    store.append(*tokens(4))
    assert_refused(lambda: store.truncate(**refusal.changes), refusal)
    assert torch.equal(store.seqlens, int32(4, 4))


def test_a_dense_store_works_in_a_compiled_program() -> None:
    store, eager = make(DenseKVStore), make(DenseKVStore)
    q, (k, v) = queries(2), tokens(2)
    compiled = torch.compile(lambda: store.attend(q, k, v, causal=True), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(), eager.attend(q, k, v, causal=True))
    assert torch.equal(store.seqlens, int32(4, 4))


def test_a_large_store_is_usable_memory_and_given_back() -> None:
    """Large stores do not come from torch's allocator."""
    store = DenseKVStore(1, 20000, 2, 64, dtype=torch.float32)
    k, v = torch.randn(2, 1, 20000, 2, 64)
    store.append(k, v)
    assert torch.equal(store.read()[0], k)
    view = store.read()[1]
    del store
    assert torch.equal(view, v)
