"""Exact linear attention: the recurrence, token by token, written to be read. Every backend is tested against it.

A head keeps a state S of (headdim_k, headdim_v). For each token, with its gate a = exp(g), and l2norm of q and k where
asked for:

    gated linear attention      S = diag(a) S + k v^T
    gated delta rule            S = a S;  S = S + k (beta (v - S^T k))^T
    Kimi delta attention        S = diag(a) S;  S = S + k (beta (v - S^T k))^T
    state space duality         S = a S + k (beta v)^T
    all                         out = S^T (scale q), and skip v with state space duality

GLA: https://arxiv.org/abs/2312.06635, equation 4. Gated delta rule: https://arxiv.org/abs/2412.06464, equation 10. Kimi
delta attention (KDA): https://arxiv.org/abs/2510.26692, equation 1. State space duality (SSD), in Mamba-2:
https://arxiv.org/abs/2405.21060, equation 16, where C is q, B is k, x is v and beta is the length of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.engine.offsets import spans
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

L2NORM_EPSILON = 1e-6  # as in flash-linear-attention and Transformers


def linear_attention(problem: LinearProblem, inputs: LinearInputs, dtype: torch.dtype = torch.float64) -> LinearOutput:
    """(out, final state), computed in `dtype`."""
    q, k, v, g = (tensor.to(dtype) for tensor in inputs[:4])
    if problem.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (tensor.repeat_interleave(problem.group_size, dim=2) for tensor in (q * problem.scale, k))
    beta = None if inputs.beta is None else inputs.beta.to(dtype)
    gate = g.exp() if problem.gate_per_key else g.exp().unsqueeze(-1)  # (batch_size, seqlen, nheads, headdim_k or 1)
    out = torch.zeros(problem.out_shape, dtype=dtype, device=problem.device)
    if inputs.initial_state is None:
        states = torch.zeros(problem.state_shape, dtype=dtype, device=problem.device)
    else:
        states = inputs.initial_state.to(dtype)
    final_states = []
    for state, (batch, first, last) in zip(
        states, spans(problem.batch_size, problem.seqlen, inputs.cu_seqlens), strict=True
    ):
        for token in range(first, last):
            key, value = k[batch, token], v[batch, token]
            state = gate[batch, token].unsqueeze(-1) * state
            if beta is not None:
                held = torch.einsum("hkv,hk->hv", state, key) if problem.delta_rule else 0.0
                value = beta[batch, token].unsqueeze(-1) * (value - held)
            state = state + torch.einsum("hk,hv->hkv", key, value)
            out[batch, token] = torch.einsum("hkv,hk->hv", state, q[batch, token])
        final_states.append(state)  # (nheads, headdim_k, headdim_v)
    states = torch.stack(final_states) if final_states else states
    if inputs.skip is not None:
        out = out + inputs.skip.to(dtype).unsqueeze(-1) * v
    return LinearOutput(out, states if problem.returns_state else None)


def l2norm(rows: Tensor) -> Tensor:
    """Rows of length 1: x / sqrt(sum(x^2) + 1e-6)."""
    return rows * torch.rsqrt(rows.square().sum(dim=-1, keepdim=True) + L2NORM_EPSILON)
