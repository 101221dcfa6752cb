"""Checks the arguments of linear attention: to a LinearProblem and LinearInputs, or an ArgumentError."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.engine.checks import (
    DTYPES,
    TensorSpec,
    check_device,
    check_dtype,
    check_like_q,
    check_rank,
    check_shape,
    differentiation,
    last_axis_contiguous,
    read_flag,
    read_number,
    require_tensor,
    spec_of,
)
from fastattention.engine.offsets import check_cu_seqlens
from fastattention.errors import ArgumentError
from fastattention.linear.problem import RULES, LinearInputs, LinearProblem, Rule

MAX_HEADDIM = 256


class LinearOptions(NamedTuple):
    """The scalar arguments of a call, of the right types."""

    rule: str  # of RULES
    chunked: bool
    scale: float | None
    l2norm: bool
    returns_state: bool


def read_linear_options(
    rule: str, chunked: bool, scale: object, l2norm: object, output_final_state: object
) -> LinearOptions:
    """LinearOptions from arguments as given; raises ArgumentError for anything of a wrong type."""
    return LinearOptions(
        rule,
        chunked,
        scale if scale is None or type(scale) is float else read_number("scale", scale),
        l2norm if type(l2norm) is bool else read_flag("use_qk_l2norm_in_kernel", l2norm),
        output_final_state if type(output_final_state) is bool else read_flag("output_final_state", output_final_state),
    )


def prepare(given: LinearInputs, options: LinearOptions) -> tuple[LinearProblem, LinearInputs]:
    """The problem of a call, and its tensors as backends read them. Raises ArgumentError."""
    q, k, v, g = (spec_of(name, tensor) for name, tensor in zip("qkvg", given[:4], strict=True))
    _check_qkv(q, k, v)
    batch_size, seqlen, nheads, headdim_v = v.shape
    nheads_k, headdim_k = q.shape[2:]
    gate_per_key = _check_gates(given, q, v, RULES[options.rule])
    varlen = given.cu_seqlens is not None
    num_sequences = batch_size
    if given.cu_seqlens is not None:
        num_sequences = check_cu_seqlens(given.cu_seqlens, q)
    state_shape = (num_sequences, nheads, headdim_k, headdim_v)
    if given.initial_state is not None:
        state = spec_of("initial_state", given.initial_state)
        check_shape("initial_state", state, state_shape, "sequences, nheads, headdim_k, headdim_v")
        _check_float32("initial_state", state, q)
    if given.skip is not None:
        skip = spec_of("skip", given.skip)
        check_shape("skip", skip, (nheads,), "nheads,")
        _check_float32("skip", skip, q)
    scale = headdim_k**-0.5 if options.scale is None else options.scale
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ArgumentError(f"scale={scale} must be finite in float32; None means headdim_k ** -0.5")
    wanted = differentiation(**given._asdict())
    problem = LinearProblem(
        rule=options.rule,
        gate_per_key=gate_per_key,
        chunked=options.chunked,
        batch_size=batch_size,
        seqlen=seqlen,
        num_sequences=num_sequences,
        varlen=varlen,
        nheads=nheads,
        nheads_k=nheads_k,
        headdim_k=headdim_k,
        headdim_v=headdim_v,
        dtype=q.dtype,
        gate_dtype=g.dtype,
        beta_dtype=None if given.beta is None else given.beta.dtype,
        device=q.device,
        scale=scale,
        l2norm=options.l2norm,
        returns_state=options.returns_state,
        grads=wanted.grads,
        in_transform=wanted.in_transform,
    )
    return problem, as_backends_read(given)


def check_gate_dtype(name: str, gate: Tensor | TensorSpec) -> None:
    """Raises unless `gate`, a gate or a parameter of gates, has one of the dtypes of a call."""
    if gate.dtype not in DTYPES:
        raise ArgumentError(f"{name} must be float32, float16 or bfloat16, got {gate.dtype}")


def check_values_first(given: LinearInputs) -> None:
    """Raises for an initial_state without headdim_v before headdim_k, in a call that is otherwise right."""
    sequences = given.v.shape[0] if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
    shape = (sequences, given.v.shape[2], given.v.shape[3], given.q.shape[3])
    state = spec_of("initial_state", given.initial_state)
    check_shape("initial_state", state, shape, "sequences, nheads, headdim_v, headdim_k")


def as_backends_read(given: LinearInputs) -> LinearInputs:
    """The tensors of a call with a contiguous last axis, offsets in int32: tensors that have these are not copied."""
    offsets = given.cu_seqlens
    if offsets is not None:
        offsets = offsets.to(torch.int32).contiguous()
    beta, state, skip = (
        None if x is None else last_axis_contiguous(x) for x in (given.beta, given.initial_state, given.skip)
    )
    return LinearInputs._make([*(last_axis_contiguous(x) for x in given[:4]), beta, state, offsets, skip])


def _check_qkv(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    check_dtype(q)
    check_rank("q", q, "batch_size, seqlen, nheads_k, headdim_k")
    check_rank("v", v, "batch_size, seqlen, nheads, headdim_v")
    check_shape("k", k, tuple(q.shape), "batch_size, seqlen, nheads_k, headdim_k")
    check_like_q("k", k, q)
    check_like_q("v", v, q)
    if v.shape[:2] != q.shape[:2]:
        raise ArgumentError(
            f"v must have the batch_size and seqlen of q, {tuple(q.shape[:2])}, got shape {tuple(v.shape)}"
        )
    nheads_k, nheads = q.shape[2], v.shape[2]
    if nheads_k < 1 or nheads < 1 or nheads % nheads_k:
        raise ArgumentError(f"nheads={nheads} of v must be a positive multiple of nheads_k={nheads_k} of q")
    for name, value in (("headdim_k", q.shape[3]), ("headdim_v", v.shape[3])):
        if not 1 <= value <= MAX_HEADDIM:
            raise ArgumentError(f"{name}={value} is not supported; allowed are 1 to {MAX_HEADDIM}")


def _check_gates(given: LinearInputs, q: TensorSpec, v: TensorSpec, rule: Rule) -> bool:
    """Checks g and beta; whether there is a gate for every key dimension."""
    g = spec_of("g", given.g)
    per_head = tuple(v.shape[:3])
    per_key = (*per_head, q.shape[3])
    gate_per_key = len(g.shape) == 4
    if not rule.key_gates:
        check_shape("g", g, per_head, "batch_size, seqlen, nheads")
    elif not rule.head_gates:
        check_shape("g", g, per_key, "batch_size, seqlen, nheads, headdim_k")
    elif tuple(g.shape) not in (per_head, per_key):
        raise ArgumentError(
            f"g must be (batch_size, seqlen, nheads, headdim_k) = {per_key} or, for a gate of whole heads, "
            f"(batch_size, seqlen, nheads) = {per_head}, got shape {tuple(g.shape)}"
        )
    gates = {"g": g}
    if rule.has_beta:
        require_tensor("beta", given.beta)
        gates["beta"] = spec_of("beta", given.beta)
        check_shape("beta", gates["beta"], per_head, "batch_size, seqlen, nheads")
    for name, gate in gates.items():
        check_gate_dtype(name, gate)
        check_device(name, gate, q)
    return gate_per_key


def _check_float32(name: str, tensor: TensorSpec, q: TensorSpec) -> None:
    if tensor.dtype is not torch.float32:
        raise ArgumentError(f"{name} must be float32, got {tensor.dtype}")
    check_device(name, tensor, q)
