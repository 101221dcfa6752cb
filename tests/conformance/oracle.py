"""The exact results of a call, and the errors that a backend may have."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from conformance.calls import WRITTEN, Call, build_call
from conformance.case import Case, KvCacheCase
from conformance.memory import bits
from fastattention.attention.reference import apply_rotary, reference_attention
from fastattention.cli.check.judge import FACTOR, LSE_FLOOR, OUT_FLOOR
from fastattention.quantized import LARGEST_STORED

# OUT_FLOOR and LSE_FLOOR are absolute errors that are always allowed: with few values the error of torch is chance,
# down to 0 for a single key.

# A bias with the lowest finite value for all keys of a row gives an lse near it, where rounding is relative.
_LARGE_LSE = 1e30
_LARGE_LSE_TOLERANCE = 4 * torch.finfo(torch.float32).eps


def score_rounding(case: Case) -> float:
    """One float32 ulp of the products that a score sums up: a score, and so a weight, may always be off by it.

    It is that of the largest sum of many: about four deviations above the usual one.
    """
    scale = case.headdim**-0.5 if case.softmax_scale is None else abs(case.softmax_scale)
    products = case.headdim + 4 * case.headdim**0.5
    return scale * products * case.magnitude**2 * torch.finfo(torch.float32).eps


def out_floor(case: Case, dtype: torch.dtype) -> float:
    """The error of out that is always allowed."""
    return OUT_FLOOR[dtype] + score_rounding(case)


class Expected(NamedTuple):
    """The exact results of a call, in float64, and the largest errors allowed."""

    out: Tensor
    lse: Tensor
    out_tolerance: float
    lse_tolerance: float


@functools.lru_cache(maxsize=64)  # the engines of one case and dtype are tested one after the other
def expected(case: Case, dtype: torch.dtype) -> Expected:
    """The exact results of the call of `case` in `dtype`, and the allowed errors."""
    exact = reference_attention(*build_call(case, dtype).prepare())
    usual = reference_attention(*build_call(case, dtype).prepare(), compute_dtype=None)
    assert exact.lse is not None
    assert usual.lse is not None
    out_error = largest_error(usual.out, exact.out)
    ordinary = ~exact.lse.isneginf() & (exact.lse.abs() < _LARGE_LSE)
    lse_error = largest_error(usual.lse[ordinary], exact.lse[ordinary])
    if isinstance(case, KvCacheCase) and case.rotary_dim:
        # Rounding rotated queries is one of that implementation's errors, which others may happen to cancel.
        problem, turned = apply_rotary(*build_call(case, dtype).prepare(), torch.float32)
        rounded = reference_attention(problem, turned._replace(q=turned.q.to(dtype)), torch.float32)
        assert rounded.lse is not None
        out_error = max(out_error, largest_error(rounded.out, exact.out))
        lse_error = max(lse_error, largest_error(rounded.lse, exact.lse))
    out_tolerance = FACTOR * out_error + out_floor(case, dtype)
    lse_floor = LSE_FLOOR[dtype] * max(1.0, largest(exact.lse[ordinary])) + score_rounding(case)
    lse_tolerance = FACTOR * lse_error + lse_floor
    assert max(out_tolerance, lse_tolerance) < torch.inf, f"{case.name} overflows {dtype}; make its numbers smaller"
    return Expected(exact.out, exact.lse, out_tolerance, lse_tolerance)


def expected_after(case: Case, dtype: torch.dtype, call: Call | None) -> Expected:
    """The exact results of `call`, the call of `case` that has run. Without it, those of any call of the case.

    A rotated element half way between two storable values may be rounded to either by its float32 rotation, and a step
    of the cache is far more than the allowed error. So results are compared with those for the stored cache, which is
    checked by itself.
    """
    wanted = expected(case, dtype)
    if call is None or not (isinstance(case, KvCacheCase) and case.cache_dtype and case.rotary_dim):
        return wanted
    problem, inputs = apply_rotary(*build_call(case, dtype).prepare(), torch.float64)
    _, stored = call.prepare()
    assert inputs.cache_seqlens is not None
    after = inputs._replace(
        k=stored.k, v=stored.v, k_scale=stored.k_scale, v_scale=stored.v_scale, k_new=None, v_new=None,
        cache_seqlens=inputs.cache_seqlens + problem.seqlen_new,
    )  # fmt: skip
    exact = reference_attention(replace(problem, seqlen_new=0), after)
    assert exact.lse is not None
    return wanted._replace(out=exact.out, lse=exact.lse)


def assert_out_matches(case: Case, out: Tensor, dtype: torch.dtype, call: Call | None = None) -> None:
    """Fails unless out is what the call of `case` must return."""
    wanted = expected_after(case, dtype, call)
    assert (out.dtype, out.shape) == (dtype, wanted.out.shape)
    assert out.isfinite().all(), "out has elements that are not finite; memory that is not part of the call is NaN"
    error = largest_error(out, wanted.out)
    assert error <= wanted.out_tolerance, f"out is off by {error:.3g}; allowed are {wanted.out_tolerance:.3g}"


def assert_lse_matches(case: Case, lse: Tensor, dtype: torch.dtype, call: Call | None = None) -> None:
    """Fails unless lse is what the call of `case` must return."""
    wanted = expected_after(case, dtype, call)
    assert (lse.dtype, lse.shape) == (torch.float32, wanted.lse.shape)
    assert torch.equal(lse.isneginf(), wanted.lse.isneginf()), (
        "lse must be -inf for the rows without keys, and no others"
    )
    lse, exact = lse[~wanted.lse.isneginf()], wanted.lse[~wanted.lse.isneginf()]
    large = exact.abs() >= _LARGE_LSE
    assert largest_error(lse[large].double() / exact[large], torch.ones_like(exact[large])) <= _LARGE_LSE_TOLERANCE
    error = largest_error(lse[~large], exact[~large])
    assert error <= wanted.lse_tolerance, f"lse is off by {error:.3g}; allowed are {wanted.lse_tolerance:.3g}"


class Snapshot(NamedTuple):
    """The memory of a call's tensors before it ran."""

    buffers: dict[str, Tensor]
    caches: dict[str, Tensor]

    @classmethod
    def of(cls, call: Call) -> Snapshot:
        """The memory of a call that has not run."""
        buffers = {name: buffer.clone() for name, buffer in call.buffers.items()}
        caches = {name: call.arguments[name].clone() for name in WRITTEN if name in call.arguments}
        return cls(buffers, caches)

    def assert_only_new_tokens_written(self, case: Case, call: Call, dtype: torch.dtype) -> None:
        """Fails unless new tokens are in the caches, and every other bit, gaps between rows included, is as it was."""
        if call.new_slots is not None:
            _assert_new_tokens(case, call, dtype)
            for name, cache in self.caches.items():
                call.arguments[name][call.new_slots] = cache[call.new_slots]
        for name, buffer in self.buffers.items():
            assert torch.equal(bits(buffer), bits(call.buffers[name])), f"{name} was written where nothing belongs"


