"""What a call must return, and how far from it a result may be.

The promise of docs/internals/numerics.md: the largest error against float64 is at most twice that of plain torch in the
same precision, three times for gradients that torch computes. A small error is always allowed beside that: the error of
torch may be 0 by chance, e.g. for a single key. Everything here is computed on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import Problem
from fastattention.attention.reference import apply_rotary, reference_attention
from fastattention.backends.common.dropout import kept
from fastattention.testing.calls import SEED, Call, build_call, call_without_values
from fastattention.testing.case import Case, DenseCase, KvCacheCase

FACTOR, FACTOR_OF_TORCH_GRADIENTS = 2.0, 3.0  # times the error of torch

_EPS: dict[torch.dtype, float] = {
    dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
_EPS32 = _EPS[torch.float32]
# For out, in units of the values, which have standard deviation 1: what rounding an exact result between 1 and 2 costs.
# In float32 eight roundings, as polynomials for exponentials make several.
OUT_FLOOR = {
    torch.float16: _EPS[torch.float16] / 2,
    torch.bfloat16: _EPS[torch.bfloat16] / 2,
    torch.float32: 8 * _EPS32,
}
# For lse, which is float32 whatever the inputs are, relative to the largest of the call. Kernels may take exponentials
# of bfloat16 scores to 1e-4: rounding the inputs moved a score of 1 by dozens of times that.
LSE_FLOOR = {torch.float16: 8 * _EPS32, torch.bfloat16: _EPS[torch.bfloat16] / 64, torch.float32: 8 * _EPS32}
# A bias of the lowest finite value for all keys of a row leaves an lse near it, where rounding is relative.
_LARGE_LSE, _LARGE_LSE_TOLERANCE = 1e30, 4 * _EPS32

Results = Mapping[str, Tensor]  # by name: "out", "lse", "gradient of q"
Attention = Callable[[Call], tuple[Tensor, Tensor | None]]  # (out, lse) of a call


class Error(NamedTuple):
    """How far off a result is, and how far it may be."""

    error: float
    allowed: float

    @property
    def is_small(self) -> bool:
        """Whether the result is right."""
        return self.error <= self.allowed


class Expected(NamedTuple):
    """The exact results of a call in float64, the errors of torch in the same precision, and those always allowed."""

    exact: Results
    errors_of_torch: Mapping[str, float]
    floors: Mapping[str, float]

    def errors(self, found: Results, factor: float = FACTOR) -> dict[str, Error]:
        """The largest error of each result that was found, and the one allowed. factor: times that of torch."""
        return {
            name: Error(error_of(name, one, self.exact[name]), factor * self.errors_of_torch[name] + self.floors[name])
            for name, one in found.items()
        }


@functools.lru_cache(maxsize=64)  # the engines of one case and dtype are tested one after the other
def expected(
    case: Case, dtype: torch.dtype, grads: tuple[str, ...] = (), with_lse: bool = True, device: str = "cpu"
) -> Expected:
    """What the call of `case` in `dtype` must return, and the gradients that `results_of` describes.

    device: where the call runs; its generator decides what dropout drops.
    """
    exact, usual = (
        _reference_results(case, dtype, grads, with_lse, device, compute_dtype)
        for compute_dtype in (torch.float64, None)
    )
    errors = {name: error_of(name, usual[name], right) for name, right in exact.items()}
    if isinstance(case, KvCacheCase) and case.rotary_dim:
        # Rounding rotated queries is one error of torch's, which its others may happen to cancel.
        problem, rotated = apply_rotary(*build_call(case, dtype).prepare(), torch.float32)
        rounded = reference_attention(problem, rotated._replace(q=rotated.q.to(dtype)), torch.float32)
        for name, result in (("out", rounded.out), ("lse", rounded.lse)):
            if name in errors and result is not None:
                errors[name] = max(errors[name], error_of(name, result, exact[name]))
    if max(errors.values()) == torch.inf:
        raise ValueError(f"{case.name} overflows {dtype}; make its values smaller")
    return Expected(exact, errors, {name: _floor(case, dtype, name, right) for name, right in exact.items()})


def expected_after(
    call: Call, case: Case, grads: tuple[str, ...] = (), with_lse: bool = True, device: str = "cpu"
) -> Expected:
    """What `call`, which is that of `case` and has run, must have returned.

    A rotated element half way between two steps of a quantized cache may be rounded to either, as its float32 rotation
    falls. A step is far more than results may be off. So they are compared with attention to what was stored, and
    `Snapshot` compares that with the new tokens.
    """
    dtype = call.arguments["q"].dtype
    wanted = expected(case, dtype, grads, with_lse, device)
    if not (isinstance(case, KvCacheCase) and case.cache_dtype and case.rotary_dim):
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
    return wanted._replace(exact={"out": exact.out, "lse": exact.lse})


def results_of(
    call: Call, attention: Attention, grads: Sequence[str] = (), dtype: torch.dtype | None = None
) -> Results:
    """What `attention` gives for a call: out and lse on the CPU, and gradients by the arguments called `grads`.

    The gradients are those of a weighted sum of the results: of out alone where `attention` gives no lse. The weights
    are the same for every attention. dtype: to which they are rounded; that of q, unless the call is a wider copy.
    """
    given = [call.arguments[name].requires_grad_() for name in grads]
    out, lse = attention(call)
    results = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if not grads:
        return results
    generator = torch.Generator("cpu").manual_seed(1)

    def weights(of: Tensor) -> Tensor:
        return torch.randn(of.shape, generator=generator, dtype=torch.float32, device="cpu")

    loss = (out.double() * weights(out).to(dtype or call.arguments["q"].dtype).double()).sum()
    if lse is not None:
        finite = lse.double().masked_fill(lse.isneginf(), 0.0)
        loss = loss + (finite * weights(lse).double()).sum()
    gradients = torch.autograd.grad(loss, given)
    return results | {f"gradient of {name}": one for name, one in zip(grads, gradients, strict=True)}


@functools.cache
def present(case: Case, names: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments among `names` that the call of `case` has."""
    call = call_without_values(case, torch.float32)
    return tuple(name for name in names if call.arguments.get(name) is not None)


