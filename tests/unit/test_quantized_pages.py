"""Varlen calls over quantized pages, beside dequantized ones. The conformance list has the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import ArgumentError, UnsupportedError, explain, fast_attn_varlen_func
from fastattention.quantized import dequantize, quantize
from unit.samples import int32

OFFSETS_Q, OFFSETS_K, TABLE = int32(0, 5, 70), int32(0, 37, 137), int32([3, 0, 1], [2, 4, 5])


def stored(dtype: torch.dtype = torch.int8) -> tuple[dict[str, Any], dict[str, Any]]:
    """Quantized pages with their scales, and the same dequantized."""
    generator = torch.Generator().manual_seed(0)
    (k, k_scale), (v, v_scale) = (quantize(torch.randn(6, 40, 2, 16, generator=generator), dtype) for _ in range(2))
    pages = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    return pages, {"k": dequantize(k, k_scale), "v": dequantize(v, v_scale)}


def call(q: Tensor, pages: dict[str, Any], **options: Any) -> Any:
    return fast_attn_varlen_func(
        q, cu_seqlens_q=OFFSETS_Q, cu_seqlens_k=OFFSETS_K, block_table=TABLE, causal=True, **pages, **options
    )


QUERIES = torch.randn(70, 4, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seqused_k": int32(20, 64)},
        {"block_mask": torch.ones(2, 4, 2, 2).tril() > 0, "block_size": 64},
        {"dropout_p": 0.3},
        {"window_size": (9, 0), "sinks": torch.ones(4)},
    ],
    ids=["plain", "used", "blocks", "dropout", "window"],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_pages_give_what_dequantized_ones_give(options: dict[str, Any], dtype: torch.dtype) -> None:
    results = []
    for pages in stored(dtype):
        torch.manual_seed(0)  # of dropout
        results.append(call(QUERIES, pages, **options))
    torch.testing.assert_close(*results, atol=2e-6, rtol=1e-5)


def test_our_kernels_read_them_and_name_what_they_leave_to_torch() -> None:
    where = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K, "block_table": TABLE, **stored()[0]}
    assert explain(QUERIES, function=fast_attn_varlen_func, **where).backend == "cpu"
    dropped = explain(QUERIES, function=fast_attn_varlen_func, dropout_p=0.1, **where)
    assert dropped.backend == "sdpa"
    assert "dropout_p with quantized pages is not served" in str(dropped)


def test_queries_have_gradients() -> None:
    grads = []
    for pages in stored():
        q = QUERIES.clone().requires_grad_()
        grads.append(torch.autograd.grad(call(q, pages).square().sum(), q)[0])
    torch.testing.assert_close(*grads, atol=2e-5, rtol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    pages, exact = stored()
    for changes, error, says in (
        ({"v_scale": None}, ArgumentError, "k_scale and v_scale must be given together"),
        ({"k_scale": None, "v_scale": None}, ArgumentError, "k has dtype torch.int8"),
        ({"k": exact["k"]}, ArgumentError, "both must be torch.int8 or torch.float8_e4m3fn"),
        ({"k_scale": pages["k_scale"].double()}, ArgumentError, "k_scale must be float32"),
        ({"k_scale": pages["k_scale"][1:]}, ArgumentError, "k_scale must be"),
        ({"k_scale": pages["k_scale"].clone().requires_grad_()}, ArgumentError, "k_scale must not require gradients"),
        ({"attention_chunk": 16}, UnsupportedError, "not served with attention_chunk"),
        ({"qk_dtype": "int8"}, UnsupportedError, "qk_dtype"),
    ):
        with pytest.raises(error, match=says):
            call(QUERIES, {**pages, **changes})
    flat = {name: pages[name].flatten(0, 1) for name in pages}
    with pytest.raises(ArgumentError, match="k_scale and v_scale belong to quantized pages: give block_table"):
        fast_attn_varlen_func(QUERIES, cu_seqlens_q=OFFSETS_Q, cu_seqlens_k=OFFSETS_K, **flat)
