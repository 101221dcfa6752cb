"""The torch backend: linear attention in operations of torch, which autograd follows, on any device.

A chunk of tokens is a few matrix products, and one state passes from chunk to chunk. With a(i, j) the product of the
gates of tokens j+1 to i of a chunk, S the state before it, and everything per head:

    delta rules             u_i = beta_i (v_i - a(i, -1) S^T k_i - sum_{j<i} a(i, j) (k_i . k_j) u_j)
    gated linear attention  u_i = v_i
    state space duality     u_i = beta_i v_i
    all                     out_i = a(i, -1) S^T q_i + sum_{j<=i} a(i, j) (q_i . k_j) u_j
                            S' = a(last, -1) S + sum_j a(last, j) k_j u_j^T

where -1 stands for all tokens of the chunk up to i. Sums of gates are formed for each pair, never as a difference of
two sums. So neither strong gates nor long chunks lose digits, and a gate of -inf erases the state.

A NaN or an infinity reaches what it reaches token by token: `triangles` keeps it from earlier tokens of its chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.backends.torch import triangles
from fastattention.engine.offsets import spans
from fastattention.linear.backend import LinearBackend, Serve
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.reference import l2norm

# Tokens of a chunk, by gate_per_key: with gates per key, (chunk, chunk, headdim_k) values should fit into caches.
_CHUNK = {False: 64, True: 16}


class TorchBackend(LinearBackend):
    """Computes in float32, or in float64 for tests, and rounds once."""

    name = "torch"

    def why_unavailable(self) -> str | None:
        """Never: torch is always there."""
        return None

    def why_not(self, problem: LinearProblem) -> str | None:
        """Serves everything."""
        return None

    def make_call(self, problem: LinearProblem, inputs: LinearInputs) -> Serve:
        """The computation itself; nothing is prepared."""
        chunk = _CHUNK[problem.gate_per_key] if problem.chunked else 1
        return lambda inputs: linear_attention(problem, inputs, chunk)


class _Tokens(NamedTuple):
    """Tensors of tokens, heads first: (batch_size, nheads, seqlen, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def part(self, first: int, last: int) -> _Tokens:
        """Tokens first to last - 1 of each sequence."""
        beta = None if self.beta is None else self.beta[:, :, first:last]
        return _Tokens._make([*(tensor[:, :, first:last] for tensor in self[:4]), beta])


def linear_attention(
    problem: LinearProblem, inputs: LinearInputs, chunk: int, dtype: torch.dtype = torch.float32
) -> LinearOutput:
    """Linear attention in chunks of at most `chunk` tokens, computed in `dtype`."""
    q, k, v, g = (tensor.to(dtype) for tensor in inputs[:4])
    if problem.l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (tensor.repeat_interleave(problem.group_size, dim=2) for tensor in (q * problem.scale, k))
    if not problem.gate_per_key:
        g = g.unsqueeze(-1)
    beta = None if inputs.beta is None else inputs.beta.to(dtype).transpose(1, 2)
    skipped = 0.0 if inputs.skip is None else inputs.skip.to(dtype).unsqueeze(-1) * v
    if beta is not None and not problem.delta_rule:
        v, beta = beta.transpose(1, 2).unsqueeze(-1) * v, None
    tokens = _Tokens._make([*(tensor.transpose(1, 2) for tensor in (q, k, v, g)), beta])
    if inputs.initial_state is None:
        states = torch.zeros(problem.state_shape, dtype=dtype, device=problem.device)
    else:
        states = inputs.initial_state.to(dtype)
    if not problem.varlen:
        out, states = _sequences(tokens, states, chunk)
    elif problem.num_sequences:
        parts = [
            _sequences(tokens.part(first, last), state.unsqueeze(0), chunk)
            for state, (_, first, last) in zip(
                states, spans(problem.batch_size, problem.seqlen, inputs.cu_seqlens), strict=True
            )
        ]
        out, states = torch.cat([out for out, _ in parts], dim=2), torch.cat([state for _, state in parts])
    else:
        out, states = _nothing(tokens), states.clone()
    out = (out.transpose(1, 2) + skipped).to(problem.dtype).contiguous()
    return LinearOutput(out, states.float().contiguous() if problem.returns_state else None)


def _sequences(tokens: _Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """(out, final state) of sequences of one length."""
    outs = []
    for first in range(0, tokens.v.shape[2], chunk):
        out, state = _chunk(tokens.part(first, first + chunk), state)
        outs.append(out)
    if not outs:  # results are tensors of their own
        return _nothing(tokens), state.clone()
    return torch.cat(outs, dim=2), state


def _nothing(tokens: _Tokens) -> Tensor:
    """The result for no tokens, made of all tensors: so each of them has a gradient, which is empty."""
    q, k, v, g, beta = tokens
    out = v * q[..., :1] * k[..., :1] * g[..., :1]
    return out if beta is None else out * beta.unsqueeze(-1)


def _chunk(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """(out, next state) of one chunk, by the formulas above."""
    q, k, update, g, beta = tokens
    since = g.cumsum(dim=2).exp()  # a(i, -1): (batch_size, nheads, chunk, headdim_k or 1)
    between = sums_between(g).exp()  # a(i, j): (batch_size, nheads, chunk, chunk, headdim_k or 1)
    with_keys = _with_keys(k, between)
    scores = with_keys(q)
    if beta is not None:
        beta = beta.unsqueeze(-1)
        right = beta * (update - (k * since) @ state)
        update = triangles.solve(beta * with_keys(k), right)
    out = (q * since) @ state + triangles.times(scores, update)
    last = k * between[:, :, -1]  # a(last, j) k_j
    return out, since[:, :, -1].unsqueeze(-1) * state + last.mT @ update


def _with_keys(k: Tensor, between: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of rows: a(i, j) (row i . k_j), a lower triangle. between: a(i, j)."""
    if between.shape[-1] == 1:
        return lambda rows: triangles.scores(rows, k) * between[..., 0]
    later = torch.ones_like(between[0, 0, ..., 0], dtype=torch.bool).triu(1).unsqueeze(-1)
    # Without the mask, a NaN in a key would reach gradients of earlier rows.
    weakened = (k.unsqueeze(2) * between).masked_fill(later, 0.0)
    return lambda rows: torch.einsum("bhid,bhijd->bhij", rows, weakened).tril()


def sums_between(g: Tensor) -> Tensor:
    """Sums of g over tokens j+1 to i, for every i and j: (..., chunk, chunk, headdim_k or 1); -inf where j > i."""
    chunk = g.shape[2]
    token = torch.arange(chunk, device=g.device)
    behind = (token.unsqueeze(1) > token).unsqueeze(-1)  # [t, j]: t > j
    # [t, j] is g_t after j, and 0 before it; summed over t up to i.
    sums = torch.where(behind, g.unsqueeze(3), 0.0).cumsum(dim=2)
    return sums.masked_fill(behind.transpose(0, 1), -torch.inf)
