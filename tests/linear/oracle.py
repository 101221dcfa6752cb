"""What results of linear attention are compared with: the recurrence in float64, and how far torch is from it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.reference import l2norm, linear_attention, spans


def exact(problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
    """(out, final state) in float64."""
    return linear_attention(problem, inputs)


def same_precision(problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
    """The recurrence as matrix units compute it: operands of products in the dtype of the call, sums in float32."""

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(problem.dtype).float()

    q, k, v, g = (tensor.float() for tensor in inputs[:4])
    if problem.l2norm:
        q, k = rounded(l2norm(q)), rounded(l2norm(k))
    q, k = (tensor.repeat_interleave(problem.group_size, dim=2) for tensor in (q, k))
    gate = g.exp() if problem.gate_per_key else g.exp().unsqueeze(-1)
    beta = None if inputs.beta is None else inputs.beta.float()
    out = torch.zeros(problem.out_shape, dtype=problem.dtype, device=problem.device)
    states = torch.zeros(problem.state_shape, dtype=torch.float32, device=problem.device)
    if inputs.initial_state is not None:
        states = inputs.initial_state.clone()
    for sequence, (batch, first, last) in enumerate(spans(problem, inputs.cu_seqlens)):
        state = states[sequence]
        for token in range(first, last):
            key, value = k[batch, token], v[batch, token]
            state = gate[batch, token].unsqueeze(-1) * state
            if beta is not None:
                held = torch.einsum("hkv,hk->hv", rounded(state), key)
                value = rounded(beta[batch, token].unsqueeze(-1) * (value - held))
            state = state + torch.einsum("hk,hv->hkv", key, value)
            query = rounded(q[batch, token] * problem.scale)
            out[batch, token] = torch.einsum("hkv,hk->hv", rounded(state), query).to(problem.dtype)
        states[sequence] = state
    return LinearOutput(out, states if problem.returns_state else None)


def check(problem: LinearProblem, inputs: LinearInputs, result: LinearOutput) -> None:
    """Errors are at most twice those of `same_precision`, and never above a few roundings of what is there."""
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
    # Sums of a few tokens are exact in the peer by chance: two roundings of the largest number are always allowed.
    allowed = 2 * allowed + 2 * epsilon * wanted.abs().max().item()
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
