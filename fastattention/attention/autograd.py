"""Attention as a node of autograd's graph, for backends that have a backward.

Of a call are kept its tensors, out and lse: nothing of size seqlen_q x seqlen_k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, OutputGradients, Problem
from fastattention.backends.base import Backend
from fastattention.backends.registry import get_backend
from fastattention.engine.eager import runs_eagerly

Serve = Callable[[Inputs], AttentionOutput]


def differentiable(backend: Backend, problem: Problem, serve: Serve) -> Serve:
    """`serve` so that autograd asks `backend` for gradients."""

    def run(inputs: Inputs) -> AttentionOutput:
        return AttentionOutput(*FastAttention.apply(backend, problem, serve, *inputs))  # type: ignore[no-untyped-call]

    return run


def gradients(
    backend: Backend, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
) -> dict[str, Tensor]:
    """`Backend.backward`, of gradients as autograd gives them: one may be missing, and strides are any."""
    contiguous = OutputGradients(*(None if grad is None else grad.contiguous() for grad in grads))
    return backend.backward(problem, inputs, result, contiguous)


def gradients_by_torch(problem: Problem, inputs: Inputs, grads: OutputGradients) -> dict[str, Tensor]:
    """The same by computing the forward again in operations of torch, which autograd follows."""
    given = {name: tensor for name, tensor in inputs._asdict().items() if tensor is not None}
    leaves = {name: tensor.detach().requires_grad_(name in problem.grads) for name, tensor in given.items()}
    problem = replace(problem, return_lse=grads.lse is not None)
    with torch.enable_grad():
        result = get_backend("sdpa").forward(problem, inputs._replace(**leaves))
    pairs = [(x, grad) for x, grad in zip(result, grads, strict=False) if x is not None and grad is not None]
    found = torch.autograd.grad(
        [x for x, _ in pairs],
        [leaves[name] for name in problem.grads],
        [grad for _, grad in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: grad.contiguous() for name, grad in zip(problem.grads, found, strict=True)}


# The fields of Inputs that are arguments of the operators `attention` and `attention_backward`, in their order.
OPERATOR_TENSORS = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table", "alibi_slopes", "attn_bias", "sinks", "dropout_seed",
    "block_mask",
)  # fmt: skip


class FastAttention(Function):
    """The node, after whose name profilers and `grad_fn` call it. It has no second derivative."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, backend: Backend, problem: Problem, serve: Serve, *inputs: Tensor | None
    ) -> Any:
        result = serve(Inputs(*inputs))  # type: ignore[arg-type]
        ctx.backend, ctx.problem = backend, problem
        ctx.save_for_backward(*inputs, result.out, result.lse)
        ctx.set_materialize_grads(False)
        if result.dropout_mask is not None:
            ctx.mark_non_differentiable(result.dropout_mask)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> Any:  # noqa: D102
        *inputs, out, lse = ctx.saved_tensors
        found: dict[str, Tensor] = {}
        grads = OutputGradients(grad_out, grad_lse)
        given = [grad for grad in grads if grad is not None]
        if given:
            call = ctx.backend, ctx.problem, Inputs(*inputs), AttentionOutput(out, lse), grads
            if not runs_eagerly(*given):  # compiled autograd traces
                found = _gradients_by_operator(*call)
            elif any(map(torch._C._functorch.is_legacy_batchedtensor, given)):  # by is_grads_batched
                found = gradients_by_torch(ctx.problem, Inputs(*inputs), grads)
            else:
                found = gradients(*call)
        return None, None, None, *(found.get(name) for name in Inputs._fields)


def _gradients_by_operator(
    backend: Backend, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
) -> dict[str, Tensor]:
    """`gradients` by the operator of `fastattention.attention.ops`."""
    longest = (problem.seqlen_q, problem.seqlen_k) if problem.layout is Layout.VARLEN else (None, None)
    found = torch.ops.fastattention.attention_backward(
        *grads, *(getattr(inputs, name) for name in OPERATOR_TENSORS), result.out, result.lse, *longest,
        problem.softmax_scale, False, problem.window_left, problem.window_right, problem.softcap, problem.dropout_p,
        problem.deterministic, *(problem.block_size or (0, 0)), None, " ".join(problem.grads), backend.name,
    )  # fmt: skip
    return dict(zip(problem.grads, found, strict=True))


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Lets autograd record inside an operator, which torch runs with autograd's dispatch keys excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_AUTOGRAD_KEYS = tuple(
    getattr(torch._C.DispatchKey, name)
    for name in ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
)