def kept_weights(problem: Problem, device: str = "cpu") -> Tensor:
    """The mask (batch_size, nheads, seqlen_q, seqlen_k) of weights that a call with dropout keeps on `device`."""
    torch.manual_seed(SEED)
    seed = torch.randint(2**62, (), dtype=torch.int64, device=device).cpu()
    sequences, rows, keys = (slice(0, n) for n in (problem.batch_size, problem.seqlen_q, problem.seqlen_k))
    return kept(seed, problem.dropout_p, sequences, problem.nheads, rows, keys)


def _reference_results(
    case: Case,
    dtype: torch.dtype,
    grads: Sequence[str],
    with_lse: bool,
    device: str,
    compute_dtype: torch.dtype | None,
) -> Results:
    call = build_call(case, dtype)
    # Torch rounds a gradient to the dtype of its tensor. Exact ones are those of copies, which are not rounded.
    copies = {} if compute_dtype is None else {name: call.arguments[name].to(compute_dtype) for name in grads}

    def attention(given: Call) -> tuple[Tensor, Tensor | None]:
        problem, inputs = call.prepare()
        inputs = inputs._replace(**{name: given.arguments[name].expand_as(getattr(inputs, name)) for name in copies})
        keep = kept_weights(problem, device) if case.dropout_p else None
        out, lse, _ = reference_attention(problem, inputs, compute_dtype, keep)
        return out, lse if with_lse else None

    return results_of(replace(call, arguments=call.arguments | copies), attention, grads, dtype)


def _scale(case: Case) -> float:
    """The absolute factor of products of queries and keys."""
    scale: float = case.headdim**-0.5 if case.softmax_scale is None else abs(case.softmax_scale)
    return scale


def score_rounding(case: Case) -> float:
    """A float32 ulp of the products that a score sums up: by so much a score, and so a weight, may always be off.

    The largest sum of many is about four deviations above the usual one.
    """
    products: float = case.headdim + 4 * case.headdim**0.5
    return _scale(case) * products * case.magnitude**2 * _EPS32


def _floor(case: Case, dtype: torch.dtype, name: str, exact: Tensor) -> float:
    """The error that is always allowed."""
    score = score_rounding(case)
    if name == "lse":
        return LSE_FLOOR[dtype] * max(1.0, largest(exact[exact.abs() < _LARGE_LSE])) + score
    floor = (OUT_FLOOR[dtype] + score) / (1.0 - case.dropout_p)
    if name == "out":
        return floor
    floor *= max(1.0, largest(exact))
    return floor + _single_key_rounding(case, dtype) if name in ("gradient of q", "gradient of k") else floor


def _single_key_rounding(case: Case, dtype: torch.dtype) -> float:
    """What the rounding of out adds to gradients of q and k where each row has one key: nothing averages it.

    Kernels subtract delta, the sum of products of out and its gradient. Without dropout, out is the value itself. Four
    deviations of that sum are allowed, times the scale and an element of k or q, of at most about 3.
    """
    if not case.dropout_p or not isinstance(case, DenseCase) or case.seqlen_k > 1:
        return 0.0
    rounding: float = (
        OUT_FLOOR[dtype] / (1.0 - case.dropout_p) / 3**0.5
    )  # the deviation of an error within +- OUT_FLOOR
    deviation: float = rounding * case.headdim_of_v**0.5
    return 4.0 * deviation * _scale(case) * 3.0 * case.magnitude


def error_of(name: str, found: Tensor, exact: Tensor) -> float:
    """The largest absolute difference. Infinite for NaN, another shape, and -inf in another place."""
    if found.shape != exact.shape or not torch.equal(found.isneginf(), exact.isneginf()):
        return torch.inf
    if name != "lse":
        return largest_error(found, exact)
    large = exact.isfinite() & (exact.abs() >= _LARGE_LSE)
    if largest_error(found[large].double() / exact[large], torch.ones_like(exact[large])) > _LARGE_LSE_TOLERANCE:
        return torch.inf
    return largest_error(found[~large], exact[~large])


def largest_error(found: Tensor, exact: Tensor) -> float:
    """The largest absolute difference where exact is finite. NaN counts as infinite."""
    difference = (found.double() - exact.double())[exact.isfinite()].abs()
    return largest(torch.where(difference.isnan(), torch.inf, difference))


def largest(tensor: Tensor) -> float:
    """The largest absolute value; -inf, the lse of rows without keys, does not count."""
    finite = tensor[~tensor.isneginf()]
    return float(finite.abs().max()) if finite.numel() else 0.0
