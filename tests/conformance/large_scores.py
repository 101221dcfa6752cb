"""Scores of any size that float32 has: of masks with finite values, of large queries and keys, and of sinks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastattention.attention.backend import AttentionBackend
from fastattention.attention.problem import Inputs, OutputGradients, Problem
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
    (-1e37, -1e37),
    (1e30, 1e30),
    (-1e20, -0.9e20),
    (-1e12, -1e12),
    (-1e10, -1e10),
    (-1e10, 3.0),
    (2.0, 1e10),
    (0.0, 0.0),
)
# Values of softmax_scale that make scores large, and of the queries and keys that they multiply.
SCALES = ((1e9, 1.0), (0.1, 1e5), (1e20, 1e5), (1e31, 3e-16), (1e-31, 1e15))
SINKS = (-_LARGEST, -1e10, 1e10, 3e38)
_LARGE = 1e8  # from here on float32 has no lse between the highest score and the next larger number
OPTIONS = Options(return_lse=True)


def large_bias_call(
    dtype: torch.dtype, times: int, keys: int, cached: bool, device: str = "cpu"
) -> tuple[Problem, Inputs]:
    """A call with each of the rows above, `times` times: few rows take another path through kernels than many."""
    rows = len(_ROWS) * times
    q, k, v = _tensors(rows, keys, dtype, device)
    bias = torch.zeros(rows, keys, dtype=torch.float32, device=device)
    for row in range(rows):
        usual, last = _ROWS[row % len(_ROWS)]
        bias[row, :-1], bias[row, -1] = usual, last
        if usual != 0.0:  # beside such values float32 has no products, but float64 has some
            q[:, row] = 0.0
    if cached:
        v = k if times > 1 else v  # as in latent attention, which takes another path through kernels
        return prepare_kvcache(KvCacheArguments(q, k, v, cache_seqlens=keys, attn_bias=bias), OPTIONS)
    return prepare_dense(q, k, v, OPTIONS, attn_bias=bias)


def check_large_scores(
    backend: AttentionBackend, dtype: torch.dtype, times: int, keys: int, cached: bool, device: str = "cpu"
) -> None:
    """Results are those of float64, and lse is as exact as float32. The arguments are those of `large_bias_call`."""
    lse = _check(backend, *large_bias_call(dtype, times, keys, cached, device))
    assert (lse.abs() > _LARGE).sum() == (len(_ROWS) - 3) * times * 2


def check_large_products(
    backend: AttentionBackend,
    dtype: torch.dtype,
    scale: float,
    size: float,
    rows: int,
    device: str = "cpu",
    qk_dtype: str | None = None,
) -> None:
    """The same without a bias; scale, size: one of SCALES. float16 has no larger queries than 6e4.

    Skips where the backend does not multiply as qk_dtype.
    """
    q, k, v = _tensors(rows, 300, dtype, device)
    q, k = (x * size for x in (q, k)) if dtype is not torch.float16 else (q, k)
    problem, inputs = prepare_dense(q, k, v, OPTIONS._replace(softmax_scale=scale, qk_dtype=qk_dtype))
    if qk_dtype is not None and (reason := backend.why_not(problem)) is not None:
        pytest.skip(reason)
    _check(backend, problem, inputs)


def check_large_sinks(backend: AttentionBackend, dtype: torch.dtype, modified: bool, device: str = "cpu") -> None:
    """The same with SINKS, a head each. modified: whether something modifies scores, which gives them another unit."""
    q, k, v = _tensors(9, 70, dtype, device, heads=len(SINKS))
    options = OPTIONS._replace(softcap=50.0 if modified else 0.0)
    _check(backend, *prepare_dense(q, k, v, options, sinks=torch.tensor(SINKS, device=device)))


def check_large_gradients(
    backend: AttentionBackend, dtype: torch.dtype, scale: float | None, device: str = "cpu"
) -> None:
    """Gradients are those of float64. scale: None for the rows with a bias, else softmax_scale of one of SCALES."""
    if scale is None:
        problem, inputs = large_bias_call(dtype, 1, 70, False, device)
    else:
        q, k, v = _tensors(9, 300, dtype, device)
        problem, inputs = prepare_dense(q, k, v, OPTIONS._replace(softmax_scale=scale))
    problem = replace(problem, grads=("q", "k", "v"))
    assert backend.why_not(problem) is None
    grad_out = torch.randn(problem.out_shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = backend.backward(problem, inputs, backend.forward(problem, inputs), OutputGradients(grad_out, None))
    leaves = inputs._replace(**{name: getattr(inputs, name).double().requires_grad_() for name in problem.grads})
    out = reference_attention(problem, leaves, torch.float64).out
    exact = torch.autograd.grad(out, [getattr(leaves, name) for name in problem.grads], grad_out.double())
    for name, right in zip(problem.grads, exact, strict=True):
        # A row with a single key has gradients of 0 for q and k: a difference, which softmax_scale multiplies.
        bound = _tolerance(dtype) * (problem.softmax_scale if scale is not None and name != "v" else 1.0)
        torch.testing.assert_close(found[name].double(), right, rtol=0.02, atol=4 * max(bound, _tolerance(dtype)))


def _tensors(rows: int, keys: int, dtype: torch.dtype, device: str, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, heads, 32, generator=generator).to(device, dtype) for n in (rows, keys, keys)]


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype is torch.float32 else 0.02


def _check(backend: AttentionBackend, problem: Problem, inputs: Inputs) -> Tensor:
    """Checks out and lse, and returns the lse of float64."""
    assert backend.why_not(problem) is None
    found = backend.forward(problem, inputs)
    exact = reference_attention(problem, inputs)
    assert found.lse is not None
    assert exact.lse is not None
    tolerance = _tolerance(problem.dtype)
    torch.testing.assert_close(found.out.double(), exact.out.double(), rtol=0, atol=tolerance)
    large = exact.lse.abs() > _LARGE
    torch.testing.assert_close(found.lse[large].double(), exact.lse[large].double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.lse[~large].double(), exact.lse[~large].double(), rtol=1e-6, atol=tolerance)
    return exact.lse
