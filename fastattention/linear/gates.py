"""The functions that models apply to their gates: beta from its logits, and the decay of Kimi delta attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.engine.checks import (
    TensorSpec,
    check_device,
    check_shape,
    read_flag,
    read_number,
    require_tensor,
    spec_of,
)
from fastattention.engine.kinds import check_readable
from fastattention.engine.signature import CheckedOnce
from fastattention.errors import ArgumentError
from fastattention.linear.validation import check_gate_dtype


def beta_of(beta: Tensor, before_sigmoid: object, doubled: object) -> Tensor:
    """beta; the sigmoid of it, or twice that, if it is given before its sigmoid."""
    if before_sigmoid is False and doubled is False:
        return beta
    doubled = read_flag("allow_neg_eigval", doubled)
    if not read_flag("use_beta_sigmoid_in_kernel", before_sigmoid):
        if doubled:
            raise ArgumentError("allow_neg_eigval takes use_beta_sigmoid_in_kernel=True; else give beta doubled")
        return beta
    require_tensor("beta", beta)
    check_gate_dtype("beta", beta)
    try:
        beta = torch.sigmoid(beta.float())
    except RuntimeError:
        check_readable({"beta": beta})
        raise
    return 2.0 * beta if doubled else beta


def kda_gate_of(
    g: Tensor, q: Tensor, v: Tensor, before_function: object, a_log: Any, dt_bias: Any, lower_bound: object
) -> Tensor:
    """g; or its gate function in float32, if it is given before that. See chunk_kda for the formulas."""
    if not read_flag("use_gate_in_kernel", before_function):
        if not a_log is dt_bias is lower_bound is None:
            raise ArgumentError("A_log, dt_bias and lower_bound take use_gate_in_kernel=True")
        return g
    bound = None if lower_bound is None else read_number("lower_bound", lower_bound)
    _check_kda_gate((g, q, v, a_log, dt_bias), bound)
    try:
        logits = g.float()
        if dt_bias is not None:
            logits = logits + dt_bias.float().reshape(g.shape[2:])
        rate: Tensor | None = None if a_log is None else a_log.float().reshape(g.shape[2], 1).exp()
    except RuntimeError:
        check_readable({"g": g, "A_log": a_log, "dt_bias": dt_bias})
        raise
    if bound is None:
        assert rate is not None
        return -rate * functional.softplus(logits)
    return bound * torch.sigmoid(logits if rate is None else rate * logits)


@CheckedOnce
def _check_kda_gate(g: Tensor, q: Tensor, v: Tensor, a_log: object, dt_bias: object, bound: float | None) -> None:
    given = spec_of("g", g)
    check_gate_dtype("g", given)
    shape = (*spec_of("v", v).shape[:3], spec_of("q", q).shape[-1])
    check_shape("g", given, shape, "batch_size, seqlen, nheads, headdim_k")
    if bound is not None and not -torch.inf < bound < 0:
        raise ArgumentError(f"lower_bound={bound} must be negative and finite")
    if a_log is None and bound is None:
        raise ArgumentError("A_log must be a torch.Tensor (nheads,) without lower_bound, got None")
    nheads, headdim = shape[2:]
    if dt_bias is not None:
        _check_of_heads("dt_bias", dt_bias, given, (nheads, headdim), "nheads, headdim_k")
    if a_log is not None:
        _check_of_heads("A_log", a_log, given, (nheads, 1), "nheads,")


def _check_of_heads(name: str, parameter: object, g: TensorSpec, shape: tuple[int, int], axes: str) -> None:
    """Raises unless a parameter of heads has this shape, or is flat."""
    spec = spec_of(name, parameter)
    check_gate_dtype(name, spec)
    check_device(name, spec, g)
    if spec.shape not in (shape, (shape[0] * shape[1],)):
        raise ArgumentError(
            f"{name} must be ({axes}) = {shape if shape[1] > 1 else shape[:1]}, or flat, got shape {tuple(spec.shape)}"
        )
