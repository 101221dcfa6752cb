"""The exact results of a call, and how far off its results may be.

The promise of docs/internals/numerics.md: the largest error against float64 is at most twice that of plain torch in the
same precision, three times for gradients that torch computes. A small error is always allowed besides, because the
error of torch may happen to be 0. Everything here is computed on the CPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.reference import apply_rotary, reference_attention
from fastattention.backends.common.dropout import kept
from fastattention.cli.check.calls import CACHES, DIFFERENTIATED, Call, build_call, spans_of
from fastattention.cli.check.cases import Case
from fastattention.quantized import LARGEST_STORED, dequantize

SEED = 0  # seed of torch's generator before each call
FACTOR, FACTOR_OF_TORCH_GRADIENTS = 2.0, 3.0  # factors on the error of torch

_EPS: dict[torch.dtype, float] = {
    dtype: torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
_EPS32 = _EPS[torch.float32]
# Always allowed in out, whose values have standard deviation 1: the rounding error of a result between 1 and 2. float32
# is allowed eight roundings, because polynomials for exponentials make several.
OUT_FLOOR = {
    torch.float16: _EPS[torch.float16] / 2,
    torch.bfloat16: _EPS[torch.bfloat16] / 2,
    torch.float32: 8 * _EPS32,
}
# Always allowed in lse, which is float32 for all inputs, relative to the largest of the call. Kernels may take
# exponentials of bfloat16 scores to 1e-4, because rounding the inputs moves a score of 1 by dozens of times that.
LSE_FLOOR = {torch.float16: 8 * _EPS32, torch.bfloat16: _EPS[torch.bfloat16] / 64, torch.float32: 8 * _EPS32}

Results = dict[str, Tensor]  # by name: out, lse, caches after an append, gradients


class Wanted(NamedTuple):
    """The exact results of a case, and how far off plain torch is."""

    exact: Results
    errors_of_torch: dict[str, float]
    floors: dict[str, float]

    def judge(self, found: Results, by_torch: bool) -> dict[str, dict[str, float]]:
        """Largest error and the one allowed, by name. by_torch: whether torch has computed the gradients."""
        judged = {}
        for name, exact in self.exact.items():
            factor = FACTOR_OF_TORCH_GRADIENTS if by_torch and name.startswith("gradient") else FACTOR
            allowed = factor * self.errors_of_torch[name] + self.floors[name]
            error = largest_error(found[name], exact)
            if name in CACHES and not torch.equal(found[name].isnan(), exact.isnan()):
                error = torch.inf  # a slot without a token was written
            judged[name] = {"error": error, "allowed": allowed}
        return judged


def seed_drawn_on(device: str) -> Tensor:
    """The seed that a call with dropout draws on `device` after torch.manual_seed(SEED)."""
    torch.manual_seed(SEED)
    return torch.randint(2**62, (), dtype=torch.int64, device=device).cpu()


@functools.cache
def wanted_of(case: Case, device: str) -> Wanted:
    """The exact results of `case` on `device`, on which dropout depends."""
    exact, usual = (_reference(case, device, dtype) for dtype in (torch.float64, None))
    errors = {name: largest_error(usual[name], exact[name]) for name in exact}
    if case.rotary_dim:
        # Rounding rotated queries is one of torch's errors, which others may happen to cancel.
        problem, turned = apply_rotary(*build_call(case).prepare(), torch.float32)
        rounded = reference_attention(problem, turned._replace(q=turned.q.to(case.dtype)), torch.float32)
        errors["out"] = max(errors["out"], largest_error(rounded.out, exact["out"]))
    errors |= {name: 0.0 for name in CACHES if name in errors}  # only the floor counts for caches
    return Wanted(exact, errors, {name: _floor(case, name, right) for name, right in exact.items()})


def results_of(case: Case, given: Call, call: Call, out: Tensor, lse: Tensor | None) -> Results:
    """All results that are compared, on the CPU. given: holds tensors with gradients; call: holds written caches."""
    out = out.cpu()
    found: Results = {"out": out.detach()}
    if case.spans and out.shape[1] == case.seqlens_q[0]:
        found["out"] = torch.cat([out[:, begin:end] for begin, end in case.spans], dim=1)
    if lse is not None and case.lse:
        found["lse"] = lse.detach().cpu()
    if case.seqlen_new:
        for name in ("k", "v"):
            cache = call.tensors[f"{name}_cache"].cpu()
            if case.stored is not None:
                cache = dequantize(cache, call.tensors[f"{name}_scale"].cpu())
            found[f"{name}_cache"] = cache
    if case.gradients:
        names = [name for name in DIFFERENTIATED if name in given.tensors]
        generator = torch.Generator("cpu").manual_seed(SEED)
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float32, device="cpu").to(case.dtype)
        gradients = torch.autograd.grad(
            (out.double() * weights.double()).sum(), [given.tensors[name] for name in names]
        )
        found |= {f"gradient of {name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return found


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Largest absolute difference where `exact` is finite. Infinite for NaN, another shape, or a wrong lse of -inf."""
    if found.shape != exact.shape or not torch.equal(found.isneginf(), exact.isneginf()):
        return torch.inf
    difference = (found.double() - exact.double())[exact.isfinite()].abs()
    return float(torch.where(difference.isnan(), torch.inf, difference).max()) if difference.numel() else 0.0


def _reference(case: Case, device: str, compute_dtype: torch.dtype | None) -> Results:
    call = build_call(case)
    if case.spans:
        outs = [reference_attention(*part.prepare(), compute_dtype).out for part in spans_of(case, call)]
        return results_of(case, call, call, torch.cat(outs, dim=1), None)
    problem, inputs = call.prepare()
    keep = None
    if case.dropout_p:
        sequences, rows, keys = (slice(0, n) for n in (problem.batch_size, problem.seqlen_q, problem.seqlen_k))
        keep = kept(seed_drawn_on(device), case.dropout_p, sequences, problem.nheads, rows, keys)
    out, lse, _ = reference_attention(problem, inputs, compute_dtype, keep)
    return results_of(case, call, call, out, lse)


def _floor(case: Case, name: str, exact: Tensor) -> float:
    """The error that is always allowed."""
    largest: float = max(1.0, _largest(exact))
    # One float32 unit of the products that a score sums up: a score, and so a weight, may be off by it.
    score: float = case.headdim**-0.5 * (case.headdim + 4 * case.headdim**0.5) * _EPS32
    if name in CACHES:  # caches hold copies, but rotated and quantized values that lie half-way may round either way
        if case.stored is not None:
            return largest / LARGEST_STORED[case.stored]
        return largest * _EPS[case.dtype] if case.rotary_dim and name == "k_cache" else 0.0
    if name == "lse":
        return LSE_FLOOR[case.dtype] * largest + score
    floor = (OUT_FLOOR[case.dtype] + score) / (1.0 - case.dropout_p)
    return floor if name == "out" else floor * largest


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
