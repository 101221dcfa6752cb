"""Gradients of dense and variable-length sequences on npu_fusion_attention_grad. Not run on an NPU.

It takes the arguments of the forward, its out as attention_in, the gradient of out as dy, and the maximum and the sum
of every row's softmax. It computes softmax weights as exp(score - maximum) / sum, so lse with a sum of 1 does as well.
Only out and lse have to be kept between the passes.

Rows without keys are left out, as in the forward. Their queries have gradient 0, and so have keys that no query sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Problem
from fastattention.backends.ascend.vendor import prefill
from fastattention.backends.ascend.vendor.masks import rows_without_keys
from fastattention.backends.ascend.vendor.operators import GRADIENT, STATISTICS, OperatorCall, run


class ForwardResults(NamedTuple):
    """The results of the forward and the gradient of out; shapes as in AttentionOutput."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor


def backward_dense(problem: Problem, inputs: Inputs, results: ForwardResults) -> dict[str, Tensor]:
    """One call of the operator, for the queries that have keys."""
    hidden = rows_without_keys(problem.seqlen_q, problem.seqlen_k, problem.window_right)
    seqlen_q = problem.seqlen_q - hidden
    if problem.batch_size == 0 or seqlen_q == 0:
        return _wanted(problem, _zeros(inputs))
    if hidden == 0:
        return _wanted(problem, _gradients(dense_call(problem, inputs, results)))
    rest = prefill.last_queries(problem, seqlen_q)
    out, lse, grad_out = results.out[:, hidden:], results.lse[..., hidden:], results.grad_out[:, hidden:]
    part = dense_call(rest, inputs._replace(q=inputs.q[:, hidden:]), ForwardResults(out, lse, grad_out))
    found = _gradients(part)
    grad_q = _zero_like(inputs.q)
    grad_q[:, hidden:] = found["q"]
    return _wanted(problem, found | {"q": grad_q})


def dense_call(problem: Problem, inputs: Inputs, results: ForwardResults) -> OperatorCall:
    """The call for sequences of which every query has keys."""
    return _gradient_call(prefill.dense_call(problem, inputs), results, results.lse)


def backward_varlen(problem: Problem, inputs: Inputs, results: ForwardResults) -> dict[str, Tensor]:
    """One call of the operator for varlen sequences. Reads the lengths on the host, where the operator takes them."""
    sequences = prefill.VarlenSequences.of_call(problem, inputs)
    if not sequences.spans_q:
        return _wanted(problem, _zeros(inputs))
    given, kept_q, kept_k = prefill.take(sequences, inputs)
    if kept_q is not None:
        results = ForwardResults(results.out[kept_q], results.lse[:, kept_q], results.grad_out[kept_q])
    found = _gradients(varlen_call(problem, given, sequences, results))
    for name, kept in (("q", kept_q), ("k", kept_k), ("v", kept_k)):
        if kept is not None:
            whole = _zero_like(getattr(inputs, name))
            whole[kept] = found[name]
            found[name] = whole
    return _wanted(problem, found)


def varlen_call(
    problem: Problem, inputs: Inputs, sequences: prefill.VarlenSequences, results: ForwardResults
) -> OperatorCall:
    """The call for sequences of which every query has keys; inputs and results hold the tokens of `sequences` only."""
    return _gradient_call(prefill.varlen_call(problem, inputs, sequences), results, results.lse.T)


def _gradient_call(forward: OperatorCall, results: ForwardResults, lse: Tensor) -> OperatorCall:
    """The call of a forward's gradient: its arguments, mask included, and its results. lse: with the rows' axes."""
    arguments = dict(forward.arguments)
    row_max = lse.unsqueeze(-1).expand(*lse.shape, STATISTICS).contiguous()
    arguments |= {
        "scale_value": arguments.pop("scale"),
        "dy": results.grad_out.contiguous(),
        "attention_in": results.out.contiguous(),
        "softmax_max": row_max,
        "softmax_sum": torch.ones_like(row_max),
    }
    return OperatorCall(GRADIENT, arguments)


def _gradients(call: OperatorCall) -> dict[str, Tensor]:
    grad_q, grad_k, grad_v, _, grad_sinks = run(call)
    return {"q": grad_q, "k": grad_k, "v": grad_v, "sinks": grad_sinks}


def _zeros(inputs: Inputs) -> dict[str, Tensor]:
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks}
    return {name: _zero_like(tensor) for name, tensor in given.items() if tensor is not None}


def _zero_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def _wanted(problem: Problem, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: found[name] for name in problem.grads}