def _assert_new_tokens(case: Case, call: Call, dtype: torch.dtype) -> None:
    """Values and keys are appended as they are, rotated keys to within rounding; or quantized."""
    assert isinstance(case, KvCacheCase)
    assert call.new_slots is not None
    if case.cache_dtype is not None:
        _assert_quantized_tokens(case, call, dtype)
        return
    new_k, new_v = (call.arguments[name].flatten(0, 1) for name in ("k", "v"))
    k, v = (call.arguments[name][call.new_slots] for name in ("k_cache", "v_cache"))
    assert torch.equal(v, new_v)
    if not case.rotary_dim:
        assert torch.equal(k, new_k)
        return
    assert torch.equal(k[..., case.rotary_dim :], new_k[..., case.rotary_dim :])
    exact = build_call(case, dtype)
    reference_attention(*exact.prepare())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        k, exact.arguments["k_cache"][call.new_slots], rtol=eps, atol=8 * torch.finfo(torch.float32).eps
    )


def _assert_quantized_tokens(case: KvCacheCase, call: Call, dtype: torch.dtype) -> None:
    """Scales are those of the exact new tokens, and stored values are the nearest ones.

    Half a step is allowed, and a little for float32 rounding before it.
    """
    problem, inputs = build_call(case, dtype).prepare()
    if case.rotary_dim:
        _, inputs = apply_rotary(problem, inputs, torch.float64)
    assert case.cache_dtype is not None
    largest_stored = LARGEST_STORED[case.cache_dtype]
    for name, new in (("k", inputs.k_new), ("v", inputs.v_new)):
        assert new is not None
        exact = new.double().flatten(0, 1)
        stored, scale = (call.arguments[f"{name}_{what}"][call.new_slots].double() for what in ("cache", "scale"))
        amax = exact.abs().amax(dim=-1, keepdim=True)
        torch.testing.assert_close(
            scale, amax.squeeze(-1) / largest_stored, rtol=8 * torch.finfo(torch.float32).eps, atol=0.0
        )
        wanted = exact * (largest_stored / amax)
        distance = (stored - wanted).abs() / step_at(wanted, case.cache_dtype)
        assert largest(distance) <= 0.501, f"{name}_cache is {largest(distance):.3f} steps from a new token"


def step_at(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """The distance between values of `cache_dtype` around x."""
    if cache_dtype is torch.int8:
        return torch.ones_like(x)
    # 3 bits after the first; the smallest normal value is 2^-6
    return torch.exp2(torch.log2(x.abs().clamp(min=2.0**-6)).floor() - 3)


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference where exact is finite; NaN in `actual` counts as infinite."""
    difference = (actual.double() - exact)[exact.isfinite()].abs()
    return largest(torch.where(difference.isnan(), torch.inf, difference))


def largest(tensor: Tensor) -> float:
    """Largest absolute value; -inf, the lse of rows without keys, does not count."""
    finite = tensor[~tensor.isneginf()]
    return float(finite.abs().max()) if finite.numel() else 0.0
