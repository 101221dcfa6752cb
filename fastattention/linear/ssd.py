"""The arguments of Mamba-2, state space duality (SSD), as linear attention takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.engine.checks import (
    check_device,
    check_dtype,
    check_like_q,
    check_rank,
    check_shape,
    read_flag,
    read_number,
    require_tensors,
    spec_of,
)
from fastattention.engine.kinds import check_readable
from fastattention.engine.signature import CheckedOnce
from fastattention.errors import ArgumentError
from fastattention.linear.problem import LinearInputs
from fastattention.linear.validation import MAX_HEADDIM, check_gate_dtype


class SsdArguments(NamedTuple):
    """The tensors and numbers of a call of chunk_ssd, by its names."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: object
    dt_limit: object


def ssd_inputs(given: SsdArguments, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> LinearInputs:
    """C, B and x as queries, keys and values; steps as beta, and their products with A as logarithms of gates.

    Steps are computed in float32, from dt as given.
    """
    limit = _read_limit(given.dt_limit)
    softplus = read_flag("dt_softplus", given.dt_softplus)
    _check(given[:7])
    try:
        steps = given.dt.float() if given.dt_bias is None else given.dt + given.dt_bias.float()
        if softplus:
            steps = functional.softplus(steps)
        if limit != (0.0 if softplus else -torch.inf, torch.inf):
            steps = steps.clamp(*limit)
        skip = None if given.D is None else given.D.float()
        return LinearInputs(given.C, given.B, given.x, steps * given.A.float(), steps, initial_state, cu_seqlens, skip)
    except RuntimeError:
        check_readable(given._asdict())
        raise


def _read_limit(limit: object) -> tuple[float, float]:
    if not isinstance(limit, (tuple, list)) or len(limit) != 2:
        raise ArgumentError(f"dt_limit must be two numbers, the least and the most, got {limit!r}")
    least, most = (read_number("dt_limit", number) for number in limit)
    if not least <= most:
        raise ArgumentError(f"dt_limit={limit!r} must have its least number first")
    return least, most


@CheckedOnce
def _check(*tensors: Any) -> None:
    """Raises for what the rule would refuse by the names of its own arguments. tensors: x to dt_bias."""
    given = SsdArguments._make((*tensors, None, None))
    require_tensors(x=given.x, dt=given.dt, A=given.A, B=given.B, C=given.C)
    x, keys = spec_of("x", given.x), spec_of("B", given.B)
    check_dtype(x, "x")
    check_rank("x", x, "batch_size, seqlen, nheads, headdim")
    check_rank("B", keys, "batch_size, seqlen, ngroups, dstate")
    check_shape("C", spec_of("C", given.C), tuple(keys.shape), "batch_size, seqlen, ngroups, dstate")
    check_shape("dt", spec_of("dt", given.dt), tuple(x.shape[:3]), "batch_size, seqlen, nheads")
    if keys.shape[:2] != x.shape[:2]:
        raise ArgumentError(
            f"B must have the batch_size and seqlen of x, {tuple(x.shape[:2])}, got shape {tuple(keys.shape)}"
        )
    for name, size in (("headdim", x.shape[3]), ("dstate", keys.shape[3])):
        if not 1 <= size <= MAX_HEADDIM:
            raise ArgumentError(f"{name}={size} is not supported; allowed are 1 to {MAX_HEADDIM}")
    nheads, ngroups = x.shape[2], keys.shape[2]
    if nheads < 1 or ngroups < 1 or nheads % ngroups:
        raise ArgumentError(f"nheads={nheads} of x must be a positive multiple of ngroups={ngroups} of B")
    for name in ("A", "D", "dt_bias"):
        tensor = getattr(given, name)
        if tensor is not None:
            check_shape(name, spec_of(name, tensor), (nheads,), "nheads,")
    for name in ("dt", "A", "B", "C", "D", "dt_bias"):
        tensor = getattr(given, name)
        if tensor is None:
            continue
        spec = spec_of(name, tensor)
        if name in "BC":
            check_like_q(name, spec, x, "x")
        else:
            check_gate_dtype(name, spec)
            check_device(name, spec, x, "x")
