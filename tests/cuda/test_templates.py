"""Cached parameters of calls: their key covers everything that they depend on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from emulator import EmulatedSm80
from torch import Tensor

from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache
from fastattention.attention.validation import lengths as lengths_module
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.backends.cuda.attention.call import AttentionCall

CAPACITY = 90


def narrowed(backend: CudaBackend, seed: int) -> tuple[Tensor, Tensor]:
    """Attention to 60 columns of tensors that have 64, and the exact result."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 8, 2, 64, generator=generator).half()[..., :60] for _ in range(3))
    problem, inputs = prepare_dense(q, k, v, Options())
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))
    return backend.forward(problem, inputs).out, expected.transpose(1, 2)


def test_columns_of_wider_rows_are_padded_in_every_call() -> None:
    """The padded copy has the strides of the tensor that it was copied from."""
    backend = EmulatedSm80()
    for seed in range(3):
        out, expected = narrowed(backend, seed)
        assert out.shape == expected.shape
        torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=0)


def with_tables_of(backend: CudaBackend, rows: int, length: int) -> Tensor:
    """A token that is appended after `length` others and rotated by tables of `rows` rows."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, heads, 32, generator=generator).half() for heads in (4, 2, 2))
    caches = [torch.randn(1, CAPACITY, 2, 32, generator=generator).half() for _ in range(2)]
    angles = torch.rand(CAPACITY, 8, generator=generator)[:rows]
    cache_seqlens = torch.tensor([length], dtype=torch.int32)
    arguments = KvCacheArguments(q, *caches, k, v, angles.cos().half(), angles.sin().half(), cache_seqlens)
    with mock.patch.object(lengths_module, "are_checked", return_value=False):  # as on a GPU
        problem, inputs = prepare_kvcache(arguments, Options(causal=True, window_right=0))
    return backend.forward(problem, inputs).out


@pytest.mark.parametrize("before", [32, CAPACITY])
def test_tables_may_grow_and_shrink_from_call_to_call(before: int) -> None:
    """A position beyond the table has no angle, and the row is NaN."""
    backend = EmulatedSm80()
    assert with_tables_of(backend, before, 20).isfinite().all()
    assert torch.equal(with_tables_of(backend, CAPACITY, 60), with_tables_of(EmulatedSm80(), CAPACITY, 60))
    assert with_tables_of(backend, CAPACITY, 60).isfinite().all()
    assert with_tables_of(backend, 32, 60).isnan().all()


@pytest.mark.parametrize("name", ["cache_leftpad", "cache_batch_idx"])
def test_a_tensor_more_is_another_call(name: str) -> None:
    """Both calls have the same problem, which contains neither tensor."""
    q, cache = torch.randn(2, 1, 4, 32).half(), torch.randn(2, CAPACITY, 2, 32).half()
    lengths, indices = torch.tensor([40, 9], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    plain = prepare_kvcache(KvCacheArguments(q, cache, cache, cache_seqlens=lengths), Options())
    other = prepare_kvcache(KvCacheArguments(q, cache, cache, cache_seqlens=lengths, **{name: indices}), Options())
    assert plain[0] == other[0]
    backend = EmulatedSm80()
    first = backend.forward(*plain).out
    assert torch.equal(backend.forward(*other).out, EmulatedSm80().forward(*other).out)
    assert torch.equal(backend.forward(*plain).out, first)
    assert not torch.equal(backend.forward(*other).out, first)


def test_values_that_leave_the_keys_are_read_where_they_are() -> None:
    """Latent attention has kernels of its own, though both calls have the same problem and strides."""
    q, keys = torch.randn(1, 1, 16, 288).half(), torch.randn(1, CAPACITY, 1, 288).half()
    others = torch.randn_like(keys)
    lengths = torch.tensor([CAPACITY], dtype=torch.int32)
    backend = EmulatedSm80()
    backend.reports = []
    for values in (keys, others, keys):
        call = prepare_kvcache(KvCacheArguments(q, keys, values[..., :256], cache_seqlens=lengths), Options())
        first = prepare_kvcache(KvCacheArguments(q, keys, keys[..., :256], cache_seqlens=lengths), Options())
        serve = CudaBackend.make_call(backend, *first)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(1, 2),
            *(x.double().transpose(1, 2).expand(-1, 16, -1, -1) for x in (keys, values[..., :256])),
        )
        torch.testing.assert_close(serve(call[1]).out.double(), expected.transpose(1, 2), atol=4e-3, rtol=0)


def test_a_plan_copies_what_is_not_aligned_in_every_call() -> None:
    """Memory with the same strides may begin anywhere."""
    generator = torch.Generator().manual_seed(2)
    memory = [torch.randn(1 + 8 * 2 * 32, generator=generator).half() for _ in range(3)]
    backend = EmulatedSm80()
    aligned = [x[:-1].view(1, 8, 2, 32) for x in memory]
    serve = CudaBackend.make_call(backend, *prepare_dense(*aligned, Options()))
    assert isinstance(serve, AttentionCall)
    backend.reports = []
    for offset in (0, 1, 0):
        q, k, v = (x[offset : offset + 512].view(1, 8, 2, 32) for x in memory)
        expected = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))
        out = serve(prepare_dense(q, k, v, Options())[1]).out
        torch.testing.assert_close(out.double(), expected.transpose(1, 2), atol=2e-3, rtol=0)


def test_nothing_is_appended_where_a_tensor_has_no_memory() -> None:
    q, new = torch.randn(1, 1, 4, 32).half(), torch.randn(1, 1, 2, 32).half()
    k_cache, v_cache = (torch.zeros(1, CAPACITY, 2, 32).half() for _ in range(2))
    sinks = torch.ones(4)
    lengths = torch.tensor([3], dtype=torch.int32)
    arguments = KvCacheArguments(q, k_cache, v_cache, new, new, cache_seqlens=lengths, sinks=sinks)
    call = prepare_kvcache(arguments, Options())
    sinks.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        EmulatedSm80().forward(*call)
    assert not k_cache.any()
