"""The user's default device and dtype change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fastattention import DenseKVStore, PackedKVStore, fast_attn_func, merge_attn_states
from unit.functions import CALLS, FunctionCall, every_call

DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
every_default = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
every_device = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Calls within see these defaults."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@every_default
@every_device
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@every_call
@torch.no_grad()
def test_every_function_gives_the_same_bits(call: FunctionCall, backend: str, device: str, dtype: torch.dtype) -> None:
    tensors, expected_tensors = call.tensors(), call.tensors()
    expected = call.run(expected_tensors, backend)
    with defaults(device, dtype):
        got = call.run(tensors, backend)
    assert_same(got, expected)
    assert_same(tuple(tensors.values()), tuple(expected_tensors.values()))


@every_default
@every_device
@pytest.mark.parametrize("call", [call for call in CALLS if call.differentiable], ids=lambda call: call.name)
def test_gradients_are_the_same_bits(call: FunctionCall, device: str, dtype: torch.dtype) -> None:
    found = []
    for context in (defaults("cpu", torch.float32), defaults(device, dtype)):
        leaves = {name: x.requires_grad_(x.is_floating_point()) for name, x in call.tensors().items()}
        with context:
            call.run(leaves, "auto")[0].square().sum().backward()
        found.append(tuple(x.grad for x in leaves.values() if x.grad is not None))
    assert len(found[0]) >= len(call.shapes) - len(call.bools)
    assert_same(found[1], found[0])


@every_default
@every_device
@torch.no_grad()
def test_merges_and_stores_give_the_same_bits(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 2, 8, generator=generator) for _ in range(3))
    found = []
    for context in (defaults("cpu", torch.float32), defaults(device, dtype)):
        with context:
            parts = [fast_attn_func(q, x, v, return_lse=True) for x in (k, v)]
            results = [*merge_attn_states(*zip(*parts, strict=True))]
            for store in (DenseKVStore, PackedKVStore):
                made = store(2, 8, 2, 8, dtype=torch.float32)
                made.append(k, v)
                results.append(made.attend(q, k, v, causal=True))
                made.truncate(2)
                results += [made.attend(q), made.seqlens]
        found.append(tuple(results))
    assert_same(found[1], found[0])


@every_default
@every_device
def test_dropout_draws_the_same_weights(device: str, dtype: torch.dtype) -> None:
    """A rate of 0.001 that was drawn in bfloat16 became 0.003."""
    q = torch.randn(1, 200, 2, 8)
    found = []
    for context in (defaults("cpu", torch.float32), defaults(device, dtype)):
        torch.manual_seed(0)
        with context:
            found.append(fast_attn_func(q, q, q, dropout_p=0.001, return_attn_probs=True))
    assert_same(found[1], found[0])
    dropped = found[0][2].signbit().double().mean().item()
    assert 0.0004 < dropped < 0.0018
