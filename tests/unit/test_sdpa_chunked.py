"""Chunks of backend sdpa are computed one by one, keep few tensors, and give the gradients of all rows at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import fast_attn_func
from fastattention.backends.sdpa import masks
from fastattention.backends.sdpa.chunked import compute_chunked

OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "dropout": {"dropout_p": 0.3},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "bias": {"attn_bias": torch.linspace(-1, 1, 60 * 90).view(60, 90)},
}
MANY_CHUNKS = 2 * 90 * 16  # scores of a chunk: 16 rows of two heads


def gradients(options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Gradients of q, k and v, and the bytes that are kept for them."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 16, generator=generator).requires_grad_() for rows in (60, 90, 90))
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    torch.manual_seed(1)  # seeds the dropout mask
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = fast_attn_func(q, k, v, causal=True, backend="sdpa", **options)
    return list(torch.autograd.grad((out * out).sum(), (q, k, v))), kept


@pytest.mark.parametrize("name", OPTIONS)
def test_no_scores_are_kept_for_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "CHUNK_ELEMENTS", MANY_CHUNKS)
    _, kept = gradients(OPTIONS[name])
    assert kept < 60 * 90 * 4


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "dropout"])
def test_gradients_are_those_of_all_rows_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, kept = gradients(OPTIONS[name])
    assert kept > 60 * 90 * 4
    monkeypatch.setattr(masks, "CHUNK_ELEMENTS", MANY_CHUNKS)
    found, _ = gradients(OPTIONS[name])
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_gradients_have_the_dropout_mask_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of values have the weights of the returned mask, though each chunk draws it again."""
    monkeypatch.setattr(masks, "CHUNK_ELEMENTS", MANY_CHUNKS)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 16, generator=generator).requires_grad_() for rows in (60, 90, 90))
    out, _, mask = fast_attn_func(q, k, v, dropout_p=0.3, causal=True, return_attn_probs=True, backend="sdpa")
    assert 0.2 < (mask < 0).float().sum() / (mask != 0).float().sum() < 0.4
    weights = mask.clamp(min=0.0) / 0.7
    torch.testing.assert_close(out, (weights @ v.transpose(1, 2)).transpose(1, 2))
    [gradient] = torch.autograd.grad(out.sum(), (v,))
    torch.testing.assert_close(gradient, (weights.transpose(2, 3) @ torch.ones(60, 16)).transpose(1, 2))


def test_the_last_chunk_is_computed_first() -> None:
    order: list[int] = []
    results = compute_chunked(lambda chunk: order.append(chunk) or chunk, [1, 2, 3], with_gradients=False)  # type: ignore[func-returns-value]
    assert (results, order) == ([1, 2, 3], [3, 2, 1])
