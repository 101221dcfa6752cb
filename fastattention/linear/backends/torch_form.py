"""The torch backend: linear attention in operations of torch, on any device, which autograd follows.

A chunk of tokens is a few matrix products, and one state passes from chunk to chunk. With a(i, j) the product of the gates
of tokens j+1 to i of a chunk, S the state before it, and everything per head:

    gated delta rule        u_i = beta_i (v_i - a(i, -1) S^T k_i - sum_{j<i} a(i, j) (k_i . k_j) u_j)
    gated linear attention  u_i = v_i
    both                    out_i = a(i, -1) S^T q_i + sum_{j<=i} a(i, j) (q_i . k_j) u_j
                            S' = a(last, -1) S + sum_j a(last, j) k_j u_j^T

where -1 stands for all tokens of the chunk up to i. Sums of gates are formed for each pair, never as a difference of two
sums: neither strong gates nor long chunks lose digits, and a gate of -inf forgets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.linear.backends.base import LinearBackend, Serve
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.reference import l2norm, spans

# Tokens of a chunk. Gates of single keys make a product of (chunk, chunk, headdim_k) numbers, which should fit into caches.
_CHUNK = {False: 64, True: 16}  # by gate_per_key


class TorchBackend(LinearBackend):
    """Computes in float32, or in float64 for tests, and rounds once."""

    name = "torch"

    def why_unavailable(self) -> str | None:
        """Never: torch is always there."""
        return None

    def why_not(self, problem: LinearProblem) -> str | None:
        """Serves everything."""
        return None

    def plan(self, problem: LinearProblem, inputs: LinearInputs) -> Serve:
        """Nothing is prepared."""
        chunk = _CHUNK[problem.gate_per_key] if problem.chunked else 1
        return lambda inputs: linear_attention(problem, inputs, chunk)


def linear_attention(
    problem: LinearProblem, inputs: LinearInputs, chunk: int, dtype: torch.dtype = torch.float32
) -> LinearOutput:
    """Linear attention in chunks of at most `chunk` tokens, computed in `dtype`."""
    q, k, v, g = (tensor.to(dtype) for tensor in inputs[:4])
    if problem.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (tensor.repeat_interleave(problem.group_size, dim=2) for tensor in (q * problem.scale, k))
    beta = None if inputs.beta is None else inputs.beta.to(dtype)
    if inputs.initial_state is None:
        states = torch.zeros(problem.state_shape, dtype=dtype, device=problem.device)
    else:
        states = inputs.initial_state.to(dtype)
    # (batch_size, nheads, seqlen, ...): heads are a batch of matrix products.
    tokens = [None if tensor is None else tensor.transpose(1, 2) for tensor in (q, k, v, g, beta)]
    if not problem.varlen:
        out, final = _sequences(tokens, states, chunk, problem.gate_per_key)
    else:
        parts = [
            _sequences([None if x is None else x[:, :, first:last] for x in tokens], states[i : i + 1], chunk,
                       problem.gate_per_key)
            for i, (_, first, last) in enumerate(spans(problem, inputs.cu_seqlens))
        ]  # fmt: skip
        empty = tokens[2]
        assert empty is not None
        out = torch.cat([part for part, _ in parts], dim=2) if parts else empty
        final = torch.cat([state for _, state in parts]) if parts else states
    out = out.transpose(1, 2).to(problem.dtype).contiguous()
    return LinearOutput(out, final.float().contiguous() if problem.returns_state else None)


def _sequences(
    tokens: list[Tensor | None], state: Tensor, chunk: int, gate_per_key: bool
) -> tuple[Tensor, Tensor]:
    """(out, final state) of sequences of one length; tokens are (batch_size, nheads, seqlen, ...)."""
    values = tokens[2]
    assert values is not None
    outs = []
    for first in range(0, values.shape[2], chunk):
        part = [None if x is None else x[:, :, first : first + chunk] for x in tokens]
        out, state = _chunk(*part, state, gate_per_key)  # type: ignore[arg-type]
        outs.append(out)
    return torch.cat(outs, dim=2) if outs else torch.empty_like(values), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, gate_per_key: bool
) -> tuple[Tensor, Tensor]:
    """(out, next state) of one chunk, by the formulas above."""
    if not gate_per_key:
        g = g.unsqueeze(-1)
    since = g.cumsum(dim=2).exp()  # a(i, -1): (batch_size, nheads, chunk, headdim_k or 1)
    between = _sums_between(g).exp()  # a(i, j): (batch_size, nheads, chunk, chunk, headdim_k or 1)
    if gate_per_key:
        scores = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, between)
    else:
        scores = (q @ k.mT) * between[..., 0]
    update = v
    if beta is not None:
        system = ((k @ k.mT) * between[..., 0]).tril(-1) * beta.unsqueeze(-1)
        right = beta.unsqueeze(-1) * (v - since * (k @ state))
        update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (q * since) @ state + scores @ update
    last = k * between[:, :, -1]  # a(last, j) k_j
    return out, since[:, :, -1].unsqueeze(-1) * state + last.mT @ update


def _sums_between(g: Tensor) -> Tensor:
    """Sums of g over tokens j+1 to i, for every i and j: (..., chunk, chunk, headdim_k or 1); -inf where j > i."""
    chunk = g.shape[2]
    token = torch.arange(chunk, device=g.device)
    behind = (token.unsqueeze(1) > token).unsqueeze(-1)  # [t, j]: t > j
    # [t, j] is g_t behind j, and 0 before it; summed over t up to i.
    sums = torch.where(behind, g.unsqueeze(3), 0.0).cumsum(dim=2)
    return sums.masked_fill(behind.transpose(0, 1), -torch.inf)
