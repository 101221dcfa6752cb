"""Rows of q after the last sequence of a varlen call, which only the CPU can refuse in time."""

from __future__ import annotations

from unittest import mock

import torch

from fastattention.attention.backend import AttentionBackend
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, lengths, prepare_varlen
from fastattention.testing.memory import nan_in_fresh_memory


def check_rows_behind(backend: AttentionBackend, dtype: torch.dtype, longest: int) -> None:
    """Checks that such rows see no keys: out 0, lse -inf. Other rows are right.

    longest: queries of a sequence; few take another path through kernels than many
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 32, generator=generator).to(dtype) for n in (longest + 8, 70, 70))
    cu_seqlens_q, cu_seqlens_k = (torch.tensor([0, 1, n], dtype=torch.int32) for n in (longest + 1, 70))
    with mock.patch.object(lengths, "are_checked", return_value=False):
        problem, inputs = prepare_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest, 69, Options(causal=True, window_right=0, return_lse=True)
        )
    assert backend.why_not(problem) is None
    with nan_in_fresh_memory():
        out, lse, _ = backend.forward(problem, inputs)
    assert lse is not None
    assert out.shape == problem.out_shape
    assert (out[longest + 1 :] == 0.0).all()
    assert lse[:, longest + 1 :].isneginf().all()
    exact = reference_attention(problem, inputs)
    assert exact.lse is not None
    rows = slice(longest + 1)
    torch.testing.assert_close(out[rows].double(), exact.out[rows].double(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse[:, rows].double(), exact.lse[:, rows].double(), rtol=0.02, atol=0.02)
