"""NaN and infinity are never swallowed: every row that meets one says so, and no other row does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import sampled

from fastattention import PackedKVStore, fast_attn_func


def _qkv(seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q + seqlen_k)
    q = torch.randn(1, seqlen_q, 2, 32, generator=generator).to(dtype)
    k, v = (torch.randn(1, seqlen_k, 2, 32, generator=generator).to(dtype) for _ in range(2))
    return q, k, v


def _from_a_panel_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """fast_attn_func on keys and values in a store."""
    store = PackedKVStore(k.shape[0], k.shape[1], *k.shape[2:], dtype=k.dtype)
    store.append(k, v)
    return store.attend(q, **options)


def _with_values_in_the_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """fast_attn_func on keys that begin with the values, where queries are 0."""
    keys = torch.cat((v, k), dim=-1)
    return fast_attn_func(torch.cat((torch.zeros_like(q), q), dim=-1), keys, keys[..., : v.shape[-1]], **options)


ATTENTION = pytest.mark.parametrize(
    "attend",
    [fast_attn_func, _from_a_panel_cache, _with_values_in_the_keys],
    ids=["tensors", "panel-cache", "values-in-keys"],
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
SHAPES = pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 900), (70, 70), (60, 700)], ids=["1x900", "70x70", "60x700"]
)


@sampled
@ATTENTION
@DTYPES
@SHAPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0)], ids=["full", "causal", "window"])
def test_a_bad_query_spoils_its_own_row_only(
    isa: str,
    attend: Callable[..., Any],
    dtype: torch.dtype,
    seqlen_q: int,
    seqlen_k: int,
    bad: float,
    window: tuple[int, int],
) -> None:
    q, k, v = _qkv(seqlen_q, seqlen_k, dtype)
    row = seqlen_q // 2
    clean, _ = attend(q, k, v, window_size=window, return_lse=True, backend="cpu")
    q[0, row] = bad
    out, lse = attend(q, k, v, window_size=window, return_lse=True, backend="cpu")
    assert out[0, row].isnan().all()
    assert lse[0, :, row].isnan().all()
    others = torch.arange(seqlen_q) != row
    assert torch.equal(out[0, others], clean[0, others])


@sampled
@ATTENTION
@DTYPES
@SHAPES
def test_a_bad_key_spoils_the_rows_that_see_it_only(
    isa: str, attend: Callable[..., Any], dtype: torch.dtype, seqlen_q: int, seqlen_k: int
) -> None:
    q, k, v = _qkv(seqlen_q, seqlen_k, dtype)
    offset = seqlen_k - seqlen_q
    key = offset + seqlen_q // 2  # on the diagonal of the middle row
    k[0, key] = float("nan")
    out = attend(q, k, v, causal=True, backend="cpu")
    sees = torch.arange(seqlen_q) + offset >= key
    assert out[0, sees].isnan().all()
    assert out[0, ~sees].isfinite().all()


MODIFIED = {
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "bias": {"attn_bias": torch.zeros(1)},
    "all": {"softcap": 30.0, "alibi_slopes": torch.tensor([0.5, 0.25]), "attn_bias": torch.zeros(1)},
}


@sampled
@ATTENTION
@DTYPES
@SHAPES
@pytest.mark.parametrize("options", MODIFIED.values(), ids=MODIFIED)
def test_a_nan_is_not_swallowed_where_scores_are_modified(
    isa: str, attend: Callable[..., Any], dtype: torch.dtype, seqlen_q: int, seqlen_k: int, options: dict[str, Any]
) -> None:
    q, k, v = _qkv(seqlen_q, seqlen_k, dtype)
    row, key = seqlen_q // 2, seqlen_k // 3
    clean, _ = attend(q, k, v, return_lse=True, backend="cpu", **options)
    bad_q, bad_k = q.clone(), k.clone()
    bad_q[0, row, 0, 5] = float("nan")  # in one head
    bad_k[0, key, 1] = float("nan")
    out, lse = attend(bad_q, k, v, return_lse=True, backend="cpu", **options)
    assert out[0, row, 0].isnan().all()
    assert lse[0, 0, row].isnan()
    out[0, row, 0] = clean[0, row, 0]
    assert torch.equal(out, clean)
    out, lse = attend(q, bad_k, v, return_lse=True, backend="cpu", **options)
    assert out[:, :, 1].isnan().all()
    assert lse[:, 1].isnan().all()
    assert torch.equal(out[:, :, 0], clean[:, :, 0])


@ATTENTION
@SHAPES
def test_a_nan_of_the_bias_or_of_slopes_is_not_swallowed(
    isa: str, attend: Callable[..., Any], seqlen_q: int, seqlen_k: int
) -> None:
    bias = torch.zeros(1, 2, seqlen_q, seqlen_k)
    bias[0, 1, 0, 33] = float("nan")
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = _qkv(seqlen_q, seqlen_k, dtype)
        out = attend(q, k, v, attn_bias=bias.to(dtype), backend="cpu")
        assert out[0, 0, 1].isnan().all()
        assert out[0, 1:].isfinite().all()
        assert out[0, :, 0].isfinite().all()
    out = attend(q, k, v, alibi_slopes=torch.tensor([float("nan"), 1.0]), backend="cpu")
    assert out[:, :, 0].isnan().all()
    assert out[:, :, 1].isfinite().all()


@ATTENTION
def test_an_infinite_bias_or_sink_is_not_swallowed(isa: str, attend: Callable[..., Any]) -> None:
    q, k, v = _qkv(40, 80, torch.float32)
    bias = torch.zeros(1, 1, 40, 80)
    bias[..., 7, 33] = float("inf")
    out = attend(q, k, v, attn_bias=bias, backend="cpu")
    assert out[0, 7].isnan().all()
    assert out[0, torch.arange(40) != 7].isfinite().all()
    assert attend(q, k, v, sinks=torch.tensor([float("nan"), 0.0]), backend="cpu")[:, :, 0].isnan().all()
