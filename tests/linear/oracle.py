"""The recurrence in float64, with which results of linear attention are compared, and torch's errors."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.backends.torch.linear import sums_between
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.reference import l2norm, linear_attention, spans


def exact(problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
    """(out, final state) in float64."""
    return linear_attention(problem, inputs)


def same_precision(problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
    """The results of matrix units: operands of products are rounded to the dtype of the call, sums are float32.

    It computes in chunks or token by token, like the problem: later tokens of a chunk do not correct its rounding of a
    value.
    """

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(problem.dtype).float()

    q, k, v, g = (tensor.float() for tensor in inputs[:4])
    if problem.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (rounded(x).repeat_interleave(problem.group_size, dim=2) for x in (q * problem.scale, k))
    if not problem.gate_per_key:
        g = g.unsqueeze(-1)
    beta = None if inputs.beta is None else inputs.beta.float().unsqueeze(-1)
    chunk = 64 if problem.chunked else 1
    out = torch.zeros(problem.out_shape, dtype=problem.dtype, device=problem.device)
    states = torch.zeros(problem.state_shape, dtype=torch.float32, device=problem.device)
    if inputs.initial_state is not None:
        states = inputs.initial_state.clone()
    for sequence, (batch, first, last) in enumerate(spans(problem, inputs.cu_seqlens)):
        for begin in range(first, last, chunk):
            part = slice(begin, min(begin + chunk, last))
            queries, keys, values, gates = (
                x[batch, part].transpose(0, 1) for x in (q, k, v, g)
            )  # (nheads, tokens, ...)
            between = sums_between(gates.unsqueeze(0))[0].exp()  # (nheads, tokens, tokens, headdim_k or 1)
            since = gates.cumsum(dim=1).exp()
            state, update = rounded(states[sequence]), values
            if beta is not None:
                learned = beta[batch, part].transpose(0, 1)
                system = learned * ((keys @ keys.mT) * between[..., 0]).tril(-1)
                right = learned * (values - since * (keys @ state))
                update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            scores = torch.einsum(
                "hid,hjd,hijd->hij", queries, keys, between.expand(*between.shape[:3], keys.shape[-1])
            )
            result = rounded(queries * since) @ state + rounded(scores) @ rounded(update)
            out[batch, part] = result.transpose(0, 1).to(problem.dtype)
            carried = rounded(keys * between[:, -1]) if problem.gate_per_key else keys
            update = update if problem.gate_per_key else update * between[:, -1]
            states[sequence] = since[:, -1].unsqueeze(-1) * states[sequence] + carried.mT @ rounded(update)
    return LinearOutput(out, states if problem.returns_state else None)


def check(problem: LinearProblem, inputs: LinearInputs, result: LinearOutput) -> None:
    """Asserts errors of at most twice those of `same_precision`, or a few roundings of the results."""
    assert result.out.shape == problem.out_shape
    assert result.out.dtype is problem.dtype
    wanted, peer = exact(problem, inputs), same_precision(problem, inputs)
    _check_one("out", result.out, wanted.out, peer.out, torch.finfo(problem.dtype).eps)
    if not problem.returns_state:
        assert result.final_state is None
        return
    assert result.final_state is not None
    assert result.final_state.dtype is torch.float32
    assert wanted.final_state is not None
    assert peer.final_state is not None
    _check_one("final_state", result.final_state, wanted.final_state, peer.final_state, torch.finfo(problem.dtype).eps)


def _check_one(name: str, given: Tensor, wanted: Tensor, peer: Tensor, epsilon: float) -> None:
    assert given.shape == wanted.shape
    if wanted.numel() == 0:
        return
    error, allowed = (given.double() - wanted).abs().max().item(), (peer.double() - wanted).abs().max().item()
    # Sums of a few tokens may be exact in the peer by chance, so two roundings of the largest value are always allowed.
    allowed = 2 * allowed + 2 * epsilon * wanted.abs().max().item()
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
