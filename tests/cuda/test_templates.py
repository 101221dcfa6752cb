"""Parameters that a call has from one before it: all that they depend on is in what they are found by."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from emulator import EmulatedSm80
from torch import Tensor

from fastattention.backends.cuda.backend import CudaBackend
from fastattention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache
from fastattention.validation import lengths as lengths_module

CAPACITY = 90


def narrowed(backend: CudaBackend, seed: int) -> tuple[Tensor, Tensor]:
    """Attention to 60 columns of tensors that have 64, and what it should be."""
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
    """A token that is appended behind so many others and rotated by tables of so many rows."""
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
    """Beyond a table there are no angles, and the row is NaN."""
    backend = EmulatedSm80()
    assert with_tables_of(backend, before, 20).isfinite().all()
    assert torch.equal(with_tables_of(backend, CAPACITY, 60), with_tables_of(EmulatedSm80(), CAPACITY, 60))
    assert with_tables_of(backend, CAPACITY, 60).isfinite().all()
    assert with_tables_of(backend, 32, 60).isnan().all()
