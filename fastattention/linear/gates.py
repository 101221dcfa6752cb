"""The functions that models apply to their gates: beta from its logits, and the decay of Kimi delta attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.engine.checks import check_device, check_shape, read_flag, read_number, require_tensor, spec_of
from fastattention.engine.kinds import check_readable
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
    g: Tensor, q: Tensor, v: Tensor, before_function: object, a_log: object, dt_bias: object, lower_bound: object
) -> Tensor:
    """g; or its gate function in float32, if it is given before that. See chunk_kda for the formulas."""
    if not read_flag("use_gate_in_kernel", before_function):
        if not a_log is dt_bias is lower_bound is None:
            raise ArgumentError("A_log, dt_bias and lower_bound take use_gate_in_kernel=True")
        return g
    given = spec_of("g", g)
    check_gate_dtype("g", given)
    shape = (*spec_of("v", v).shape[:3], spec_of("q", q).shape[-1])
    check_shape("g", given, shape, "batch_size, seqlen, nheads, headdim_k")
    nheads, headdim = shape[2:]
    bound = None if lower_bound is None else read_number("lower_bound", lower_bound)
    if bound is not None and not -torch.inf < bound < 0:
        raise ArgumentError(f"lower_bound={bound} must be negative and finite")
    if a_log is None and bound is None:
        raise ArgumentError("A_log must be a torch.Tensor (nheads,) without lower_bound, got None")
    try:
        logits = g.float()
        if dt_bias is not None:
            logits = logits + _of_heads("dt_bias", dt_bias, g, (nheads, headdim), "nheads, headdim_k")
        rate = None if a_log is None else _of_heads("A_log", a_log, g, (nheads, 1), "nheads,").exp()
    except RuntimeError:
        check_readable({"g": g, "A_log": a_log, "dt_bias": dt_bias})
        raise
    if bound is None:
        assert rate is not None
        return -rate * functional.softplus(logits)
    return bound * torch.sigmoid(logits if rate is None else rate * logits)


def _of_heads(name: str, given: object, g: Tensor, shape: tuple[int, int], axes: str) -> Tensor:
    """A parameter of heads in float32, in this shape or flat."""
    require_tensor(name, given)
    assert isinstance(given, Tensor)
    check_gate_dtype(name, given)
    spec = spec_of(name, given)
    check_device(name, spec, spec_of("g", g))
    if spec.shape not in (shape, (shape[0] * shape[1],)):
        raise ArgumentError(
            f"{name} must be ({axes}) = {shape if shape[1] > 1 else shape[:1]}, or flat, got shape {tuple(spec.shape)}"
        )
    return given.float().reshape(shape)
