"""Exact merging of attention over parts of the keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.problem import MergeProblem
from fastattention.backends.common.layout import pointers
from fastattention.backends.common.merge import merge_parts
from fastattention.engine.checks import (
    TensorSpec,
    last_axis_contiguous,
    needs_grad,
    spec_of,
)
from fastattention.engine.eager import runs_eagerly, transform_level
from fastattention.engine.kinds import check_kinds, check_readable
from fastattention.engine.registry import Verdict, serving
from fastattention.errors import ArgumentError


def merge_attn_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint parts of them.

    - `outs`: n tensors (batch_size, seqlen_q, nheads, headdim_v), or (total_q, nheads, headdim_v) of varlen calls; all
        of one shape and dtype. A single tensor is split along its first axis.
    - `lses`: n float32 tensors (batch_size, nheads, seqlen_q), varlen (nheads, total_q), as return_lse gives them.

    Returns (out, lse) in the same shapes and the dtype of out, computed in float32:

        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) * out_i

    A part without keys takes no part: its lse is -inf, or +inf as flash-attn has it. Rows that no part has keys for
    give 0 and -inf. Differentiable. Raises ArgumentError when counts, shapes or dtypes do not fit.

    Where the cuda backend is available, its kernel merges parts in float16, bfloat16 or float32 on a GPU from Pascal
    on, when no gradient is needed: up to 8 parts in one launch, more in groups of 8 whose results are merged in
    float32. Everything else is operations of torch: other devices and dtypes, gradients, and calls under torch.compile,
    which fuses them.
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    try:
        first = _check_parts(outs, lses)
        eager = runs_eagerly(*outs, *lses)
        if not eager and not torch.compiler.is_compiling():
            check_kinds(_named(outs, lses))
        if not eager or transform_level() is not None:  # tracers and torch.func follow operations of torch
            return merge_parts(outs, lses)
        pointers(*outs, *lses)  # raises where a tensor has no memory, which torch.stack does not check
        problem = MergeProblem(*first, needs_grad(*outs, *lses))
        return select_merging_backend(problem).merge(problem, [last_axis_contiguous(out) for out in outs], lses)
    except RuntimeError:
        check_readable(_named(outs, lses))
        raise


@functools.lru_cache(maxsize=4096)
def select_merging_backend(problem: MergeProblem) -> AttentionBackend:
    """The backend that merges parts. Raises UnsupportedError with every reason when there is none."""
    backends = {name: ATTENTION_BACKENDS.get(name) for name in ATTENTION_BACKENDS.order}
    considered = [
        Verdict(name, each.why_unavailable() or each.why_not_merge(problem)) for name, each in backends.items()
    ]
    return backends[serving(considered, "merge these parts")]


def _named(outs: list[Tensor], lses: list[Tensor]) -> dict[str, Tensor]:
    named_parts = (("outs", outs), ("lses", lses))
    return {f"{name}[{index}]": part for name, parts in named_parts for index, part in enumerate(parts)}


def _listed(name: str, parts: Any) -> list[Tensor]:
    if not isinstance(parts, (Sequence, Tensor)) or (isinstance(parts, Tensor) and parts.dim() == 0):
        raise ArgumentError(f"{name} must be a sequence of tensors, or one with an axis of parts, got {parts!r}")
    return list(parts.unbind() if isinstance(parts, Tensor) else parts)


def _check_parts(outs: list[Tensor], lses: list[Tensor]) -> TensorSpec:
    """The spec_of that all outs have."""
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs and lses must be of one length of at least 1, got {len(outs)} and {len(lses)}")
    first = spec_of("outs[0]", outs[0])
    if len(first.shape) not in (3, 4):
        raise ArgumentError(
            "outs[0] must be (batch_size, seqlen_q, nheads, headdim_v) or (total_q, nheads, headdim_v), "
            f"got shape {tuple(first.shape)}"
        )
    if not first.dtype.is_floating_point:
        raise ArgumentError(f"outs[0] must be floating point, got {first.dtype}")
    *batch, tokens, nheads, _ = first.shape
    fitting = TensorSpec(torch.Size((*batch, nheads, tokens)), torch.float32, first.device)
    if not (all(_is_like(out, first) for out in outs) and all(_is_like(lse, fitting) for lse in lses)):
        raise _misfit(outs, lses, first, fitting)
    return first


def _is_like(value: object, wanted: TensorSpec) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.shape == wanted.shape and value.dtype is wanted.dtype and value.device == wanted.device


def _misfit(outs: list[Tensor], lses: list[Tensor], first: TensorSpec, fitting: TensorSpec) -> ArgumentError:
    """The error of the first part that does not fit. Names cost more than the checks, which every call makes."""
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if (given := spec_of(f"outs[{index}]", out)) != first:
            return ArgumentError(f"outs[{index}] is {given}; it must be like outs[0], {first}")
        if (given := spec_of(f"lses[{index}]", lse)) != fitting:
            return ArgumentError(f"lses[{index}] must be {fitting} to fit outs[{index}], got {given}")
    raise AssertionError("every part fits")
