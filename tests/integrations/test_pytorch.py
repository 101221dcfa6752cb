"""Our scaled_dot_product_attention against torch's own: values, gradients, errors, and code that calls it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import sampled
from torch import Tensor, nn

from fastattention.attention import interface
from fastattention.integrations import pytorch
from fastattention.integrations.pytorch import scaled_dot_product_attention, torch_attention

SHAPES = {
    "one head": ((5, 8), (7, 8), (7, 16)),
    "heads": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "batch": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)),
    "square": ((2, 3, 70, 64), (2, 3, 70, 64), (2, 3, 70, 64)),
    "more queries": ((2, 3, 9, 8), (2, 3, 4, 8), (2, 3, 4, 8)),
    "one query": ((2, 3, 1, 8), (2, 3, 9, 8), (2, 3, 9, 8)),
    "five axes": ((2, 4, 3, 5, 8), (2, 4, 3, 7, 8), (2, 4, 3, 7, 8)),
    "keys broadcast": ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 8)),
    "queries broadcast": ((1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "fewer axes": ((3, 5, 8), (2, 3, 7, 8), (7, 8)),
    "matrices": ((5, 8), (7, 8), (7, 4)),
    "five axes broadcast": ((2, 1, 3, 5, 8), (1, 4, 1, 7, 8), (2, 4, 3, 7, 8)),
}
MASKS: dict[str, Any] = {
    "none": lambda *_: None,
    "bool": lambda *shape: torch.rand(shape[-2:]) < 0.6,
    "padding": lambda *shape: torch.arange(shape[-1])[None] < 4,
    "added": lambda *shape: torch.randn(shape),
    "whole": lambda *shape: torch.rand(shape) < 0.6,
    "rows without keys": lambda *shape: (torch.arange(shape[-2]) > 0)[:, None].expand(shape[-2:]),
}


def tensors(shapes: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(function: Any, inputs: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return out, *torch.autograd.grad((out * weights).sum(), inputs)


@sampled
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(dtype: torch.dtype, shapes: Any, mask: str, is_causal: bool) -> None:
    inputs = tensors(shapes, dtype)
    outer = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    given = MASKS[mask](*outer, shapes[0][-2], shapes[1][-2])
    if mask == "added":
        given = given.to(dtype)
    options = {"attn_mask": given, "is_causal": is_causal and given is None, "scale": 0.3}
    exact = results(torch_attention, [x.detach().double().requires_grad_() for x in inputs], **options | (
        {"attn_mask": given.double()} if mask == "added" else {}
    ))  # fmt: skip
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    for found, right in zip(results(scaled_dot_product_attention, inputs, **options), exact, strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("heads", "heads_v"), [(2, 2), (1, 1), (2, 4), (4, 2)])
def test_grouped_heads(heads: int, heads_v: int) -> None:
    inputs = tensors(((2, 4, 5, 8), (2, heads, 7, 8), (2, heads_v, 7, 8)))
    options = {"enable_gqa": True, "is_causal": True}
    exact = results(torch_attention, [x.detach().double().requires_grad_() for x in inputs], **options)
    for found, right in zip(results(scaled_dot_product_attention, inputs, **options), exact, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_a_mask_that_learns_has_a_gradient() -> None:
    q, k, v = tensors(SHAPES["batch"])
    mask = torch.randn(3, 5, 7, requires_grad=True)
    found, right = (
        torch.autograd.grad(f(q, k, v, attn_mask=mask).square().sum(), mask)[0]
        for f in (scaled_dot_product_attention, torch_attention)
    )
    torch.testing.assert_close(found, right)


REFUSED: dict[str, Any] = {
    "mask and causal": lambda q, k, v: {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True},
    "mask of another shape": lambda q, k, v: {"attn_mask": torch.zeros(5, 8)},
    "mask of integers": lambda q, k, v: {"attn_mask": torch.ones(5, 7, dtype=torch.int64)},
    "heads": lambda q, k, v: {"query": q.expand(2, 3, 5, 8)[:, :2]},
    "head dimension": lambda q, k, v: {"query": q[..., :4]},
    "dtypes": lambda q, k, v: {"key": k.bfloat16()},
    "batches": lambda q, k, v: {"query": q.expand(2, 2, 3, 5, 8), "key": k.expand(3, 2, 3, 7, 8)},
    "mask of one axis": lambda q, k, v: {"attn_mask": torch.zeros(7)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_torch(name: str) -> None:
    q, k, v = tensors(SHAPES["batch"])
    arguments = {"query": q, "key": k, "value": v, **REFUSED[name](q, k, v)}
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        torch_attention(**arguments)
    with pytest.raises(type(theirs.value)) as ours:
        scaled_dot_product_attention(**arguments)
    assert str(ours.value) == str(theirs.value)


class Scaled(Tensor):
    """A subclass that overrides functions of torch."""


@pytest.mark.parametrize(
    "inputs",
    [
        [torch.randn(2, 3, 5, 8, dtype=torch.float64)] * 3,
        [torch.randn(2, 3, 5, 600)] * 3,
        [torch.randn(2, 3, 0, 8), *[torch.randn(2, 3, 7, 8)] * 2],
        [torch.randn(2, 3, 5, 8), *[torch.randn(2, 3, 0, 8)] * 2],
        [torch.randn(2, 3, 5, 8).as_subclass(Scaled)] * 3,
    ],
    ids=["float64", "headdim 600", "no queries", "no keys", "subclass"],
)
def test_torch_computes_the_rest(inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "fast_attn_func", None)
    out = scaled_dot_product_attention(*inputs)
    assert type(out) is type(inputs[0])
    torch.testing.assert_close(out, torch_attention(*inputs))


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_installed_it_serves_modules_of_torch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        out: Tensor = interface.fast_attn_func(*args, **kwargs, backend=backend)
        return out

    monkeypatch.setattr(pytorch, "fast_attn_func", counted)
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 9, 32)
    right = layer(x, x, x, need_weights=False)[0]
    with pytorch.install():
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
        found = layer(x, x, x, need_weights=False)[0]
        with pytorch.install():
            pass
        assert F.scaled_dot_product_attention is scaled_dot_product_attention
    torch.testing.assert_close(found, right)
    assert len(calls) == 1
    pytorch.install()
    pytorch.uninstall()
    assert F.scaled_dot_product_attention is torch_attention


def test_autocast_converts_arguments() -> None:
    inputs = tensors(SHAPES["batch"])
    with torch.autocast("cpu", torch.bfloat16):
        found, right = (
            f(*inputs, attn_mask=torch.zeros(5, 7)) for f in (scaled_dot_product_attention, torch_attention)
        )
    assert found.dtype is right.dtype is torch.bfloat16
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)


def test_tensors_without_memory_have_results_without_memory() -> None:
    """Their device has no autocast, which may be on for others."""
    q = torch.empty(2, 4, 5, 16, device="meta")
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = scaled_dot_product_attention(q, q, q)
        assert (found.shape, found.dtype, found.device) == (q.shape, q.dtype, q.device)


def test_autocast_in_a_compiled_call() -> None:
    inputs = tensors(SHAPES["batch"])
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        found, right = compiled(*inputs), torch_attention(*inputs)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)


def test_compiled_it_is_one_graph() -> None:
    inputs = tensors(SHAPES["batch"])
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for found, right in zip(
        itertools.chain(
            results(compiled, inputs, is_causal=True), results(compiled, inputs, attn_mask=torch.ones(5, 7) > 0)
        ),
        itertools.chain(
            results(torch_attention, inputs, is_causal=True),
            results(torch_attention, inputs, attn_mask=torch.ones(5, 7) > 0),
        ),
        strict=True,
    ):
        torch.testing.assert_close(found, right)
