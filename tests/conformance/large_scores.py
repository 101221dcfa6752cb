"""Scores near the limits of float32, as masks with finite values give."""

from __future__ import annotations

import torch

from fastattention.attention.backend import AttentionBackend
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache

_LARGEST = torch.finfo(torch.float32).max
# Values added to the scores of a row: to all keys, and to the last key, which a running maximum meets last.
_ROWS = (
    (-_LARGEST, -_LARGEST),
    (_LARGEST, _LARGEST),
    (0.0, _LARGEST),
    (-_LARGEST, 0.0),
    (-3e38, -2.5e38),
    (2.5e38, 3e38),
    (2.5e38, 1.0),
    (0.0, 0.0),
)


def check_large_scores(backend: AttentionBackend, dtype: torch.dtype, times: int, keys: int, cached: bool) -> None:
    """Results are those of float64, and lse is as exact as float32.

    times: number of rows of each kind, because few rows take another path through kernels than many
    """
    generator = torch.Generator().manual_seed(0)
    rows = len(_ROWS) * times
    q, k, v = (torch.randn(1, n, 2, 32, generator=generator).to(dtype) for n in (rows, keys, keys))
    bias = torch.zeros(rows, keys, dtype=torch.float32)
    for row in range(rows):
        usual, last = _ROWS[row % len(_ROWS)]
        bias[row, :-1], bias[row, -1] = usual, last
    options = Options(return_lse=True)
    if cached:
        v = k if times > 1 else v  # as in latent attention, which takes another path through kernels
        problem, inputs = prepare_kvcache(KvCacheArguments(q, k, v, cache_seqlens=keys, attn_bias=bias), options)
    else:
        problem, inputs = prepare_dense(q, k, v, options, attn_bias=bias)
    assert backend.why_not(problem) is None
    out, lse, _ = backend.forward(problem, inputs)
    exact = reference_attention(problem, inputs)
    assert lse is not None
    assert exact.lse is not None
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    torch.testing.assert_close(out.double(), exact.out.double(), rtol=0, atol=tolerance)
    large = exact.lse.abs() > 1e30
    assert large.sum() == 6 * times * 2
    torch.testing.assert_close(lse[large].double(), exact.lse[large].double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse[~large].double(), exact.lse[~large].double(), rtol=0, atol=tolerance)
